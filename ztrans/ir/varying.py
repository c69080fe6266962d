"""Find the values that differ from rank to rank, and the mesh axes over which they differ.

`varying` returns the values that differ because of the batch: all that depend on it, and every random draw. The state
does not differ. Nor does the gradient of an invariant value, because it will be reduced, nor the result of a `pmean`, a
`psum` or an all_reduce over its axis. JAX checks this property by `check_vma`; here it is derived from the program.
`varying_by_leaf` returns the values that differ because each rank holds another leaf of the state, such as its own
experts. `replicated_equations` returns the equations that must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .axes import members
from .cached_analysis import cached_on_graph
from .collectives import role, rules
from .dependencies import needed
from .graph import Eqn, Graph, Var, producers
from .op_facts import is_random
from .rules import Axes
from .user_collectives import is_user_start, scatters

Varying = Mapping[Var, Axes]


@cached_on_graph
def varying(graph: Graph, axes: tuple[str, ...]) -> Varying:
    """For each varying value, the axes over which it differs. A value that is not in the result is invariant."""
    axes_of: dict[Var, Axes] = {v: frozenset(axes) for v in graph.batch}
    for eqn in graph.eqns:
        is_draw = is_random(eqn) and not _draws_on_shards(eqn, axes_of)
        result_axes = frozenset(axes) if is_draw else rules(eqn).varies(eqn, axes_of)
        if result_axes:
            axes_of.update(dict.fromkeys(eqn.results, result_axes))
    return axes_of


def varying_by_leaf(graph: Graph, leaves: Mapping[Var, Axes], axes: Sequence[str]) -> Varying:
    """For each value, the axes over which it differs because ranks hold other leaves of the state.

    Args:
        graph: the program.
        leaves: the axes over which each leaf differs. In expert parallelism, each rank of an axis holds other experts.
        axes: all axes over which a value may differ.
    """
    axes_of: dict[Var, Axes] = {leaf: leaf_axes for leaf, leaf_axes in leaves.items() if leaf_axes}
    for eqn in graph.eqns:
        result_axes = rules(eqn).varies(eqn, axes_of)
        if scatters(eqn):
            result_axes |= {*members(rules(eqn).axis(eqn) or "")} & {*axes}
        if result_axes:
            axes_of.update(dict.fromkeys(eqn.results, result_axes))
    return axes_of


def replicated_equations(graph: Graph) -> set[Eqn]:
    """The equations that must be equal on all ranks, or the states of the ranks would diverge.

    The new state depends on their results in another way than through a reduction or the step's own collectives.
    """
    # Stop at reductions and at the step's own collectives: their arguments may differ between ranks.
    makers = {}
    for v, e in producers(graph.eqns).items():
        if not is_user_start(e) and role(e) not in ("grad", "pmean", "state"):
            makers[v] = e
    return needed((makers[v] for v in graph.new_state if v in makers), makers)


def _draws_on_shards(eqn: Eqn, axes_of: Varying) -> bool:
    """Whether an equation of the update draws in the shape of an invariant value.

    Each rank then draws for its own part of that value, so the draws together are one invariant value.
    """
    if eqn.region != "update" or any(v in axes_of for v in eqn.ins):
        return False
    return any(v.shape for v in eqn.ins)
