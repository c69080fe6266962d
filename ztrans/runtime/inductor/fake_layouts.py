"""Fake layouts: find the dtype, shape and strides of every value of a program on one rank.

Each kind of equation runs once, on fake tensors, which computes no elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...ir.collectives import rules
from ...ir.donation import in_place, updated
from ...ir.graph import Eqn, Graph, Primitive, Var
from ...ir.higher_order import Function
from ...ir.launch import Launch
from ...ir.layout import local_shape, localize
from ...ir.operations import compute
from ...ir.printer import one_line
from ...ir.update_groups import is_fused_update
from .compiler import fake


class Strided(NamedTuple):
    """A tensor without its elements: the arguments of `torch.empty_strided`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor) -> Strided:
        return Strided(x.dtype, tuple(x.shape), x.stride(), x.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a tensor has this shape and these strides."""
        strides = x.stride()
        if x.shape != self.shape:
            return False
        return strides == self.stride or all(
            n == 1 or a == b for n, a, b in zip(self.shape, strides, self.stride)
        )

    def conform(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, copied if it has other strides: fake tensors do not always predict the strides of a result.

        Raises: RuntimeError if it has another shape.
        """
        if x.shape != self.shape:
            raise RuntimeError(
                f"inductor: a value has shape {[*x.shape]}, and {[*self.shape]} in the traced program.\n"
                f"The fake implementation of an operation (register_fake) returns another shape than the operation. "
                f"Correct it, or compile(backend='eager')."
            )
        return x if self.fits(x) else self.empty().copy_(x)


def infer_layouts(
    graph: Graph, at: Mapping[str, int], inputs: Sequence[torch.Tensor], twins: Mapping[Eqn, Any]
) -> dict[Var, Strided]:
    """Infer the layout of every value on the rank at coordinates `at`, from those of its inputs.

    An equation with an in-place operation among `twins` writes its result over an argument, whose layout it keeps.
    """
    layouts = {v: Strided.of(x) for v, x in zip(graph.inputs, inputs, strict=True)}
    known: dict[
        str, list[Strided | None]
    ] = {}  # the layouts of results, by the text of their equation
    for e in graph.eqns:
        shapes = [local_shape(v, graph.axes, at) for v in e.results]
        results: Sequence[Strided | None]
        if isinstance(e.op, Primitive) and rules(e).shares(e):
            results = [layouts[e.args[0]]._replace(shape=shapes[0])]
        elif isinstance(e.op, Primitive):
            results = _contiguous(e, shapes, layouts[e.ins[0]].device)
        elif is_fused_update(e) and (
            pairs := updated(e, in_place(e.op))
        ):  # fake tensors would compute these for real
            results = [layouts[v] for v, _ in pairs]
        else:
            twin = twins.get(
                e
            )  # which computes the equation when the program runs, if it returns results
            op = twin if isinstance(twin, torch._ops.OpOverload) and twin._schema.returns else e.op
            results = _run_fake(localize(e.replace(op=op), graph.axes, at), layouts, known)
        layouts.update((v, x) for v, x in zip(e.outs, results) if v and x)
    return layouts


def _run_fake(
    e: Eqn, layouts: Mapping[Var, Strided], known: dict[str, list[Strided | None]]
) -> list[Strided | None]:
    """Run an equation on fake tensors, unless one of its kind is `known`."""
    if e.args and isinstance(launch := e.args[0], Launch):  # a kernel does not run on them
        return [layouts[v] for name, v in zip(launch.tensors, e.args[1:]) if name in launch.changed]
    key = as_text([e], e.ins, (), layouts)
    if key not in known:
        with fake():
            results = compute(e, {v: layouts[v].empty() for v in e.ins})
        known[key] = [Strided.of(x) if isinstance(x, torch.Tensor) else None for x in results]
    return known[key]


def _contiguous(e: Eqn, shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Strided]:
    """The layouts of received values, which are contiguous, whatever was sent."""
    dense = [torch.empty(shape, device="meta").stride() for shape in shapes]
    return [
        Strided(v.dtype, shape, stride, device)
        for v, shape, stride in zip(e.outs, shapes, dense)
        if v
    ]


def as_text(
    eqns: Iterable[Eqn], ins: Sequence[Var], outs: Sequence[Var], layouts: Mapping[Var, tuple]
) -> str:
    """Equations as text, with numbers for names. Equal texts mean equal computations on values of equal layouts."""
    number = {v: f"%{k}" for k, v in enumerate(dict.fromkeys(ins))}
    lines = [f"{name}: {tuple(layouts[v])}" for v, name in number.items()]

    def show(x: Any) -> str:
        if isinstance(x, Var):
            return number[x]
        if isinstance(x, torch.Tensor):
            return f"tensor {tuple(Strided.of(x))} {id(x)}"
        if isinstance(x, Function):
            return one_line(x)
        return f"[{', '.join(map(show, x))}]" if isinstance(x, (list, tuple)) else repr(x)

    for e in eqns:
        args = [*map(show, e.args), *(f"{k}={show(x)}" for k, x in e.kwargs.items())]
        for v in e.outs:
            if v is not None:
                number[v] = f"%{len(number)}"
        names = ["_" if v is None else number[v] for v in e.outs]
        lines.append(f"{', '.join(names)} = {e.op}({', '.join(args)})")
    return "\n".join([*lines, f"return {', '.join(number[v] for v in outs)}"])
