"""Which values differ from rank to rank, and over which mesh axes.

`varying` has the values that differ because of the batch: every value that depends on it, and every random draw. The
state does not differ. Nor does the gradient of an invariant value, because it will be reduced, nor the result of a
`pmean`, a `psum` or an all_reduce over its axis. JAX checks this property by `check_vma`; here it is derived from the
program. `varying_by_leaf` has the values that differ because each rank holds another leaf of the state, such as its own
experts. `replicated_equations` are those that every rank must compute alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .axes import members
from .collectives import role, rules
from .dependencies import needed
from .graph import Eqn, Graph, Var, producers, variables
from .op_facts import is_random
from .rules import Axes
from .user_collectives import is_user_start, scatters

Varying = dict[Var, Axes]


def varying(graph: Graph, axes: Sequence[str]) -> Varying:
    """For each varying value, the axes over which it differs. A value that is not in the result is invariant."""
    axes_of: Varying = {v: frozenset(axes) for v in graph.batch}
    for eqn in graph.eqns:
        draws = is_random(eqn) and not _draws_on_shards(eqn, axes_of)
        differs = frozenset(axes) if draws else rules(eqn).varies(eqn, axes_of)
        if differs:
            axes_of.update(dict.fromkeys(eqn.results, differs))
    return axes_of


def varying_by_leaf(graph: Graph, leaves: Mapping[Var, Axes], axes: Sequence[str]) -> Varying:
    """For each value, the axes over which it differs because ranks hold other leaves of the state.

    Args:
        graph: the program.
        leaves: the axes over which each leaf differs: over those of expert parallelism, ranks hold other experts.
        axes: all axes over which a value may differ.
    """
    axes_of: Varying = {leaf: differs for leaf, differs in leaves.items() if differs}
    for eqn in graph.eqns:
        differs = rules(eqn).varies(eqn, axes_of)
        if scatters(eqn):
            differs |= {*members(rules(eqn).axis(eqn) or "")} & {*axes}
        if differs:
            axes_of.update(dict.fromkeys(eqn.results, differs))
    return axes_of


def replicated_equations(graph: Graph) -> set[Eqn]:
    """The equations that every rank must compute alike, or the states of the ranks would diverge.

    The new state depends on them other than through a reduction or the step's own collectives.
    """
    # Without the equations that make values equal on all ranks, however their arguments differ.
    makers = {}
    for v, e in producers(graph.eqns).items():
        if not is_user_start(e) and role(e) not in ("grad", "pmean", "state"):
            makers[v] = e
    new_state = variables(graph.outputs[: graph.num_state])
    return needed((makers[v] for v in new_state if v in makers), makers)


def _draws_on_shards(eqn: Eqn, axes_of: Varying) -> bool:
    """Whether an equation of the update draws in the shape of an invariant value.

    Each rank then draws for its own part of that value, so the draws together are one invariant value.
    """
    if eqn.region != "update" or any(v in axes_of for v in eqn.ins):
        return False
    return any(v.shape for v in eqn.ins)
