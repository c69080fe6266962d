"""Accumulate first, reduce once: what ZeRO stages 0 and 1 do with micro-batches.

    wait(reduce(a)) + wait(reduce(b))          -->   wait(reduce(a + b))
    (x + wait(reduce(a))) + wait(reduce(b))    -->   x + wait(reduce(a + b))
    wait(reduce(a)) * c                        -->   wait(reduce(a * c)), on the way to such a sum

Sums are linear, so this holds up to rounding; the gradients stay whole until the last micro-batch.
"""

from __future__ import annotations

import dataclasses

import torch

from ..ir.collectives import pair
from ..ir.graph import Eqn, Graph, Var, dce, producers, rename, users, variables

aten = torch.ops.aten
_CAST = aten._to_copy.default
SUMS = (aten.add.Tensor,)
SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def accumulate_unsharded(graph: Graph) -> Graph:
    """Reduce sums of gradients instead of summing reduced gradients, to fix-point."""
    changed = True
    while changed:
        graph, changed = _once(graph)
    return graph


@dataclasses.dataclass(frozen=True)
class _Reduced:
    """A value that is `wait(reduce(term))`, all links used once."""

    term: Var
    start: Eqn
    end: Eqn


def _once(graph: Graph) -> tuple[Graph, bool]:
    made, used, waits = producers(graph.eqns), users(graph), pair(graph).waits
    outputs = set(variables(graph.outputs))

    def once(v: Var) -> bool:
        return len(used.get(v, ())) == 1 and v not in outputs

    def as_reduced(v: object) -> _Reduced | None:
        end = made.get(v) if isinstance(v, Var) and once(v) else None
        if end is None or end not in waits:
            return None
        start = waits[end].start
        ok = start.provenance.role == "grad" and len(start.ins) == 1
        return _Reduced(start.ins[0], start, end) if ok else None

    def holds(v: object, r: _Reduced) -> bool:
        """Whether `v` is a sum with another reduction for the same value among its terms."""
        if isinstance(v, Var) and once(v) and v in made:
            e = made[v]
            if e.op in SUMS or e.op in SCALES:
                return any(holds(a, r) for a in e.args)
            other = as_reduced(v)
            return other is not None and _same(other, r)
        return False

    def meets(v: Var, r: _Reduced) -> bool:
        """Whether `v` is on its way to such a sum: what is scaled for another would be scaled whole for nothing."""
        while once(v) and used[v][0].op in SUMS:
            add = used[v][0]
            if any(holds(other, r) for other in add.args if other is not v):
                return True
            v = add.outs[0]
        return False

    for e in graph.eqns:
        if e.op in SUMS and not e.kwargs:
            if type(e.args[1]) in (int, float) and e.args[1] == 0 and as_reduced(e.args[0]):
                return _without(graph, e), True  # what sum() starts from
            pairs = [(e.args[0], e.args[1]), (e.args[1], e.args[0])]
            for left, right in pairs:
                r, first = as_reduced(right), as_reduced(left)
                if r and first and _same(first, r):
                    return _merge(graph, e, first, r, None), True
                inner = made.get(left) if isinstance(left, Var) and once(left) else None
                if r and inner is not None and inner.op in SUMS and not inner.kwargs:
                    for x, y in ((inner.args[0], inner.args[1]), (inner.args[1], inner.args[0])):
                        first = as_reduced(y)
                        if first and _same(first, r) and isinstance(x, Var):
                            return _merge(graph, e, first, r, x), True
        if e.op in SCALES and not isinstance(e.args[1], Var) and once(e.outs[0]):
            r = as_reduced(e.args[0])
            if r and meets(e.outs[0], r):
                return _scale(graph, e, r), True
    return graph, False


def _same(a: _Reduced, b: _Reduced) -> bool:
    keys = [(r.start.op, r.start.kwargs, r.start.provenance.paths, r.start.outs[0].layout) for r in (a, b)]
    return keys[0] == keys[1]


def _merge(graph: Graph, add: Eqn, a: _Reduced, b: _Reduced, rest: Var | None) -> Graph:
    """a + b, reduced where the later of them was; `rest` is added to the result."""
    a, b = sorted((a, b), key=lambda r: graph.eqns.index(r.start))
    total = dataclasses.replace(b.term, name=f"{b.term.name}.acc", dtype=b.end.outs[0].dtype)
    casts, (x, y) = _as(total.dtype, (a.term, b.term), b.start)
    before = b.start.replace(op=aten.add.Tensor, args=(x, y), outs=(total,), kwargs={}, provenance=None)
    start = b.start.replace(args=([total],))
    eqns = []
    for e in graph.eqns:
        if e is b.start:
            eqns += [*casts, before, start]
        elif e is add and rest is not None:
            eqns.append(e.replace(args=(rest, b.end.outs[0])))
        elif e is add or e is a.start or e is a.end:
            continue
        else:
            eqns.append(e)
    graph = graph.replace(eqns=tuple(eqns))
    if rest is None:
        graph = rename(graph, {add.outs[0]: b.end.outs[0]})
    return dce(graph)


def _as(dtype: torch.dtype, terms: tuple[Var, Var], at: Eqn) -> tuple[list[Eqn], list[Var]]:
    """The terms in the dtype of the gradient: what is rounded for the wire is their sum, as when it is written so."""
    casts, found = [], []
    for v in terms:
        if v.dtype != dtype:
            wide = dataclasses.replace(v, name=f"{v.name}.wide", dtype=dtype)
            casts.append(at.replace(op=_CAST, args=(v,), outs=(wide,), kwargs={"dtype": dtype}, provenance=None))
            v = wide
        found.append(v)
    return casts, found


def _without(graph: Graph, e: Eqn) -> Graph:
    """The program with the first argument of `e` in place of what it makes."""
    return rename(graph.replace(eqns=tuple(x for x in graph.eqns if x is not e)), {e.outs[0]: e.args[0]})


def _scale(graph: Graph, e: Eqn, r: _Reduced) -> Graph:
    """reduce(term) * c as reduce(term * c)."""
    scaled = dataclasses.replace(r.term, name=f"{r.term.name}.scaled")
    first = e.replace(args=(r.term, *e.args[1:]), outs=(scaled,), region=r.start.region)
    eqns = []
    for old in graph.eqns:
        if old is r.start:
            eqns += [first, old.replace(args=([scaled],))]
        elif old is not e:
            eqns.append(old)
    return rename(graph.replace(eqns=tuple(eqns)), {e.outs[0]: r.end.outs[0]})
