"""Start exchanges early: right after what they send exists, while backward continues.

An update that ranks own (see `owned_updates`) first sends shards to the owners. With eager updates these shards exist
as soon as the gradients of a group are reduced. A plan places reductions and gathers, and leaves the exchanges where
they are written, after backward; here they move to their shards, as far as this does not raise the peak.
"""

from __future__ import annotations

from ..ir.collectives import role, rules
from ..ir.graph import Eqn, Graph
from ..ir.rewriter import prerequisites, reordered
from .cost import memory


def start_exchanges(graph: Graph) -> Graph:
    """The program in which exchanges of the update start early; if memory has no room for all, the last ones do."""
    needs = prerequisites(graph)
    early = []
    for e in graph.eqns:
        is_exchange = rules(e).moves and e.out.split is not None
        if is_exchange and role(e) == "update":
            early.append(e)
    peak = memory(graph).peak if early else 0
    limit = graph.hints.memory_limit or peak
    while early:
        moved = _moved_up(graph, early, needs)
        if moved.eqns == graph.eqns or memory(moved).peak <= max(limit, peak):
            return moved
        early = early[(len(early) + 1) // 2 :]
    return graph


def _moved_up(graph: Graph, starts: list[Eqn], needs: dict[Eqn, list[Eqn]]) -> Graph:
    """The program with each of these starts right after the last equation that it needs."""
    place = {e: (k, 0) for k, e in enumerate(graph.eqns)}
    moved = {}
    for start in starts:
        last, _ = max((place[e] for e in needs[start]), default=place[start])
        moved[start] = (last, 1)
    return reordered(graph, (place | moved).__getitem__, needs)
