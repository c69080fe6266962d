"""reduce_scatter(memory, outs, sizes, op, dtype): this rank's parts of the sum of every rank's terms.

    memory  symmetric; each rank's buffer begins with dtype[ranks, sum(sizes)]: row r is for rank r and holds its
            parts one after another. cast_pack(..., ranks=W) writes it
    dtype   the dtype of the terms: float32, bfloat16 or float16
    outs    this rank's parts, contiguous, float32 or a dtype of 16 bits; at most `sizes` elements each
    op      sum, or mean, which divides by the number of ranks at the end

Terms of any dtype are summed in float32, in rank order, and rounded once. So the result depends on neither the network
nor its timing. There are two barriers, as in all_gather; if a rank misses the first one, `outs` is NaN. Errors: mixed
or unknown dtypes, parts larger than their sizes, a buffer that is too small. Bytes moved at least: over the wire the
other ranks' rows for this rank; in memory the same rows, this rank's own row, and one write of the parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from einops import rearrange

from .barrier import SPINS, meet
from .barrier import reference as wait_for_all
from .kernel import FLOATS, element, kernel, tl
from .operation import define
from .reduce import reduce
from .symmetric import BLOCKS, Symmetric, at_addresses, check, check_arguments
from .tables import addresses, blocks, on_device

BLOCK = 2048


def reduce_scatter(
    memory: Symmetric,
    outs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    op: str,
    dtype: torch.dtype,
    *,
    channels: int = BLOCKS,
    spins: int = SPINS,
) -> None:
    """Reduce into `outs`. The docstring of this file describes the arguments.

    >>> from .symmetric import in_one_process
    >>> (memory,) = in_one_process(1, 8)
    >>> _, part = memory.mine.view(torch.float32).fill_(3), torch.empty(2)
    >>> reduce_scatter(memory, [part], [2], "sum", torch.float32); part
    tensor([3., 3.])
    """
    memory.check_room("reduce_scatter", memory.ranks * sum(sizes) * dtype.itemsize)
    torch.ops.ztrans.reduce_scatter.default(
        memory.buffers,
        memory.pads,
        memory.error,
        outs,
        sizes,
        op,
        dtype,
        memory.rank,
        channels,
        spins,
    )


def reference(buffers, pads, error, outs, sizes, op, dtype, rank, channels, spins) -> None:
    """reduce_scatter in plain torch: the reference, and the implementation for processes that share memory."""
    wait_for_all(pads, error, rank, spins)
    world = len(buffers)
    parts = []
    for memory in at_addresses(buffers, world * sum(sizes) * dtype.itemsize):
        rows = rearrange(memory.view(dtype), "(rank element) -> rank element", rank=world)
        parts.append(rows[rank].split(list(sizes)))
    for out, *terms in zip(outs, *parts, strict=True):
        out.view(-1).copy_(reduce([term[: out.numel()] for term in terms], op, out.dtype))
    wait_for_all(pads, error, rank, spins)


@kernel
def finished(total, all_here, DIVISOR: tl.constexpr):
    if DIVISOR & (DIVISOR - 1):
        total = tl.div_rn(total, DIVISOR * 1.0)
    elif DIVISOR > 1:  # the reciprocal of a power of two is exact
        total *= 1.0 / DIVISOR
    return tl.where(all_here, total, float("nan"))


@kernel
def _as_float(term):
    if term.dtype == tl.bfloat16:
        # By bits: LLVM would add two bf16 numbers in fp16 if their sum is rounded to fp16, and lose large ones.
        bits = term.to(tl.uint16, bitcast=True).to(tl.uint32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return term.to(tl.float32)


@kernel
def _sum(
    buffers,
    offset,
    i,
    n,
    all_here,
    TERM: tl.constexpr,
    OUT: tl.constexpr,
    WORLD: tl.constexpr,
    DIVISOR: tl.constexpr,
):
    # In rank order, starting with the first term: from zero, a sum of negative zeros would be positive.
    full = i < n
    total = _as_float(
        tl.load((tl.load(buffers) + offset).to(tl.pointer_type(TERM)) + i, mask=full, other=0)
    )
    if WORLD > 1:  # Triton 3.6 does not compile a loop that never runs
        p = 1
        while p < WORLD:  # not unrolled, as only a few blocks take this path
            term = tl.load(
                (tl.load(buffers + p) + offset).to(tl.pointer_type(TERM)) + i, mask=full, other=0
            )
            total += _as_float(term)
            p += 1
    return finished(total, all_here, DIVISOR).to(OUT)


@kernel
def _sum_whole(
    buffers,
    offset,
    i,
    all_here,
    TERM: tl.constexpr,
    OUT: tl.constexpr,
    WORLD: tl.constexpr,
    DIVISOR: tl.constexpr,
):
    total = _as_float(
        tl.load(tl.multiple_of((tl.load(buffers) + offset).to(tl.pointer_type(TERM)), 16) + i)
    )
    for p in tl.static_range(1, WORLD):
        term = tl.load(
            tl.multiple_of((tl.load(buffers + p) + offset).to(tl.pointer_type(TERM)), 16) + i
        )
        total += _as_float(term)
    return finished(total, all_here, DIVISOR).to(OUT)


@kernel(unspecialized="count values first total spins")
def sum_rows(
    buffers, pads, error, rows, count, bases, values, first, total, spins,
    TERM: tl.constexpr, OUT: tl.constexpr, DIVISOR: tl.constexpr,
    WORLD: tl.constexpr, ALIGNED: tl.constexpr, SYNC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One launch may run several ranks, along the second axis of the grid. The buffers are ALIGNED to 16 bytes, or not.
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    rank = (first + tl.program_id(1)).to(tl.int64)
    all_here = True
    if SYNC:
        all_here = meet(pads, error, rank, block, spins, WORLD)
    i = tl.arange(0, BLOCK)
    k = block
    while k < count:
        row = rows + (tl.program_id(1) * count + k).to(tl.int64) * 4
        start = tl.load(row + 1)
        n = tl.load(row + 3).to(tl.int32)
        offset = (rank * total + tl.load(row + 2) + start) * (TERM.primitive_bitwidth // 8)
        base = tl.load(bases + tl.program_id(1) * values + tl.load(row))
        dst = base + start * (OUT.primitive_bitwidth // 8)
        if ALIGNED & (n >= BLOCK) & (((offset | dst) & 15) == 0):
            x = _sum_whole(buffers, offset, i, all_here, TERM, OUT, WORLD, DIVISOR)
            tl.store(tl.multiple_of(dst.to(tl.pointer_type(OUT)), 16) + i, x)
        else:
            x = _sum(buffers, offset, i, n, all_here, TERM, OUT, WORLD, DIVISOR)
            tl.store(dst.to(tl.pointer_type(OUT)) + i, x, mask=i < n)
        k += blocks
    if SYNC:
        meet(pads, error, rank, block, spins, WORLD)


def launch(
    buffers,
    pads,
    error,
    outs,
    sizes,
    op,
    dtype,
    rank,
    channels,
    spins,
    *,
    together: int = 1,
    sync=True,
) -> None:
    """reduce_scatter by the kernel. A launch may run `together` ranks, with their `outs` one after another."""
    check(error, rank)
    world = len(buffers)
    values = len(outs) // together
    device = buffers.device
    rows = pieces_of(tuple(sizes), tuple(v.numel() for v in outs), together, device)
    divisor = world if op == "mean" else 1
    with torch.cuda.device_of(buffers):
        sum_rows[(channels, together)](
            buffers, pads, error, rows, len(rows) // together, addresses(outs, device), values,
            rank, sum(sizes), spins,
            TERM=element(dtype), OUT=element(outs[0].dtype), DIVISOR=divisor,
            WORLD=world, ALIGNED=True, SYNC=sync and world > 1, BLOCK=BLOCK, launch_cooperative_grid=together > 1,
            num_warps=8, maxnreg=128,  # otherwise ptxas spills registers, to fit more blocks on an SM than it gets
        )  # fmt: skip


@functools.cache
def pieces_of(
    sizes: tuple[int, ...], numels: tuple[int, ...], together: int, device: torch.device
) -> torch.Tensor:
    # A row: the index of the value, the start in it, its offset in a row of the buffer, and the elements left. `numels`
    # lists the values of all ranks, rank after rank.
    offsets = list(itertools.accumulate(sizes, initial=0))
    pieces = []
    for k, numel in enumerate(numels):
        value = k % len(sizes)
        pieces.append((value, 0, offsets[value], numel))
    return on_device(
        blocks(pieces, sizes * together, BLOCK, advancing=(1,), remaining=(3,)), device
    )


def _check(buffers, pads, error, outs, sizes, op, dtype, rank, channels, spins) -> None:
    check_arguments("reduce_scatter", "part", buffers, outs, sizes, rank, channels)
    check_sum("reduce_scatter", "part", outs, sizes, op, dtype)


def check_sum(name: str, kind: str, outs, sizes, op: str, dtype: torch.dtype) -> None:
    """Raise for sums that the kernel cannot compute. `kind` is the name of an out in errors."""
    if op not in ("sum", "mean"):
        raise ValueError(f"{name}: unknown operation {op!r}; use sum or mean.")
    if dtype not in FLOATS or outs[0].dtype not in FLOATS:
        raise TypeError(f"{name}: {dtype} to {outs[0].dtype} cannot be summed.")
    for k, (out, size) in enumerate(zip(outs, sizes)):
        if out.numel() > size:
            raise ValueError(f"{name}: {kind} {k} has {out.numel()} elements, room is for {size}.")


define(
    "reduce_scatter(Tensor buffers, Tensor pads, Tensor(a!) error, Tensor(b!)[] outs, int[] sizes, str op,"
    " ScalarType dtype, int rank, int channels, int spins) -> ()",
    _check, reference, launch,
)  # fmt: skip
