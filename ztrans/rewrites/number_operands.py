"""Pass scalars in host memory to operations by value, as PyTorch's own optimizers do.

Learning rates and other settings are inputs of a program: fp64 scalars in host memory. The scalars that an optimizer
computes from its step counts are there too. This pass turns such scalars from tensors into Python numbers:

    a = rsub(alpha, 1)                                  n = item(alpha); m = rsub(n, 1)
    g1 = mul(g, a); v1 = addcmul(v, g1, g)      -->     v1 = addcmul(v, g, g, value=m)

Arithmetic on settings alone runs in Python and launches nothing. A product with a number becomes one call with the sum
that reads it. On a CPU every result keeps its bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.graph import Eqn, Graph, Var, dce, producers, used_once
from ..ir.op_facts import CAST, op_facts

aten = torch.ops.aten
ITEM = aten._local_scalar_dense.default
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Number(Var):
    """A scalar that is a Python number when the program runs."""


def _quotient(x: float, y: float) -> float:
    """The quotient of IEEE 754: a division by zero gives inf or nan, where Python raises."""
    return x / y if y else torch.tensor(x, dtype=torch.float64).div(y).item()


def _reversed_difference(x: float, y: float) -> float:
    return y - x


# Python's arithmetic on numbers, by the same operation on tensors. fp64 has the same bits in both.
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
    """Whether an input outside the state is a number that the caller passes, or a tensor of the same type."""
    return v.dtype == torch.float64 and not v.shape and not v.layout


def settings(graph: Graph) -> frozenset[Var]:
    """The numbers among the inputs of a program."""
    return frozenset(v for v in graph.arguments if is_setting(v))


def with_number_operands(graph: Graph, on_host: Collection[Var]) -> Graph:
    """Let the operations of the update take scalars on the host as numbers.

    Args:
        graph: the program.
        on_host: the inputs that are in the memory of the host. Only float scalars count.
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
        on_host: the scalars on the host: inputs, and results computed from them alone.
        makers: the equation that computes each value.
        single_use_makers: the same, for values with a single reader.
    """

    def __init__(self, graph: Graph, on_host: Iterable[Var]) -> None:
        floats = [v for v in on_host if v.dtype in _FLOATS and not v.shape and not v.layout]
        self.on_host = set(floats)
        self.makers = producers(graph.eqns)
        self.single_use_makers = used_once(graph)
        self._settings = set(settings(graph) & self.on_host)
        self._numbers: dict[Var, Number] = {}
        self._new: list[Eqn] = []

    def record(self, e: Eqn) -> None:
        """Record the result of an equation if it is a scalar computed on the host."""
        if len(e.results) != 1 or not e.ins or any(v.shape or v.layout for v in e.results):
            return
        facts = op_facts(e.op)
        if (facts.pointwise or e.op is CAST) and self.on_host.issuperset(e.ins):
            self.on_host.add(e.out)
            if self._settings.issuperset(e.ins) and _is_arithmetic(e):
                self._settings.add(e.out)

    def pop_new(self) -> list[Eqn]:
        """The equations that compute the numbers requested since the last call."""
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
                e = Eqn(ITEM, (v,), (number,)).like(maker, "update")
            self._numbers[v] = number
            self._new.append(e)
        return self._numbers[v]

    def with_operands(self, e: Eqn) -> Eqn:
        """The equation with numbers instead of scalars on the host; unchanged if no operation takes them."""
        if len(e.results) != 1 or e.out.dtype not in _FLOATS or not e.out.shape:
            return e
        for form in (_scaled_product, _scaled_quotient, _interpolation, _arithmetic):
            rewritten = form(e, self)
            if rewritten is not None:
                return rewritten
        return e

    def scalar(self, x: Any, dtype: torch.dtype) -> Number | None:
        """The number that stands for `x` in an operation that computes in `dtype`, or None."""
        if not isinstance(x, Var) or isinstance(x, Number) or x not in self.on_host:
            return None
        # The operation rounds the number itself, so skip a cast before it.
        maker = self.makers.get(x)
        if maker is not None and _rounds(maker) and x.dtype == dtype:
            x = maker.args[0]
        return self.number(x)

    def scaled(self, x: Any, dtype: torch.dtype) -> tuple[Var, Number] | None:
        """The tensor and the number whose product is `x`, or None for any other value or one with several readers."""
        if not isinstance(x, Var) or x not in self.single_use_makers or x.dtype != dtype:
            return None
        maker = self.single_use_makers[x]
        if maker.op is not aten.mul.Tensor or maker.region != "update":
            return None
        y, factor = maker.args
        if not _is_tensor(y, dtype):
            y, factor = factor, y
        if not _is_tensor(y, dtype):
            return None
        number = self.scalar(factor, dtype)
        return None if number is None else (y, number)


def _is_arithmetic(e: Eqn) -> bool:
    """Whether Python's arithmetic computes the same fp64 result."""
    is_plain = not e.kwargs and len(e.args) <= 2  # without `alpha`
    return e.op in ARITHMETIC and is_plain and e.out.dtype == torch.float64


def _rounds(e: Eqn) -> bool:
    """Whether an equation casts fp64 to another dtype and does nothing else."""
    return e.op is CAST and list(e.kwargs) == ["dtype"] and e.ins[0].dtype == torch.float64


def _is_tensor(x: Any, dtype: torch.dtype) -> bool:
    """Whether an argument is a tensor of this dtype, not a scalar."""
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
    tensor, number = scaled
    return _call(e, e.op, (x, tensor, z), value=number)


def _scaled_quotient(e: Eqn, numbers: _Numbers) -> Eqn | None:
    """`addcdiv(x, mul(y, s), z)` and `add(x, div(mul(y, s), z))` as `addcdiv(x, y, z, value=s)`."""
    dtype = e.out.dtype
    if e.kwargs or len(e.args) < 2 or not _is_tensor(e.args[0], dtype):
        return None
    x, y = e.args[:2]
    if e.op is aten.addcdiv.default:
        z = e.args[2]
    elif e.op is aten.add.Tensor and isinstance(y, Var) and y in numbers.single_use_makers:
        quotient = numbers.single_use_makers[y]
        if quotient.op is not aten.div.Tensor or quotient.region != "update":
            return None
        y, z = quotient.args
    else:
        return None
    scaled = numbers.scaled(y, dtype)
    if scaled is None or not _is_tensor(z, dtype):
        return None
    tensor, number = scaled
    return _call(e, aten.addcdiv.default, (x, tensor, z), value=number)


def _interpolation(e: Eqn, numbers: _Numbers) -> Eqn | None:
    """`lerp` with a number as its weight."""
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
