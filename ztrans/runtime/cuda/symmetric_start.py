"""Symmetric starts: start collectives whose messages the other ranks read out of this rank's memory.

A message is packed as for NCCL, then copied on its lane to the symmetric memory of the communicator. A kernel reads the
messages of all ranks from there, directly into the final tensors. It sums terms of half precision in fp32 and in rank
order. The kernel starts to read when the messages of all ranks are there, and ends when all ranks have read them, so
the next message of the lane may overwrite them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import ops
from ...ir.collectives import ALL_GATHER, buffer_bytes, wire_dtype
from ...ir.graph import Eqn
from ...ir.routes import route_of
from ...ops.kernel import FLOATS
from ..collectives import Start
from ..process_groups import Channel
from .nccl import Message, StreamedStart, moved_back
from .streams import Streams
from .symmetric_memory import SymmetricMemory, gather, scatter
from .transport import transport


class SymmetricStart(StreamedStart):
    """Starts one collective equation, like `StreamedStart`, over symmetric memory."""

    def __init__(self, symmetric: SymmetricMemory, *common: Any) -> None:
        """`common` are the arguments of a `StreamedStart`."""
        super().__init__(*common)
        self.symmetric = symmetric
        rows = 1 if self.kind is ALL_GATHER else self.size
        elements = max(rows * sum(self.parts[k] for k in ks) for ks in self.groups)
        symmetric.reserve(self.group, elements * self.wire.itemsize)

    def _call(self, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        """Do nothing: the kernel that finishes a message also communicates."""

    def _gathered(self, ks: list[int], shards: Sequence[torch.Tensor]) -> Message:
        read = lambda sent, outs, sizes: gather(
            self.symmetric.buffer(self.group), sent, outs, sizes
        )
        return self._message(ks, shards, 1, [self.shapes[k] for k in ks], self.wire, read)

    def _scattered(self, ks: list[int], terms: Sequence[torch.Tensor]) -> Message:
        read = lambda sent, outs, sizes: scatter(
            self.symmetric.buffer(self.group), sent, outs, sizes, self.op
        )
        return self._message(
            ks, terms, self.size, [self.part_shape(k) for k in ks], self.outs[ks[0]].dtype, read
        )

    def _message(
        self,
        ks: list[int],
        members: Sequence[torch.Tensor],
        ranks: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        read: Callable[[torch.Tensor, list[torch.Tensor], list[int]], None],
    ) -> Message:
        """A message with a row for each of `ranks` ranks.

        `read` takes the packed message, the flat tensors that it fills, which become the values, and the number of
        elements that each has for a rank.
        """
        sizes, rows = [self.parts[k] for k in ks], [m.movedim(self.dim, 0) for m in members]
        sent = members[0].new_empty(ranks * sum(sizes), dtype=self.wire)
        values = [sent.new_empty(moved_back(shape, self.dim), dtype=dtype) for shape in shapes]
        # The kernel returns fp32 or half precision; values of other dtypes are then cast.
        read_dtype = dtype if ranks == 1 or dtype in FLOATS else torch.float32

        def finish(_: torch.Tensor) -> None:
            if self.dim == 0 and read_dtype == dtype:
                read(sent, [v.view(-1) for v in values], sizes)
                return
            flat = [
                torch.empty(math.prod(shape), dtype=read_dtype, device=sent.device)
                for shape in shapes
            ]
            read(sent, flat, sizes)
            for x, value, shape in zip(flat, values, shapes):
                value.copy_(x.view(shape).movedim(0, self.dim))

        pack = lambda: ops.cast_pack(rows, sizes, self.wire, ranks=ranks, out=sent)
        return Message(sent, values, pack, lambda: sent, finish)


def side_streams(device: str) -> Streams | None:
    """Streams in addition to the compute stream if the devices are CUDA devices, or None."""
    return Streams(symmetric=SymmetricMemory()) if device == "cuda" else None


def check(program: torch.nn.Module) -> None:
    """Raises: RuntimeError if this rank has given up waiting for another one, in the part that has run so far."""
    for memory in {
        id(s.symmetric): s.symmetric for s in program.modules() if isinstance(s, SymmetricStart)
    }.values():
        memory.check()


def start(
    eqn: Eqn,
    sizes: Mapping[str, int],
    at: Mapping[str, int],
    channel: Channel | None,
    streams: Streams | None,
) -> Start:
    """The module that starts a collective equation, on `streams` if there are any."""
    if streams is None or channel is None:
        return Start(eqn, sizes, at, channel)
    kind: Any = eqn.op
    symmetric, wire = streams.symmetric, wire_dtype(eqn, eqn.ins[0])
    nbytes = sum(buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))
    times = lambda: (
        symmetric.times(channel.group, kind, wire, nbytes) if symmetric else "none was given"
    )
    by = transport(
        kind, eqn.kwargs.get("op"), wire, times, route_of(eqn, sizes, channel.hosts, gloo=False)
    )
    if symmetric is not None and by.is_symmetric:
        return SymmetricStart(symmetric, eqn, sizes, at, channel, streams, by)
    return StreamedStart(eqn, sizes, at, channel, streams, by)
