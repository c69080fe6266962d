"""Invariant and varying values: which values differ from rank to rank, and over which mesh axes.

The batch varies, and so does every value that depends on it, and every random draw. The state is invariant. So is the
gradient of an invariant value, because it will be reduced, and the result of a `pmean` or `psum` over its axis. JAX
checks the same property by `check_vma`; here it is derived from the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from .collectives import rules
from .graph import Eqn, Graph, Var, is_random

Varying = dict[Var, frozenset[str]]
INVARIANT: frozenset[str] = frozenset()


def varying(graph: Graph, axes: Sequence[str]) -> Varying:
    """For each varying value, the axes over which it differs. A value that is not in the result is invariant."""
    over: Varying = {var: frozenset(axes) for var in graph.batch}
    for eqn in graph.eqns:
        drawn = is_random(eqn.op) and not _on_shards(eqn, over)
        axes_of = frozenset(axes) if drawn else rules(eqn).varies(eqn, over)
        if axes_of:
            over.update((out, axes_of) for out in eqn.results)
    return over


def _on_shards(eqn: Eqn, over: Varying) -> bool:
    """Whether an equation of the update draws in the shape of an invariant value.

    Each rank then draws for its own part of that value, so the draws together are one invariant value.
    """
    return eqn.region == "update" and any(v.shape for v in eqn.ins) and not any(v in over for v in eqn.ins)
