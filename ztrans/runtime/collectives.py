"""Asynchronous collectives of one rank, over torch.distributed.

`Start` starts a collective, and returns a `Member` for each of its values; `wait` returns the value of a member.

A gather only moves bytes. A reduce_scatter is an all-to-all, followed by a local sum in rank order, so its bits do not
depend on the order of the program. Over gloo it sends half as many bytes as gloo's own reduce_scatter, which is an
all-reduce and a slice. Between hosts it sends sums instead of terms (see `hierarchical`). Gloo would round some
all_reduces at every hop, or lose a NaN in them: those are sent as a reduce_scatter and a gather of the total. An
all_to_all sends each rank the block of a shard that the rank will hold.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import ops
from ..ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    LARGE_MEMBER,
    MOST_RANKS_OF_EXCHANGE,
    REDUCE_SCATTER,
    buffer_bytes,
    host_sum_format,
    in_bytes,
    is_reduced_by_ranks,
    is_sent_alone,
    rules,
    wire_format,
)
from ..ir.graph import Eqn, Primitive, Split, Var
from ..ir.layout import chunk, local_shape, on_axis, part, without
from ..ir.routes import EXCHANGE, HIERARCHICAL, RING, Hosts, route_of
from ..ir.wire_format import Format, Shaped
from .channels import Channel, Work
from .hierarchical import (
    HierarchicalMessage,
    exchange_parts,
    exchange_sums,
    reduction_of_hosts,
    tags_of_parts,
)
from .session import session_of

# The reductions that a backend computes. The terms of a mean are added, and the sum is divided afterwards.
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# For each lane, the purpose of the channel that carries its messages.
_PURPOSES: Mapping[str | None, str] = {"gather": "gathers", "reduce": "reductions"}


def all_gather(received: torch.Tensor, send: torch.Tensor, **options: Any) -> Any:
    """Gather one buffer from each rank. Torch 2.13 renamed the function; this calls the one that exists."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(received, send, **options)


def channel(mesh: DeviceMesh, axis: str, lane: str | None) -> Channel:
    """The channel of a lane of a mesh axis: gathers and reductions do not queue behind each other."""
    return session_of(mesh).channel(axis, _PURPOSES[lane])


def channel_of(mesh: DeviceMesh, eqn: Eqn) -> Channel:
    """The channel that carries the messages of a collective equation."""
    return channel(mesh, eqn.kwargs["axis"], rules(eqn).lane)


@dataclass(eq=False)
class Future:
    """The values of a collective in progress.

    Attributes:
        work: the operations in progress; None once the values exist, or the channel has been closed.
        finish: computes the values from the received bytes, when `work` is done; None when `work` is.
        values: the values by member, once they exist.
    """

    work: Work | None
    finish: Callable[[], dict[int, torch.Tensor]] | None
    values: dict[int, torch.Tensor] | None = None

    def value(self, member: int) -> torch.Tensor:
        """Wait, then return the value of one member of the bucket. The future keeps no reference to it."""
        if self.values is None:
            if self.work is None or self.finish is None:
                raise RuntimeError(
                    "ztrans: this collective was dropped, because the step that started it failed."
                )
            self.work.wait()
            self.values = self.finish()
            self.drop()
        return self.values.pop(member)

    def drop(self) -> None:
        """Release the buffers, and with them the last references to the connections to other ranks."""
        self.work = self.finish = None


@dataclass(frozen=True, eq=False)
class Works:
    """Several sends and receives of one channel, waited for together."""

    works: Sequence[Work]
    channel: Channel

    def wait(self) -> None:
        # Begin all second levels before the wait for any of them.
        self.channel.advance()
        for work in self.works:
            if isinstance(work, HierarchicalMessage):
                work.advance()
        with self.channel.errors():
            for work in self.works:
                work.wait()


# The operations in progress of one message, and a function that computes its values when they are done.
InProgress = tuple[Sequence[Work], Callable[[], list[torch.Tensor]]]


class Member(NamedTuple):
    """One member of a bucket: the bucket's future, and the member's position in it."""

    future: Future
    position: int


def wait(member: Member) -> torch.Tensor:
    """The value of a member of a started collective."""
    return member.future.value(member.position)


@functools.cache
def _delay_exit_for_gloo() -> None:
    """Delay the end of the process by 0.1 s, for gloo's threads to release the tensors that they sent.

    If such a thread releases a tensor after the interpreter has ended, the process aborts (pytorch#190489).
    """
    atexit.register(time.sleep, 0.1)


