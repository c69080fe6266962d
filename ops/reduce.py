"""reduce(terms, op, dtype): one value of many terms, summed in rank order.

    terms: one tensor per rank, equal shapes and dtypes; op: sum, mean, max or min.  ->  one tensor

Half-precision terms are summed in fp32, whatever crossed the wire; the order is that of the ranks,
so the result depends on neither the network nor the transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HALF = (torch.bfloat16, torch.float16)


def reduce(terms: Sequence[torch.Tensor], op: str, dtype: torch.dtype) -> torch.Tensor:
    """Combine `terms` by `op`, as `dtype`.

    >>> reduce([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])], "mean", torch.float32)
    tensor([2., 3.])
    """
    first, *rest = terms
    if first.dtype in _HALF:
        total = first.to(torch.float32)
    elif op in ("sum", "mean") and rest:  # one pass instead of a copy and a sum
        total, rest = first + rest[0], rest[1:]
    else:
        total = first.clone()
    for term in rest:
        if op in ("sum", "mean"):
            total.add_(term)
        elif op in ("max", "min"):
            total = torch.maximum(total, term) if op == "max" else torch.minimum(total, term)
        else:
            raise ValueError(f"reduce: unknown operation {op!r}; use sum, mean, max or min.")
    if op == "mean":
        total = total.div_(len(terms)) if total.is_floating_point() else total / len(terms)
    return total.to(dtype)
