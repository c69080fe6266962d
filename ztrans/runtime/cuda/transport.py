"""Choose what carries a collective on a GPU, NCCL or symmetric memory, and make the module that starts it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ... import ops
from ...ir.collectives import ALL_GATHER, is_reduced_by_ranks, wire_dtype
from ...ir.graph import Eqn, Primitive
from ...ir.printer import format_bytes, format_seconds
from ...ir.routes import HIERARCHICAL, Route, is_gathered_whole, route_of
from ...ir.rules import Sizes
from ...ops import HALF
from ...ops.kernel import FLOATS
from ..agreement import everywhere
from ..collectives import channel_of
from ..process_groups import Channel, process_groups
from .connect import INSIDE
from .copies import exchange_by_copies, gather_by_copies
from .hierarchical import HierarchicalStart
from .nccl import PackedMessage, StreamedStart, Transport, Way, moved_back
from .streams import Streams
from .symmetric import Buffer, Times, gather, message_kind, scatter


def inside_channel_of(mesh: DeviceMesh, eqn: Eqn, sizes: Sizes) -> Channel | None:
    """The channel that carries the first level of a hierarchical reduction on GPUs; None for other collectives."""
    channel = channel_of(mesh, eqn)
    route = route_of(eqn, sizes, channel.hosts, gloo=False)
    if route.way != HIERARCHICAL or is_gathered_whole(eqn, sizes):
        return None
    return process_groups(mesh).channel(channel.axis, f"{channel.purpose}{INSIDE}")


def reserve_messages(
    mesh: DeviceMesh, messages: Iterable[tuple[Channel, Eqn, Sizes, int]], streams: Streams
) -> None:
    """Decide what carries the messages of collective equations, and allocate the symmetric memory they need.

    All ranks of the mesh must call this together. Each of `messages` is a channel, an equation, the sizes of the axes,
    and the number of lanes that are under way at the same time.
    """
    if streams.symmetric is None:
        return
    kinds = []
    for channel, eqn, sizes, lanes in messages:
        kind = message_kind(eqn, sizes, lanes)
        if isinstance(kind, str):
            continue
        route = route_of(eqn, sizes, channel.hosts, gloo=False)
        collective: Any = eqn.op
        has_two = has_two_ways(collective, eqn.kwargs.get("op"), kind.wire, route)
        if has_two and not is_gathered_whole(eqn, sizes):
            kinds.append((channel, kind))
    streams.symmetric.reserve(kinds, functools.partial(everywhere, mesh=mesh))


def streamed_start(
    eqn: Eqn,
    sizes: Mapping[str, int],
    coordinates: Mapping[str, int],
    channel: Channel,
    streams: Streams,
    lanes: int,
    inside: Channel | None = None,
) -> StreamedStart:
    """The module that starts a collective equation on a GPU (see `start_module` of `runtime/transport.py`)."""
    symmetric = streams.symmetric
    kind = message_kind(eqn, sizes, lanes)

    def times() -> Times | str:
        if symmetric is None:
            return "none was given"
        if isinstance(kind, str):
            return kind
        return symmetric.answer(channel, kind)

    collective: Any = eqn.op
    reduction = eqn.kwargs.get("op")
    wire = wire_dtype(eqn, eqn.ins[0])
    route = route_of(eqn, sizes, channel.hosts, gloo=False)
    is_whole = is_gathered_whole(eqn, sizes)
    transport = choose_transport(collective, reduction, wire, times, route, is_whole)
    common = eqn, sizes, coordinates, channel, streams, transport
    # A hierarchical reduction crosses hosts, and symmetric memory does not.
    if inside is not None:
        return HierarchicalStart(inside, *common)
    if symmetric is not None and not isinstance(kind, str):
        if transport.way == "copied":
            return CopiedStart(symmetric.buffer_of[channel, kind], *common)
        if transport.way == "symmetric":
            return SymmetricStart(symmetric.buffer_of[channel, kind], *common)
    return StreamedStart(*common)


def has_two_ways(
    collective: Primitive, reduction: str | None, wire: torch.dtype, route: Route | None
) -> bool:
    """Whether symmetric memory and NCCL can both carry a collective, with the same bits."""
    if collective is ALL_GATHER:
        return True
    # NCCL itself would round half precision at every hop. So in both ways, ranks exchange terms and sum them in order.
    sums_half = reduction in ("sum", "mean") and wire in HALF
    return sums_half and (route is None or route.way != HIERARCHICAL)


def choose_transport(
    collective: Primitive,
    reduction: str | None,
    wire: torch.dtype,
    times: Callable[[], Times | str],
    route: Route | None = None,
    is_whole: bool = False,
) -> Transport:
    """Choose what carries a collective, by its reduction, its dtype on the wire, and its route.

    With `is_whole`, ranks gather the whole terms of an all_reduce. `times` returns the seconds of each way, or why
    symmetric memory cannot be used. It is called only if both ways give the same bits.

    >>> print(choose_transport(ALL_GATHER, None, torch.bfloat16, lambda: Times(12e-6, 21e-6, 2**20)))
    symmetric all_gather (moves bytes; 12.00 us for 1.00 MiB, NCCL 21.00 us)
    >>> print(choose_transport(ALL_GATHER, None, torch.bfloat16, lambda: "ranks on 2 hosts"))
    nccl all_gather (moves bytes; no symmetric memory: ranks on 2 hosts)
    """
    work = _work(reduction, route)
    if is_whole:
        return Transport("terms", collective.name, _work(reduction, None))
    if route is not None and route.way == HIERARCHICAL:
        return Transport("hierarchical", collective.name, f"{work}; {route.reason}")
    if not has_two_ways(collective, reduction, wire, route):
        if reduction is None or not is_reduced_by_ranks(reduction, wire):
            dtype = str(wire).removeprefix("torch.")
            return Transport("nccl", collective.name, f"reduces {dtype} on the way")
        return Transport("all_to_all", collective.name, work)
    way: Way = "nccl" if reduction is None else "all_to_all"
    seconds = times()
    if isinstance(seconds, str):
        figures = f"no symmetric memory: {seconds}"
    elif seconds.is_copied:
        way = "copied"
        figures = _figures("copies", seconds)
    elif seconds.uses_symmetric_memory:
        way = "symmetric"
        figures = _figures("symmetric memory", seconds)
    else:
        figures = _figures("NCCL", seconds)
    return Transport(way, collective.name, f"{work}; {figures}")


def _work(reduction: str | None, route: Route | None) -> str:
    """The text that says what ranks do with the bytes that arrive, if NCCL does not reduce them."""
    if reduction is None:
        return "moves bytes"
    is_hierarchical = route is not None and route.way == HIERARCHICAL
    work = f"NCCL's {reduction} loses NaN"
    if reduction in ("sum", "mean"):
        order = "the order of hosts" if is_hierarchical else "rank order"
        work = f"sums half precision in fp32 and in {order}"
    is_in_halves = route is not None and route.gather_way is not None
    return f"{work}, then gathers the parts" if is_in_halves else work


def _figures(chosen: str, times: Times) -> str:
    """The seconds of a message as text: of the chosen way, then of the other ways that can carry it."""
    ways = {"symmetric memory": times.kernel, "copies": times.copies, "NCCL": times.nccl}
    figures = [f"{format_seconds(ways.pop(chosen))} for {format_bytes(times.nbytes)}"]
    for way, seconds in ways.items():
        if seconds < math.inf:
            figures.append(f"{way} {format_seconds(seconds)}")
    return ", ".join(figures)


class _BufferedStart(StreamedStart):
    """Starts one collective equation, like `StreamedStart`, through a buffer of symmetric memory."""

    def __init__(self, buffer: Buffer, *common: Any) -> None:
        """`common` are the arguments of a `StreamedStart`."""
        super().__init__(*common)
        self.buffer = buffer


class CopiedStart(_BufferedStart):
    """Starts one collective equation, whose bytes copy engines copy from the buffers of the other ranks."""

    def _call_gather(
        self, received: Sequence[torch.Tensor], send_buffers: Sequence[torch.Tensor]
    ) -> None:
        gather_by_copies(self.buffer.memory, received, send_buffers, self.buffer.spins)

    def _call_exchange(
        self, received: Sequence[torch.Tensor], send_buffers: Sequence[torch.Tensor]
    ) -> None:
        exchange_by_copies(self.buffer.memory, received, send_buffers, self.buffer.spins)


class SymmetricStart(_BufferedStart):
    """Starts one collective equation by a kernel that reads the messages of all ranks."""

    def _call(self, received: list[torch.Tensor], send_buffers: list[torch.Tensor]) -> None:
        """Do nothing: the kernel that finishes a message also communicates."""

    def _gather_message(self, ks: list[int], shards: Sequence[torch.Tensor]) -> PackedMessage:
        shapes = [self.shapes[k] for k in ks]
        return self._message(ks, shards, 1, shapes, self.wire, gather)

    def _scatter_message(self, ks: list[int], terms: Sequence[torch.Tensor]) -> PackedMessage:
        shapes = [self.part_shape(k) for k in ks]
        read = functools.partial(scatter, op=self.reduction)
        return self._message(ks, terms, self.size, shapes, self.outs[ks[0]].dtype, read)

    def _message(
        self,
        ks: list[int],
        members: Sequence[torch.Tensor],
        ranks: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        read: Callable[..., None],
    ) -> PackedMessage:
        """A message with a row for each of `ranks` ranks.

        `read` takes the symmetric memory, the packed message, the flat tensors that it fills, which become the values,
        and the number of elements of each for one rank.
        """
        sizes = [self.part_sizes[k] for k in ks]
        rows = [member.movedim(self.dim, 0) for member in members]
        send_buffer = members[0].new_empty(ranks * sum(sizes), dtype=self.wire)
        values = [
            send_buffer.new_empty(moved_back(shape, self.dim), dtype=dtype) for shape in shapes
        ]
        # The kernel returns fp32 or half precision; values of other dtypes are then cast.
        read_dtype = dtype if ranks == 1 or dtype in FLOATS else torch.float32

        def pack() -> None:
            ops.cast_pack(rows, sizes, self.wire, ranks=ranks, out=send_buffer)

        def fill(outs: list[torch.Tensor]) -> None:
            read(self.buffer.memory, send_buffer, outs, sizes, spins=self.buffer.spins)

        def finish(received: torch.Tensor) -> None:
            self._fill_values(fill, read_dtype, shapes, values)

        return PackedMessage([send_buffer], values, pack, lambda: send_buffer, finish)
