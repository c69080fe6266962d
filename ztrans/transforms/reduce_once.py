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

from ..ir.graph import Eqn, Graph, Names, Var, dce, producers, rename, used_once
from ..ir.marks import GRADIENT
from ..ir.op_facts import ADD, SCALES, adds_zero


def reduce_once(graph: Graph) -> Graph:
    """Rewrite with the patterns above until none of them matches."""
    while True:
        rewrites = _Sums(graph).rewrites()
        if not rewrites:
            return graph
        graph = dce(_rewritten(graph, rewrites))


class _Term(NamedTuple):
    """A gradient, as its mark, and the equations that multiply it by numbers. Nothing else reads these values."""

    mark: Eqn
    factors: tuple[Eqn, ...] = ()


class _Summand(NamedTuple):
    """What may be a term of a sum: an argument of the sum, or an argument of a sum that only this sum reads.

    Attributes:
        value: the summand.
        inner_sum: the equation that adds it to `rest`, if it is not an argument of the sum itself.
        rest: the other argument of that equation.
    """

    value: object
    inner_sum: Eqn | None = None
    rest: Var | None = None


class _Rewrite(NamedTuple):
    """A match of a pattern: the equations that it is about, what replaces some of them, and values that are renamed."""

    eqns: set[Eqn]
    replacements: dict[Eqn, list[Eqn]]
    alias: dict[Var, Var]


def _rewritten(graph: Graph, rewrites: Sequence[_Rewrite]) -> Graph:
    replacements: dict[Eqn, list[Eqn]] = {}
    alias: dict[Var, Var] = {}
    for rewrite in rewrites:
        replacements.update(rewrite.replacements)
        alias.update(rewrite.alias)
    eqns: list[Eqn] = []
    for e in graph.eqns:
        eqns += replacements.get(e, [e])
    return rename(graph.replace(eqns=tuple(eqns)), alias)


class _Sums:
    """The sums of gradients in a program."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
        self.used_once = used_once(graph)
        self.position = {e: i for i, e in enumerate(graph.eqns)}

    def rewrites(self) -> list[_Rewrite]:
        """The matches of a pattern that share no equation with a match before them."""
        rewrites: list[_Rewrite] = []
        matched: set[Eqn] = set()
        for e in self.graph.eqns:
            if e.op is ADD and not e.kwargs:
                rewrite = self._without_zero(e) or self._of_two_terms(e, matched)
                if rewrite is not None:
                    rewrites.append(rewrite)
                    matched |= rewrite.eqns
        return rewrites

    def _without_zero(self, e: Eqn) -> _Rewrite | None:
        if not adds_zero(e) or self._term(e.args[0]) is None:
            return None
        return _Rewrite({e}, {}, {e.out: e.args[0]})

    def _of_two_terms(self, e: Eqn, matched: Set[Eqn]) -> _Rewrite | None:
        for argument, other in permutations(e.args):
            a = self._term(other)
            if a is None:
                continue
            for summand in self._summands(argument):
                b = self._term(summand.value)
                if b is not None and _are_of_one_value(a, b):
                    eqns = {e, a.mark, b.mark, *a.factors, *b.factors}
                    if summand.inner_sum is not None:
                        eqns.add(summand.inner_sum)
                    # What shares an equation with another match is merged with its result in the next round.
                    return (
                        self._merged(eqns, e, a, b, summand) if matched.isdisjoint(eqns) else None
                    )
        return None

    def _term(self, value: object) -> _Term | None:
        """The gradient that a value is, or is a multiple of."""
        maker = self._only_maker(value)
        if maker is None:
            return None
        if maker.op is GRADIENT:
            return _Term(maker)
        if maker.op not in SCALES or isinstance(maker.args[1], Var):
            return None
        term = self._term(maker.args[0])
        return term and _Term(term.mark, (*term.factors, maker))

    def _summands(self, value: object) -> list[_Summand]:
        """What an argument of a sum contributes: itself, and what it is the sum of."""
        summands = [_Summand(value)]
        maker = self._only_maker(value)
        if maker is not None and maker.op is ADD and not maker.kwargs:
            for rest, summand in permutations(maker.args, 2):
                if isinstance(rest, Var):
                    summands.append(_Summand(summand, maker, rest))
        return summands

    def _only_maker(self, value: object) -> Eqn | None:
        """The equation that computes a value, if nothing but one equation reads it."""
        return self.used_once.get(value) if isinstance(value, Var) else None

    def _merged(
        self, matched: set[Eqn], add: Eqn, a: _Term, b: _Term, summand: _Summand
    ) -> _Rewrite:
        """Mark the sum of two terms, where the later of their marks is. What else is summed is added to the result."""
        first, last = sorted((a, b), key=lambda term: self.position[term.mark])
        mark = last.mark
        first_products, first_value = self._scaled(first, mark)
        last_products, last_value = self._scaled(last, mark)
        total = dataclasses.replace(last_value, name=self.names.fresh(f"{last_value.name}.acc"))
        sum_of_terms = mark.replace(op=ADD, args=(first_value, last_value), outs=(total,))
        new_mark = mark.replace(args=(total, mark.args[1]))
        eqns = [*first_products, *last_products, sum_of_terms, new_mark]
        if summand.inner_sum is None:
            return _Rewrite(matched, {mark: eqns}, {add.out: mark.out})
        sum_with_rest = add.replace(args=(summand.rest, mark.out))
        return _Rewrite(matched, {mark: eqns, add: [sum_with_rest]}, {})

    def _scaled(self, term: _Term, mark: Eqn) -> tuple[list[Eqn], Var]:
        """The equations that multiply the value of a term by its factors before `mark`, and their result."""
        products: list[Eqn] = []
        value = term.mark.args[0]
        for factor in term.factors:
            scaled = dataclasses.replace(value, name=self.names.fresh(f"{value.name}.scaled"))
            args = (value, *factor.args[1:])
            products.append(factor.replace(args=args, outs=(scaled,), region=mark.region))
            value = scaled
        return products, value


def _are_of_one_value(a: _Term, b: _Term) -> bool:
    """Whether two terms are different gradients of the same value."""
    return a.mark is not b.mark and a.mark.args[1] is b.mark.args[1]
