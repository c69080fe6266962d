"""A simulated `torch.cuda` for machines without a GPU: streams, events, and graphs that are captured and replayed.

    cuda = FakeCuda()                           `cuda` stands in for `torch.cuda`
    with cuda.stream(cuda.Stream()):
        program(...)                            runs on CPU tensors, at once

Each stream has a vector clock, and a launch is one tick of its stream. A launch happens after all earlier launches on
its stream, and after the events that the stream has waited for. No other launches are ordered.
`tests/support/races.py` adds the allocator, and checks that no two unordered launches touch the same memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict["Stream", int]


@dataclass(eq=False)
class Event:
    """A point in a stream, as a vector clock."""

    clock: Clock

    def synchronize(self) -> None:
        raise AssertionError("the host waits for an event")


@dataclass(eq=False)
class Stream:
    """A queue of launches."""

    name: str
    clock: Clock = field(default_factory=dict)

    @property
    def cuda_stream(self) -> str:
        """The name stands in for the address of the stream."""
        return self.name

    def tick(self) -> int:
        """Count a launch on this stream, and return its time."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        for stream, at in event.clock.items():
            self.clock[stream] = max(at, self.clock.get(stream, 0))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


class TimedEvent:
    """A stand-in for `torch.Event` with a time: the number of events that were recorded before it."""

    readings: ClassVar[list[TimedEvent]] = []

    def __init__(self, device: str, enable_timing: bool) -> None:
        assert (device, enable_timing) == ("cuda", True)

    def record(self, stream: Stream | None = None) -> None:
        self.at, self.stream = len(self.readings), stream
        self.readings.append(self)

    def synchronize(self) -> None:
        """Nothing to wait for: an event has its time as soon as it is recorded."""

    def elapsed_time(self, end: TimedEvent) -> float:
        return 1e3 * (end.at - self.at)


class CUDAGraph(TorchDispatchMode):
    """Records the operations that run under it, and undoes them. A replay runs them again in the same memory.

    As in PyTorch, a capture begins with launches that reset the state of random generators, and a replay, on whatever
    stream, begins with launches that set it. Unless that stream has waited for the former, they may run after the latter.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda, self.seeded = cuda, Event({})
        self.calls: list[tuple] = []
        self.before: dict[int, tuple] = {}
        self.replays = self.resets = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            if (
                args[0].dtype == torch.float64 and not args[0].ndim
            ):  # a number, which stays on the host
                return func(*args)
            raise RuntimeError("operation not permitted when stream is capturing")
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for x in tensors:
            self.before.setdefault(x.untyped_storage()._cdata, (x, x.untyped_storage().clone()))
        results = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor):  # the graph's own memory needs no undoing
                self.before.setdefault(x.untyped_storage()._cdata, (x, None))
        self.calls.append((func, args, kwargs or {}, results))
        return results

    def undo(self) -> None:
        for x, content in self.before.values():
            if content is not None:
                x.untyped_storage().copy_(content)

    def replay(self) -> None:
        self.replays += 1
        clock = self.cuda.current_stream().clock
        for stream, at in self.seeded.clock.items():
            assert clock.get(stream, 0) >= at, (
                "a replay on a stream that has not waited for the beginning of the capture"
            )
        for func, args, kwargs, results in self.calls:
            replayed = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(replayed)):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.calls, self.resets = [], self.resets + 1


class FakeCuda:
    """The simulated `torch.cuda`. It records the streams that were entered, the graphs, and their capture modes."""

    def __init__(self) -> None:
        super().__init__()  # a subclass may also be a TorchDispatchMode
        self.compute = self.now = Stream("compute")
        self.created = 0
        self.entered: list[Stream] = []
        self.graphs: list[CUDAGraph] = []
        self.capture_modes: list[str] = []
        self.capturing = False
        self.synchronized: list[Any] = []  # the devices that the host waited for

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Stream(self, priority: int = 0) -> Stream:  # the name is that of torch.cuda
        self.created += 1
        return Stream(f"stream {self.created}")

    def CUDAGraph(self) -> CUDAGraph:
        self.graphs.append(CUDAGraph(self))
        return self.graphs[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        self.entered.append(stream)
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def graph(self, graph: CUDAGraph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.capture_modes.append(capture_error_mode)
        stream.tick()
        graph.seeded = stream.record_event()
        self.capturing = True
        try:
            with self.stream(stream), graph:
                yield
        finally:
            self.capturing = False
            graph.undo()

    def synchronize(self, device: Any = None) -> None:
        self.synchronized.append(device)
