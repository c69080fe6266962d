"""reduce(terms, op, dtype): one value of many terms, summed in rank order.

    terms: one tensor per rank, equal shapes and dtypes; op: sum, mean, max or min.  ->  one tensor
    over: the one of the first two terms that may be written over.

Half-precision terms are summed in fp32, whatever crossed the wire; the order is that of the ranks,
so the result depends on neither the network nor the transport.
Bytes moved at least: one read of each term and one write of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HALF = (torch.bfloat16, torch.float16)
_COMBINE = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce(
    terms: Sequence[torch.Tensor], op: str, dtype: torch.dtype, over: torch.Tensor | None = None
) -> torch.Tensor:
    """Combine `terms` by `op`, as `dtype`.

    >>> reduce([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])], "mean", torch.float32)
    tensor([2., 3.])
    """
    if op not in _COMBINE:
        raise ValueError(f"reduce: unknown operation {op!r}; use sum, mean, max or min.")
    combine = _COMBINE[op]
    first, *rest = terms
    if first.dtype in _HALF:
        first, over = first.to(torch.float32), None
        total = combine(first, rest[0], out=first) if rest else first
    else:
        total = combine(first, rest[0], out=over) if rest else first.clone()
    for term in rest[1:]:
        combine(total, term, out=total)
    if op == "mean":
        total = total.div_(len(terms)) if total.is_floating_point() else total / len(terms)
    return total.to(dtype)
