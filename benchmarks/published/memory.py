"""What PyTorch's allocator reserves for a step of eager FSDP, and the allocator itself as a model.

Published peaks are bytes that the caching allocator had reserved from the GPU, not bytes of live tensors. A tensor
takes the smallest free block in which it fits, and the rest of that block stays free for others. No segment goes back
to the GPU. The rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp.

Besides, eager PyTorch keeps more alive than a program of ztrans. An operation of forward or backward writes to new
memory. A selective checkpoint keeps whatever it was told to save until the block is computed again, read or not. FSDP2
receives a unit in one buffer, in memory of a stream of its own, and keeps what the root has gathered to the end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ztrans.ir.dependencies import grouped
from ztrans.ir.donation import donation
from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.ir.pairing import pair
from ztrans.planning.buffers import storages

from .fusion import fused_kernels
from .schedule import ROOT, is_gather, unit_of, whole_bytes

MIB = 2**20
SMALLEST, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
LARGE, LARGE_SEGMENT, ROUND = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment, and its neighbours there."""

    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class Allocator:
    """PyTorch's caching allocator for one stream."""

    def __init__(self) -> None:
        self.reserved = 0
        # Free blocks by their pool (small or not), each with its size; the number makes the order definite.
        self.free_blocks: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self.number: dict[Block, int] = {}

    def take(self, size: int) -> Block:
        """A block for `size` bytes."""
        size = max(-(-size // SMALLEST) * SMALLEST, SMALLEST)
        small = size <= SMALL
        blocks = self.free_blocks[small]
        index = bisect_left(blocks, (size,))
        if index < len(blocks):
            block = blocks.pop(index)[2]
            block.free = False
        else:
            block = Block(_segment(size), small)
            self.number[block] = len(self.number)
            self.reserved += block.size
        rest = block.size - size
        if rest >= (SMALLEST if small else SMALL + 1):
            after = Block(rest, small, before=block, after=block.after)
            self.number[after] = len(self.number)
            if block.after is not None:
                block.after.before = after
            block.after, block.size = after, size
            self._put(after)
        return block

    def give(self, block: Block) -> None:
        """Free a block, and join it with free neighbours."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                first, second = (
                    (neighbour, block) if neighbour is block.before else (block, neighbour)
                )
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._put(block)

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self.free_blocks[block.small], (block.size, self.number[block], block))

    def _remove(self, block: Block) -> None:
        blocks = self.free_blocks[block.small]
        del blocks[bisect_left(blocks, (block.size, self.number[block]))]
        block.free = False


def _segment(size: int) -> int:
    """The bytes of a new segment for a request."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUND) * ROUND


@dataclass(frozen=True)
class Tensor:
    """Bytes that are live from one equation to another; `pool` names the stream in whose memory they are."""

    bytes: int
    first: int
    last: int
    pool: str = "compute"


def tensors(graph: Graph, is_compiled: Callable[[Eqn], bool]) -> Iterator[Tensor]:
    """What eager FSDP2 holds, from which equation to which."""
    eager = frozenset(e for e in graph.eqns if e.region != "update" and not is_compiled(e))
    inside = {v for kernel in fused_kernels(graph, is_compiled) for v in kernel.inside}
    held = dict(_held(graph, is_compiled))
    owner = donation(graph, eager).owner
    in_memory = {owner[v] for v in owner if v not in inside}
    for storage in storages(graph, donation(graph, eager)):
        if storage.bytes and storage.value in in_memory:
            last = max(storage.last, held.get(storage.value, 0))
            yield Tensor(storage.bytes, storage.first, last)
    for started in pair(graph).starts.values():
        if is_gather(started.start):
            yield Tensor(whole_bytes(started.start), started.index, started.first_wait, "gather")


def _held(graph: Graph, is_compiled: Callable[[Eqn], bool]) -> Iterator[tuple[Var, int]]:
    """Values that eager PyTorch holds for longer, each with the last equation up to which it does."""
    backward = [i for i, e in enumerate(graph.eqns) if e.region == "backward"]
    unit = ROOT
    unit_made: list[tuple[Var, int]] = []
    again: dict[
        int, int
    ] = {}  # by unit, the equation at which its parameters are there for backward
    for started in pair(graph).starts.values():
        if is_gather(started.start) and started.first_wait >= backward[0]:
            again[unit_of(started.start)] = started.first_wait
    waits = pair(graph).waits
    for e in graph.eqns:
        if e in waits and is_gather(waits[e].start):
            unit = unit_of(waits[e].start)
            if unit == ROOT:
                yield e.out, backward[-1]
        elif e.region == "forward" and e.demand == "save" and not is_compiled(e):
            unit_made += ((v, unit) for v in e.results)
    for v, number in unit_made:
        yield v, again.get(number, backward[0])


def reserved_bytes(graph: Graph, is_compiled: Callable[[Eqn], bool]) -> int:
    """The bytes that PyTorch's allocator has reserved after two steps."""
    every = list(tensors(graph, is_compiled))
    end = len(graph.eqns) - 1
    stay = [t for t in every if t.first == 0 and t.last == end]
    passing = [t for t in every if not (t.first == 0 and t.last == end)]
    starts = grouped((t.first, t) for t in passing)
    ends = grouped((min(t.last, end), t) for t in passing)
    pools = {t.pool: Allocator() for t in every}
    for t in stay:
        pools[t.pool].take(t.bytes)
    for _ in range(2):
        blocks: dict[Tensor, list[Block]] = {}
        for index in range(len(graph.eqns)):
            for t in starts.get(index, ()):
                blocks.setdefault(t, []).append(pools[t.pool].take(t.bytes))
            for t in ends.get(index, ()):
                pools[t.pool].give(blocks[t].pop())
    return sum(pool.reserved for pool in pools.values())
