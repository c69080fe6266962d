"""Copy many pieces of tensors to places in other tensors and cast them, in one launch.

    rows   int64[blocks, 6]  for each block of BLOCK elements: tensor and element to read from, tensor and element to
                             write to, number of elements to read, number of elements to write
    bases  int64[tensors]    the address of each tensor

Elements that are written but not read are padding, and zero. Bytes moved at least: one read and one write of each
element. A full block with source and destination aligned to 16 bytes moves 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from .kernel import FLOATS, element, kernel, tl
from .tables import addresses, blocks, on_device

BLOCK = 4096


@kernel
def _move(rows, bases, SRC: tl.constexpr, DST: tl.constexpr, BLOCK: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 6
    reads = tl.load(row + 4).to(tl.int32)
    writes = tl.load(row + 5).to(tl.int32)
    src = tl.load(bases + tl.load(row)) + tl.load(row + 1) * (SRC.primitive_bitwidth // 8)
    dst = tl.load(bases + tl.load(row + 2)) + tl.load(row + 3) * (DST.primitive_bitwidth // 8)
    i = tl.arange(0, BLOCK)
    # Without a mask, and aligned, a thread moves 16 bytes at a time.
    if (reads >= BLOCK) & (writes >= BLOCK) & (((src | dst) & 15) == 0):
        x = tl.load(
            tl.multiple_of(src.to(tl.pointer_type(SRC)), 16) + i, eviction_policy="evict_first"
        )
        tl.store(tl.multiple_of(dst.to(tl.pointer_type(DST)), 16) + i, x.to(DST))
    else:
        x = tl.load(src.to(tl.pointer_type(SRC)) + i, mask=i < reads, other=0)
        tl.store(dst.to(tl.pointer_type(DST)) + i, x.to(DST), mask=i < writes)


Piece = tuple[int, int, int, int, int, int]


def parts_of(
    sizes: Sequence[int], numels: Sequence[int], ranks: int
) -> Iterator[tuple[int, int, int, int]]:
    """The part of each value for each rank: (value, start in it, start in a buffer, elements).

    Row r of the buffer has room for `sizes` elements of each value, and holds those from r * size on.

    >>> list(parts_of([2, 1], [3, 2], 2))
    [(0, 0, 0, 2), (0, 2, 3, 1), (1, 0, 2, 1), (1, 1, 5, 1)]
    """
    total = sum(sizes)
    for k, (size, numel, offset) in enumerate(zip(sizes, numels, accumulate(sizes, initial=0))):
        for r in range(ranks):
            start = r * size
            yield k, start, r * total + offset, min(size, max(0, numel - start))


def plan(pieces: Sequence[Piece], device: torch.device) -> torch.Tensor:
    """The rows for some pieces, on `device`. A piece is (source, start, target, start, elements to read, to write)."""
    lengths = [piece[5] for piece in pieces]
    return on_device(blocks(pieces, lengths, BLOCK, advancing=(1, 3), remaining=(4, 5)), device)


def is_movable(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether the kernel can move `src` to `dst` as `copy_` does: floats of at most 32 bits, or equal dtypes."""
    return (src in FLOATS and dst in FLOATS) or (src == dst and src.itemsize <= 8)


def move(
    rows: torch.Tensor, tensors: Sequence[torch.Tensor], src: torch.dtype, dst: torch.dtype
) -> None:
    """Move the pieces that `rows` describe, from tensors of dtype `src` to tensors of dtype `dst`."""
    if not len(rows):
        return
    as_bits = src == dst
    source = element(src, as_bits)
    target = element(dst, as_bits)
    with torch.cuda.device_of(rows):
        bases = addresses(tensors, rows.device)
        _move[(len(rows),)](rows, bases, SRC=source, DST=target, BLOCK=BLOCK, num_warps=8)
