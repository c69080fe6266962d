"""Liveness: which values share storage, and how long each storage is needed.

A view shares the storage of what it shows. What a collective sends as it lies is needed until its
wait, not its start. Storage of the state and of outputs is needed to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import REDUCE_SCATTER, SHARD, WAIT, sends_as_it_lies, wire_dtype
from .graph import Graph, Var, producers, variables
from .operations import is_view


@dataclass(frozen=True)
class Liveness:
    """`root[v]` owns the storage of `v`; `last[root]` is the index of the last equation that needs it."""

    root: dict[Var, Var]
    last: dict[Var, int]


def liveness(graph: Graph) -> Liveness:
    """Storage and lifetimes of every value of a program."""
    root: dict[Var, Var] = {v: v for v in graph.inputs}
    made = producers(graph.eqns)
    for e in graph.eqns:
        # What a reduce_scatter receives is one part of each rank; its value is made of them at the wait.
        start = made[e.args[0]] if e.op is WAIT else None
        same = start and start.op is not REDUCE_SCATTER and wire_dtype(start, e.outs[0]) == e.outs[0].dtype
        shares = (is_view(e) and e.ins) or e.op is SHARD or same
        root.update((out, root[e.ins[0]] if shares else out) for out in e.outs if out is not None)
    last: dict[Var, int] = {}
    for i, e in enumerate(graph.eqns):
        for v in e.ins:
            last[root[v]] = i
        if e.op is WAIT:
            start = made[e.args[0]]
            k = start.outs.index(e.args[0])
            if sends_as_it_lies(start, k, graph.axes):
                last[root[start.ins[k]]] = i
        for out in e.outs:
            if out is not None:
                last.setdefault(root[out], i)
    for v in variables(graph.outputs):
        last[root[v]] = len(graph.eqns)
    return Liveness(root, last)
