"""Streams: where a GPU packs and communicates beside compute, and when memory may be used again.

    compute    the current stream, on which the program's equations run
    packing    one for all collectives: members are cast and packed, never behind a collective
    lane       one for each communicator: the collective, and what is made of what came

    start:  compute ──● event ───────────────────────────────▶ goes on
                      packing ──■ pack ──●
                                         lane ──■ collective ──■ unpack ──●
    wait:   compute ──────────────────────────────────────────────────────● waits, the host does not

No block of memory is used again while a stream may still touch it, and nobody calls `record_stream`:

- What is handed from stream to stream (sent, received, results) is allocated on the compute stream
  before the event that the others wait for, and held until compute has waited for the lane's last event.
- What one lane alone uses is allocated on that lane, and let go at once: it is used again there, in order.
- The members that were packed are held until compute has waited for the packing, which it does at
  the next start or wait, when that has long been over.

So the host never waits, the allocator's choices depend on the program alone, and every step finds
the addresses of the step before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

HIGH = -1  # the priority of what is short, and waited for
_AHEAD = 8  # products of 4096 x 4096 in fp32, some milliseconds each


class Streams:
    """The streams of a program, and its symmetric memory (`near.Near`), if there is any. `cuda` is `torch.cuda`, or
    what stands in for it on a machine without a GPU."""

    def __init__(self, cuda: Any = torch.cuda, near: Any = None) -> None:
        self.near = near
        self.cuda, self.packing = cuda, _stream(cuda, cuda.current_device(), "packing")
        self.packed: tuple[Any, Sequence[torch.Tensor]] | None = None  # the last packing: its event, what it read

    def lane(self, communicator: Hashable) -> Any:
        """The stream of a communicator: one for all programs, as its collectives have one order."""
        return _stream(self.cuda, self.cuda.current_device(), communicator)

    @contextlib.contextmanager
    def pack(self, members: Sequence[torch.Tensor]) -> Iterator[None]:
        """What is launched here runs on the packing stream, after all that compute was given; it reads `members`."""
        self.packing.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(self.packing):
            yield
        self.packed = self.packing.record_event(), members

    @contextlib.contextmanager
    def communicate(self, lane: Any) -> Iterator[None]:
        """What is launched here runs on the stream of a communicator, after the packing."""
        lane.wait_stream(self.packing)
        with self.cuda.stream(lane):
            yield

    def release(self) -> None:
        """Compute waits for the last packing, so that what this read may be freed and used again."""
        if self.packed is not None:
            event, self.packed = self.packed[0], None
            self.cuda.current_stream().wait_event(event)


@dataclass(eq=False)
class Done:
    """The end of what has been launched on a lane, and the tensors that must live until it is waited for."""

    streams: Streams
    lane: Any
    event: Any
    held: Sequence[torch.Tensor]

    def wait(self) -> None:
        """Let compute wait; not the host."""
        self.streams.release()
        self.streams.cuda.current_stream().wait_event(self.event)


def in_a_row(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of one of `times` calls on a GPU that has other work until all are launched: what they take there, and
    not what it takes to launch them, which in a step is done ahead."""
    busy = torch.ones(4096, 4096, device=device)
    begin, end = (torch.Event(device.type, enable_timing=True) for _ in range(2))
    for _ in range(_AHEAD):
        torch.mm(busy, busy)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


@functools.cache
def _stream(cuda: Any, device: int, name: Hashable) -> Any:
    return cuda.Stream(priority=HIGH)