class Start(torch.nn.Module):
    """Starts one collective equation. A call takes the members of the equation, and returns a `Member` for each.

    A large member is a message of its own; all small members are packed into one message (see `is_sent_alone`). Without
    a channel the module can be printed, but not called.

    Attributes:
        dtypes: the dtypes of the values, if these are sent as bytes; else empty.
        size, rank: the number of ranks along the axis, and the index of this rank.
        outs: the values of the members after the wait.
        dim: the dim along which the members, or the values, are split; in an all_to_all the values.
        from_dim: the dim along which the members are split, or else `dim`. It differs from `dim` in an all_to_all.
        format: how members are sent: the format of the equation, or what `formats` has in its place.
        wire: the dtype of the elements of a message: bytes, if members are sent as codes.
        host_format: how hosts send their sums to each other.
        reduction_of_hosts: the reduction that each host computes and sends to the others, with two levels.
        divisor: the number by which a sum is divided to give the mean.
        way: the way of the messages between ranks (see `ir.routes`).
        gather_way: the way of a gather, or of the parts of a total.
        transport: the text for the printed program. A subclass has a `Transport`.
        shapes: for each value, unsplit along the axis, its shape with the split dim first; for each member of an
            all_to_all, padded along the dim along which it is split.
        part_sizes: for each value, the number of elements of a padded part.
        result_shapes: for each value, its shape on this rank.
        members_by_message: for each message, the positions of its members.
        sends_without_copy: for each member, whether it is sent from its own memory.
    """

    def __init__(
        self,
        eqn: Eqn,
        sizes: Mapping[str, int],
        coordinates: Mapping[str, int],
        channel: Channel | None,
        formats: Mapping[Format, Format] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        _delay_exit_for_gloo()
        as_sent = in_bytes(eqn)
        self.dtypes = [v.dtype for v in eqn.results] if as_sent is not eqn else []
        eqn = as_sent
        axis = eqn.kwargs["axis"]
        self.collective = cast(Primitive, eqn.op)
        self.reduction = str(eqn.kwargs.get("op", ""))
        self.size = sizes[axis]
        self.rank = coordinates[axis]
        self._channel = channel
        self.is_gloo = channel is not None and channel.is_gloo
        self.outs = eqn.results
        member_dim = _split_dim(eqn.ins[0], axis)
        value_dim = _split_dim(eqn.out, axis)
        self.dim = next((dim for dim in (value_dim, member_dim) if dim is not None), 0)
        self.from_dim = self.dim if member_dim is None else member_dim
        wire = wire_format(eqn, eqn.ins[0])
        self.format = self.host_format = formats.get(wire, wire)
        self.wire = self.format.carrier
        self.is_reduced_by_ranks = False
        if self.reduction:
            self.is_reduced_by_ranks = is_reduced_by_ranks(self.reduction, self.format)
            between = host_sum_format(eqn, eqn.ins[0])
            self.host_format = formats.get(between, between)
        hosts = channel.hosts if channel is not None else Hosts(self.size)
        route = route_of(eqn, sizes, hosts, self.is_gloo)
        self.way = route.way
        self.reduction_of_hosts = reduction_of_hosts(self.reduction, self.host_format)
        self.divisor = self._divisor(hosts, route.way == HIERARCHICAL)
        self.gather_way = route.gather_way or route.way
        self.transport: Any = route if hosts.count > 1 and route.way != RING else None
        self.shapes = []
        self.part_sizes = []
        for v in self.outs:
            unsplit = dataclasses.replace(v, layout=without(v.layout, axis))
            whole = list(local_shape(unsplit, sizes, coordinates))
            if self.from_dim != self.dim:
                whole[self.from_dim] = chunk(whole[self.from_dim], self.size)
            shape = _dim_first(whole, self.dim)
            self.shapes.append(shape)
            part_size = chunk(shape[0], self.size) * math.prod(shape[1:]) if shape else 1
            self.part_sizes.append(part_size)
        self.result_shapes = [local_shape(v, sizes, coordinates) for v in self.outs]
        self.members_by_message = message_groups(eqn, sizes)
        self.sends_without_copy = [
            rules(eqn).sends_without_copy(eqn, k, sizes) for k in range(len(self.outs))
        ]
        self.call = CALLS[self.collective]

    def _divisor(self, hosts: Hosts, has_two_levels: bool) -> int:
        """The divisor of a mean: the number of ranks, or of hosts if each host sends a mean."""
        is_mean_of_hosts = has_two_levels and self.reduction_of_hosts == "mean"
        return hosts.count if is_mean_of_hosts else self.size

    @property
    def channel(self) -> Channel:
        """The channel that carries the messages.

        Raises: RuntimeError if the program was generated without a mesh.
        """
        if self._channel is None:
            raise RuntimeError(
                "ztrans: this program was made without a mesh, so its collectives have no process group.\n"
                "Make it for one: to_fx(graph, mesh)."
            )
        return self._channel

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that carries the messages."""
        return self.channel.group

    def extra_repr(self) -> str:
        text = f"{self.collective}, ranks={self.size}, members={len(self.outs)}, wire={self.format}"
        return f"{text}, by={self.transport}" if self.transport else text

    def forward(self, *members: torch.Tensor) -> tuple[Member, ...]:
        self.channel.advance()
        if self.dtypes:
            members = tuple(map(as_bytes, members))
        messages: list[InProgress] = []
        for ks in self.members_by_message:
            messages.append(self.call(self, ks, [members[k] for k in ks]))

        def finish() -> dict[int, torch.Tensor]:
            values: dict[int, torch.Tensor] = {}
            for ks, (_, make_values) in zip(self.members_by_message, messages):
                values.update(zip(ks, make_values()))
            messages.clear()  # this releases the send and receive buffers
            return from_bytes(values, self.dtypes) if self.dtypes else values

        works: list[Work] = []
        for works_of_message, _ in messages:
            works += works_of_message
        future = Future(Works(works, self.channel), finish)
        self.channel.futures.add(future)
        return tuple(Member(future, k) for k in range(len(members)))

    def release_members(self) -> None:
        """Make compute wait until the members are packed, and may be overwritten. On CPUs they are already."""

    def join(self) -> None:
        """Make compute wait for all work of this collective, so that the memory of its messages may be reused.

        Between CPUs there is nothing to do: the operations in progress hold their buffers.
        """

    # ---- gathers

    def _gather(self, ks: list[int], shards: Sequence[torch.Tensor]) -> InProgress:
        sizes = [self.part_sizes[k] for k in ks]
        received = self._new_rows(self.size, sizes, shards[0])
        mine = received[self.rank : self.rank + 1]
        self.format.pack([shard.movedim(self.dim, 0) for shard in shards], sizes, 1, mine)
        works = self._send_parts(received, self._tags_of_parts())

        def finish() -> list[torch.Tensor]:
            outs = [Shaped(self.shapes[k], self.outs[k].dtype) for k in ks]
            return [self._dim_back(x) for x in self.format.unpack(received, sizes, outs)]

        return works, finish

    def _new_rows(
        self, ranks: int, sizes: Sequence[int], like: torch.Tensor, to: Format | None = None
    ) -> torch.Tensor:
        """An empty buffer with a row for each rank, for parts of so many elements, sent as members are or as `to`."""
        sent = to or self.format
        nbytes = sum(map(sent.nbytes, sizes))
        return like.new_empty(ranks, nbytes // sent.carrier.itemsize, dtype=sent.carrier)

    def _tags_of_parts(self) -> list[int]:
        """The tags of a gather whose parts the ranks exchange; empty if the backend gathers."""
        return tags_of_parts(self.channel) if self.is_gloo and self.gather_way != RING else []

    def _send_parts(self, received: torch.Tensor, tags: Sequence[int]) -> Sequence[Work]:
        """Send this rank's row of `received` to all ranks, and receive the rows of the others."""
        mine = received[self.rank]
        if self.gather_way == HIERARCHICAL:
            return [exchange_parts(self.channel, self.rank, list(received), tags)]
        if self.gather_way == EXCHANGE:
            return self.channel.exchange([mine] * self.size, list(received), tag=tags[0])
        buffers = _bytes(received), _bytes(mine)
        with self.channel.errors():
            return [all_gather(*buffers, group=self.group, async_op=True)]

    def _dim_back(self, value: torch.Tensor) -> torch.Tensor:
        """Move the split dim, which arrives first, back to its place, with the strides of the trace."""
        return value if self.dim == 0 else value.movedim(0, self.dim).contiguous()

    # ---- reductions to parts

    def _scatter(self, ks: list[int], terms: Sequence[torch.Tensor]) -> InProgress:
        sizes = [self.part_sizes[k] for k in ks]
        send = self._rows(ks, [term.movedim(self.dim, 0) for term in terms], sizes)
        pieces, works = self._all_to_all(send, sizes)

        def finish() -> list[torch.Tensor]:
            outs = [Shaped(self.part_shape(k), self.outs[k].dtype) for k in ks]
            return [self._dim_back(x) for x in self._totals(pieces, sizes, outs)]

        return works, finish

    def _rows(
        self, ks: list[int], terms: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> torch.Tensor:
        """The send buffer of terms: a row for each rank, with a part of so many elements of each term."""
        if self.format.is_coded:
            codes = self._new_rows(self.size, sizes, terms[0])
            return self.format.pack(terms, sizes, self.size, codes)
        rows = [self._by_rank(term, size) for term, size in zip(terms, sizes)]
        # Joined rows take two thirds of the time of `pack`, for 64 terms of 25 KiB.
        return torch.cat(rows, 1) if len(rows) > 1 else self._unshared(rows[0], ks[0], terms[0])

    def _all_to_all(
        self, send: torch.Tensor, sizes: Sequence[int]
    ) -> tuple[list[torch.Tensor], Sequence[Work]]:
        """Send row r of `send` to rank r. Returns the rows, or sums of hosts, that arrive, and the work in progress."""
        if self.way == HIERARCHICAL:
            sum_terms = functools.partial(self._sum_of_host, sizes)
            return exchange_sums(self.channel, self.rank, send, sum_terms)
        if not self.is_gloo:  # another backend for CPUs, such as MPI
            received = torch.empty_like(send)
            buffers = _bytes(received), _bytes(send)
            with self.channel.errors():
                work = dist.all_to_all_single(*buffers, group=self.group, async_op=True)
            return list(received), [work]  # the work keeps `send` alive until it is done
        rows = list(send)
        pieces = [row if r == self.rank else torch.empty_like(row) for r, row in enumerate(rows)]
        return pieces, self.channel.exchange(rows, pieces)

    def _sum_of_host(
        self, sizes: Sequence[int], terms: Sequence[torch.Tensor], memory: torch.Tensor
    ) -> torch.Tensor:
        """The sum of the terms of this host, as it is sent to others. It may overwrite `memory`, which is a term."""
        reduction = self.reduction_of_hosts
        if not self.format.is_coded:
            return ops.reduce(terms, reduction, self.host_format.carrier, memory)
        outs = [Shaped((size,), self.format.sum_dtype) for size in sizes]
        sums = self.format.totals(terms, sizes, outs, reduction, len(terms))
        row = self._new_rows(1, sizes, sums[0], self.host_format)
        return self.host_format.pack(sums, sizes, 1, row)[0]

    def _totals(
        self, pieces: Sequence[torch.Tensor], sizes: Sequence[int], outs: Sequence[Shaped]
    ) -> list[torch.Tensor]:
        """The totals of this rank's parts, from the terms of all ranks or the sums of all hosts."""
        arrived = self.host_format if self.way == HIERARCHICAL else self.format
        memory = self._sum_buffer(pieces)
        return arrived.totals(pieces, sizes, outs, self.reduction, self.divisor, memory)

    def _sum_buffer(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The received piece that the sum may overwrite, or None if all pieces share one buffer.

        It is one of the first two, as `ops.reduce` requires, but not this rank's own: that may be the term itself,
        which the program may still read. In a shared buffer, the sum would keep the whole buffer alive.
        """
        if self.way == HIERARCHICAL:
            return pieces[0]
        if not self.is_gloo or self.size == 1:
            return None
        return pieces[1] if self.rank == 0 else pieces[0]

    def part_shape(self, k: int) -> tuple[int, ...]:
        """The shape of this rank's part of a member, with the split dim first."""
        rows, *last_dims = self.shapes[k]
        return part(rows, self.size, self.rank)[1], *last_dims

    def _by_rank(self, term: torch.Tensor, size: int) -> torch.Tensor:
        """A whole term as one row for each rank, padded with zeros."""
        flat = term.to(self.wire).contiguous().view(-1)
        missing = self.size * size - flat.numel()
        if missing:
            flat = torch.nn.functional.pad(flat, (0, missing))
        return flat.view(self.size, size)

    def _unshared(self, send: torch.Tensor, k: int, term: torch.Tensor) -> torch.Tensor:
        """The send buffer of a message of one member: a copy if the program may overwrite the term before the wait.

        Gloo reads the buffer when the other rank receives it, which may be much later.
        """
        is_copied = _is_same_memory(send, term) and not self.sends_without_copy[k]
        return send.clone() if is_copied else send

    # ---- exchanges

    def _exchange(self, ks: list[int], members: Sequence[torch.Tensor]) -> InProgress:
        sizes = [self.part_sizes[k] for k in ks]
        rows = []
        for k, member in zip(ks, members):
            rows.append(self._by_rank(self.padded(k, member), self.part_sizes[k]))
        send = torch.cat(rows, 1) if len(rows) > 1 else self._unshared(rows[0], ks[0], members[0])
        received = torch.empty_like(send)
        works: Sequence[Work]
        if self.is_gloo:
            received[self.rank].copy_(send[self.rank])
            works = self.channel.exchange(list(send), list(received))
        else:
            with self.channel.errors():
                buffers = _bytes(received), _bytes(send)
                works = [dist.all_to_all_single(*buffers, group=self.group, async_op=True)]

        def finish() -> list[torch.Tensor]:
            values = []
            for k, blocks in zip(ks, received.split(sizes, 1)):
                values.append(self.joined(k, blocks).contiguous())
            return values

        return works, finish

    def padded(self, k: int, member: torch.Tensor) -> torch.Tensor:
        """A member of an all_to_all, of as many rows as the first rank has, with the dim first that will be split."""
        x = member.movedim(self.dim, 0)
        shape = self.shapes[k]
        if x.shape == shape:
            return x
        full = x.new_zeros(shape)
        full[tuple(map(slice, x.shape))] = x
        return full

    def joined(self, k: int, blocks: torch.Tensor) -> torch.Tensor:
        """The value of a member of an all_to_all from the blocks of all ranks: a view, if they are in its order."""
        x = self._in_order(k, blocks).flatten(self.from_dim, self.from_dim + 1)
        return x[tuple(map(slice, self.result_shapes[k]))]

    def arrives_in_place(self, k: int) -> bool:
        """Whether the blocks of a member of an all_to_all, alone in a buffer, are its value without a copy."""
        blocks = torch.empty(self.size, self.part_sizes[k], device="meta")
        is_padded = blocks.numel() != math.prod(self.result_shapes[k])
        return not is_padded and self._in_order(k, blocks).is_contiguous()

    def _in_order(self, k: int, blocks: torch.Tensor) -> torch.Tensor:
        """The blocks with their dims in the order of the value, and the ranks right before the dim to join."""
        rows, *others = self.shapes[k]
        x = blocks.view(self.size, chunk(rows, self.size), *others)
        return x.movedim(1, self.dim + 1).movedim(0, self.from_dim)

    # ---- reductions to whole values

    def _reduce(self, ks: list[int], terms: Sequence[torch.Tensor]) -> InProgress:
        nbytes = sum(self.format.nbytes(term.numel()) for term in terms)
        is_whole = self.is_gloo and _is_exchanged_whole(self.format, nbytes, self.size)
        if self.is_reduced_by_ranks and not is_whole:
            return self._reduce_parts(ks, terms)

        flat = [term.to(self.wire).contiguous().view(-1) for term in terms]
        send = torch.cat(flat) if len(flat) > 1 else self._unshared(flat[0], ks[0], terms[0])
        works: Sequence[Work]
        if is_whole:
            # Every rank receives all terms, and adds them in rank order. Between two ranks, a ring would send as much.
            pieces = [send if r == self.rank else torch.empty_like(send) for r in range(self.size)]
            works = self.channel.exchange([send] * self.size, pieces)

            def reduced() -> torch.Tensor:
                return ops.reduce(pieces, self.reduction, self.wire, self._sum_buffer(pieces))
        else:
            # The all_reduce overwrites what it sends.
            total = send.clone() if _is_same_memory(send, terms[0]) else send
            with self.channel.errors():
                works = [dist.all_reduce(total, self._reduce_op(), group=self.group, async_op=True)]

            def reduced() -> torch.Tensor:
                return ops.mean(total, self.size) if self.reduction == "mean" else total

        def finish() -> list[torch.Tensor]:
            shapes = [self.shapes[k] for k in ks]
            dtype = self.outs[ks[0]].dtype
            parts = reduced().to(dtype).split([math.prod(shape) for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes)]

        return works, finish

    def _reduce_op(self) -> Any:
        """The reduction that the backend computes. For bools, a sum is a maximum: gloo would add their bytes."""
        is_of_bools = self.wire == torch.bool and self.reduction in ("sum", "mean")
        return REDUCE_OPS["max" if is_of_bools else self.reduction]

    def _reduce_parts(self, ks: list[int], terms: Sequence[torch.Tensor]) -> InProgress:
        """Reduce one part of each term on each rank, then gather the parts.

        Each rank receives as many bytes as in a ring.
        """
        sizes = [chunk(term.numel(), self.size) for term in terms]
        pieces, works = self._all_to_all(self._rows(ks, terms, sizes), sizes)
        tags = self._tags_of_parts()
        gathered: list[torch.Tensor] = []

        def begin_gather() -> Sequence[Work]:
            outs = [Shaped((size,), self.format.sum_dtype) for size in sizes]
            totals = self._totals(pieces, sizes, outs)
            pieces.clear()  # so that the buffer below can reuse their memory
            received = self._new_rows(self.size, sizes, totals[0])
            self.format.pack(totals, sizes, 1, received[self.rank : self.rank + 1])
            gathered.append(received)
            return self._send_parts(received, tags)

        if self.way == HIERARCHICAL:
            (message,) = works
            cast(HierarchicalMessage, message).then(begin_gather)
        else:
            message = HierarchicalMessage(self.channel, works, begin_gather)

        def finish() -> list[torch.Tensor]:
            outs = [Shaped(self.shapes[k], self.outs[k].dtype) for k in ks]
            return self.format.unpack(gathered.pop(), sizes, outs)

        return [message], finish


# The call that starts one message of each collective.
CALLS: Mapping[Primitive, Callable[[Start, list[int], Sequence[torch.Tensor]], InProgress]] = {
    ALL_GATHER: Start._gather,
    REDUCE_SCATTER: Start._scatter,
    ALL_REDUCE: Start._reduce,
    ALL_TO_ALL: Start._exchange,
}


def _is_exchanged_whole(sent: Format, nbytes: int, ranks: int) -> bool:
    """Whether the ranks of an all_reduce over gloo send each other their whole terms of `nbytes` each."""
    if sent.is_coded:  # the blocks of a part are codes of their own
        return False
    return ranks == 2 or (ranks <= MOST_RANKS_OF_EXCHANGE and nbytes <= LARGE_MEMBER)


def message_groups(eqn: Eqn, sizes: Mapping[str, int]) -> list[list[int]]:
    """The members of each message: first the messages of one large member, then the one that packs all others."""
    large = [k for k in range(len(eqn.outs)) if is_sent_alone(eqn, k, sizes)]
    packed = [k for k in range(len(eqn.outs)) if k not in large]
    groups = [[k] for k in large]
    return [*groups, packed] if packed else groups


def _is_same_memory(send: torch.Tensor, term: torch.Tensor) -> bool:
    """Whether a term is its own send buffer."""
    return send.data_ptr() == term.data_ptr()


def _split_dim(v: Var, axis: str) -> int | None:
    """The dim along which a member, or a result, is split over the axis; None if it is not split."""
    split = on_axis(v.layout, axis)
    return split.dim if isinstance(split, Split) else None


def _dim_first(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """A shape with one dim moved to the front."""
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if shape else ()


def as_bytes(member: torch.Tensor) -> torch.Tensor:
    """A view of the bytes of a member, in one more dim (see `in_bytes`)."""
    return member.unsqueeze(-1).view(torch.uint8)


def from_bytes(
    values: Mapping[int, torch.Tensor], dtypes: Sequence[torch.dtype]
) -> dict[int, torch.Tensor]:
    """The values by member, from their bytes."""
    return {k: x.view(dtypes[k]).squeeze(-1) for k, x in values.items()}


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    """A flat view of a buffer. Floats of 8 or 16 bits are viewed as bytes, which every backend can move."""
    short = buffer.dtype.is_floating_point and buffer.itemsize < 4
    return buffer.view(-1).view(torch.uint8) if short else buffer.view(-1)


def has_second_level_at_wait(mesh: DeviceMesh, eqn: Eqn, sizes: Mapping[str, int]) -> bool:
    """Whether the wait for a collective may send its second level, over gloo.

    This is so for a hierarchical collective, and for an all_reduce that gathers the parts of its total.
    """
    channel = channel_of(mesh, eqn)
    if not channel.is_gloo:
        return False
    route = route_of(eqn, sizes, channel.hosts, True)
    if route.gather_way is None:
        return route.way == HIERARCHICAL
    sent = wire_format(eqn, eqn.ins[0])
    for ks in message_groups(eqn, sizes):
        nbytes = sum(buffer_bytes(eqn, k, sizes) for k in ks)
        if not _is_exchanged_whole(sent, nbytes, channel.hosts.ranks):
            return True
    return False
