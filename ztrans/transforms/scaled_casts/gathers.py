"""Gathers of what each rank computes on its shards, in place of gathers of parameters.

    a = wait(all_gather(w))                        m = wait(all_reduce(max(abs(w)), max))
    s = div(448, max(abs(a)))                -->   s = div(448, m); c = cast(mul(w, s), f8)
    b = cast(mul(a, s), f8)                        b = wait(all_gather(c))

All but the gather depends on the state only, so it moves to the start of the step.
"""

from __future__ import annotations

import dataclasses

from ...ir.collectives import rules
from ...ir.graph import Eqn, Graph, Var, dce, producers, rename
from ...ir.pairing import pair
from ..edits import Edits
from .on_shards import OnShards


def cast_on_shards(graph: Graph) -> Graph:
    """The program in which parameters are scaled and cast on shards, as far as all that reads them allows it."""
    notes: dict[Var, str] = {}  # by the leaf
    starts = {
        e: graph.eqns[s.first_wait].out
        for e, s in pair(graph).starts.items()
        if _is_of_leaf(e, graph)
    }
    while starts:
        walk = OnShards(graph, {whole: start for start, whole in starts.items()})
        stay = {start: why for start in starts if (why := walk.stays(start)) is not None}
        for start in filter(stay.get, stay):
            notes.setdefault(start.ins[0], stay[start])
        if not stay:
            graph = _Narrow(walk).run()
            break
        starts = {start: whole for start, whole in starts.items() if start not in stay}
    return graph.replace(notes=(*graph.notes, *notes.values()))


def _is_of_leaf(start: Eqn, graph: Graph) -> bool:
    """Whether an equation starts the gather of one leaf of the state, which is cut along one dim."""
    leaf = start.ins[0]
    gathers = rules(start).moves and start.kwargs["dtype"] is None and len(start.outs) == 1
    return (
        gathers
        and leaf in graph.inputs[: graph.num_state]
        and len(leaf.layout) == 1
        and leaf.split is not None
    )


class _Narrow:
    """The program whose gathers bring what `walk` computes on shards."""

    def __init__(self, walk: OnShards) -> None:
        self.walk, self.graph, self.names = walk, walk.graph, walk.head.names
        self.makers = producers(self.graph.eqns)
        self.waits = {waited.start: e for e, waited in pair(self.graph).waits.items()}
        self.needed = {start: values for start, values in walk.needed.items() if values}
        self.instead: dict[Eqn, list[Eqn]] = {}  # what takes the place of an equation
        self.alias: dict[Var, Var] = {}

    def run(self) -> Graph:
        for start, values in self.needed.items():
            self.narrow(start, values)
        first = self.head()
        bound = {out for e in first for out in e.results}
        self.alias |= {v: x for v, x in self.walk.head.values.items() if v is not x and x in bound}
        rest = (
            x
            for e in self.graph.eqns
            if bound.isdisjoint(e.results)
            for x in self.instead.get(e, [e])
        )
        edits = Edits(self.graph.replace(eqns=(*first, *rest)))
        if self.graph.stage == 3:
            for start, values in self.needed.items():
                self.regather(start, values, edits)
        return dce(rename(edits.applied(), self.alias))

    def head(self) -> list[Eqn]:
        """The equations at the start: all that the gathers send, and the scalars that the program reads."""
        head = self.walk.head
        sent = [self.walk.whole[values[0]].shards for values in self.needed.values()]
        return head.needed(
            [
                *sent,
                *(x for v, x in head.values.items() if head.follows(v) and self.walk.is_needed(v)),
            ]
        )

    def narrow(self, start: Eqn, values: list[Var]) -> None:
        """Gather the shards from which `values` follow, and compute these from the gathered value."""
        end = self.waits[start]
        self.instead[start], self.instead[end] = (
            [e] for e in self.gather(start, values[0], end.out.name)
        )
        narrow = self.instead[end][0].out
        for v in values:
            maker = self.makers[v]
            self.instead[maker], self.alias[v] = self.viewed(v, narrow, v.name, maker)

    def gather(self, start: Eqn, v: Var, name: str) -> tuple[Eqn, Eqn]:
        """The gather of the shards of a whole value, in place of another gather."""
        shards = self.walk.whole[v].shards
        value = dataclasses.replace(self.waits[start].out, name=name, dtype=shards.dtype)
        future = dataclasses.replace(value, name=f"{name}'", future=True)
        begin = start.replace(args=([shards],), outs=(future,))
        return begin, self.waits[start].replace(args=(future,), outs=(value,))

    def viewed(self, v: Var, value: Var, name: str, at: Eqn) -> tuple[list[Eqn], Var]:
        """The views by which a gathered value becomes `v`, in the region of `at`, and the result, called `name`."""
        eqns, views = [], self.walk.whole[v].views
        for view in views:
            called = name if view is views[-1] else self.names.fresh(view.out.name)
            out = dataclasses.replace(view.out, name=called, dtype=v.dtype)
            eqns.append(view.replace(args=(value, *view.args[1:]), outs=(out,), region=at.region))
            value = out
        return eqns, value

    def regather(self, start: Eqn, values: list[Var], edits: Edits) -> None:
        """Gather what forward has gathered anew for backward, if that reads it, as stage 3 gathers a parameter."""
        reading = {v: [e for e in self.walk.readers(v) if e.region == "backward"] for v in values}
        readers = set[Eqn]().union(*reading.values())
        if not readers or start.region == "backward":
            return
        at = next(e for e in self.graph.eqns if e in readers)
        begin, end = self.gather(start, values[0], self.names.fresh(self.waits[start].out.name))
        again = start.provenance and dataclasses.replace(
            start.provenance, regather=self.graph.reshard
        )
        edits.before(at, begin.replace(region=at.region, source=at.source, provenance=again))
        edits.before(at, end.replace(region=at.region, source=at.source))
        for v, eqns in reading.items():
            views, copy = self.viewed(v, end.out, self.names.fresh(v.name), at)
            edits.before(at, *views)
            edits.read(eqns, v, copy)
