"""Invariant and varying values: which values differ from rank to rank, and over which mesh axes.

The batch varies, and so does every value that depends on it, and every random draw. The state is invariant. So is the
gradient of an invariant value, because it will be reduced, and the result of a `pmean`, a `psum` or an all_reduce over
its axis. JAX checks the same property by `check_vma`; here it is derived from the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..axes import members
from ..graph import Eqn, Graph, Var, producers, variables
from ..op_facts import is_random
from ..relations import needed
from .table import role, rules
from .user_collectives import functional_name, is_users, is_wait

Varying = dict[Var, frozenset[str]]
INVARIANT: frozenset[str] = frozenset()
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single")


def varying(graph: Graph, axes: Sequence[str]) -> Varying:
    """For each varying value, the axes over which it differs. A value that is not in the result is invariant."""
    over: Varying = {var: frozenset(axes) for var in graph.batch}
    for eqn in graph.eqns:
        drawn = is_random(eqn.op) and not _on_shards(eqn, over)
        axes_of = frozenset(axes) if drawn else rules(eqn).varies(eqn, over)
        if axes_of:
            over.update((out, axes_of) for out in eqn.results)
    return over


def differing(graph: Graph, leaves: Mapping[Var, frozenset[str]], axes: Sequence[str]) -> Varying:
    """For each value, the axes over which it differs because leaves of the state do.

    Args:
        graph: the program.
        leaves: the axes over which each leaf differs: over those of expert parallelism, ranks hold other experts.
        axes: all axes over which a value may differ.
    """
    over: Varying = {leaf: of_leaf for leaf, of_leaf in leaves.items() if of_leaf}
    for eqn in graph.eqns:
        axes_of = rules(eqn).varies(eqn, over)
        if functional_name(eqn.op) in _SCATTERS:
            axes_of |= {*members(rules(eqn).axis(eqn) or "")} & {*axes}
        if axes_of:
            over.update((out, axes_of) for out in eqn.results)
    return over


def alike(graph: Graph) -> set[Eqn]:
    """The equations that the new state depends on, other than through a reduction or the step's own collectives.

    All ranks must compute the same by them, or their states would diverge.
    """
    exchanges = lambda e: role(e) in ("grad", "pmean", "state") or (is_users(e) and not is_wait(e))
    makers = {v: e for v, e in producers(graph.eqns).items() if not exchanges(e)}
    new = variables(graph.outputs[: graph.num_state])
    return needed((makers[v] for v in new if v in makers), makers)


def _on_shards(eqn: Eqn, over: Varying) -> bool:
    """Whether an equation of the update draws in the shape of an invariant value.

    Each rank then draws for its own part of that value, so the draws together are one invariant value.
    """
    return (
        eqn.region == "update"
        and any(v.shape for v in eqn.ins)
        and not any(v in over for v in eqn.ins)
    )
