"""Let a step write its state last, after everything that may fail because of another rank (see `ir.donation`)."""

from __future__ import annotations

from ..ir.dependencies import needed
from ..ir.donation import can_fail
from ..ir.graph import Graph, producers
from ..ir.op_facts import is_random
from ..ir.rewriter import reordered


def writes_last(graph: Graph) -> Graph:
    """Move those equations of the update that no collective depends on to the end of the program.

    Random draws keep their order, so they and what they depend on stay in place.
    """
    fixed = [e for e in graph.eqns if can_fail(e) or is_random(e)]
    before_writes = needed(fixed, producers(graph.eqns))
    return reordered(graph, lambda e: e not in before_writes).with_hints(update="last")
