"""The two in-place kernels of a GradScaler, expressed by operations that a program can shard.

make_fx records these operations instead of the kernels (see `fx_trace`). They write into the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops import HALF

aten = torch.ops.aten


def _unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    num_not_finite: Any = sum((~torch.isfinite(g)).sum() for g in grads)
    # An earlier call, for gradients of another dtype, may have found an inf too.
    found_inf.copy_(torch.maximum(found_inf, (num_not_finite > 0).to(found_inf.dtype)))
    for g in grads:
        g.copy_((g.float() if g.dtype in HALF else g) * inverse)


def _update(
    scale: torch.Tensor,
    growth: torch.Tensor,
    found_inf: torch.Tensor,
    factor: float,
    backoff: float,
    interval: int,
) -> torch.Tensor:
    """Like PyTorch's kernel: reduce the scale after a skipped step, and raise it after `interval` others in a row."""
    is_skipped = found_inf > 0
    # The kernel has its factors in fp64.
    grown = (scale.double() * factor).to(scale.dtype)
    grows = growth + 1 == interval
    larger = torch.where(grows & torch.isfinite(grown), grown, scale)
    growth.copy_(torch.where(is_skipped | grows, 0, growth + 1))
    return scale.copy_(torch.where(is_skipped, (scale.double() * backoff).to(scale.dtype), larger))


FORMS: dict[Any, Callable] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._amp_update_scale_.default: _update,
}
