"""Operations: compute an equation of PyTorch's operations.

On fake tensors PyTorch's operations do not always lay out their results as on real ones. For instance, batch norm of a
transposed input returns a contiguous tensor, but a transposed one in a trace. A view that was possible in the trace may
then need a copy when the program runs (see `called`). This changes no value: a program is functional, so it does not
matter whether a view shares memory with its argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.torch_version import TorchVersion

from .graph import Eqn, Var, substitute
from .nested.call import call_operator

aten = torch.ops.aten


def bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.view(dtype)`, of a contiguous copy of `x` if its strides allow no view.

    >>> bits(torch.ones(2, 4).t(), torch.float64).shape
    torch.Size([4, 1])
    """
    try:
        return aten.view.dtype(x, dtype)
    except RuntimeError:
        return aten.view.dtype(x.contiguous(), dtype)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """`torch.view_as_complex(pairs)`, of a contiguous copy if the strides allow no view.

    >>> as_complex(torch.ones(2, 3).t())
    tensor([1.+1.j, 1.+1.j, 1.+1.j])
    """
    try:
        return aten.view_as_complex.default(pairs)
    except RuntimeError:
        return aten.view_as_complex.default(pairs.contiguous())


def strided(base: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    """`base.as_strided(...)` with an offset from the beginning of `base`.

    PyTorch counts from the beginning of the storage, and a program does not know where in its storage an input begins.
    """
    return aten.as_strided.default(base, size, stride, base.storage_offset() + (offset or 0))


def strided_scatter(
    base: torch.Tensor, new: torch.Tensor, size: Any, stride: Any, offset: int | None = None
) -> Any:
    """`as_strided_scatter`, whose offset counts from the beginning of `base`, as that of `strided`."""
    return aten.as_strided_scatter.default(
        base, new, size, stride, base.storage_offset() + (offset or 0)
    )


_FROM = getattr(
    aten.random, "from"
)  # generated code cannot name it, because `from` is a word of Python


def drawn_from(x: torch.Tensor, low: int, high: int | None, **kwargs: Any) -> torch.Tensor:
    """Whole numbers from `low` to below `high`, as `x.random_(low, high)` draws them."""
    return _FROM(x, low, high, **kwargs)


_WAIT = torch.ops._c10d_functional.wait_tensor.default
_NEED_CONTIGUOUS = TorchVersion(torch.__version__) < "2.13"
_CALLED: dict[Any, Callable] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view.dtype: bits,
    aten.view_as_complex.default: as_complex,
    aten.as_strided.default: strided,
    aten.as_strided_scatter.default: strided_scatter,
    _FROM: drawn_from,
}


def _contiguous(x: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return x.contiguous() if isinstance(x, torch.Tensor) else [each.contiguous() for each in x]


@functools.cache
def called(op: Any) -> Callable:
    """A function that computes `op` for arguments with any strides. Collectives of torch 2.11 need contiguous ones."""
    if (
        _NEED_CONTIGUOUS
        and getattr(op, "namespace", None) == "_c10d_functional"
        and op is not _WAIT
    ):
        return lambda x, *args, **kwargs: op(_contiguous(x), *args, **kwargs)
    return _CALLED.get(op, op)


def bound(eqn: Eqn) -> tuple[bool, ...]:
    """Whether the equation binds each of its results."""
    return tuple(out is not None for out in eqn.outs)


def compute(eqn: Eqn, values: Mapping[Var, Any]) -> list[Any]:
    """Compute an equation of PyTorch's operations from `values`; return one result for each of its `outs`."""
    read = values.__getitem__
    args, kwargs = substitute(eqn.args, read), substitute(eqn.kwargs, read)
    if isinstance(eqn.op, torch._ops.HigherOrderOperator):
        return call_operator(eqn.op, bound(eqn), *args, **kwargs)
    returned = called(eqn.op)(*args, **kwargs)
    outs = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [x for out in outs for x in (out if isinstance(out, list) else (out,))]
