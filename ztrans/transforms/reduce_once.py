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
from dataclasses import dataclass
from itertools import product

from ..ir.graph import Eqn, Graph, Var, dce, used_once
from ..ir.marks import GRADIENT
from ..ir.op_facts import ADD, SCALES, adds_zero
from ..ir.rewriter import Rewriter


def reduce_once(graph: Graph) -> Graph:
    """Rewrite the sums of gradients as above. What has been rewritten may be a part of the next sum."""
    sums = _Sums(graph)
    if not sums.alias and not sums.replaced:
        return graph
    for e, replacement in sums.replaced.items():
        sums.new.replace(e, replacement)
    for v, value in sums.alias.items():
        sums.new.alias(v, value)
    return dce(sums.new.applied())


@dataclass(frozen=True)
class _Gradient:
    """A marked gradient that reaches a value: as the value itself, or as a summand of it.

    Attributes:
        mark: its mark, in the program as it was.
        factors: the equations that multiply it by numbers.
        rest: the other summand of the value.
    """

    mark: Eqn
    factors: tuple[Eqn, ...] = ()
    rest: Var | None = None


class _Sums:
    """The sums of gradients in a program, and what they become.

    Attributes:
        gradients: the gradients in each value that a single equation reads.
        new: what is written before an equation.
        replaced: what is written in place of an equation.
        alias: the values that are renamed.
    """

    def __init__(self, graph: Graph) -> None:
        self.new = Rewriter(graph)
        self.position = {e: i for i, e in enumerate(graph.eqns)}
        self.gradients: dict[Var, list[_Gradient]] = {}
        self.replaced: dict[Eqn, Eqn] = {}
        self.alias: dict[Var, Var] = {}
        single_use = used_once(graph)
        for e in graph.eqns:
            gradients = self._gradients_of(e)
            if gradients and e.out in single_use:
                self.gradients[e.out] = gradients

    def _gradients_of(self, e: Eqn) -> list[_Gradient]:
        """The gradients in the result of an equation. A sum of two gradients of one leaf is rewritten."""
        if e.op is GRADIENT:
            return [_Gradient(e)]
        if e.op in SCALES and not isinstance(e.args[1], Var):
            gradients = self._without_rest(e.args[0])
            return [dataclasses.replace(g, factors=(*g.factors, e)) for g in gradients]
        if e.op is not ADD or e.kwargs:
            return []

        a, b = e.args
        if adds_zero(e):
            gradients = self._without_rest(a)
            if gradients:
                self.alias[e.out] = a
            return gradients
        # A gradient that is added to itself is read twice.
        return self._of_sum(e, a, b) if isinstance(b, Var) and a is not b else []

    def _without_rest(self, value: Var) -> list[_Gradient]:
        """The gradients that are the value itself, and not one of its two summands."""
        return [g for g in self.gradients.get(value, []) if g.rest is None]

    def _of_sum(self, e: Eqn, a: Var, b: Var) -> list[_Gradient]:
        """The gradients in the sum of `a` and `b`. If each has a gradient of one leaf, these two are merged."""
        pair = self._of_one_leaf(a, b)
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
            self.replaced[e] = e.replace(args=(a, b))
        gradients = [dataclasses.replace(g, rest=a) for g in self._without_rest(b)]
        gradients += [dataclasses.replace(g, rest=b) for g in self._without_rest(a)]
        return gradients

    def _of_one_leaf(self, a: Var, b: Var) -> tuple[_Gradient, _Gradient] | None:
        """A gradient in `a` and one in `b` that are of one leaf, and of which at most one has a rest; or None."""
        for x, y in product(self.gradients.get(a, []), self.gradients.get(b, [])):
            are_of_one_leaf = x.mark.args[1] is y.mark.args[1]
            if are_of_one_leaf and (x.rest is None or y.rest is None):
                return x, y
        return None

    def _merged(self, x: _Gradient, y: _Gradient) -> _Gradient:
        """Mark the sum of two gradients, where the later of their marks is."""
        first, last = sorted((x, y), key=lambda gradient: self.position[gradient.mark])
        mark = self._written_mark(last)
        first_value = self._scaled(first, last.mark)
        last_value = self._scaled(last, last.mark)
        total = self.new.fresh(last_value, ".acc")
        add = mark.replace(op=ADD, args=(first_value, last_value), outs=(total,))
        self.new.insert_before(last.mark, add)
        self.replaced[last.mark] = mark.replace(args=(total, mark.args[1]))
        return _Gradient(last.mark)

    def _written_mark(self, gradient: _Gradient) -> Eqn:
        return self.replaced.get(gradient.mark, gradient.mark)

    def _scaled(self, gradient: _Gradient, reader: Eqn) -> Var:
        """The marked value times the factors of its gradient, which is computed before `reader`."""
        value = self._written_mark(gradient).args[0]
        for factor in gradient.factors:
            scaled = self.new.fresh(value, ".scaled")
            args = (value, *factor.args[1:])
            multiplied = factor.replace(args=args, outs=(scaled,), region=reader.region)
            self.new.insert_before(reader, multiplied)
            value = scaled
        return value
