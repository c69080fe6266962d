"""Asynchronous copies from and to pinned memory, on a stream for each direction.

    start:  compute ──● event ───────────────▶ continues
                      lane ──■ copy ──●
    wait:   compute ──────────────────● waits; the host does not

A value that has no storage on the host gets a pinned buffer of its own there, which every step reuses. Both tensors of
a copy are held until compute has waited for it.
"""

from __future__ import annotations

import torch

from ...calling.host_memory import empty_on_host
from ..collectives import Future, Member
from ..host_copies import HostCopy
from .streams import Done, Streams


class StreamedHostCopy(HostCopy):
    """Copies one value to the other memory, like `HostCopy`, on a stream beside the compute stream.

    `device` is the target of a copy from the host; None for a copy to the host.
    """

    def __init__(self, lane: str, streams: Streams, device: torch.device | None) -> None:
        super().__init__()
        self.streams = streams
        self.lane = streams.lane(lane)
        self.device = device
        self.buffer: torch.Tensor | None = None

    def forward(self, value: torch.Tensor, over: torch.Tensor | None = None) -> Member:
        streams = self.streams
        target = self._target(value) if over is None else over
        self.lane.wait_stream(streams.cuda.current_stream())
        with streams.cuda.stream(self.lane):
            target.copy_(value, non_blocking=True)
        done = Done(streams, self.lane, self.lane.record_event(), [value, target])
        return Member(Future(done, lambda: {0: target}), 0)

    def join(self) -> None:
        self.streams.join(self.lane)

    def _target(self, value: torch.Tensor) -> torch.Tensor:
        """Memory for the copy. On the device it is new each time, so that it is freed after its last use."""
        if self.device is not None:
            return torch.empty_like(value, device=self.device)
        if self.buffer is None or self.buffer.shape != value.shape:
            self.buffer = empty_on_host(value)
        return self.buffer
