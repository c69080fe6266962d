"""Reduce a sum of gradients once, instead of summing reduced gradients: ZeRO stages 0 and 1 with micro-batches.

    wait(reduce(a)) + 0                        -->   wait(reduce(a)), because `sum()` starts from 0
    wait(reduce(a)) + wait(reduce(b))          -->   wait(reduce(a + b))
    (x + wait(reduce(a))) + wait(reduce(b))    -->   x + wait(reduce(a + b))
    wait(reduce(a)) * c                        -->   wait(reduce(a * c)), if such a sum follows

Reductions are linear, so the results are equal up to rounding. Gradients stay whole until the last micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import torch

from ..ir.collectives import pair, role
from ..ir.graph import Eqn, Graph, Var, dce, producers, rename, users, variables
from .edits import widened

aten = torch.ops.aten
SUMS = (aten.add.Tensor,)
SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def reduce_once(graph: Graph) -> Graph:
    """Rewrite with the patterns above until none of them matches."""
    while (rewritten := _rewritten(graph)) is not None:
        graph = dce(rewritten)
    return graph


def _rewritten(graph: Graph) -> Graph | None:
    """The program with one pattern applied: the first that matches, at the first equation at which one matches."""
    uses = _Uses(graph)
    graphs = (pattern(uses, e) for e in graph.eqns for pattern in _PATTERNS)
    return next((new for new in graphs if new is not None), None)


class _Reduced(NamedTuple):
    """A value `wait(reduce(term))`, of which `start` is the reduction and `end` the wait. The value has one reader."""

    term: Var
    start: Eqn
    end: Eqn

    def sums_with(self, second: _Reduced) -> bool:
        """Whether both reduce gradients of the same value in the same way, so that their sum may be reduced instead."""
        keys = [(r.start.op, r.start.kwargs, r.start.provenance, r.start.out.layout) for r in (self, second)]
        return keys[0] == keys[1] and self.end is not second.end


class _Uses:
    """A program, with the equation that computes each value and those that read it."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.makers, self.readers = graph, producers(graph.eqns), users(graph)
        self.waits = pair(graph).waits
        self.outputs = set(variables(graph.outputs))

    def only_reader(self, v: Var) -> Eqn | None:
        """The equation that reads `v`, if it is the only one, and `v` is no output."""
        readers = self.readers.get(v, ())
        return readers[0] if len(readers) == 1 and v not in self.outputs else None

    def maker(self, v: object) -> Eqn | None:
        """The equation that computes `v`, if `v` has one reader and is no output."""
        return self.makers.get(v) if isinstance(v, Var) and self.only_reader(v) is not None else None

    def reduced(self, v: object) -> _Reduced | None:
        """The reduction of a gradient whose result is `v`, if `v` has one reader and is no output."""
        end = self.maker(v)
        if end is None or end not in self.waits:
            return None
        start = self.waits[end].start
        return _Reduced(start.ins[0], start, end) if role(start) == "grad" and len(start.ins) == 1 else None

    def holds(self, v: object, r: _Reduced) -> bool:
        """Whether `v` is a sum with a term that may be summed with `r` before the reduction."""
        e = self.maker(v)
        if e is not None and (e.op in SUMS or e.op in SCALES):
            return any(self.holds(term, r) for term in e.args)
        term = self.reduced(v)
        return term is not None and term.sums_with(r)

    def is_summed(self, v: Var, r: _Reduced) -> bool:
        """Whether `v` is added to a sum with another reduction that may be summed with `r`.

        Otherwise a factor is better applied after the reduction, to the part: it has fewer elements.
        """
        while (add := self.only_reader(v)) is not None and add.op in SUMS:
            if any(self.holds(term, r) for term in add.args if term is not v):
                return True
            v = add.out
        return False


def _is_sum(e: Eqn) -> bool:
    return e.op in SUMS and not e.kwargs


def _from_zero(uses: _Uses, e: Eqn) -> Graph | None:
    """wait(reduce(a)) + 0, from which `sum()` starts."""
    zero = _is_sum(e) and type(e.args[1]) in (int, float) and e.args[1] == 0
    return rename(uses.graph, {e.out: e.args[0]}) if zero and uses.reduced(e.args[0]) else None


def _of_two(uses: _Uses, e: Eqn) -> Graph | None:
    """wait(reduce(a)) + wait(reduce(b)), or (x + wait(reduce(a))) + wait(reduce(b)), with the terms in any order."""
    for left, right in permutations(e.args) if _is_sum(e) else ():
        b, inner = uses.reduced(right), uses.maker(left)
        terms = permutations(inner.args) if inner is not None and _is_sum(inner) else ()
        for x, y in ((None, left), *terms):
            a = uses.reduced(y)
            if a and b and a.sums_with(b) and (x is None or isinstance(x, Var)):
                return _merge(uses.graph, e, a, b, x)
    return None


def _scaled(uses: _Uses, e: Eqn) -> Graph | None:
    """wait(reduce(a)) * c, if a sum of two reductions follows."""
    scales = e.op in SCALES and not isinstance(e.args[1], Var) and uses.only_reader(e.out) is not None
    r = uses.reduced(e.args[0]) if scales else None
    if r is None or not uses.is_summed(e.out, r):
        return None
    scaled = dataclasses.replace(r.term, name=f"{r.term.name}.scaled")
    first = e.replace(args=(r.term, *e.args[1:]), outs=(scaled,), region=r.start.region)
    return rename(_with(uses.graph, {r.start: [first, r.start.replace(args=([scaled],))]}), {e.out: r.end.out})


_PATTERNS = (_from_zero, _of_two, _scaled)


def _merge(graph: Graph, add: Eqn, a: _Reduced, b: _Reduced, rest: Var | None) -> Graph:
    """The program with `a + b` reduced at the later of the two reductions; `rest` is added to the result."""
    a, b = sorted((a, b), key=lambda r: graph.eqns.index(r.start))
    total = dataclasses.replace(b.term, name=f"{b.term.name}.acc", dtype=b.end.out.dtype)
    # The terms are cast to the dtype of the gradient, so that only their sum is rounded when it is sent.
    (casts, x), (more, y) = (widened(r.term, total.dtype, f"{r.term.name}.wide", b.start) for r in (a, b))
    first = b.start.replace(op=aten.add.Tensor, args=(x, y), outs=(total,), kwargs={}, provenance=None)
    changes = {b.start: [*casts, *more, first, b.start.replace(args=([total],))]}
    if rest is None:
        return rename(_with(graph, changes), {add.out: b.end.out})
    return _with(graph, {**changes, add: [add.replace(args=(rest, b.end.out))]})


def _with(graph: Graph, changes: Mapping[Eqn, Sequence[Eqn]]) -> Graph:
    """The program with other equations in the place of some."""
    return graph.replace(eqns=tuple(new for e in graph.eqns for new in changes.get(e, (e,))))
