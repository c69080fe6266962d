"""Liveness: which values share storage, and how long each storage is needed.

A view shares the storage of its argument. The value of a future may share the storage in which it was received. What
a collective sends from its own storage is needed until its wait, and not only until its start. The storage of the
state and of outputs is needed to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import pair, rules
from .graph import Graph, Var, variables


@dataclass(frozen=True)
class Liveness:
    """`root[v]` owns the storage of `v`; `last[root]` is the index of the last equation that needs it."""

    root: dict[Var, Var]
    last: dict[Var, int]


def liveness(graph: Graph) -> Liveness:
    """Storage and lifetimes of every value of a program."""
    waits = pair(graph).waits
    root: dict[Var, Var] = {v: v for v in graph.inputs}
    last: dict[Var, int] = {}
    for e in graph.eqns:
        waited = waits.get(e)
        shares = rules(waited.start).shares_buffer(waited.start, waited.member) if waited else rules(e).shares(e)
        root.update((out, root[e.ins[0]] if shares and e.ins else out) for out in e.results)
    for i, e in enumerate(graph.eqns):
        last.update((root[v], i) for v in e.ins)
        waited = waits.get(e)
        if waited and rules(waited.start).sends_own(waited.start, waited.member, graph.axes):
            last[root[waited.start.ins[waited.member]]] = i
        for out in e.results:
            last.setdefault(root[out], i)
    last.update((root[v], len(graph.eqns)) for v in variables(graph.outputs))
    return Liveness(root, last)
