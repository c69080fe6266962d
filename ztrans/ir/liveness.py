"""Liveness: which values share storage, and how long each storage is needed.

A view shares the storage of its argument. The value of a future may share the buffer in which it was received. If a
collective sends a member from the member's own storage, that storage is needed until the wait. The storage of outputs,
and so of the new state, is needed to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import rules
from .graph import Graph, Var, variables
from .pairing import pair
from .relations import cached_on_graph


@dataclass(frozen=True)
class Liveness:
    """`root[v]` owns the storage of `v`; `last[root]` is the index of the last equation that needs it."""

    root: dict[Var, Var]
    last: dict[Var, int]


@cached_on_graph
def liveness(graph: Graph) -> Liveness:
    """Storage and lifetimes of every value of a program."""
    waits = pair(graph).waits
    root: dict[Var, Var] = {v: v for v in graph.inputs}
    last: dict[Var, int] = {}
    for i, e in enumerate(graph.eqns):
        waited = waits.get(e)
        shares = (
            rules(waited.start).shares_buffer(waited.start, waited.member)
            if waited
            else rules(e).shares(e)
        )
        root.update((out, root[e.ins[0]] if shares and e.ins else out) for out in e.results)
        last.update((root[v], i) for v in e.ins)
        if waited and rules(waited.start).sends_own(waited.start, waited.member, graph.axes):
            last[root[waited.start.ins[waited.member]]] = i
        for out in e.results:
            last.setdefault(root[out], i)
    last.update((root[v], len(graph.eqns)) for v in variables(graph.outputs))
    return Liveness(root, last)
