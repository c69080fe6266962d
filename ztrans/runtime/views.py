"""Views: the equations of a program in fewer calls, where views can be left out or are part of another operation.

A small step spends its time in calls, and a third of the equations of a transformer are views. So a view of a view is
taken of the first value, a view that undoes another is its argument, and `addmm` of a transposed weight is `linear`,
which transposes and flattens in C++. Values and bits stay the same.

    a = view(x, [16, 64]); wt = t(w); y = addmm(b, a, wt); z = view(y, [2, 8, 48])    -->    z = linear(x, w, b)

The rules only say how an equation is called. The program, its storages and their lifetimes are those of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import fx

from ..ir.graph import Eqn, Graph, Var, variables

aten = torch.ops.aten
# Views that show all elements of their argument in its order.
_RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
_TRANSPOSES = (aten.t.default, aten.transpose.int)
_CALLS = (torch.reshape, torch.t, torch.transpose, torch.sum)  # what calls these in a program

Shape = Callable[[Var], tuple[int, ...]]


class Views:
    """The views of a program that is being emitted, equation by equation.

    `shape` gives the shape of a value on this rank.
    """

    def __init__(self, graph: Graph, shape: Shape) -> None:
        self.shape = shape
        self.reshaped: dict[Var, Var] = {}  # by reshaped value, what it shows
        self.transposed: dict[Var, tuple[Var, tuple[int, int]]] = {}  # likewise, with the dims that were exchanged
        self.summed: dict[Var, Eqn] = {}  # by sum that keeps the dims it is taken over, its equation
        self.readers = Counter(v for e in graph.eqns for v in dict.fromkeys(e.ins))
        self.readers.update(variables(graph.outputs))

    def fewer_calls(self, eqn: Eqn) -> list[Eqn] | Var:
        """The equations to call for `eqn`, or the value that its result is equal to.

        The last of these equations binds the result. A view that nobody reads in the end need not be called.
        """
        if eqn.op in _RESHAPES:
            return self._reshape(eqn)
        if eqn.op in _TRANSPOSES:
            return self._transpose(eqn)
        if eqn.op is aten.sum.dim_IntList and len(eqn.args) == 3 and eqn.args[2]:
            self.summed[eqn.out] = eqn
        if eqn.op in (aten.addmm.default, aten.mm.default) and not eqn.kwargs:
            return self._linear(eqn)
        return [eqn]

    def _reshape(self, eqn: Eqn) -> list[Eqn] | Var:
        wanted, shown = self.shape(eqn.out), eqn.ins[0]
        for earlier in self._shown(shown):
            if self.shape(earlier) == wanted:
                self.reshaped[eqn.out] = earlier
                return earlier
        summed = self.summed.get(shown)
        if summed is not None and self.readers[shown] == 1 and wanted == self._without_summed(summed):
            return [summed.replace(args=(*summed.args[:2], False), outs=eqn.outs)]
        while shown in self.reshaped and self.readers[shown] == 1:  # else a copy for strides might be made twice
            shown = self.reshaped[shown]
        self.reshaped[eqn.out] = shown
        return [eqn.replace(op=aten.view.default, args=(shown, list(wanted)), kwargs={})]

    def _shown(self, v: Var) -> Iterable[Var]:
        """A value, and the values that it shows reshaped."""
        yield v
        while v in self.reshaped:
            v = self.reshaped[v]
            yield v

    def _without_summed(self, eqn: Eqn) -> tuple[int, ...]:
        shape = self.shape(eqn.ins[0])
        summed = {d % len(shape) for d in eqn.args[1]}
        return tuple(n for d, n in enumerate(shape) if d not in summed) if summed else ()

    def _transpose(self, eqn: Eqn) -> list[Eqn] | Var:
        shown, rank = eqn.ins[0], len(eqn.out.shape)
        if rank < 2:  # `t` of a vector is the vector
            return shown
        dims = eqn.args[1:] if eqn.op is aten.transpose.int else (0, 1)
        exchanged = min(d % rank for d in dims), max(d % rank for d in dims)
        if shown in self.transposed and self.transposed[shown][1] == exchanged:
            return self.transposed[shown][0]
        self.transposed[eqn.out] = shown, exchanged
        return [eqn]

    def _linear(self, eqn: Eqn) -> list[Eqn] | Var:
        """A product with a transposed weight as `linear`, and of rows that were flattened as that of their value."""
        *bias, rows, columns = eqn.args
        if columns not in self.transposed or (bias and len(bias[0].shape) != 1):
            return [eqn]
        weight, value = self.transposed[columns][0], self.reshaped.get(rows, rows)
        whole = self.shape(value)
        if not bias or len(whole) != 3 or whole[-1] != self.shape(rows)[-1]:
            return [eqn.replace(op=aten.linear.default, args=(rows, weight, *bias))]
        result = Var(f"{eqn.out.name}.whole", eqn.out.dtype, (*whole[:-1], eqn.out.shape[-1]))
        self.reshaped[eqn.out] = result
        flat = eqn.replace(op=aten.view.default, args=(result, list(self.shape(eqn.out))), outs=eqn.outs)
        return [eqn.replace(op=aten.linear.default, args=(value, weight, *bias), outs=(result,)), flat]


def is_view_call(node: fx.Node) -> bool:
    """Whether a node of a program only calls one of these views, so that it may be left out where nothing reads it."""
    return node.op == "call_function" and node.target in _CALLS
