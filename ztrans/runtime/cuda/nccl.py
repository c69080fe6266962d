"""The collectives of one rank on a GPU by NCCL, on streams next to the compute stream.

One call sends all messages of an equation, and one launch packs each of them. A gather of a single member is received
in the memory of its value.

NCCL would round terms of half precision at every hop, and lose a NaN in a maximum of floats. So ranks exchange these
terms and reduce them in rank order, with sums of half precision in fp32. Between hosts they do this hierarchically if
that sends fewer bytes (see `hierarchical`). An all_reduce of such terms is an exchange of the terms for each part,
then a gather of the parts; if it is short, all ranks gather the terms. NCCL reduces all other terms. A mean is a sum
that is then scaled. Members that are sent as codes are in `coded_messages`.

The calls are synchronous to torch, so they run on the current stream, which here is the lane of the communicator. Torch
then holds no tensors for them and uses no stream of its own, and a CUDA graph captures them like kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    ReduceScatterOptions,
)

from ... import ops
from ...ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from ...ir.graph import Eqn
from ...ops.kernel import FLOATS
from ..channels import Channel
from ..collectives import REDUCE_OPS, Future, Member, Start, as_bytes, from_bytes
from . import coded_messages
from .packed_message import PackedMessage, fill_values, moved_back
from .streams import Done, Streams

# What carries a collective. Terms that NCCL must not reduce are exchanged by all_to_all, or all "terms" are gathered.
Way = Literal["nccl", "terms", "all_to_all", "hierarchical", "symmetric", "copied"]
_CALLS: Mapping[Way, str] = {
    "nccl": "nccl {}",
    "terms": "nccl all_gather of terms",
    "all_to_all": "nccl all_to_all",
    "hierarchical": "nccl hierarchical all_to_all",
    "symmetric": "symmetric {}",
    "copied": "copied {}",
}
# A value inside a larger buffer starts at a multiple of this many elements.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Transport:
    """What carries a collective, and the reason for the choice, which printed programs show."""

    way: Way
    collective: str
    reason: str

    def __str__(self) -> str:
        return f"{_CALLS[self.way].format(self.collective)} ({self.reason})"


class StreamedStart(Start):
    """Starts one collective equation, like `Start`, on streams next to the compute stream."""

    def __init__(
        self,
        eqn: Eqn,
        sizes: Mapping[str, int],
        coordinates: Mapping[str, int],
        channel: Channel,
        streams: Streams,
        transport: Transport,
    ) -> None:
        super().__init__(eqn, sizes, coordinates, channel)
        self.streams = streams
        self.lane = streams.lane(channel)
        self.transport = transport
        self.is_exchanged = transport.way in ("all_to_all", "terms", "copied")
        self.divisor = self._divisor(channel.hosts, transport.way == "hierarchical")
        # How many terms arrive for each part of a reduction, and how.
        self.arriving_rows = self.size if self.is_exchanged else 1
        self.arriving_format = self.format
        make_message = {
            ALL_GATHER: self._gather_message,
            REDUCE_SCATTER: self._scatter_message,
            ALL_REDUCE: self._reduce_message,
            ALL_TO_ALL: self._exchange_message,
        }
        if self.format.is_coded:
            make_message |= {
                ALL_GATHER: self._coded_gather_message,
                REDUCE_SCATTER: self._coded_scatter_message,
                ALL_REDUCE: self._coded_total_message,
            }
        self.message = make_message[self.collective]

    def forward(self, *members: torch.Tensor) -> tuple[Member, ...]:
        streams = self.streams
        streams.release()
        if self.dtypes:
            members = tuple(map(as_bytes, members))
        messages = []
        for ks in self.members_by_message:
            messages.append(self.message(ks, [members[k] for k in ks]))
        with streams.pack(members):
            for message in messages:
                message.pack()
        buffers = self._send(messages)
        done = Done(streams, self.lane, self.lane.record_event(), buffers)

        # The messages themselves would keep their send buffers alive.
        delivered = [(ks, m.values, m.decode) for ks, m in zip(self.members_by_message, messages)]

        def finish() -> dict[int, torch.Tensor]:
            values: dict[int, torch.Tensor] = {}
            for ks, filled, decode in delivered:
                values.update(zip(ks, decode() if decode else filled))
            delivered.clear()
            return from_bytes(values, self.dtypes) if self.dtypes else values

        future = Future(done, finish)
        return tuple(Member(future, k) for k in range(len(members)))

    def release_members(self) -> None:
        self.streams.release()

    def join(self) -> None:
        self.streams.join(self.lane)

    # ---- the call

    def _send(self, messages: Sequence[PackedMessage]) -> list[torch.Tensor]:
        """Launch the collective, and the work that turns received bytes into values.

        Returns: the buffers that must live until compute has waited for the values.
        """
        send_buffers = [buffer for message in messages for buffer in message.send_buffers]
        with self.streams.communicate(self.lane):
            received = [message.receive_buffer() for message in messages]
            with self.channel.errors():
                self._call(received, send_buffers)
            for message, buffer in zip(messages, received):
                message.finish(buffer)
        return send_buffers

    def _call(self, received: list[torch.Tensor], send_buffers: list[torch.Tensor]) -> None:
        """Launch the collective on the current stream, for all messages at once."""
        if self.wire.is_complex:  # NCCL has no complex dtypes; it adds real and imaginary parts
            received = [torch.view_as_real(x).view(-1) for x in received]
            send_buffers = [torch.view_as_real(x).view(-1) for x in send_buffers]
        if self.collective is ALL_GATHER or self.transport.way == "terms":
            self._call_gather(received, send_buffers)
        elif self.is_exchanged or self.from_dim != self.dim:
            self._call_exchange(received, send_buffers)
        elif self.collective is ALL_REDUCE:
            options = self._options(AllreduceCoalescedOptions())
            _wait(self.group.allreduce_coalesced(send_buffers, options))
        else:
            names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
            options = self._options(ReduceScatterOptions())
            _wait(_method(self.group, *names)(received, send_buffers, options))

    def _call_gather(
        self, received: Sequence[torch.Tensor], send_buffers: Sequence[torch.Tensor]
    ) -> None:
        options = AllgatherOptions()
        options.asyncOp = False
        names = "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        received_bytes = [x.view(torch.uint8) for x in received]
        sent_bytes = [x.view(torch.uint8) for x in send_buffers]
        work = _method(self.group, *names)(received_bytes, sent_bytes, options)
        _wait(work)

    def _call_exchange(
        self, received: Sequence[torch.Tensor], send_buffers: Sequence[torch.Tensor]
    ) -> None:
        for into, terms in zip(received, send_buffers):
            all_to_all(into, terms, self.group)

    def _options(self, options: Any) -> Any:
        options.reduceOp = REDUCE_OPS[self.reduction]
        options.asyncOp = False
        return options

    # ---- messages

    def _coded_gather_message(self, ks: list[int], shards: Sequence[torch.Tensor]) -> PackedMessage:
        return coded_messages.gather_message(self, ks, shards)

    def _coded_scatter_message(self, ks: list[int], terms: Sequence[torch.Tensor]) -> PackedMessage:
        arriving = self.arriving_format, self.arriving_rows
        return coded_messages.scatter_message(self, ks, terms, *arriving)

    def _coded_total_message(self, ks: list[int], terms: Sequence[torch.Tensor]) -> PackedMessage:
        arriving = self.arriving_format, self.arriving_rows
        return coded_messages.total_message(self, ks, terms, *arriving, self._gather_parts)

    def _gather_parts(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Gather the parts of a total, on the current stream."""
        with self.channel.errors():
            self._call_gather([total], [part])

    def _gather_message(self, ks: list[int], shards: Sequence[torch.Tensor]) -> PackedMessage:
        sizes = [self.part_sizes[k] for k in ks]
        shapes = [self.shapes[k] for k in ks]
        rows = [shard.movedim(self.dim, 0) for shard in shards]
        new = shards[0].new_empty

        def pack() -> None:  # `send_buffer` is chosen below
            ops.cast_pack(rows, sizes, self.wire, out=send_buffer)

        # A single member is received in the memory of its value, where this rank packs its part.
        if len(ks) == 1 and self.dim == 0:
            size = sizes[0]
            gathered = new(self.size * size, dtype=self.wire)
            send_buffer = gathered[self.rank * size : (self.rank + 1) * size]
            value = gathered[: math.prod(shapes[0])].view(shapes[0])
            return PackedMessage(
                [send_buffer], [value], pack, lambda: gathered, lambda received: None
            )

        send_buffer = new(sum(sizes), dtype=self.wire)
        values = [new(moved_back(shape, self.dim), dtype=self.wire) for shape in shapes]

        def receive_buffer() -> torch.Tensor:
            return new(self.size * send_buffer.numel(), dtype=self.wire)

        def finish(received: torch.Tensor) -> None:
            self._deliver(received, self.size, sizes, shapes, values)

        return PackedMessage([send_buffer], values, pack, receive_buffer, finish)

    def _scatter_message(self, ks: list[int], terms: Sequence[torch.Tensor]) -> PackedMessage:
        sizes = [self.part_sizes[k] for k in ks]
        shapes = [self.part_shape(k) for k in ks]
        dtype = self.outs[ks[0]].dtype
        total = sum(sizes)
        new = terms[0].new_empty
        send_buffers, pack = self._send_buffers_of(ks, terms)

        # NCCL writes a single sum into the memory of its value.
        is_single = len(ks) == 1 and self.dim == 0
        if is_single and dtype == self.wire and not self.is_exchanged:
            mine = new(total, dtype=dtype)
            value = mine[: math.prod(shapes[0])].view(shapes[0])
            return PackedMessage(send_buffers, [value], pack, lambda: mine, self._scale)

        values = [new(moved_back(shape, self.dim), dtype=dtype) for shape in shapes]
        rows = self.arriving_rows

        def receive_buffer() -> torch.Tensor:
            return new(rows * total, dtype=self.arriving_format.carrier)

        def finish(received: torch.Tensor) -> None:
            terms = received.view(rows, total)
            if self.reduction in ("sum", "mean") and self.arriving_format.carrier in FLOATS:
                self._sum(terms, sizes, shapes, values)
                return
            if self.is_exchanged:
                reduced = new(total, dtype=self.arriving_format.carrier)
                self._reduce_rows(terms, [reduced], self.reduction, self.divisor)
            else:
                reduced = received
                self._scale(reduced)
            self._deliver(reduced, 1, sizes, shapes, values)

        return PackedMessage(send_buffers, values, pack, receive_buffer, finish)

    def _send_buffers_of(
        self, ks: list[int], terms: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], object]]:
        """The send buffer of a reduction to parts, with a row for each rank, and the function that fills it."""
        if len(ks) == 1 and self._is_sent_as_it_is(ks[0], terms[0]):
            return [terms[0].view(-1)], lambda: None
        sizes = [self.part_sizes[k] for k in ks]
        send_buffer = terms[0].new_empty(self.size * sum(sizes), dtype=self.wire)
        rows = [term.movedim(self.dim, 0) for term in terms]

        def pack() -> None:
            ops.cast_pack(rows, sizes, self.wire, ranks=self.size, out=send_buffer)

        return [send_buffer], pack

    def _is_sent_as_it_is(self, k: int, term: torch.Tensor) -> bool:
        """Whether a term is its own send buffer: the program keeps it until it has been sent, and it is contiguous."""
        is_whole = term.is_contiguous() and term.numel() == self.size * self.part_sizes[k]
        return self.sends_without_copy[k] and is_whole

    def _exchange_message(self, ks: list[int], members: Sequence[torch.Tensor]) -> PackedMessage:
        sizes = [self.part_sizes[k] for k in ks]
        send_buffers, pack = self._send_buffers_of(
            ks, [self.padded(k, x).movedim(0, self.dim) for k, x in zip(ks, members)]
        )
        new = members[0].new_empty
        numel = self.size * sum(sizes)
        if len(ks) == 1 and self.arrives_in_place(ks[0]):
            buffer = new(numel, dtype=self.wire)
            value = buffer.view(self.result_shapes[ks[0]])
            return PackedMessage(send_buffers, [value], pack, lambda: buffer, lambda received: None)
        values = [new(self.result_shapes[k], dtype=self.wire) for k in ks]

        def finish(received: torch.Tensor) -> None:
            blocks_of_members = received.view(self.size, -1).split(sizes, 1)
            for k, value, blocks in zip(ks, values, blocks_of_members):
                value.copy_(self.joined(k, blocks))

        receive_buffer = lambda: new(numel, dtype=self.wire)
        return PackedMessage(send_buffers, values, pack, receive_buffer, finish)

    def _reduce_message(self, ks: list[int], terms: Sequence[torch.Tensor]) -> PackedMessage:
        new = terms[0].new_empty
        shapes = [self.shapes[k] for k in ks]
        dtype = self.outs[ks[0]].dtype
        numels = [math.prod(shape) for shape in shapes]
        sizes = numels
        if len(ks) > 1:
            sizes = [-(-n // _ALIGNMENT) * _ALIGNMENT for n in numels]
        if self.is_exchanged and self.transport.way != "terms":  # each rank reduces an equal part
            missing = -sum(sizes) % (self.size * _ALIGNMENT)
            sizes = [*sizes[:-1], sizes[-1] + missing]
        send_buffer = new(sum(sizes), dtype=self.wire)
        totals = []
        for x, numel, shape in zip(send_buffer.split(sizes), numels, shapes):
            totals.append(x[:numel].view(shape))
        # The totals are written over the terms. Without a cast they are the values.
        is_cast = dtype != self.wire
        values = [new(shape, dtype=dtype) for shape in shapes] if is_cast else totals

        def pack() -> None:
            ops.cast_pack(terms, sizes, self.wire, out=send_buffer)

        def receive_buffer() -> torch.Tensor:
            if not self.is_exchanged:
                return send_buffer
            ranks = (
                1 if self.transport.way == "terms" else self.size
            )  # ranks that reduce a part each
            numel = self.arriving_rows * len(send_buffer) // ranks
            return new(numel, dtype=self.arriving_format.carrier)

        def finish(received: torch.Tensor) -> None:
            if self.is_exchanged:
                self._reduce_exchanged(received.view(self.arriving_rows, -1), send_buffer)
            elif is_cast and self.reduction in ("sum", "mean") and self.wire in FLOATS:
                self._sum(received.view(1, -1), sizes, shapes, values)
                return
            else:
                self._scale(received)
            if is_cast:
                for value, x in zip(values, totals):
                    value.copy_(x)

        return PackedMessage([send_buffer], values, pack, receive_buffer, finish)

    def _reduce_exchanged(self, terms: torch.Tensor, total: torch.Tensor) -> None:
        """Reduce the rows of `terms` into all of `total`, or into this rank's part and then gather the parts."""
        if self.transport.way == "terms":
            self._reduce_rows(terms, [total], self.reduction, self.divisor)
            return
        part = total.view(self.size, -1)[self.rank]
        self._reduce_rows(terms, [part], self.reduction, self.divisor)
        self._gather_parts(total, part)

    # ---- values of what has arrived

    def _reduce_rows(
        self, terms: torch.Tensor, totals: Sequence[torch.Tensor], reduction: str, divisor: int
    ) -> None:
        """Reduce the rows of `terms` into flat `totals`, one after another."""
        sizes = [len(total) for total in totals]
        if reduction in ("sum", "mean"):
            ops.sum_terms(terms, totals, sizes, reduction, divisor)
            return
        extreme = torch.amax if reduction == "max" else torch.amin  # they keep NaN
        for columns, total in zip(terms.split(sizes, 1), totals):
            extreme(columns, 0, out=total)

    def _sum(
        self,
        terms: torch.Tensor,
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        values: Sequence[torch.Tensor],
    ) -> None:
        """Sum the rows of `terms`, scale a mean, and write the values."""
        dtype = values[0].dtype if values[0].dtype in FLOATS else torch.float32

        def fill(outs: list[torch.Tensor]) -> None:
            ops.sum_terms(terms, outs, sizes, self.reduction, self.divisor)

        fill_values(fill, dtype, self.dim, shapes, values)

    def _scale(self, total: torch.Tensor) -> None:
        if self.reduction == "mean":
            ops.mean(total, self.size)

    def _deliver(
        self,
        flat: torch.Tensor,
        ranks: int,
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        values: Sequence[torch.Tensor],
    ) -> None:
        """Copy several values out of a buffer, each to its own memory, with the split dim back at its position."""
        if self.dim == 0 and flat.dtype == values[0].dtype:
            torch.ops.ztrans.unpack.default(flat, sizes, ranks, [v.view(-1) for v in values])
            return
        flat_shapes = [[math.prod(shape)] for shape in shapes]
        unpacked = ops.unpack(flat, sizes, flat_shapes, ranks)
        for x, value, shape in zip(unpacked, values, shapes):
            value.copy_(x.view(shape).movedim(0, self.dim) if shape else x.view(()))


def rounds(nbytes: Sequence[int], room: float) -> list[slice]:
    """Cut a list of buffers into slices that are sent at once: each has as many as fit into `room`, or one.

    >>> rounds([4, 4, 8, 2], room=8)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    slices: list[slice] = []
    total = 0
    for k, size in enumerate(nbytes):
        total += size
        if not slices or total > room:
            slices.append(slice(k, k + 1))
            total = size
        else:
            slices[-1] = slice(slices[-1].start, k + 1)
    return slices


def all_to_all(
    into: torch.Tensor,
    send_buffer: torch.Tensor,
    group: dist.ProcessGroup,
    ranks: range | None = None,
) -> None:
    """Send equal parts of a buffer to some ranks of a group, by default all, and receive parts from them."""
    splits = None
    if ranks is not None:
        part = send_buffer.nbytes // len(ranks)
        splits = [part if rank in ranks else 0 for rank in range(group.size())]
    incoming = into.view(-1).view(torch.uint8)
    outgoing = send_buffer.view(-1).view(torch.uint8)
    dist.all_to_all_single(incoming, outgoing, splits, splits, group=group)


def _wait(work: Any) -> None:
    """Wait for the work of a collective, which backends other than NCCL return."""
    if work is not None:
        work.wait()


def _method(group: dist.ProcessGroup, *names: str) -> Callable:
    """A method of a process group, by the first of these names that this torch has: 2.13 renamed some."""
    return next(getattr(group, name) for name in names if hasattr(group, name))
