"""A GPU that is not there: its streams, its allocator, and a checker of who may touch which memory when.

    with Races() as cuda:                       `cuda` stands for `torch.cuda`
        program(...)                            on CPU tensors; every operation is a launch on the current stream
    cuda.races, cuda.blocks, cuda.peak

Time is a vector clock for each stream. A launch happens after what is before it on its stream and
after the events that this has waited for; nothing else is ordered. Memory is blocks, in one pool for
each stream: a block whose tensor is gone is given to the next allocation there that fits, at once.
Two launches that touch one block, one of them writing, must be ordered, or it is a race. What asks
for a value, or would make the host wait, is an error.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict["Stream", int]
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")


@dataclass(eq=False)
class Event:
    """A moment of a stream."""

    clock: Clock

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


@dataclass(eq=False)
class Stream:
    """A queue of launches."""

    name: str
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        for stream, at in event.clock.items():
            self.clock[stream] = max(at, self.clock.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


@dataclass(eq=False)
class Block:
    """Memory, and the last launch of each stream that has read or written it."""

    pool: Stream | None
    nbytes: int
    read: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    written: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    owners: int = 0


class Races(TorchDispatchMode):
    """The double of `torch.cuda`, and what it has found; `peak` counts the bytes alive of all that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.now = Stream("compute")
        self.races: list[str] = []
        self.blocks: list[Block] = []
        self.launches: list[tuple[str, str]] = []
        self.free: defaultdict[Stream, list[Block]] = defaultdict(list)
        self.live: dict[int, tuple[StorageWeakRef, Block]] = {}
        self.sizes: dict[int, int] = {}
        self.behind: dict[torch.Tensor, torch.Tensor] = {}  # what a launch reads too that is given these addresses
        self.peak = self.made = 0

    def knows(self, make: Callable) -> Callable:
        """`make`, of whose symmetric memories it knows that who is given the addresses reads what lies there."""

        def known(*args):
            memory = make(*args)
            self.behind[memory.buffers] = memory.mine
            return memory

        return known

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Stream:
        return self.now

    def Stream(self, priority: int = 0) -> Stream:  # the name is that of torch.cuda
        self.made += 1
        return Stream(f"stream {self.made}")

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert not name.startswith(SYNCS), f"the host waits for a value: {func}"
        self._collect()
        given = [(x, self._block(x)) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        given += [(x, self._block(x)) for at, x in self.behind.items() if any(at is y for y, _ in given)]
        writes = self._writes(func, args, kwargs)
        result = func(*args, **kwargs)
        outs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        known = {id(b) for _, b in given}
        made = [b for b in (self._block(x, new=True) for x in outs) if id(b) not in known]
        shows = outs and not made and not writes  # a view
        if not shows and not name.startswith(("empty", "new_empty")):
            self._launch(name, [b for _, b in given], [*writes, *made])
        return result

    def _writes(self, func: Any, args: tuple, kwargs: dict) -> list[Block]:
        if func.namespace == "c10d":  # their schemas do not say: the first argument is the result
            return [self._block(x) for x in pytree.tree_leaves(args[0])]
        declared = func._schema.arguments
        pairs = [*zip(declared, args), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
        written = [x for a, x in pairs if a.alias_info is not None and a.alias_info.is_write]
        return [self._block(x) for x in pytree.tree_leaves(written) if isinstance(x, torch.Tensor)]

    def _launch(self, name: str, reads: list[Block], writes: list[Block]) -> None:
        stream = self.now
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        self.launches.append((name, stream.name))
        for block in dict.fromkeys((*reads, *writes)):
            earlier = [*block.written.items(), *(block.read.items() if block in writes else ())]
            for other, (at, what) in earlier:
                if stream.clock.get(other, 0) < at:
                    self.races.append(f"{name} on {stream.name} and {what} on {other.name}")
        for block in reads:
            block.read[stream] = stream.clock[stream], name
        for block in writes:
            block.written[stream] = stream.clock[stream], name

    def _block(self, tensor: torch.Tensor, new: bool = False) -> Block:
        """Where a tensor lies: in a block of the current stream's pool if it is new, of none if it was there before."""
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
