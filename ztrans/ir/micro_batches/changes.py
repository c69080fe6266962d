"""Changing values: those that differ from micro-batch to micro-batch."""

from __future__ import annotations

from ..collectives import rules
from ..graph import Graph, Var
from ..op_facts import is_random


def changing(graph: Graph) -> set[Var]:
    """The values that each micro-batch computes anew: those that depend on the batch without a mark in between, and on
    leaves of the state that change with every micro-batch."""
    changes, leaves = set(graph.batch), list(zip(graph.inputs, graph.outputs[: graph.num_state]))
    while True:
        for e in graph.eqns:
            drawn = is_random(e.op) and e.region != "update"
            if drawn or (not rules(e).over_all and any(v in changes for v in e.ins)):
                changes.update(e.results)
        carried = {old for old, new in leaves if new in changes} - changes
        if not carried:
            return changes
        changes |= carried
