"""pack: many parts to one buffer for the wire, each where it is sent from.

    pack(parts, sizes, dtype) ->  [sum(sizes)]   each part cast to dtype, zero-padded to its size

In plain torch, a copy a part; `cast_pack` is one kernel. Bytes moved at least: one read and one
write of each element that changes dtype or place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """One send buffer for `parts`, each flattened, cast to `dtype` and zero-padded to its size in elements.

    >>> pack([torch.ones(2), torch.ones(1, 1)], [2, 2], torch.float32)
    tensor([1., 1., 1., 0.])
    """
    buffer = parts[0].new_empty(sum(sizes), dtype=dtype) if out is None else out
    offset = 0
    for part, size in zip(parts, sizes, strict=True):
        n = part.numel()
        buffer[offset : offset + n].view(part.shape).copy_(part)
        if n < size:
            buffer[offset + n : offset + size].zero_()
        offset += size
    return buffer
