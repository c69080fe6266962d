"""Views: the calls that a program needs, where views can be left out or are part of another operation.

A small step spends its time in calls, and a third of the equations of a transformer are views. So a view of a view is
taken of the first value, a view that undoes another is its argument, a view that nothing reads in the end is not
taken, and `addmm` of a transposed weight is `linear`, which transposes and flattens in C++. Bits stay the same.

    a = view(x, [16, 64]); wt = t(w); y = addmm(b, a, wt); z = view(y, [2, 8, 48])    -->    z = linear(x, w, b)

This says only how an equation is called. The program, its storages and their lifetimes are those of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from .graph import Eqn, Graph, Var, variables
from .operations import is_view

aten = torch.ops.aten
# Views that show all elements of their argument in its order.
_RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
_TRANSPOSES = (aten.t.default, aten.transpose.int)
_LEFT_OUT = (*_RESHAPES, *_TRANSPOSES, aten.sum.dim_IntList)  # where nothing reads them


@dataclass(frozen=True)
class Calls:
    """What is called for each equation that has no call of its own: `eqns`, in order, and the last binds its results.

    `equal` has the values that are another value: no call makes them.
    """

    eqns: Mapping[Eqn, tuple[Eqn, ...]]
    equal: Mapping[Var, Var]


def simpler_calls(
    graph: Graph, shape: Callable[[Var], tuple[int, ...]], apart: Collection[Eqn] = ()
) -> Calls:
    """The calls of a program's operations in as few as its views allow. Equations in `apart` are called as they are.

    `shape` gives the shape of a value on this rank; the sizes in the program are those of this rank too.
    """
    views = _Views(graph, shape)
    calls: dict[Eqn, tuple[Eqn, ...]] = {}
    equal: dict[Var, Var] = {}
    for e in graph.eqns:
        simpler = (e,) if e in apart else views.simpler(e)
        if isinstance(simpler, Var):
            equal[e.out], simpler = equal.get(simpler, simpler), ()
        calls[e] = simpler
    calls.update((e, (call,)) for e, call in views.without_dims.items())
    read = {equal.get(v, v) for v in variables(graph.outputs)}
    for e in reversed(graph.eqns):
        kept = []
        for call in reversed(calls[e]):
            if call.op not in _LEFT_OUT or e in apart or any(v in read for v in call.results):
                kept.append(call)
                read.update(equal.get(v, v) for v in call.ins)
        calls[e] = tuple(reversed(kept))
    return Calls({e: simpler for e, simpler in calls.items() if simpler != (e,)}, equal)


class _Views:
    """The views of a program up to some equation."""

    def __init__(self, graph: Graph, shape: Callable[[Var], tuple[int, ...]]) -> None:
        self.shape = shape
        self.reshaped: dict[Var, Var] = {}  # by reshaped value, what it shows
        self.transposed: dict[
            Var, tuple[Var, tuple[int, int]]
        ] = {}  # likewise, with the dims that were exchanged
        self.strided: set[Var] = (
            set()
        )  # results of other views, which may have gaps or another order in memory
        self.summed: dict[
            Var, Eqn
        ] = {}  # by sum that keeps the dims it is taken over, its equation
        self.without_dims: dict[
            Eqn, Eqn
        ] = {}  # by sum whose only reader drops the dims again, the sum without them
        self.readers = Counter(v for e in graph.eqns for v in dict.fromkeys(e.ins))
        self.readers.update(variables(graph.outputs))

    def simpler(self, eqn: Eqn) -> tuple[Eqn, ...] | Var:
        """The equations to call for `eqn`, or the value that its result is equal to."""
        if eqn.op in _RESHAPES:
            return self._reshape(eqn)
        if eqn.op in _TRANSPOSES:
            return self._transpose(eqn)
        if is_view(eqn):
            self.strided.update(eqn.results)
        elif eqn.op is aten.sum.dim_IntList and len(eqn.args) == 3 and eqn.args[2]:
            self.summed[eqn.out] = eqn
        elif eqn.op in (aten.addmm.default, aten.mm.default) and not eqn.kwargs:
            return self._linear(eqn)
        return (eqn,)

    def _reshape(self, eqn: Eqn) -> tuple[Eqn, ...] | Var:
        wanted, shown = self.shape(eqn.out), eqn.ins[0]
        for earlier in self._shown(shown):
            if self.shape(earlier) == wanted:
                self.reshaped[eqn.out] = earlier
                return earlier
        summed = self.summed.get(shown)
        if (
            summed is not None
            and self.readers[shown] == 1
            and wanted == self._without_summed(summed)
        ):
            self.without_dims[summed] = summed.replace(
                args=(*summed.args[:2], False), outs=eqn.outs
            )
            return ()  # computed where the sum stands: its argument may be overwritten before the view
        while (
            shown in self.reshaped and self.readers[shown] == 1
        ):  # else a copy for strides might be made twice
            shown = self.reshaped[shown]
        self.reshaped[eqn.out] = shown
        return (eqn.replace(op=aten.view.default, args=(shown, list(wanted)), kwargs={}),)

    def _shown(self, v: Var) -> Iterator[Var]:
        """A value, and the values that it shows reshaped."""
        yield v
        while v in self.reshaped:
            v = self.reshaped[v]
            yield v

    def _without_summed(self, eqn: Eqn) -> tuple[int, ...]:
        shape = self.shape(eqn.ins[0])
        summed = {d % max(1, len(shape)) for d in eqn.args[1] or range(len(shape))}
        return tuple(n for d, n in enumerate(shape) if d not in summed)

    def _transpose(self, eqn: Eqn) -> tuple[Eqn, ...] | Var:
        shown, rank = eqn.ins[0], len(eqn.out.shape)
        if rank < 2:  # `t` of a vector is the vector
            return shown
        dims = eqn.args[1:] if eqn.op is aten.transpose.int else (0, 1)
        exchanged = min(d % rank for d in dims), max(d % rank for d in dims)
        if shown in self.transposed and self.transposed[shown][1] == exchanged:
            return self.transposed[shown][0]
        self.transposed[eqn.out] = shown, exchanged
        self.strided.add(eqn.out)
        return (eqn,)

    def _linear(self, eqn: Eqn) -> tuple[Eqn, ...]:
        """A product with a transposed weight as `linear`, and of rows that were flattened as that of their value."""
        *bias, rows, columns = eqn.args
        if columns not in self.transposed or (bias and len(bias[0].shape) != 1):
            return (eqn,)
        weight = self.transposed[columns][0]
        value = next((v for v in self._shown(rows) if self._is_rows(v, self.shape(rows)[-1])), rows)
        if (
            not bias or value is rows or value in self.strided
        ):  # without a bias `linear` may choose another kernel
            return (eqn.replace(op=aten.linear.default, args=(rows, weight, *bias)),)
        result = Var(
            f"{eqn.out.name}.whole", eqn.out.dtype, (*self.shape(value)[:-1], eqn.out.shape[-1])
        )
        self.reshaped[eqn.out] = result
        flat = eqn.replace(op=aten.view.default, args=(result, list(self.shape(eqn.out))))
        return (
            eqn.replace(op=aten.linear.default, args=(value, weight, *bias), outs=(result,)),
            flat,
        )

    def _is_rows(self, v: Var, width: int) -> bool:
        """Whether a value has three dims, and `linear` can multiply its rows of this width as they are."""
        shape = self.shape(v)
        return len(shape) == 3 and shape[-1] == width
