"""Random bit patterns, and comparison of tensors bit by bit."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(count: int, dtype: torch.dtype, seed: int = 0, skew: int = 0) -> torch.Tensor:
    """Random bit patterns viewed as `dtype`. They include infinities, NaN and subnormal numbers."""
    draw = torch.Generator().manual_seed(seed)
    room = torch.randint(
        0, 256, ((count + skew) * dtype.itemsize,), generator=draw, dtype=torch.uint8
    )
    return room.view(dtype)[skew:]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits agree. Any two NaN count as equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    integers = [x.masked_fill(nan, 0).contiguous().view(_INTEGERS[x.itemsize]) for x in (a, b)]
    return torch.equal(nan, b.isnan()) and torch.equal(*integers)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """`x` as `same` compares it: floats as they are, any other dtype as bytes."""
    return x if x.is_floating_point() else x.contiguous().view(torch.uint8)


def room(count: int, dtype: torch.dtype, skew: int = 0) -> torch.Tensor:
    """Memory filled with 0xA5, so that a comparison shows elements that were not written."""
    return torch.full(((count + skew) * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)[
        skew:
    ]
