"""NCCL: the collectives of one rank on a GPU, on streams of their own.

One call sends all messages of an equation, and one launch packs each of them. A gather of a single member is received
in the memory of its value. NCCL would round terms of half precision at every hop, so these are exchanged, and summed in
fp32 and in rank order: between hosts in two levels, if that sends fewer bytes (see `ir.routes`). NCCL reduces all
other terms. A mean is a sum that is then scaled.

The calls are not asynchronous to torch, so they run on the current stream, which here is the lane of the
communicator. Torch then holds no tensors for them and uses no stream of its own, and a CUDA graph captures them like
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    ReduceScatterOptions,
)

from ... import ops
from ...ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ...ir.graph import Eqn
from ..collectives import REDUCE_OPS, Future, Member, Start
from ..process_groups import Channel
from .streams import Done, Streams
from .transport import BY_HOST, Transport

_ALIGNED = 16  # a value inside a larger buffer starts at a multiple of this many elements


@dataclass(frozen=True, eq=False)
class Message:
    """One message. `sent` and `values` are allocated already. Each function is called on the stream that it runs on."""

    sent: torch.Tensor
    values: Sequence[torch.Tensor]
    pack: Callable[[], object]  # fills `sent`
    receive_buffer: Callable[
        [], torch.Tensor
    ]  # the tensor that the collective fills; maybe a value, or `sent`
    finish: Callable[[torch.Tensor], object]  # fills `values` from that tensor


class StreamedStart(Start):
    """Starts one collective equation, like `Start`, on streams next to the compute stream."""

    def __init__(
        self,
        eqn: Eqn,
        sizes: Mapping[str, int],
        at: Mapping[str, int],
        channel: Channel,
        streams: Streams,
        by: Transport,
    ) -> None:
        super().__init__(eqn, sizes, at, channel)
        self.streams, self.lane = streams, streams.lane(channel)
        self.carrier, self.is_by_host, self.hosts = by, by.call == BY_HOST, channel.hosts
        self.is_exchanged = self.is_by_host or by.call == "nccl all_to_all"
        messages = {
            ALL_GATHER: self._gathered,
            REDUCE_SCATTER: self._scattered,
            ALL_REDUCE: self._reduced,
        }
        self.message = messages[self.kind]

    def forward(self, *members: torch.Tensor) -> tuple[Member, ...]:
        streams = self.streams
        streams.release()
        messages = [self.message(ks, [members[k] for k in ks]) for ks in self.groups]
        with streams.pack(members):
            for m in messages:
                m.pack()
        with streams.communicate(self.lane):
            received = [m.receive_buffer() for m in messages]
            self._call(received, [m.sent for m in messages])
            for m, buffer in zip(messages, received):
                m.finish(buffer)
        done = Done(streams, self.lane, self.lane.record_event(), [m.sent for m in messages])
        values = dict(
            zip((k for ks in self.groups for k in ks), (v for m in messages for v in m.values))
        )
        future = Future(done, lambda: values)
        return tuple(Member(future, k) for k in range(len(members)))

    def _call(self, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        """Launch the collective on the current stream, for all messages at once."""
        if self.wire.is_complex:  # NCCL has no complex dtypes; it adds real and imaginary parts
            received, sent = (
                [torch.view_as_real(x).view(-1) for x in buffers] for buffers in (received, sent)
            )
        work: Any = None
        if self.kind is ALL_GATHER:
            options = AllgatherOptions()
            options.asyncOp = False
            pairs = [x.view(torch.uint8) for x in received], [x.view(torch.uint8) for x in sent]
            call = _method(
                self.group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
            )
            work = call(*pairs, options)
        elif self.kind is ALL_REDUCE:
            work = self.group.allreduce_coalesced(sent, self._options(AllreduceCoalescedOptions()))
        elif self.is_by_host:
            for into, out in zip(received, sent):
                self._exchange_sums(into, out)
        elif self.is_exchanged:
            for into, out in zip(received, sent):
                dist.all_to_all_single(
                    into.view(torch.uint8), out.view(torch.uint8), group=self.group
                )
        else:
            call = _method(
                self.group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
            )
            work = call(received, sent, self._options(ReduceScatterOptions()))
        if (
            work is not None
        ):  # NCCL runs on this stream and returns none; the work of another backend is waited for
            work.wait()

    def _exchange_sums(self, into: torch.Tensor, terms: torch.Tensor) -> None:
        """Sum the terms of this host, and receive in `into` the sums of all hosts for this rank."""
        count, local = self.hosts.count, self.hosts.local
        host, place = divmod(self.rank, local)
        by_rank = (
            terms.view(count, local, -1).transpose(0, 1).contiguous()
        )  # for each rank of this host, and its peers
        received = torch.empty_like(by_rank)
        self._exchange(received, by_rank, range(host * local, (host + 1) * local))
        del by_rank
        sums = ops.reduce(list(received), "sum", self.partial)
        self._exchange(into, sums, range(place, self.size, local))

    def _exchange(self, into: torch.Tensor, sent: torch.Tensor, ranks: range) -> None:
        """Send equal parts of `sent` to some ranks of the group, and receive parts from them; the others get none."""
        splits = [sent.nbytes // len(ranks) if rank in ranks else 0 for rank in range(self.size)]
        incoming, outgoing = (x.view(-1).view(torch.uint8) for x in (into, sent))
        dist.all_to_all_single(incoming, outgoing, splits, splits, group=self.group)

    def _options(self, options: Any) -> Any:
        options.reduceOp, options.asyncOp = REDUCE_OPS[self.op], False
        return options

    def _gathered(self, ks: list[int], shards: Sequence[torch.Tensor]) -> Message:
        n, sizes, new = self.size, [self.parts[k] for k in ks], shards[0].new_empty
        rows = [s.movedim(self.dim, 0) for s in shards]
        packed = lambda out: ops.cast_pack(rows, sizes, self.wire, out=out)
        if len(ks) == 1 and self.dim == 0:
            shape = self.shapes[ks[0]]
            whole = new(n * sizes[0], dtype=self.wire)
            mine = whole[self.rank * sizes[0] : (self.rank + 1) * sizes[0]]
            value = whole[: math.prod(shape)].view(shape)
            return Message(mine, [value], lambda: packed(mine), lambda: whole, lambda _: None)
        shapes = [self.shapes[k] for k in ks]
        sent = new(sum(sizes), dtype=self.wire)
        values = [new(moved_back(shape, self.dim), dtype=self.wire) for shape in shapes]
        buffer = lambda: new(n * sent.numel(), dtype=self.wire)
        deliver = lambda received: self._deliver(received, n, sizes, shapes, values)
        return Message(sent, values, lambda: packed(sent), buffer, deliver)

    def _scattered(self, ks: list[int], terms: Sequence[torch.Tensor]) -> Message:
        n, sizes, new = self.size, [self.parts[k] for k in ks], terms[0].new_empty
        shapes = [self.part_shape(k) for k in ks]
        dtype, total = self.outs[ks[0]].dtype, sum(sizes)
        sent, pack = self._terms(sizes, terms)
        if len(ks) == 1 and self.dim == 0 and dtype == self.wire and not self.is_exchanged:
            mine = new(total, dtype=dtype)
            value = mine[: math.prod(shapes[0])].view(shapes[0])
            return Message(sent, [value], pack, lambda: mine, self._scale)
        values = [new(moved_back(shape, self.dim), dtype=dtype) for shape in shapes]
        rows = self.hosts.count if self.is_by_host else n if self.is_exchanged else 1
        incoming = self.partial if self.is_by_host else self.wire

        def finish(received: torch.Tensor) -> None:
            if self.is_exchanged:
                received = ops.reduce(
                    list(received.view(rows, total)), self.op, torch.float32, count=n
                )
            else:
                self._scale(received)
            self._deliver(received, 1, sizes, shapes, values)

        return Message(sent, values, pack, lambda: new(rows * total, dtype=incoming), finish)

    def _terms(
        self, sizes: list[int], terms: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        """The send buffer of a reduction, and the function that fills it.

        A single term that needs no cast, no padding and no transposition is its own send buffer.
        """
        term, numel = terms[0], self.size * sum(sizes)
        is_ready = term.dtype == self.wire and term.is_contiguous() and term.numel() == numel
        if len(terms) == 1 and self.dim == 0 and is_ready:
            return term.view(-1), lambda: None
        sent, rows = term.new_empty(numel, dtype=self.wire), [t.movedim(self.dim, 0) for t in terms]
        return sent, lambda: ops.cast_pack(rows, sizes, self.wire, ranks=self.size, out=sent)

    def _reduced(self, ks: list[int], terms: Sequence[torch.Tensor]) -> Message:
        new, shapes, dtype = (
            terms[0].new_empty,
            [self.shapes[k] for k in ks],
            self.outs[ks[0]].dtype,
        )
        numels = [math.prod(shape) for shape in shapes]
        sizes = numels if len(ks) == 1 else [-(-n // _ALIGNED) * _ALIGNED for n in numels]
        sent = new(sum(sizes), dtype=self.wire)
        pack = lambda: ops.cast_pack(terms, sizes, self.wire, out=sent)
        sums = [x[:n].view(shape) for x, n, shape in zip(sent.split(sizes), numels, shapes)]
        if dtype == self.wire:
            return Message(sent, sums, pack, lambda: sent, self._scale)
        values = [new(shape, dtype=dtype) for shape in shapes]

        def scaled(received: torch.Tensor) -> None:
            self._scale(received)
            for value, x in zip(values, sums):
                value.copy_(x)

        return Message(sent, values, pack, lambda: sent, scaled)

    def _scale(self, total: torch.Tensor) -> None:
        if self.op == "mean":
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
        else:
            numels = [math.prod(shape) for shape in shapes]
            for x, value, shape in zip(
                ops.unpack(flat, sizes, [[n] for n in numels], ranks), values, shapes
            ):
                value.copy_(x.view(shape).movedim(0, self.dim) if shape else x.view(()))


def _method(group: dist.ProcessGroup, *names: str) -> Callable:
    """A method of a process group, by the first of these names that this torch has (2.13 renamed some)."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


def moved_back(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """A shape whose first dim is moved back to position `dim`."""
    return (*shape[1 : dim + 1], shape[0], *shape[dim + 1 :]) if shape else ()
