"""A checker for races on memory, on the simulated GPU of `fake_cuda`.

    with Races() as cuda:                       `cuda` stands in for `torch.cuda`
        program(...)                            runs on CPU tensors; each operation is a launch on the current stream
    cuda.races, cuda.blocks, cuda.peak

Memory consists of blocks, with a pool for each stream. When a tensor is freed, its block is free at once for the next
allocation on that stream that fits. Two launches that touch one block, one of them writing, must be ordered; otherwise
they are a race. An operation that reads a value on the host, or makes the host wait, is an error.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ztrans.ops.symmetric import Symmetric

from .fake_cuda import FakeCuda, Stream

SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")


@dataclass(eq=False)
class Block:
    """A block of memory, with the last launch of each stream that has read it, and the last that has written it."""

    pool: Stream | None
    nbytes: int
    read: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    written: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    owners: int = 0


class Races(FakeCuda, TorchDispatchMode):
    """The simulated `torch.cuda` with its allocator, the races that it has seen, and the peak of allocated bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.blocks: list[Block] = []
        self.launches: list[tuple[str, str]] = []
        self.free: defaultdict[Stream | None, list[Block]] = defaultdict(list)
        self.live: dict[int, tuple[StorageWeakRef, Block]] = {}
        self.sizes: dict[int, int] = {}
        self.behind: dict[
            torch.Tensor, torch.Tensor
        ] = {}  # tables of addresses, and the memory that they point to
        self.peak = 0

    def knows(self, memory: Symmetric) -> Symmetric:
        """Record a symmetric memory, and return it: a launch that reads its addresses reads its memory."""
        self.behind[memory.buffers] = memory.mine
        return memory

    def synchronize(self, device: Any = None) -> None:
        raise AssertionError("the host waits for the device")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert not name.startswith(SYNCS), f"the host waits for a value: {func}"
        self._collect()
        given = [
            (x, self._block(x))
            for x in pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        ]
        given += [
            (x, self._block(x)) for at, x in self.behind.items() if any(at is y for y, _ in given)
        ]
        writes = self._writes(func, args, kwargs)
        result = func(*args, **kwargs)
        outs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        known = {id(b) for _, b in given}
        allocated = [b for b in (self._block(x, new=True) for x in outs) if id(b) not in known]
        is_view = outs and not allocated and not writes
        if not is_view and not name.startswith(("empty", "new_empty")):
            self._launch(name, [b for _, b in given], [*writes, *allocated])
        return result

    def _writes(self, func: Any, args: tuple, kwargs: dict) -> list[Block]:
        if (
            func.namespace == "c10d"
        ):  # their schemas do not say what they write: it is the first argument
            return [self._block(x) for x in pytree.tree_leaves(args[0])]
        declared = func._schema.arguments
        pairs = [*zip(declared, args), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
        written = [x for a, x in pairs if a.alias_info is not None and a.alias_info.is_write]
        return [self._block(x) for x in pytree.tree_leaves(written) if isinstance(x, torch.Tensor)]

    def _launch(self, name: str, reads: list[Block], writes: list[Block]) -> None:
        stream = self.now
        now = stream.tick()
        self.launches.append((name, stream.name))
        for block in dict.fromkeys((*reads, *writes)):
            earlier = [*block.written.items(), *(block.read.items() if block in writes else ())]
            for toucher, (at, operation) in earlier:
                if stream.clock.get(toucher, 0) < at:
                    self.races.append(f"{name} on {stream.name} and {operation} on {toucher.name}")
        for block in reads:
            block.read[stream] = now, name
        for block in writes:
            block.written[stream] = now, name

    def _block(self, tensor: torch.Tensor, new: bool = False) -> Block:
        """The block of a tensor. A new tensor takes it from the pool of the current stream; others have no pool."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live:
            pool, nbytes = self.now if new else None, storage.nbytes()
            fits = [b for b in self.free[pool] if b.nbytes >= nbytes]
            if new and nbytes and fits:
                block = min(fits, key=lambda b: b.nbytes)
                self.free[pool].remove(block)
            else:
                block = Block(pool, nbytes)
                self.blocks.append(block)
            block.owners += 1
            self.live[storage._cdata] = StorageWeakRef(storage), block
            if new:
                self.sizes[storage._cdata] = nbytes
                self.peak = max(self.peak, sum(self.sizes.values()))
        return self.live[storage._cdata][1]

    def _collect(self) -> None:
        for key, (storage, block) in list(self.live.items()):
            if storage.expired():
                del self.live[key]
                self.sizes.pop(key, None)
                if block.pool is not None:
                    self.free[block.pool].append(block)
