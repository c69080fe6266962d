"""Reduce a sum of gradients once, instead of summing reduced gradients: ZeRO stages 0 and 1 with micro-batches.

    gradient(a, w) + 0                         -->   gradient(a, w), because `sum()` starts from 0
    gradient(a, w) + gradient(b, w)            -->   gradient(a + b, w)
    (x + gradient(a, w)) + gradient(b, w)      -->   x + gradient(a + b, w)

A gradient in such a sum may have a factor, as in gradient(a, w) / 2. The pass rewrites the marks of the traced program,
before they become reductions. Reductions are linear, so the results are equal up to rounding. Gradients stay whole
until the last micro-batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import product

from ..ir.graph import Eqn, Graph, Var, dce, used_once
from ..ir.marks import GRADIENT
from ..ir.op_facts import ADD, SCALES, adds_zero
from ..ir.rewriter import Rewriter


def reduce_once(graph: Graph) -> Graph:
    """Rewrite the sums of gradients as above. A rewritten sum may be a part of the next one."""
    sums = _Sums(graph)
    if not sums.alias and not sums.replacements:
        return graph
    for e, replacement in sums.replacements.items():
        sums.new.replace(e, replacement)
    for v, value in sums.alias.items():
        sums.new.alias(v, value)
    return dce(sums.new.applied())


@dataclass(frozen=True)
class _Gradient:
    """A marked gradient that reaches a value: as the value itself, or as a summand of it.

    Attributes:
        mark: its mark in the traced program.
        factors: the equations that multiply it by numbers.
        rest: the other summand of the value, or None if the gradient is the value itself.
    """

    mark: Eqn
    factors: tuple[Eqn, ...] = ()
    rest: Var | None = None


class _Sums:
    """The sums of gradients in a program, and their rewrites.

    Attributes:
        new: the edits of the program.
        gradients: the gradients in each value that a single equation reads.
        replacements: the new equation for each rewritten one.
        alias: the new value for each renamed one.
    """

    def __init__(self, graph: Graph) -> None:
        self.new = Rewriter(graph)
        self.position = {e: i for i, e in enumerate(graph.eqns)}
        self.gradients: dict[Var, list[_Gradient]] = {}
        self.replacements: dict[Eqn, Eqn] = {}
        self.alias: dict[Var, Var] = {}
        single_use = used_once(graph)
        for e in graph.eqns:
            gradients = self._gradients_in(e)
            if gradients and e.out in single_use:
                self.gradients[e.out] = gradients

    def _gradients_in(self, e: Eqn) -> list[_Gradient]:
        """The gradients in the result of an equation. Rewrites a sum of two gradients of one leaf."""
        if e.op is GRADIENT:
            return [_Gradient(e)]
        if e.op in SCALES and not isinstance(e.args[1], Var):
            gradients = self._without_rest(e.args[0])
            return [dataclasses.replace(g, factors=(*g.factors, e)) for g in gradients]
        if e.op is not ADD or e.kwargs:  # with `alpha` it is not a plain sum
            return []

        a, b = e.args
        if adds_zero(e):
            gradients = self._without_rest(a)
            if gradients:
                self.alias[e.out] = a
            return gradients
        # A gradient that is added to itself is read twice.
        return self._gradients_in_sum(e, a, b) if isinstance(b, Var) and a is not b else []

    def _without_rest(self, value: Var) -> list[_Gradient]:
        """The gradients that are the value itself, not just one of its two summands."""
        return [g for g in self.gradients.get(value, []) if g.rest is None]

    def _gradients_in_sum(self, e: Eqn, a: Var, b: Var) -> list[_Gradient]:
        """The gradients in the sum of `a` and `b`. Merges a gradient in `a` and one in `b` of the same leaf."""
        pair = self._same_leaf_pair(a, b)
        if pair is not None:
            x, y = pair
            merged = self._merged(x, y)
            rest = x.rest if y.rest is None else y.rest
            if rest is None:
                self.alias[e.out] = merged.mark.out
                return [merged]
            # (rest + x) + y becomes rest + (x + y).
            a = rest
            b = merged.mark.out
            self.gradients[b] = [merged]
            self.replacements[e] = e.replace(args=(a, b))
        gradients = [dataclasses.replace(g, rest=a) for g in self._without_rest(b)]
        gradients += [dataclasses.replace(g, rest=b) for g in self._without_rest(a)]
        return gradients

    def _same_leaf_pair(self, a: Var, b: Var) -> tuple[_Gradient, _Gradient] | None:
        """A gradient in `a` and one in `b` of the same leaf, at most one of them with a rest; or None."""
        for x, y in product(self.gradients.get(a, []), self.gradients.get(b, [])):
            have_one_leaf = x.mark.args[1] is y.mark.args[1]
            if have_one_leaf and (x.rest is None or y.rest is None):
                return x, y
        return None

    def _merged(self, x: _Gradient, y: _Gradient) -> _Gradient:
        """Mark the sum of two gradients, in the place of the later mark."""
        first, last = sorted((x, y), key=lambda gradient: self.position[gradient.mark])
        mark = self._current_mark(last)
        first_value = self._scaled(first, last.mark)
        last_value = self._scaled(last, last.mark)
        total = self.new.fresh(last_value, ".acc")
        add = mark.replace(op=ADD, args=(first_value, last_value), outs=(total,))
        self.new.insert_before(last.mark, add)
        self.replacements[last.mark] = mark.replace(args=(total, mark.args[1]))
        return _Gradient(last.mark)

    def _current_mark(self, gradient: _Gradient) -> Eqn:
        return self.replacements.get(gradient.mark, gradient.mark)

    def _scaled(self, gradient: _Gradient, reader: Eqn) -> Var:
        """The marked value times the factors of its gradient, computed before `reader`."""
        value = self._current_mark(gradient).args[0]
        for factor in gradient.factors:
            scaled = self.new.fresh(value, ".scaled")
            args = (value, *factor.args[1:])
            multiplied = factor.replace(args=args, outs=(scaled,), region=reader.region)
            self.new.insert_before(reader, multiplied)
            value = scaled
        return value
