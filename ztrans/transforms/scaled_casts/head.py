"""Head: equations that depend on the state only, and run at the start of a step.

Equal equations are computed once. Reductions of one kind share a message, so the scales of all parameters take one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

from ...ir.collectives import bucket_key, coalesce, reduce, role, rules, wait
from ...ir.graph import Eqn, Graph, Names, Provenance, Var, producers
from ...ir.relations import grouped, needed
from ...ir.structure import structure


class Head:
    """The equations of a head; `needed` leaves out those that no result needs.

    Attributes:
        eqns: the equations, a start and a wait for each reduction.
        values: for each value of the program that the head computes, the value of the head that equals it.
    """

    def __init__(self, graph: Graph) -> None:
        self.names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
        self.eqns: list[Eqn] = []
        self.values: dict[Var, Var] = {
            v: v for v in graph.inputs if v not in graph.batch and not v.layout
        }
        self._known: dict[Hashable, Eqn] = {}
        self._round: dict[
            Var, int
        ] = {}  # how many reductions a value depends on that follow each other

    def add(self, eqn: Eqn) -> Eqn:
        """Add an equation, unless the head has an equal one. Returns the equation that the head has."""
        eqn = eqn.reading(lambda v: self.values.get(v, v), region="forward", order=None)
        known = self._known.setdefault(structure(eqn, lambda v: v), eqn)
        if known is eqn:
            self.eqns.append(eqn)
            before = max((self._round.get(v, 0) for v in eqn.ins), default=0)
            self._round.update(dict.fromkeys(eqn.results, before + rules(eqn).waits))
        return known

    def repeat(self, eqn: Eqn) -> None:
        """Add an equation of the program, with its results."""
        self.values.update(zip(eqn.results, self.add(eqn).results))

    def reduce(self, eqn: Eqn, term: Var, op: str, path: str) -> None:
        """Reduce a term, of which each rank has one, to the result of an equation of the program."""
        out, axis = eqn.out, term.layout[0].axis
        name = self.names.fresh(f"{out.name}.all") if out.shape else out.name
        provenance = Provenance("param", (path,), axis)
        start = self.add(
            reduce([term], [name], axis, op, None, provenance=provenance, source=eqn.source)
        )
        end = wait(start.out, source=eqn.source)
        end = self.add(end if out.shape else end.replace(outs=(out,)))
        self.values[out] = end.out
        if out.shape:
            self.repeat(
                eqn.replace(
                    op=torch.ops.aten.view.default, args=(end.out, list(out.shape)), kwargs={}
                )
            )

    def follows(self, v: Var) -> bool:
        """Whether a value of the program, which the head computes, depends on a reduction."""
        return self._round.get(self.values[v], 0) > 0

    def needed(self, results: Iterable[Var]) -> list[Eqn]:
        """The equations that `results` need, in order."""
        makers = producers(self.eqns)
        computing = needed((makers[v] for v in results), makers)
        rounds = grouped((self._round[e.out], e) for e in self.eqns if e in computing)
        ordered: list[Eqn] = []
        for _, eqns in sorted(rounds.items()):
            buckets = grouped((bucket_key(e), e) for e in eqns if role(e) == "param")
            ordered += (e for e in eqns if role(e) != "param")
            ordered += map(coalesce, buckets.values())
        return ordered
