"""Pass scalars in host memory to operations by value, as PyTorch's own optimizers do.

Learning rates and other settings are inputs of a program: fp64 scalars in host memory. The scalars that an optimizer
computes from its step counts are there too. An operation takes such a scalar as a Python number, not as a tensor:

    a = rsub(alpha, 1)                                  n = item(alpha); m = rsub(n, 1)
    g1 = mul(g, a); v1 = addcmul(v, g1, g)      -->     v1 = addcmul(v, g, g, value=m)

Arithmetic on settings alone runs in Python, and launches nothing. A product with a number and the sum that it enters
become one call. On a CPU every result keeps its bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .graph import Eqn, Graph, Var, dce, producers, used_once
from .op_facts import CAST, op_facts

aten = torch.ops.aten
ITEM = aten._local_scalar_dense.default
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Number(Var):
    """A scalar that is a Python number when the program runs."""


def _quotient(x: float, y: float) -> float:
    """The quotient by IEEE 754. By zero it is inf or nan, where Python raises."""
    return x / y if y else torch.tensor(x, dtype=torch.float64).div(y).item()


def _reversed_difference(x: float, y: float) -> float:
    return y - x


# Arithmetic on numbers, by the operation on tensors that it stands for. fp64 has the same bits in both.
ARITHMETIC: Mapping[Any, Callable] = {
    aten.add.Tensor: operator.add,
    aten.add.Scalar: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.sub.Scalar: operator.sub,
    aten.rsub.Scalar: _reversed_difference,
    aten.mul.Tensor: operator.mul,
    aten.mul.Scalar: operator.mul,
    aten.div.Tensor: _quotient,
    aten.div.Scalar: _quotient,
    aten.neg.default: operator.neg,
}


def is_setting(v: Var) -> bool:
    """Whether an input outside of the state is a number that the caller passes, or a tensor like one."""
    return v.dtype == torch.float64 and not v.shape and not v.layout


def settings(graph: Graph) -> frozenset[Var]:
    """The numbers among the inputs of a program."""
    return frozenset(v for v in graph.tensor_inputs[graph.num_state :] if is_setting(v))


def with_number_operands(graph: Graph, on_host: Collection[Var]) -> Graph:
    """The program with an update whose operations take scalars on the host as numbers.

    Args:
        graph: the program.
        on_host: inputs that are scalars in the memory of the host.
    """
    numbers = _Numbers(graph, on_host)
    if not numbers.on_host:
        return graph
    eqns: list[Eqn] = []
    for e in graph.eqns:
        if e.region == "update" and isinstance(e.op, torch._ops.OpOverload):
            numbers.record(e)
            e = numbers.with_operands(e)
        eqns += numbers.pop_new()
        eqns.append(e)
    return dce(graph.replace(eqns=tuple(eqns)))


class _Numbers:
    """The scalars on the host, and the numbers that stand for them.

    Attributes:
        on_host: the scalars that are computed from scalars on the host alone.
        makers: the equation that computes each value.
        makers_of_read_once: the same, of values that a single equation reads.
    """

    def __init__(self, graph: Graph, on_host: Iterable[Var]) -> None:
        floats = [v for v in on_host if v.dtype in _FLOATS and not v.shape and not v.layout]
        self.on_host = set(floats)
        self.makers = producers(graph.eqns)
        self.makers_of_read_once = used_once(graph)
        self._settings = set(settings(graph) & self.on_host)
        self._numbers: dict[Var, Number] = {}
        self._new: list[Eqn] = []

    def record(self, e: Eqn) -> None:
        """Record the result of an equation if it is a scalar that is computed on the host."""
        if len(e.results) != 1 or not e.ins or any(v.shape or v.layout for v in e.results):
            return
        facts = op_facts(e.op)
        if (facts.pointwise or e.op is CAST) and self.on_host.issuperset(e.ins):
            self.on_host.add(e.out)
            if self._settings.issuperset(e.ins) and _is_arithmetic(e):
                self._settings.add(e.out)

    def pop_new(self) -> list[Eqn]:
        """The equations that compute the numbers that were requested since the last call."""
        new, self._new = self._new, []
        return new

    def number(self, v: Var) -> Number:
        """The number that stands for a scalar on the host."""
        if v not in self._numbers:
            number = Number(f"{v.name}.number", torch.float64, ())
            maker = self.makers.get(v)
            if v in self._settings and maker is not None:
                e = maker.with_inputs(self.number, outs=(number,))
            else:
                source = maker.source if maker is not None else None
                e = Eqn(ITEM, (v,), (number,), region="update", source=source)
            self._numbers[v] = number
            self._new.append(e)
        return self._numbers[v]

    def with_operands(self, e: Eqn) -> Eqn:
        """The equation with numbers in place of scalars on the host; unchanged if it has no such form."""
        if len(e.results) != 1 or e.out.dtype not in _FLOATS or not e.out.shape:
            return e
        for form in (_scaled_product, _scaled_quotient, _interpolation, _arithmetic):
            rewritten = form(e, self)
            if rewritten is not None:
                return rewritten
        return e

    def scalar(self, x: Any, dtype: torch.dtype) -> Number | None:
        """The number that stands for `x` in an operation that computes in `dtype`; None if there is none."""
        if not isinstance(x, Var) or isinstance(x, Number) or x not in self.on_host:
            return None
        # The operation rounds the number itself, so a cast before it is skipped.
        maker = self.makers.get(x)
        if maker is not None and _rounds(maker) and x.dtype == dtype:
            x = maker.args[0]
        return self.number(x)

    def scaled(self, x: Any, dtype: torch.dtype) -> tuple[Var, Number] | None:
        """The tensor and the number whose product is `x`; None if it is not such a product, or has other readers."""
        if not isinstance(x, Var) or x not in self.makers_of_read_once or x.dtype != dtype:
            return None
        maker = self.makers_of_read_once[x]
        if maker.op is not aten.mul.Tensor or maker.region != "update":
            return None
        y, factor = maker.args
        if not _is_tensor(y, dtype):
            y, factor = factor, y
        number = self.scalar(factor, dtype) if _is_tensor(y, dtype) else None
        return (y, number) if number is not None else None


def _is_arithmetic(e: Eqn) -> bool:
    is_plain = not e.kwargs and len(e.args) <= 2  # without `alpha`
    return e.op in ARITHMETIC and is_plain and e.out.dtype == torch.float64


def _rounds(e: Eqn) -> bool:
    """Whether an equation casts fp64 to another dtype, and does nothing else."""
    return e.op is CAST and [*e.kwargs] == ["dtype"] and e.ins[0].dtype == torch.float64


def _is_tensor(x: Any, dtype: torch.dtype) -> bool:
    """Whether an argument is a tensor of this dtype with dims."""
    return isinstance(x, Var) and bool(x.shape) and x.dtype == dtype


def _scaled_product(e: Eqn, numbers: _Numbers) -> Eqn | None:
    """`addcmul(x, mul(y, s), z)` as `addcmul(x, y, z, value=s)`, and `addcmul(x, y, s)` as `add(x, y, alpha=s)`."""
    dtype = e.out.dtype
    if e.op is not aten.addcmul.default or e.kwargs or not _is_tensor(e.args[0], dtype):
        return None
    x, y, z = e.args
    if _is_tensor(y, dtype) and not z.shape:
        alpha = numbers.scalar(z, dtype)
        return None if alpha is None else _call(e, aten.add.Tensor, (x, y), alpha=alpha)
    scaled = numbers.scaled(y, dtype)
    if scaled is None or not _is_tensor(z, dtype):
        return None
    return _call(e, e.op, (x, scaled[0], z), value=scaled[1])


def _scaled_quotient(e: Eqn, numbers: _Numbers) -> Eqn | None:
    """`addcdiv(x, mul(y, s), z)` and `add(x, div(mul(y, s), z))` as `addcdiv(x, y, z, value=s)`."""
    dtype = e.out.dtype
    if e.kwargs or len(e.args) < 2 or not _is_tensor(e.args[0], dtype):
        return None
    x, y = e.args[:2]
    if e.op is aten.addcdiv.default:
        z = e.args[2]
    elif e.op is aten.add.Tensor and isinstance(y, Var) and y in numbers.makers_of_read_once:
        quotient = numbers.makers_of_read_once[y]
        if quotient.op is not aten.div.Tensor or quotient.region != "update":
            return None
        y, z = quotient.args
    else:
        return None
    scaled = numbers.scaled(y, dtype)
    if scaled is None or not _is_tensor(z, dtype):
        return None
    return _call(e, aten.addcdiv.default, (x, scaled[0], z), value=scaled[1])


def _interpolation(e: Eqn, numbers: _Numbers) -> Eqn | None:
    """`lerp` with a number."""
    dtype = e.out.dtype
    if e.op is not aten.lerp.Tensor or not all(_is_tensor(x, dtype) for x in e.args[:2]):
        return None
    weight = numbers.scalar(e.args[2], dtype)
    return None if weight is None else _call(e, aten.lerp.Scalar, (*e.args[:2], weight))


def _arithmetic(e: Eqn, numbers: _Numbers) -> Eqn | None:
    """A sum, a difference, a product or a quotient of a tensor and a number."""
    facts = op_facts(e.op)
    if not facts.arithmetic or e.kwargs or len(e.args) != 2:
        return None
    x, y = e.args
    if facts.commutes and not _is_tensor(x, e.out.dtype):
        x, y = y, x
    if not _is_tensor(x, e.out.dtype):
        return None
    number = numbers.scalar(y, e.out.dtype)
    return None if number is None else _call(e, e.op, (x, number))


def _call(e: Eqn, op: Any, args: tuple, **kwargs: Any) -> Eqn:
    return e.replace(op=op, args=args, kwargs=kwargs)
