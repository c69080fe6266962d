"""Head: equations that depend on the state only, and run at the start of a step.

Equal equations are computed once. Reductions of one kind share a message, so the scales of all parameters take one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..ir.collectives import bucket_key, coalesce
from ..ir.graph import Eqn, Graph, Names, Provenance, Var, producers, substitute
from ..ir.relations import grouped, reachable
from ..ir.reshard import Site, reduced

aten = torch.ops.aten


class Total(NamedTuple):
    """The reduction of a term to a value that is whole on every rank."""

    start: Eqn
    end: Eqn


class Head:
    """The equations of a head, without those that no result needs (see `needed`).

    Attributes:
        eqns: the equations that each rank computes alone.
        values: for each value of the program that the head computes, the value of the head that equals it.
    """

    def __init__(self, graph: Graph) -> None:
        self.names = Names([v.name for v in graph.inputs] + [out.name for e in graph.eqns for out in e.results])
        self.eqns: list[Eqn] = []
        self.values: dict[Var, Var] = {v: v for v in graph.inputs if v not in graph.batch and not v.layout}
        self._known: dict[str, Eqn] = {}
        self._totals: dict[Var, Total] = {}  # by the term
        self._rounds: dict[Var, int] = {}  # for each value, the number of reductions that follow each other before it

    def add(self, eqn: Eqn) -> Eqn:
        """Add an equation, unless the head has an equal one. Returns the equation that the head has."""
        args, kwargs = (substitute(x, lambda v: self.values.get(v, v)) for x in (eqn.args, eqn.kwargs))
        eqn = eqn.replace(args=args, kwargs=kwargs, region="forward", order=None)
        known = self._known.setdefault(repr((eqn.op, args, kwargs)), eqn)
        if known is eqn:
            self.eqns.append(eqn)
            self._rounds.update(dict.fromkeys(eqn.results, max((self._rounds.get(v, 0) for v in eqn.ins), default=0)))
        return known

    def repeat(self, eqn: Eqn) -> None:
        """Add an equation of the program, with its results."""
        self.values.update(zip(eqn.results, self.add(eqn).results))

    def reduce(self, term: Var, op: str, provenance: Provenance, eqn: Eqn) -> None:
        """Reduce a term, of which each rank has one, to the result of an equation of the program."""
        name = eqn.out.name if not eqn.out.shape else self.names.fresh(f"{eqn.out.name}.all")
        if term not in self._totals:
            site = Site("forward", eqn.source, lambda name: name, provenance)
            (start, end), total = reduced(term, op, None, provenance.axis, site, name)
            if not eqn.out.shape:
                end, total = end.replace(outs=(eqn.out,)), eqn.out
            self._totals[term] = Total(start, end)
            self._rounds[total] = self._rounds[term] + 1
        total = self._totals[term].end.out
        if eqn.out.shape:
            view = eqn.replace(op=aten.view.default, args=(total, list(eqn.out.shape)), kwargs={})
            self.repeat(view)
        else:
            self.values[eqn.out] = total

    def follows(self, v: Var) -> bool:
        """Whether a value of the program, which the head computes, depends on a reduction."""
        return self._rounds.get(self.values[v], 0) > 0

    def needed(self, results: Iterable[Var]) -> list[Eqn]:
        """The equations that `results` need, in order, with the collectives."""
        makers = producers((*self.eqns, *(e for total in self._totals.values() for e in total)))
        before = lambda e: [makers[v] for v in e.ins if v in makers]
        needed = set(reachable([makers[v] for v in results if v in makers], before))
        rounds = grouped((self._rounds[e.out], e) for e in self.eqns if e in needed)
        totals = grouped((self._rounds[term], t) for term, t in self._totals.items() if t.start in needed)
        ordered: list[Eqn] = []
        for count in range(max(rounds, default=-1) + 1):
            ordered += rounds.get(count, [])
            for bucket in grouped((bucket_key(t.start), t) for t in totals.get(count, [])).values():
                ordered += (coalesce([t.start for t in bucket]), *(t.end for t in bucket))
        return ordered
