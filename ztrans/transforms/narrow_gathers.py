"""Narrow gathers: gather what `scaled_casts` computes on shards, in place of the parameter."""

from __future__ import annotations

import dataclasses

from ..ir.collectives import pair, rules
from ..ir.graph import Eqn, Graph, Split, Var, dce, producers, rename
from ..ir.relations import grouped
from .edits import Edits
from .scaled_casts import ScaledCasts


def cast_shards(graph: Graph) -> Graph:
    """The program in which parameters are scaled and cast on shards, as far as everything that reads them allows it."""
    notes: dict[Var, str] = {}  # by the leaf
    starts = {e: waited for e, waited in pair(graph).starts.items() if _is_of_leaf(e, graph)}
    while starts:
        walk = ScaledCasts(graph, {graph.eqns[started.first_wait].out: e for e, started in starts.items()})
        kept = {e for e in starts if walk.problem(e) is None}
        for e in starts:
            if e not in kept and (note := walk.note(e)) is not None:
                notes.setdefault(e.ins[0], note)
        if len(kept) == len(starts):
            graph = _Narrowing(walk).run()
            break
        starts = {e: started for e, started in starts.items() if e in kept}
    return graph.replace(notes=(*graph.notes, *notes.values()))


def _is_of_leaf(start: Eqn, graph: Graph) -> bool:
    """Whether an equation starts the gather of one leaf of the state, which is cut along one dim."""
    if not rules(start).moves or start.kwargs["dtype"] is not None or len(start.outs) != 1:
        return False
    leaf = start.ins[0]
    return leaf in graph.inputs[: graph.num_state] and len(leaf.layout) == 1 and isinstance(leaf.layout[0], Split)


class _Narrowing:
    """The program in which the gathers of `casts` bring what is computed on shards."""

    def __init__(self, casts: ScaledCasts) -> None:
        self.casts, self.graph, self.head = casts, casts.graph, casts.head
        self.makers, self.phases = producers(self.graph.eqns), _phases(self.graph)
        self.order = {e: k for k, e in enumerate(self.graph.eqns)}
        self.waits = {waited.start: e for e, waited in pair(self.graph).waits.items()}
        self.instead: dict[Eqn, list[Eqn]] = {}  # what takes the place of an equation
        self.alias: dict[Var, Var] = {}

    def run(self) -> Graph:
        needed = {start: values for start, values in self.casts.needed.items() if values}
        for start, values in needed.items():
            self.narrow(start, values)
        computed = [self.casts.whole[v].shards for values in needed.values() for v in values]
        scalars = [x for v, x in self.head.values.items() if self.head.follows(v) and self.casts.is_needed(v)]
        first = self.head.needed([*computed, *scalars])
        bound = {out for e in first for out in e.results}
        self.alias.update((v, x) for v, x in self.head.values.items() if v is not x and x in bound)
        rest = (x for e in self.graph.eqns if not bound.intersection(e.results) for x in self.instead.get(e, [e]))
        edits = Edits(self.graph.replace(eqns=(*first, *rest)))
        if self.graph.stage == 3:
            for start, values in needed.items():
                self.regather(start, values, edits)
        return dce(rename(edits.applied(), self.alias))

    def narrow(self, start: Eqn, values: list[Var]) -> None:
        """Gather the shards from which `values` follow, and compute these from the gathered value."""
        end = self.waits[start]
        begin, narrow = self.gather(start, self.casts.whole[values[0]].shards, end.out.name)
        self.instead[start], self.instead[end] = [begin], [end.replace(args=(begin.out,), outs=(narrow,))]
        for v in values:
            views = self.casts.whole[v].views
            if views:
                self.instead[self.makers[v]] = self.viewed(views, narrow, v, self.makers[v])
            else:
                self.alias[v] = narrow

    def gather(self, start: Eqn, shards: Var, name: str) -> tuple[Eqn, Var]:
        """The start of a gather of `shards` in place of another one, and the value that it brings."""
        value = dataclasses.replace(self.waits[start].out, name=name, dtype=shards.dtype)
        future = dataclasses.replace(start.out, name=f"{name}'", dtype=shards.dtype)
        return start.replace(args=([shards],), outs=(future,)), value

    def viewed(self, views: tuple[Eqn, ...], value: Var, last: Var, maker: Eqn) -> list[Eqn]:
        """The views of a value, the last of which is `last`; at the place of the equation `maker`."""
        eqns = []
        for view in views:
            out = last
            if view is not views[-1]:
                out = dataclasses.replace(view.out, name=self.head.names.fresh(view.out.name), dtype=last.dtype)
            eqns.append(view.replace(args=(value, *view.args[1:]), outs=(out,), region=maker.region))
            value = out
        return eqns

    def regather(self, start: Eqn, values: list[Var], edits: Edits) -> None:
        """Gather a value anew for each later phase that reads it, as stage 3 gathers a parameter."""
        phase = self.phases[self.waits[start]]
        readers = ((self.phases[e], (v, e)) for v in values for e in self.casts.readers(v) if e.region != "update")
        for later, reading in grouped(readers).items():
            if later > phase:
                self.gather_again(start, reading, edits)

    def gather_again(self, start: Eqn, reading: list[tuple[Var, Eqn]], edits: Edits) -> None:
        """Gather a value for the equations of one phase, each of which reads one of its views."""
        at = min((e for _, e in reading), key=self.order.__getitem__)
        whole = self.casts.whole
        name = self.head.names.fresh(self.waits[start].out.name)
        begin, narrow = self.gather(start, whole[reading[0][0]].shards, name)
        provenance = start.provenance and dataclasses.replace(start.provenance, again=self.graph.reshard)
        begin = begin.replace(region=at.region, source=at.source, provenance=provenance)
        end = self.waits[start].replace(args=(begin.out,), outs=(narrow,), region=at.region, source=at.source)
        edits.before(at, begin, end)
        for v, readers in grouped(reading).items():
            copy, views = narrow, whole[v].views
            if views:
                copy = dataclasses.replace(v, name=self.head.names.fresh(v.name))
                edits.before(at, *self.viewed(views, narrow, copy, at))
            edits.read(readers, v, copy)


def _phases(graph: Graph) -> dict[Eqn, int]:
    """For each equation, how often forward and backward have alternated before it."""
    phases: dict[Eqn, int] = {}
    count, region = 0, "forward"
    for e in graph.eqns:
        if e.region not in (region, "update"):
            count, region = count + 1, e.region
        phases[e] = count
    return phases
