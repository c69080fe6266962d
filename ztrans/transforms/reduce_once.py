"""Reduce a sum of gradients once, instead of summing reduced gradients: ZeRO stages 0 and 1 with micro-batches.

    gradient(a, w) + 0                         -->   gradient(a, w), because `sum()` starts from 0
    gradient(a, w) + gradient(b, w)            -->   gradient(a + b, w)
    (x + gradient(a, w)) + gradient(b, w)      -->   x + gradient(a + b, w)

A gradient in such a sum may have a factor, as in gradient(a, w) / 2. The marks of the program as it was traced are
rewritten, before they become reductions. Reductions are linear, so the results are equal up to rounding. Gradients
stay whole until the last micro-batch.
"""

from __future__ import annotations

import dataclasses
from itertools import permutations
from typing import NamedTuple

import torch

from ..ir.graph import Eqn, Graph, Names, Var, dce, producers, rename, users, variables
from ..ir.marks import GRADIENT

aten = torch.ops.aten
SUMS = (aten.add.Tensor,)
SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


class _Term(NamedTuple):
    """A gradient, as its mark, and the equations that multiply it by numbers. Nothing else reads these values."""

    mark: Eqn
    factors: tuple[Eqn, ...] = ()


def reduce_once(graph: Graph) -> Graph:
    """Rewrite with the patterns above until none of them matches."""
    while (rewritten := _rewritten(graph)) is not None:
        graph = dce(rewritten)
    return graph


def _rewritten(graph: Graph) -> Graph | None:
    """The program with a pattern applied at the first equation at which one matches."""
    uses = Uses(graph)
    for e in graph.eqns:
        if e.op in SUMS and not e.kwargs:
            new = _from_zero(uses, e) or _of_two(uses, e)
            if new is not None:
                return new
    return None


class Uses:
    """A program, with the equation that computes each value and those that read it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = producers(graph.eqns)
        self.readers = users(graph)
        self.outputs = set(variables(graph.outputs))

    def only_maker(self, v: object) -> Eqn | None:
        """The equation that computes `v`, if `v` has one reader and is no output."""
        if not isinstance(v, Var) or len(self.readers.get(v, ())) != 1 or v in self.outputs:
            return None
        return self.makers.get(v)

    def term(self, v: object) -> _Term | None:
        """The gradient that `v` is, or is a multiple of."""
        e = self.only_maker(v)
        if e is not None and e.op in SCALES and not isinstance(e.args[1], Var):
            gradient = self.term(e.args[0])
            return gradient and _Term(gradient.mark, (*gradient.factors, e))
        return _Term(e) if e is not None and e.op is GRADIENT else None

    def splits(self, v: object) -> list[tuple[Var | None, object]]:
        """The ways to take `v` as a sum of a rest and a term; without a rest, the term is `v` itself."""
        splits: list[tuple[Var | None, object]] = [(None, v)]
        maker = self.only_maker(v)
        if maker is not None and maker.op in SUMS and not maker.kwargs:
            for rest, term in permutations(maker.args, 2):
                if isinstance(rest, Var):
                    splits.append((rest, term))
        return splits


def adds_zero(e: Eqn) -> bool:
    """Whether an equation adds the number 0, from which Python's `sum` starts."""
    return e.op in SUMS and type(e.args[1]) in (int, float) and e.args[1] == 0


def _from_zero(uses: Uses, e: Eqn) -> Graph | None:
    if not adds_zero(e) or uses.term(e.args[0]) is None:
        return None
    return rename(uses.graph, {e.out: e.args[0]})


def _of_two(uses: Uses, e: Eqn) -> Graph | None:
    for summand, other_summand in permutations(e.args):
        for rest, v in uses.splits(summand):
            a, b = uses.term(v), uses.term(other_summand)
            if a and b and a.mark is not b.mark and a.mark.args[1] is b.mark.args[1]:
                return _merge(uses.graph, e, a, b, rest)
    return None


def _merge(graph: Graph, add: Eqn, a: _Term, b: _Term, rest: Var | None) -> Graph:
    """The program with `a + b` marked at the later of the two marks; `rest` is added to the result."""
    names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
    a, b = sorted((a, b), key=lambda term: graph.eqns.index(term.mark))
    mark = b.mark
    eqns: list[Eqn] = []
    values: list[Var] = []
    for term in (a, b):
        value = term.mark.args[0]
        for factor in term.factors:
            scaled = dataclasses.replace(value, name=names.fresh(f"{value.name}.scaled"))
            args = (value, *factor.args[1:])
            eqns.append(factor.replace(args=args, outs=(scaled,), region=mark.region))
            value = scaled
        values.append(value)
    total = dataclasses.replace(values[1], name=names.fresh(f"{values[1].name}.acc"))
    eqns.append(mark.replace(op=aten.add.Tensor, args=tuple(values), outs=(total,)))
    eqns.append(mark.replace(args=(total, mark.args[1])))
    changes = {mark: eqns}
    if rest is not None:
        changes[add] = [add.replace(args=(rest, mark.out))]
    new_eqns: list[Eqn] = []
    for e in graph.eqns:
        new_eqns += changes.get(e, [e])
    new = graph.replace(eqns=tuple(new_eqns))
    return new if rest is not None else rename(new, {add.out: mark.out})
