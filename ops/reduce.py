"""reduce(terms, op, dtype, out, count): combine one term of every rank, in rank order.

    terms   one tensor for each rank, of equal shapes and dtypes
    op      sum, mean, max or min
    out     one of the first two terms, whose memory the result may overwrite
    count   the divisor of a mean, if the terms are sums of several terms each
    ->      one tensor

Half-precision terms are summed in fp32. Terms are combined in rank order, so the result depends on neither the network
nor the transport. Bytes moved at least: one read of each term and one write of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

HALF = (torch.bfloat16, torch.float16)
_COMBINE: Mapping[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduce(
    terms: Sequence[torch.Tensor],
    op: str,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    count: int | None = None,
) -> torch.Tensor:
    """Combine `terms` by `op`, as `dtype`.

    >>> reduce([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])], "mean", torch.float32)
    tensor([2., 3.])
    """
    if op not in _COMBINE:
        raise ValueError(f"reduce: unknown operation {op!r}; use sum, mean, max or min.")
    combine = _COMBINE[op]
    first, *rest = terms
    if first.dtype in HALF:  # summed in a new tensor: `out` has no room for fp32
        first = out = first.to(torch.float32)

    total = combine(first, rest[0], out=out) if rest else first.clone()
    for term in rest[1:]:
        combine(total, term, out=total)
    if op == "mean":
        total = mean(total, count or len(terms))
    return total.to(dtype)


def mean(total: torch.Tensor, count: int) -> torch.Tensor:
    """Divide a sum by `count` in place. Floats are rounded once, integers towards zero.

    The sum of bools is whether any of them is true, and so is their mean.

    The reciprocal of a power of two is exact, and one launch multiplies by it. Any other divisor is a tensor: a GPU
    divides by a Python number with its reciprocal, which rounds twice, so the bits would differ from a CPU's.

    >>> mean(torch.tensor([3.0, 1.0]), 2)
    tensor([1.5000, 0.5000])
    >>> mean(torch.tensor([3, -3]), 2)
    tensor([ 1, -1])
    """
    if total.dtype == torch.bool:
        return total
    if total.is_complex():  # the real and imaginary parts are divided separately
        return torch.view_as_complex(mean(torch.view_as_real(total), count))
    if total.is_floating_point() and count & (count - 1) == 0:
        return total.mul_(1 / count)
    rounding = None if total.is_floating_point() else "trunc"
    divisor = torch.full((), count, device=total.device)
    return total.div_(divisor, rounding_mode=rounding)
