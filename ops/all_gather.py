"""all_gather(memory, outs, sizes): read the parts of every rank from its memory, directly into the whole values.

    memory  symmetric; each rank's buffer begins with its parts, one after another, `sizes` elements each, as cast_pack
            writes them
    outs    the whole values, contiguous, of one dtype, on the memory's device. They may be parameters, which are
            written in place. Elements r * size .. (r + 1) * size come from rank r; elements beyond the end are padding
    channels  the number of blocks of the grid, 1 to 128. Each block reads its share from every rank

There are two barriers: one before reading, so that the parts of every rank are there, and one after it, so that no
rank overwrites its parts too early. If a rank misses the first one, every byte of `outs` becomes 255, so floats are
NaN. Errors: values larger than the gathered parts, mixed dtypes, a small buffer, an earlier barrier that timed out.
Bytes moved at least: over the wire the whole values less this rank's part; in memory the same and one write of the
whole values. No copy follows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from einops import rearrange

from .barrier import SPINS, meet
from .barrier import reference as wait_for_all
from .kernel import element, kernel, tl
from .operation import define
from .symmetric import BLOCKS, Symmetric, at_addresses, check, check_arguments
from .tables import addresses, blocks, on_device
from .unpack import reference as unpacked

_BYTES = 1 << 14  # bytes that a block copies at a time


def all_gather(
    memory: Symmetric,
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    *,
    channels: int = BLOCKS,
    spins: int = SPINS,
) -> None:
    """Gather into `outs`. The docstring of this file describes the arguments.

    >>> from .symmetric import in_one_process
    >>> (memory,) = in_one_process(1, 8)
    >>> _, whole = memory.mine.view(torch.float32).fill_(2), torch.empty(2)
    >>> all_gather(memory, [whole], [2]); whole
    tensor([2., 2.])
    """
    memory.check_room("all_gather", sum(sizes) * (outs[0].itemsize if outs else 1))
    torch.ops.ztrans.all_gather.default(
        memory.buffers, memory.pads, memory.error, outs, sizes, memory.rank, channels, spins
    )


def reference(buffers, pads, error, outs, sizes, rank, channels, spins) -> None:
    """all_gather in plain torch: the reference, and the implementation for processes that share memory."""
    wait_for_all(pads, error, rank, spins)
    dtype = outs[0].dtype
    memories = at_addresses(buffers, sum(sizes) * dtype.itemsize)
    parts = [memory.view(dtype) for memory in memories]
    unpacked(rearrange(parts, "rank element -> (rank element)"), sizes, len(parts), outs)
    wait_for_all(pads, error, rank, spins)


@kernel(unspecialized="count values first spins")
def _gather(
    buffers, pads, error, rows, count, bases, values, first, spins,
    WORLD: tl.constexpr, SYNC: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One launch may run several ranks, along the second axis of the grid.
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    rank = (first + tl.program_id(1)).to(tl.int64)
    all_here = True
    if SYNC:
        all_here = meet(pads, error, rank, block, spins, WORLD)
    width: tl.constexpr = ITEM.primitive_bitwidth // 8
    i = tl.arange(0, BLOCK)
    s = 0
    while s < WORLD:
        p = (rank + s) % WORLD  # all ranks read at once, each from a different rank
        peer = tl.load(buffers + p)
        k = block
        while k < count:
            row = rows + k.to(tl.int64) * 5  # as `_rows` describes it
            value = tl.load(row)
            start = tl.load(row + 1)
            offset = tl.load(row + 2)
            size = tl.load(row + 3)
            numel = tl.load(row + 4)
            # The part of rank p is short or empty where the value ends.
            left = tl.maximum(tl.minimum(size, numel - p * size) - start, 0)
            n = tl.minimum(left, BLOCK).to(tl.int32)
            src = peer + (offset + start) * width
            base = tl.load(bases + tl.program_id(1) * values + value)
            dst = base + (p * size + start) * width
            if (n >= BLOCK) & (((src | dst) & 15) == 0):
                x = tl.load(tl.multiple_of(src.to(tl.pointer_type(ITEM)), 16) + i)
                x = tl.where(all_here, x, -1)
                tl.store(tl.multiple_of(dst.to(tl.pointer_type(ITEM)), 16) + i, x)
            else:
                x = tl.load(src.to(tl.pointer_type(ITEM)) + i, mask=i < n)
                x = tl.where(all_here, x, -1)
                tl.store(dst.to(tl.pointer_type(ITEM)) + i, x, mask=i < n)
            k += blocks
        s += 1
    if SYNC:
        meet(pads, error, rank, block, spins, WORLD)


def launch(
    buffers, pads, error, outs, sizes, rank, channels, spins, *, together: int = 1, sync=True
) -> None:
    """all_gather by the kernel. A launch may run `together` ranks; then `outs` has their values, rank after rank."""
    check(error, rank)
    world = len(buffers)
    values = len(outs) // together
    item = outs[0].itemsize
    rows = _rows(
        tuple(sizes), tuple(v.numel() for v in outs[:values]), _BYTES // item, buffers.device
    )
    with torch.cuda.device_of(buffers):
        _gather[(channels, together)](
            buffers, pads, error, rows, len(rows), addresses(outs, buffers.device), values, rank, spins,
            WORLD=world, SYNC=sync and world > 1, ITEM=element(outs[0].dtype, bits=True), BLOCK=_BYTES // item,
            launch_cooperative_grid=together > 1, num_warps=8, maxnreg=128,  # as in reduce_scatter
        )  # fmt: skip


@functools.cache
def _rows(
    sizes: tuple[int, ...], numels: tuple[int, ...], block: int, device: torch.device
) -> torch.Tensor:
    # A row: the index of the value, the start in its part, the offset of the part in a buffer, the size of a part, and
    # the number of elements of the value.
    pieces = []
    offset = 0
    for k, (size, numel) in enumerate(zip(sizes, numels)):
        pieces.append((k, 0, offset, size, numel))
        offset += size
    return on_device(blocks(pieces, sizes, block, advancing=(1,)), device)


def _check(buffers, pads, error, outs, sizes, rank, channels, spins) -> None:
    check_arguments("all_gather", "value", buffers, outs, sizes, rank, channels)
    world = len(buffers)
    for k, (value, size) in enumerate(zip(outs, sizes)):
        if value.numel() > world * size:
            raise ValueError(
                f"all_gather: value {k} has {value.numel()} elements, {world} ranks send {size} each."
            )
    if outs[0].itemsize > 8:
        raise ValueError(f"all_gather: values of {outs[0].dtype} cannot be moved.")


define(
    "all_gather(Tensor buffers, Tensor pads, Tensor(a!) error, Tensor(b!)[] outs, int[] sizes,"
    " int rank, int channels, int spins) -> ()",
    _check, reference, launch,
)  # fmt: skip
