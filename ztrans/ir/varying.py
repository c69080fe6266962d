"""Invariant and varying values: which values differ from rank to rank, and over which axes.

The batch varies. So does whatever depends on it and whatever draws random numbers. State does
not, and neither does a gradient for an invariant value, or what `pmean` and `psum` reduced: those
are reduced over the axes that they name. This is JAX's `check_vma`, worked out from the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from .collectives import rules
from .graph import Eqn, Graph, Var, is_random

Varying = dict[Var, frozenset[str]]
INVARIANT: frozenset[str] = frozenset()


def varying(graph: Graph, axes: Sequence[str]) -> Varying:
    """The axes of `axes` over which each value differs; a value that is missing is invariant."""
    over: Varying = {var: frozenset(axes) for var in graph.batch}
    for eqn in graph.eqns:
        drawn = is_random(eqn.op) and not _on_shards(eqn, over)
        axes_of = frozenset(axes) if drawn else rules(eqn).varies(eqn, over)
        if axes_of:
            over.update((out, axes_of) for out in eqn.results)
    return over


def _on_shards(eqn: Eqn, over: Varying) -> bool:
    """Whether an equation draws for the update, in the shape of an invariant value, each rank for its own part."""
    return eqn.region == "update" and any(v.shape for v in eqn.ins) and not any(v in over for v in eqn.ins)
