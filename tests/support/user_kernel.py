"""A Triton kernel as a user writes it. Importing this file needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _scale(x, w, out, n, BLOCK: tl.constexpr):
    row, k = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * n + k, mask=k < n) * tl.load(w + k, mask=k < n)
    tl.store(out + row * n + k, values, mask=k < n)


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Each row of `x` times `w`."""
    out = torch.empty_like(x)
    _scale[(x.shape[0],)](x, w, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
