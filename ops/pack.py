"""pack and unpack: many parts to one buffer for the wire, and back.

    pack(parts, sizes, dtype) ->  [sum(sizes)]   each part cast to dtype, zero-padded to its size
    unpack(buffer, ...)                          the inverse of a gather: rank-major to value-major

The reference in plain torch. Parts are written straight to where they are sent from, and a value
gathered alone is a view of what was received: no copy that can be avoided.
Bytes moved at least: one read and one write of each element that changes dtype or place.
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


def unpack(
    buffer: torch.Tensor, sizes: Sequence[int], shapes: Sequence[Sequence[int]], ranks: int
) -> list[torch.Tensor]:
    """The whole values of a gathered `buffer`: `ranks` rows, each holding a part of every value.

    `sizes` are the padded elements of a part, `shapes` the whole shapes; padding is cut off at the end.

    >>> unpack(torch.arange(6.0), [1, 2], [(2,), (3,)], 2)
    [tensor([0., 3.]), tensor([1., 2., 4.])]
    """
    table = buffer.view(ranks, sum(sizes))
    values, offset = [], 0
    for size, shape in zip(sizes, shapes, strict=True):
        n = 1
        for extent in shape:
            n *= extent
        values.append(table[:, offset : offset + size].reshape(-1)[:n].view(shape))
        offset += size
    return values
