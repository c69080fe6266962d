"""symmetric_start: the collectives of one rank on a GPU whose messages the other ranks read where they lie.

A message is packed as for NCCL, and copied on its communicator's lane to the symmetric memory of that
communicator; a kernel then reads what all ranks have put there, straight to where the values will lie,
half-precision terms summed in fp32 and in rank order. It begins when all ranks have put theirs, and
ends when all have read them, so the next message of the lane may take their place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ... import ops
from ...ir.collectives import ALL_GATHER, REDUCE_SCATTER, without
from ...ir.graph import Eqn
from ...ir.layout import local_shape, part
from ...ops.kernel import FLOATS
from ..collectives import Start
from ..process_groups import Channel
from .nccl import Message, StreamedStart, moved_back
from .streams import Streams
from .symmetric_memory import Near, gather, scatter
from .transport import transport


class SymmetricStart(StreamedStart):
    """Starts one collective equation, like `StreamedStart`, over symmetric memory."""

    def __init__(self, eqn: Eqn, *where: Any) -> None:
        super().__init__(eqn, *where)
        # how a message is made, and how many parts of it a rank sends
        messages = {ALL_GATHER: (self._gathered, 1), REDUCE_SCATTER: (self._scattered, self.size)}
        self.message, rows = messages[eqn.op]
        self.near = self.streams.near
        self.near.reserve(
            self.group, max(rows * sum(self.parts[k] for k in ks) for ks in self.groups) * self.wire.itemsize
        )

    def _call(self, received: list, sent: list[torch.Tensor]) -> None:
        """Nothing: each message is read by a kernel of its own."""

    def _gathered(self, ks: list[int], shards: Sequence[torch.Tensor]) -> Message:
        sizes = [self.parts[k] for k in ks]
        rows = [s.movedim(self.dim, 0) for s in shards]
        sent = shards[0].new_empty(sum(sizes), dtype=self.wire)
        read = lambda outs: gather(self.near.memory(self.group), sent, outs, sizes)
        return self._read(sent, rows, sizes, [self.shapes[k] for k in ks], self.wire, 1, read)

    def _scattered(self, ks: list[int], terms: Sequence[torch.Tensor]) -> Message:
        sizes, whole = [self.parts[k] for k in ks], [self.shapes[k] for k in ks]
        shapes = [(part(s[0], self.size, self.rank)[1], *s[1:]) for s in whole]
        rows = [t.movedim(self.dim, 0) for t in terms]
        sent = terms[0].new_empty(self.size * sum(sizes), dtype=self.wire)
        read = lambda outs: scatter(self.near.memory(self.group), sent, outs, sizes, self.op)
        return self._read(sent, rows, sizes, shapes, self.outs[ks[0]].dtype, self.size, read)

    def _read(
        self,
        sent: torch.Tensor,
        rows: Sequence[torch.Tensor],
        sizes: list[int],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        ranks: int,
        read: Callable[[list[torch.Tensor]], None],
    ) -> Message:
        values = [sent.new_empty(moved_back(shape, self.dim), dtype=dtype) for shape in shapes]

        # Sums are made in fp32 or half precision; other values are made of those.
        made = dtype if ranks == 1 or dtype in FLOATS else torch.float32

        def finish(_: None) -> None:
            if self.dim == 0 and made == dtype:
                read([v.view(-1) for v in values])
                return
            flat = [torch.empty(math.prod(shape), dtype=made, device=sent.device) for shape in shapes]
            read(flat)
            for x, value, shape in zip(flat, values, shapes):
                value.copy_(x.view(shape).movedim(0, self.dim))

        pack = lambda: ops.cast_pack(rows, sizes, self.wire, ranks=ranks, out=sent)
        return Message(sent, values, pack, lambda: None, finish)


def side_streams(device: str) -> Streams | None:
    """Streams beside compute, where a device of this type has them: CUDA; elsewhere None."""
    return Streams(near=Near()) if device == "cuda" else None


def check(program: torch.nn.Module) -> None:
    """Raises: RuntimeError if a rank has waited in vain for another, in what has run so far of a program."""
    for near in {id(s.near): s.near for s in program.modules() if isinstance(s, SymmetricStart)}.values():
        near.check()


def start(
    eqn: Eqn,
    sizes: Mapping[str, int],
    at: Mapping[str, int],
    channel: Channel | None,
    streams: Streams | None,
) -> Start:
    """What starts a collective equation, beside compute where there are streams to do so."""
    if streams is None:
        return Start(eqn, sizes, at, channel)
    axis, wire = eqn.kwargs["axis"], eqn.kwargs.get("dtype") or eqn.ins[0].dtype
    whole = (local_shape(dataclasses.replace(v, layout=without(v.layout, axis)), sizes, at) for v in eqn.outs)
    nbytes = sum(map(math.prod, whole)) * wire.itemsize
    times = lambda: streams.near.times(channel.group, eqn.op, wire, nbytes) if streams.near else "none was given"
    by = transport(eqn.op, eqn.kwargs.get("op"), wire, times)
    return (SymmetricStart if by.is_symmetric else StreamedStart)(eqn, sizes, at, channel, streams, by)
