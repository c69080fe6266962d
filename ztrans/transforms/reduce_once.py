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
from collections.abc import Sequence, Set
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


class _Split(NamedTuple):
    """A value as a term, or as the sum of a rest and a term, which `maker` computes."""

    term: object
    rest: Var | None = None
    maker: Eqn | None = None


def reduce_once(graph: Graph) -> Graph:
    """Rewrite with the patterns above until none of them matches."""
    while (rewritten := _rewritten(graph)) is not None:
        graph = dce(rewritten)
    return graph


class _Rewrite(NamedTuple):
    """A match of a pattern: the equations that it is about, what replaces some of them, and values that are renamed."""

    eqns: set[Eqn]
    changes: dict[Eqn, list[Eqn]]
    alias: dict[Var, Var]


def _rewritten(graph: Graph) -> Graph | None:
    """The program after every rewrite that shares no equation with one before it; None if no pattern matches."""
    uses = Uses(graph)
    names = Names(v.name for v in (*graph.inputs, *uses.makers))
    touched: set[Eqn] = set()
    changes: dict[Eqn, list[Eqn]] = {}
    alias: dict[Var, Var] = {}
    for e in graph.eqns:
        if e.op in SUMS and not e.kwargs:
            rewrite = _from_zero(uses, e) or _of_two(uses, names, e, touched)
            if rewrite is not None:
                touched |= rewrite.eqns
                changes.update(rewrite.changes)
                alias.update(rewrite.alias)
    if not touched:
        return None
    eqns: list[Eqn] = []
    for e in graph.eqns:
        eqns += changes.get(e, [e])
    return rename(graph.replace(eqns=tuple(eqns)), alias)


class Uses:
    """The equation of a program that computes each value, those that read it, and the position of each equation."""

    def __init__(self, graph: Graph) -> None:
        self.makers = producers(graph.eqns)
        self.readers = users(graph)
        self.outputs = set(variables(graph.outputs))
        self.position = {e: i for i, e in enumerate(graph.eqns)}

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

    def splits(self, v: object) -> list[_Split]:
        """The ways to take `v` as a sum of a rest and a term; without a rest, the term is `v` itself."""
        splits = [_Split(v)]
        maker = self.only_maker(v)
        if maker is not None and maker.op in SUMS and not maker.kwargs:
            for rest, term in permutations(maker.args, 2):
                if isinstance(rest, Var):
                    splits.append(_Split(term, rest, maker))
        return splits


def adds_zero(e: Eqn) -> bool:
    """Whether an equation adds the number 0, from which Python's `sum` starts."""
    return e.op in SUMS and type(e.args[1]) in (int, float) and e.args[1] == 0


def _from_zero(uses: Uses, e: Eqn) -> _Rewrite | None:
    if not adds_zero(e) or uses.term(e.args[0]) is None:
        return None
    return _Rewrite({e}, {}, {e.out: e.args[0]})


def _of_two(uses: Uses, names: Names, e: Eqn, touched: Set[Eqn]) -> _Rewrite | None:
    for summand, other_summand in permutations(e.args):
        for split in uses.splits(summand):
            a, b = uses.term(split.term), uses.term(other_summand)
            if a and b and a.mark is not b.mark and a.mark.args[1] is b.mark.args[1]:
                eqns = {e, a.mark, b.mark, *a.factors, *b.factors}
                if split.maker is not None:
                    eqns.add(split.maker)
                if touched.isdisjoint(eqns):
                    terms = sorted((a, b), key=lambda term: uses.position[term.mark])
                    return _merge(eqns, names, e, terms, split.rest)
                return None
    return None


def _merge(
    eqns: set[Eqn], names: Names, add: Eqn, terms: Sequence[_Term], rest: Var | None
) -> _Rewrite:
    """Mark the sum of two terms at the later of their marks; `rest` is added to the result."""
    mark = terms[1].mark
    sum_eqns: list[Eqn] = []
    values: list[Var] = []
    for term in terms:
        value = term.mark.args[0]
        for factor in term.factors:
            scaled = dataclasses.replace(value, name=names.fresh(f"{value.name}.scaled"))
            args = (value, *factor.args[1:])
            sum_eqns.append(factor.replace(args=args, outs=(scaled,), region=mark.region))
            value = scaled
        values.append(value)
    total = dataclasses.replace(values[1], name=names.fresh(f"{values[1].name}.acc"))
    sum_eqns.append(mark.replace(op=aten.add.Tensor, args=tuple(values), outs=(total,)))
    sum_eqns.append(mark.replace(args=(total, mark.args[1])))
    if rest is None:
        return _Rewrite(eqns, {mark: sum_eqns}, {add.out: mark.out})
    return _Rewrite(eqns, {mark: sum_eqns, add: [add.replace(args=(rest, mark.out))]}, {})
