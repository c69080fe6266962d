"""The streams on which a GPU packs and communicates while it computes, and how long their memory is held.

    compute    the current stream, on which the equations of the program run
    packing    one stream for all collectives, which casts and packs members, and never queues behind a collective
    lane       one stream for each communicator, which runs the collective, then unpacks the received bytes

    start:  compute ──● event ───────────────────────────────▶ continues
                      packing ──■ pack ──●
                                         lane ──■ collective ──■ unpack ──●
    wait:   compute ──────────────────────────────────────────────────────● waits; the host does not

No block of memory is reused while a stream may still touch it, and nothing calls `record_stream`:

- Tensors that several streams use (sent, received, results) are allocated on the compute stream, before the event that
  the other stream waits for. They are held until compute has waited for the last event of the lane.
- Tensors that only one lane uses are allocated on that lane, and released at once, because the lane reuses their memory
  in order.
- Members are held until compute has waited for their packing. It does so at the next start or wait, by which time the
  packing has usually ended.
- A step that fails releases all of these at once, after compute has waited for packing and all lanes.

So the host never waits. The choices of the allocator depend only on the program, so every step has the same addresses.
`back_to_back_seconds` times work on streams.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .symmetric import SymmetricMemory

HIGH = -1  # the priority of a stream, for short work that compute waits for
_AHEAD = 8  # products of 4096 x 4096 in fp32 that keep a GPU busy, for some milliseconds each


class Streams:
    """The streams of a program, and its symmetric memory, if the devices have any.

    `cuda` is `torch.cuda`, or a double of it on a machine without a GPU.
    """

    def __init__(self, cuda: Any = torch.cuda, symmetric: SymmetricMemory | None = None) -> None:
        self.cuda = cuda
        self.symmetric = symmetric
        self.packing = _stream(cuda, cuda.current_device(), "packing")
        # The event of the last packing, and the members that it reads.
        self.packed: tuple[Any, Sequence[torch.Tensor]] | None = None

    def lane(self, communicator: Hashable) -> Any:
        """The stream of a communicator. All programs share it, so that all of their collectives have one order."""
        return _stream(self.cuda, self.cuda.current_device(), communicator)

    @contextlib.contextmanager
    def pack(self, members: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context that launches work on the packing stream, after all work launched on compute so far.

        The work reads `members`.
        """
        self.packing.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(self.packing):
            yield
        self.packed = self.packing.record_event(), members

    @contextlib.contextmanager
    def communicate(self, lane: Any) -> Iterator[None]:
        """A context that launches work on the stream of a communicator, after the packing."""
        lane.wait_stream(self.packing)
        with self.cuda.stream(lane):
            yield

    def release(self) -> None:
        """Let compute wait for the last packing, so that the memory of its members may be reused."""
        if self.packed is not None:
            event, _ = self.packed
            self.packed = None
            self.cuda.current_stream().wait_event(event)

    def join(self, lane: Any) -> None:
        """Let compute wait for all packing, and for all work of a lane. The host does not wait.

        During a capture it waits for nothing: a failed capture has launched no work, and cannot wait for other work.
        """
        self.packed = None
        if self.cuda.is_current_stream_capturing():
            return
        compute = self.cuda.current_stream()
        with contextlib.suppress(RuntimeError):  # a failed device runs nothing any more
            compute.wait_stream(self.packing)
            compute.wait_stream(lane)


@dataclass(eq=False)
class Done:
    """The end of the work launched on a lane, and the buffers that must live until compute has waited for it."""

    streams: Streams
    lane: Any
    event: Any
    buffers: Sequence[torch.Tensor]

    def wait(self) -> None:
        """Let compute wait. The host does not wait."""
        self.streams.release()
        self.streams.cuda.current_stream().wait_event(self.event)


def back_to_back_seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """The seconds that a call takes on a GPU: the mean over `times` calls, launched back to back.

    The GPU has other work until all calls are launched. So the time to launch them is not included: a step launches
    while the GPU is busy.
    """
    busy = torch.ones(4096, 4096, device=device)
    begin = torch.Event(device.type, enable_timing=True)
    end = torch.Event(device.type, enable_timing=True)
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
    """A stream of the current device, the same for each call: the device and the name are the key of the cache."""
    return cuda.Stream(priority=HIGH)
