"""The dtypes and shapes of the results of PyTorch's operations, as they follow from the arguments.

An operation is run on tensors of the meta device, which have no elements. Its arguments have their global shapes, as in
a program. Some operations answer otherwise on meta than on the device of a trace: batch norm, for instance, returns
statistics of another shape. So an answer that differs is compared with that of a fake tensor on a CPU too.

Nothing is known of an operation that cannot run so: of one whose shapes depend on values, of the user's own without a
fake implementation, of a higher-order operator.

Private torch APIs live here; checked on torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .graph import DTYPES, Eqn, Split, Var
from .op_facts import op_facts
from .operations import stride_safe

# Calls whose results are remembered. A step has a few hundred different ones, however many layers it has.
_REMEMBERED = 4096
_DEVICES = ("meta", "cpu")


class _Tensor(NamedTuple):
    """A tensor, as far as the types of results depend on it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{DTYPES.get(self.dtype, self.dtype)}[{','.join(map(str, self.shape))}]"


class _Literal(NamedTuple):
    """A literal, with its type, because 1 == 1.0 == True."""

    type: type
    value: Any


def result_problem(eqn: Eqn) -> str | None:
    """How the results of an operation differ from what its arguments give, in type or in cuts, or None."""
    # An equation is frozen, and passes through several rewrites unchanged: its answer is stored with it.
    attributes = eqn.__dict__
    if "_result_problem" not in attributes:
        attributes["_result_problem"] = type_problem(eqn) or placement_problem(eqn)
    return attributes["_result_problem"]


def type_problem(eqn: Eqn) -> str | None:
    """How the types of results differ from those that the arguments give, or None.

    >>> x = Var("x", torch.float32, (4, 4))
    >>> type_problem(Eqn(torch.ops.aten.mm.default, (x, x), (Var("y", torch.int64, (7,)),)))
    'its arguments give f32[4,4], not y: i64[7]'
    """
    if not isinstance(eqn.op, torch._ops.OpOverload):
        return None
    args = _described(eqn.args)
    kwargs = _described(eqn.kwargs)
    problem = None
    for device in _DEVICES:
        try:
            expected = _results(device, eqn.op, args, kwargs)
        except TypeError:  # an argument cannot be hashed
            return None
        if expected is None:
            continue
        problem = _difference(eqn, expected)
        if problem is None:
            return None
    return problem


def placement_problem(eqn: Eqn) -> str | None:
    """How the cuts of values differ in an operation that works element by element, or None.

    Operands and results are cut alike, along dims that are as long in both. Nothing is said of other operations.

    >>> x, y = (Var(name, torch.float32, (4,), layout) for name, layout in (("x", (Split("dp"),)), ("y", ())))
    >>> placement_problem(Eqn(torch.ops.aten.add.Tensor, (x, x), (y,)))
    'x: f32[4@dp] and y: f32[4] are cut in other ways'
    """
    if not op_facts(eqn.op).pointwise:
        return None
    for out in eqn.results:
        for v in eqn.ins:
            if not v.layout and not out.layout:
                continue
            if _cuts(v, out.shape) != _cuts(out, v.shape):
                return f"{v!r} and {out!r} are cut in other ways"
    return None


def _cuts(v: Var, other_shape: tuple[int, ...]) -> set[tuple[str, int]]:
    """The cuts of a value along dims that another value has too, counted from the last one, each with its axis."""
    cuts = set()
    for placement in v.layout:
        if isinstance(placement, Split):
            dim = placement.dim - len(v.shape)
            if -dim <= len(other_shape) and other_shape[dim] == v.shape[dim]:
                cuts.add((placement.axis, dim))
    return cuts


def _difference(eqn: Eqn, expected: tuple[_Tensor | None, ...]) -> str | None:
    if len(expected) != len(eqn.outs):
        return f"its arguments give {len(expected)} results, not {len(eqn.outs)}"
    for out, result in zip(eqn.outs, expected):
        if out is None or result is None:
            continue
        dtype = result.dtype
        if _has_default_dtype(eqn) and dtype.is_floating_point and out.dtype.is_floating_point:
            dtype = out.dtype
        if (out.dtype, tuple(out.shape)) != (dtype, result.shape):
            return f"its arguments give {result}, not {out}"
    return None


def _has_default_dtype(eqn: Eqn) -> bool:
    """Whether a float among the results has the default dtype, which was set when the step was traced."""
    if eqn.kwargs.get("dtype") is not None:
        return False
    return not any(v.dtype.is_floating_point or v.dtype.is_complex for v in eqn.ins)


def _described(x: Any) -> Any:
    """An argument as a value that can be hashed, and from which `_made` makes one like it."""
    if isinstance(x, (Var, torch.Tensor)):
        return _Tensor(x.dtype, tuple(x.shape))
    if isinstance(x, (list, tuple)):
        return tuple(map(_described, x))
    if isinstance(x, Mapping):
        return tuple((name, _described(value)) for name, value in x.items())
    return _Literal(type(x), x)


def _made(x: Any, device: str) -> Any:
    """An argument for a call on a device."""
    if isinstance(x, _Tensor):
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    if isinstance(x, _Literal):
        return torch.device(device) if x.type is torch.device else x.value
    return [_made(each, device) for each in x]


@functools.lru_cache(maxsize=_REMEMBERED)
def _results(
    device: str, op: torch._ops.OpOverload, args: Any, kwargs: Any
) -> tuple[_Tensor | None, ...] | None:
    """The types of the results of a call; None if it cannot run on that device."""
    try:
        # Tensors on meta need no fake mode, in which a call takes four times as long.
        mode = FakeTensorMode() if device == "cpu" else contextlib.nullcontext()
        with torch.no_grad(), mode:
            keywords = {name: _made(value, device) for name, value in kwargs}
            returned = stride_safe(op)(*_made(args, device), **keywords)
    except Exception:
        return None
    results: list[_Tensor | None] = []
    for each in returned if isinstance(returned, (tuple, list)) else (returned,):
        for x in each if isinstance(each, list) else (each,):
            is_tensor = isinstance(x, torch.Tensor)
            results.append(_Tensor(x.dtype, tuple(x.shape)) if is_tensor else None)
    return tuple(results)
