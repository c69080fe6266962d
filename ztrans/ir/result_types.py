"""Check the dtypes and shapes of results of PyTorch's operations against those that the arguments give.

An operation runs on meta tensors, which have no elements, with the global shapes of the program. Some operations return
other types on meta than on the device of a trace: batch norm, for instance, returns statistics of another shape. So if
the types differ from the program, the operation also runs on fake CPU tensors.

Not checked are operations that cannot run in this way: higher-order operators, operations whose shapes depend on
values, and the user's own operations without a fake implementation.

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

# The number of calls with cached results. A step has a few hundred different calls, whatever its number of layers.
_CACHED_CALLS = 4096
_DEVICES = ("meta", "cpu")


class ResultType(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{DTYPES.get(self.dtype, self.dtype)}[{','.join(map(str, self.shape))}]"


class _Literal(NamedTuple):
    """A literal with its type, because 1 == 1.0 == True."""

    type: type
    value: Any


def result_problem(eqn: Eqn) -> str | None:
    """How the results of an operation differ from the types or splits that the arguments give, or None."""
    # An equation is frozen and passes through several rewrites unchanged, so the answer is stored with it.
    attributes = eqn.__dict__
    if "_result_problem" not in attributes:
        attributes["_result_problem"] = type_problem(eqn) or placement_problem(eqn)
    return attributes["_result_problem"]


def type_problem(eqn: Eqn) -> str | None:
    """How the types of results differ from the types that the arguments give, or None.

    >>> x = Var("x", torch.float32, (4, 4))
    >>> type_problem(Eqn(torch.ops.aten.mm.default, (x, x), (Var("y", torch.int64, (7,)),)))
    'its arguments give f32[4,4], not y: i64[7]'
    """
    if not isinstance(eqn.op, torch._ops.OpOverload):
        return None
    args = _as_key(eqn.args)
    kwargs = _as_key(eqn.kwargs)
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


def result_types(eqn: Eqn) -> tuple[ResultType | None, ...] | None:
    """The dtype and shape of each result of an operation, as its arguments give them; None if it cannot be run.

    >>> x = Var("x", torch.float32, (4, 2))
    >>> result_types(Eqn(torch.ops.aten.stack.default, ([x, x, x],), (Var("y", torch.float32, (9, 4, 2)),)))[0].shape
    (3, 4, 2)
    """
    if not isinstance(eqn.op, torch._ops.OpOverload):
        return None
    for device in _DEVICES:
        types = _results(device, eqn.op, _as_key(eqn.args), _as_key(eqn.kwargs))
        if types is not None:
            return types
    return None


def placement_problem(eqn: Eqn) -> str | None:
    """How an operand and a result of an elementwise operation differ in their splits, or None.

    Along dims of equal length they must have equal splits. Other operations are not checked.

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
    """The axis and dim of each split along a dim that has the same length in another shape.

    Dims count from the last one, as in broadcasting.
    """
    cuts = set()
    for placement in v.layout:
        if isinstance(placement, Split):
            dim = placement.dim - len(v.shape)
            if -dim <= len(other_shape) and other_shape[dim] == v.shape[dim]:
                cuts.add((placement.axis, dim))
    return cuts


def _difference(eqn: Eqn, expected: tuple[ResultType | None, ...]) -> str | None:
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
    """Whether float results have the default dtype of the trace, because no argument determines their dtype."""
    if eqn.kwargs.get("dtype") is not None:
        return False
    return not any(v.dtype.is_floating_point or v.dtype.is_complex for v in eqn.ins)


def _as_key(x: Any) -> Any:
    """A hashable description of an argument, from which `_argument` makes a similar one."""
    if isinstance(x, (Var, torch.Tensor)):
        return ResultType(x.dtype, tuple(x.shape))
    if isinstance(x, (list, tuple)):
        return tuple(map(_as_key, x))
    if isinstance(x, Mapping):
        return tuple((name, _as_key(value)) for name, value in x.items())
    return _Literal(type(x), x)


def _argument(x: Any, device: str) -> Any:
    """An argument on a device, made from its description."""
    if isinstance(x, ResultType):
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    if isinstance(x, _Literal):
        return torch.device(device) if x.type is torch.device else x.value
    return [_argument(item, device) for item in x]


@functools.lru_cache(maxsize=_CACHED_CALLS)
def _results(
    device: str, op: torch._ops.OpOverload, args: Any, kwargs: Any
) -> tuple[ResultType | None, ...] | None:
    """The types of the results of a call, or None if the call cannot run on that device."""
    try:
        # Tensors on meta need no fake mode, with which a call takes four times as long.
        mode = FakeTensorMode() if device == "cpu" else contextlib.nullcontext()
        with torch.no_grad(), mode:
            keywords = {name: _argument(value, device) for name, value in kwargs}
            returned = stride_safe(op)(*_argument(args, device), **keywords)
    except Exception:
        return None
    results: list[ResultType | None] = []
    for item in returned if isinstance(returned, (tuple, list)) else (returned,):
        for x in item if isinstance(item, list) else (item,):
            is_tensor = isinstance(x, torch.Tensor)
            results.append(ResultType(x.dtype, tuple(x.shape)) if is_tensor else None)
    return tuple(results)
