"""Views of values that may lie in memory in another way than they did in the trace.

PyTorch's operations without values do not always say how the real ones lay out their results: batch norm of a
transposed input is contiguous, and was transposed in the trace. A view that was possible there may then need a copy.
A program is functional, so whether a view shares memory with its argument changes no value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.view(dtype)`, of a copy where the elements of a row do not lie side by side.

    >>> bits(torch.ones(2, 4).t(), torch.float64).shape
    torch.Size([4, 1])
    """
    try:
        return aten.view.dtype(x, dtype)
    except RuntimeError:
        return aten.view.dtype(x.contiguous(), dtype)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """`torch.view_as_complex(pairs)`, of a copy where a pair does not lie side by side.

    >>> as_complex(torch.ones(2, 3).t())
    tensor([1.+1.j, 1.+1.j, 1.+1.j])
    """
    try:
        return aten.view_as_complex.default(pairs)
    except RuntimeError:
        return aten.view_as_complex.default(pairs.contiguous())


def reshape(x: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """A value in another shape, with strides of its own."""
    return aten.reshape.default(x, size)


_CALLED: dict[Any, Callable] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten._reshape_alias.default: reshape,
    aten.view.dtype: bits,
    aten.view_as_complex.default: as_complex,
}


def called(op: Any) -> Callable:
    """What computes `op` however its argument lies."""
    return _CALLED.get(op, op)
