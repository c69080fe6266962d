"""Liveness: which values share storage, and how long each storage is needed.

A view shares the storage of what it shows. What a collective sends is needed until its wait, not
its start. Storage of the state and of outputs is needed to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import SHARD, WAIT, is_start
from .graph import Graph, Var, is_view, producers, variables


@dataclass(frozen=True)
class Liveness:
    """`root[v]` owns the storage of `v`; `last[root]` is the index of the last equation that needs it."""

    root: dict[Var, Var]
    last: dict[Var, int]


def liveness(graph: Graph) -> Liveness:
    """Storage and lifetimes of every value of a program."""
    root: dict[Var, Var] = {v: v for v in graph.inputs}
    for e in graph.eqns:
        for out in e.outs:
            if out is not None:
                shares = (is_view(e) and e.ins) or e.op in (WAIT, SHARD)
                root[out] = root[e.ins[0]] if shares else out
    made = producers(graph.eqns)
    last: dict[Var, int] = {}
    for i, e in enumerate(graph.eqns):
        for v in e.ins:
            last[root[v]] = i
        if e.op is WAIT and is_start(made[e.args[0]]):
            for member in made[e.args[0]].ins:
                last[root[member]] = i
        for out in e.outs:
            if out is not None:
                last.setdefault(root[out], i)
    for v in variables(graph.outputs):
        last[root[v]] = len(graph.eqns)
    return Liveness(root, last)
