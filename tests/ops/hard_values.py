"""Values that break codecs."""

from __future__ import annotations

import math

import torch


def hard_values(block: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of ordinary, zero, subnormal, huge and equal numbers, with an outlier, NaN and infinities."""
    x = torch.randn(12, block, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    x[2] = 1e-40
    x[3] *= 1e-35
    x[4] = x[4].clamp(-1, 1) * 3.3e38
    x[5, 3] = math.nan
    x[6, 4] = math.inf
    x[7, 5] = -math.inf
    x[8] = 0.3
    x[9, 6] = 1e4
    x[10] = torch.finfo(dtype).max
    return x.to(dtype).view(-1)
