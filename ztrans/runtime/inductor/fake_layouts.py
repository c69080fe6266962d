"""Fake layouts: how every value of a program lies in memory on one rank, found without computing anything.

Each kind of equation is run once, on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...ir.collectives import rules
from ...ir.donation import in_place, updated
from ...ir.graph import Eqn, Graph, Var, substitute
from ...ir.layout import local_shape, localize
from ...ir.operations import called
from ..codegen import fake
from .fusion import is_update


class Strided(NamedTuple):
    """A tensor but for its elements: what `torch.empty_strided` asks for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(x: torch.Tensor) -> Strided:
        return Strided(x.dtype, tuple(x.shape), x.stride(), x.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def holds(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, copied where it does not lie so: operations may lay out their results otherwise than was foreseen."""
        if x.stride() == self.stride or all(n == 1 or a == b for n, a, b in zip(self.shape, x.stride(), self.stride)):
            return x
        return self.empty().copy_(x)


def strides(
    graph: Graph, at: Mapping[str, int], inputs: Sequence[torch.Tensor], twins: Mapping[Eqn, Any]
) -> dict[Var, Strided]:
    """How the values of a program lie on the rank at coordinates `at`, if its inputs lie as `inputs` do.

    What an equation writes over an argument, having one of `twins`, lies as the argument does.
    """
    lies = {v: Strided.of(x) for v, x in zip(graph.inputs, inputs, strict=True)}
    seen: dict[str, list[Strided | None]] = {}
    for e in graph.eqns:
        if rules(e).strides == "contiguous":  # as what a collective receives is, whatever was sent
            shapes = [local_shape(v, graph.axes, at) for v in e.outs]
            lies.update((v, Strided(v.dtype, s, _dense(s), lies[e.ins[0]].device)) for v, s in zip(e.outs, shapes))
        elif rules(e).strides == "argument":
            lies[e.outs[0]] = lies[e.args[0]]._replace(shape=local_shape(e.outs[0], graph.axes, at))
        elif is_update(e) and (pairs := updated(e, in_place(e.op))):  # which fake tensors would really compute
            lies.update((out, lies[v]) for v, out in pairs if out is not None)
        else:
            twin = twins.get(e)
            twin = twin if isinstance(twin, torch._ops.OpOverload) and twin._schema.returns else e.op
            e = localize(e.replace(op=twin), graph.axes, at)
            key = text([e], e.ins, (), lies)
            if key not in seen:
                with fake():
                    made = run(e, {v: lies[v].empty() for v in e.ins})
                seen[key] = [Strided.of(x) if isinstance(x, torch.Tensor) else None for x in made]
            lies.update((v, x) for v, x in zip(e.outs, seen[key]) if v is not None)
    return lies


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def run(e: Eqn, env: Mapping[Var, torch.Tensor]) -> list[Any]:
    """The results of an equation, one for each of its `outs`."""
    made = called(e.op)(*substitute(e.args, env.__getitem__), **substitute(e.kwargs, env.__getitem__))
    outs = made if isinstance(made, (tuple, list)) else (made,)
    return [x for o in outs for x in (o if isinstance(o, list) else (o,))]


def text(eqns: Iterable[Eqn], ins: Sequence[Var], outs: Sequence[Var], lies: Mapping[Var, Strided]) -> str:
    """Equations with their values numbered: equal texts are equal computations on values that lie alike."""
    number = {v: f"%{k}" for k, v in enumerate(dict.fromkeys(ins))}
    lines = [f"{name}: {tuple(lies[v])}" for v, name in number.items()]

    def show(x: Any) -> str:
        if isinstance(x, Var):
            return number[x]
        if isinstance(x, torch.Tensor):
            return f"tensor {tuple(Strided.of(x))} {id(x)}"
        return f"[{', '.join(map(show, x))}]" if isinstance(x, (list, tuple)) else repr(x)

    for e in eqns:
        args = [*map(show, e.args), *(f"{k}={show(x)}" for k, x in e.kwargs.items())]
        for v in e.outs:
            if v is not None:
                number[v] = f"%{len(number)}"
        lines.append(f"{', '.join(number.get(v, '_') for v in e.outs)} = {e.op}({', '.join(args)})")
    return "\n".join([*lines, f"return {', '.join(number[v] for v in outs)}"])
