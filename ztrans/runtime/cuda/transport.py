"""Transport: what carries the messages of a collective on a GPU, and the module that starts it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ... import ops
from ...ir.collectives import ALL_GATHER, HALF, REDUCE_SCATTER, is_start, lane, rules, wire_dtype
from ...ir.graph import Eqn, Graph, Primitive
from ...ir.printer import format_bytes, format_seconds
from ...ir.routes import TWO_LEVELS, Route, route_of
from ...ir.rules import Sizes
from ...ops.kernel import FLOATS
from ..agreement import everywhere
from ..collectives import Start
from ..collectives import channel as axis_channel
from ..process_groups import Channel, process_groups
from .by_host import ByHostStart
from .nccl import BY_HOST, EXCHANGE, Message, StreamedStart, Transport, moved_back
from .streams import Streams
from .symmetric import (
    SPINS,
    Buffer,
    SymmetricMemory,
    Times,
    copy_all,
    gather,
    message_kind,
    scatter,
)


def side_streams(mesh: DeviceMesh) -> Streams | None:
    """Streams in addition to the compute stream if the mesh is of CUDA devices, or None."""
    if mesh.device_type != "cuda":
        return None
    groups = process_groups(mesh)
    if groups.symmetric is None:
        groups.symmetric = SymmetricMemory()
    return Streams(symmetric=groups.symmetric)


def channel_of(mesh: DeviceMesh, eqn: Eqn) -> Channel:
    """The channel that carries the messages of a collective equation."""
    return axis_channel(mesh, eqn.kwargs["axis"], rules(eqn).lane == "gather")


def inside_channel_of(mesh: DeviceMesh, eqn: Eqn, sizes: Sizes) -> Channel | None:
    """The channel that carries the first of two levels of a reduction on GPUs, or None if it has one level."""
    channel = channel_of(mesh, eqn)
    if route_of(eqn, sizes, channel.hosts, gloo=False).way != TWO_LEVELS:
        return None
    return process_groups(mesh).channel(channel.axis, f"{channel.purpose} inside hosts")


def reserve(mesh: DeviceMesh, graphs: Iterable[Graph], streams: Streams | None = None) -> None:
    """Open the channels of programs, decide what carries their messages, and allocate the symmetric memory they need.

    All ranks of the mesh must call this together, for programs with the same messages, before they compile: a rank that
    then fails is not waited for.
    """
    streams = streams or side_streams(mesh)
    messages = []
    for graph in graphs:
        lanes = lane_count(graph, mesh, streams)
        for eqn in _starts(graph):
            messages.append((channel_of(mesh, eqn), eqn, graph.axes, lanes))
            if streams is not None:
                inside_channel_of(mesh, eqn, graph.axes)
    if streams is not None:
        reserve_messages(mesh, messages, streams)


def lane_count(graph: Graph, mesh: DeviceMesh | None, streams: Streams | None) -> int:
    """The number of lanes of a program, with those of the collectives that the user's step calls itself.

    On streams, reductions of two levels have another lane for the level inside hosts.
    """
    lanes = {lane(eqn) for eqn in graph.eqns if rules(eqn).starts and rules(eqn).remote}
    inside = set()
    if mesh is not None and streams is not None:
        for eqn in _starts(graph):
            if inside_channel_of(mesh, eqn, graph.axes) is not None:
                inside.add(lane(eqn))
    return len(lanes) + len(inside)


def _starts(graph: Graph) -> list[Eqn]:
    return [eqn for eqn in graph.eqns if is_start(eqn)]


def reserve_messages(
    mesh: DeviceMesh, messages: Iterable[tuple[Channel, Eqn, Sizes, int]], streams: Streams
) -> None:
    """Decide what carries the messages of collective equations, and allocate the symmetric memory they need.

    All ranks of the mesh must call this together. Each equation has its channel, the sizes of the axes, and how many
    lanes are under way at the same time.
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
        if has_two_ways(collective, eqn.kwargs.get("op"), kind.wire, route):
            kinds.append((channel, kind))
    streams.symmetric.reserve(kinds, functools.partial(everywhere, mesh=mesh))


def start_module(
    eqn: Eqn,
    sizes: Mapping[str, int],
    coordinates: Mapping[str, int],
    channel: Channel | None,
    streams: Streams | None,
    lanes: int,
    inside: Channel | None = None,
) -> Start:
    """The module that starts a collective equation of a program with so many lanes, on `streams` if there are any.

    It sends nothing: what carries the messages has been decided by `reserve`. `inside` carries the first level of a
    reduction in two levels.
    """
    if streams is None or channel is None:
        return Start(eqn, sizes, coordinates, channel)
    symmetric = streams.symmetric
    collective: Any = eqn.op
    kind = message_kind(eqn, sizes, lanes)

    def times() -> Times | str:
        if symmetric is None:
            return "none was given"
        return kind if isinstance(kind, str) else symmetric.answer(channel, kind)

    route = route_of(eqn, sizes, channel.hosts, gloo=False)
    op = eqn.kwargs.get("op")
    carrier = transport(collective, op, wire_dtype(eqn, eqn.ins[0]), times, route)
    common = eqn, sizes, coordinates, channel, streams, carrier
    if inside is not None:
        return ByHostStart(inside, *common)
    if symmetric is not None and not isinstance(kind, str):
        if carrier.is_copied:
            return CopiedStart(symmetric.buffer_of[channel, kind], *common)
        if carrier.is_symmetric:
            return SymmetricStart(symmetric.buffer_of[channel, kind], *common)
    return StreamedStart(*common)


def check(program: torch.nn.Module) -> None:
    """Raises: RuntimeError if this rank has given up waiting for another one, in the part that has run so far."""
    starts = [module for module in program.modules() if isinstance(module, _OfBuffer)]
    for buffer in dict.fromkeys(start.buffer for start in starts):
        buffer.check()


def has_two_ways(
    collective: Primitive, op: str | None, wire: torch.dtype, route: Route | None
) -> bool:
    """Whether a collective can go through symmetric memory or by NCCL, with the same bits."""
    if collective is ALL_GATHER:
        return True
    is_half = collective is REDUCE_SCATTER and op in ("sum", "mean") and wire in HALF
    return is_half and (route is None or route.way != TWO_LEVELS)


def transport(
    kind: Primitive,
    op: str | None,
    wire: torch.dtype,
    times: Callable[[], Times | str],
    route: Route | None = None,
) -> Transport:
    """Choose what carries a collective, given its kind, its reduction, its dtype on the wire, and its route.

    `times` is called if both ways give the same bits. It returns the seconds of each, or why symmetric memory cannot be
    used.

    >>> print(transport(ALL_GATHER, None, torch.bfloat16, lambda: Times(12e-6, 21e-6, 2**20)))
    symmetric all_gather (moves bytes; 12.00 us for 1.00 MiB, NCCL 21.00 us)
    >>> print(transport(ALL_GATHER, None, torch.bfloat16, lambda: "ranks on 2 hosts"))
    nccl all_gather (moves bytes; no symmetric memory: ranks on 2 hosts)
    """
    if route is not None and route.way == TWO_LEVELS:
        work = "sums half precision in fp32 and in the order of hosts"
        return Transport(BY_HOST, f"{work}; {route.reason}")
    if not has_two_ways(kind, op, wire, route):
        dtype = str(wire).removeprefix("torch.")
        return Transport(f"nccl {kind.name}", f"reduces {dtype} on the way")
    work = "moves bytes"
    nccl_call = f"nccl {kind.name}"
    if op is not None:
        work = "sums half precision in fp32 and in rank order"
        nccl_call = EXCHANGE
    seconds = times()
    if isinstance(seconds, str):
        return Transport(nccl_call, f"{work}; no symmetric memory: {seconds}")
    size = format_bytes(seconds.nbytes)
    ways = {
        "symmetric memory": seconds.symmetric,
        "copies": seconds.copies,
        "NCCL": seconds.nccl,
    }
    name = "NCCL"
    if seconds.is_copied:
        name = "copies"
    elif seconds.is_faster:
        name = "symmetric memory"
    figures = [f"{format_seconds(ways.pop(name))} for {size}"]
    for other, of_other in ways.items():
        if of_other < math.inf:
            figures.append(f"{other} {format_seconds(of_other)}")
    reason = f"{work}; {', '.join(figures)}"
    if name == "copies":
        return Transport(f"copied {kind.name}", reason, is_copied=True)
    if name == "symmetric memory":
        return Transport(f"symmetric {kind.name}", reason, is_symmetric=True)
    return Transport(nccl_call, reason)


class _OfBuffer(StreamedStart):
    """Starts one collective equation, like `StreamedStart`, through a buffer of symmetric memory."""

    def __init__(self, buffer: Buffer, *common: Any) -> None:
        """`common` are the arguments of a `StreamedStart`."""
        super().__init__(*common)
        self.buffer = buffer


class CopiedStart(_OfBuffer):
    """Starts one gather: copy engines copy the parts of the other ranks, so it takes no multiprocessors."""

    def _call(self, received: list[torch.Tensor], send_buffer: list[torch.Tensor]) -> None:
        copy_all(self.buffer.ready, received, send_buffer, SPINS)


class SymmetricStart(_OfBuffer):
    """Starts one collective equation by a kernel that reads the messages of all ranks."""

    def _call(self, received: list[torch.Tensor], send_buffer: list[torch.Tensor]) -> None:
        """Do nothing: the kernel that finishes a message also communicates."""

    def _gathered(self, ks: list[int], shards: Sequence[torch.Tensor]) -> Message:
        shapes = [self.shapes[k] for k in ks]
        return self._message(ks, shards, 1, shapes, self.wire, gather)

    def _scattered(self, ks: list[int], terms: Sequence[torch.Tensor]) -> Message:
        shapes = [self.part_shape(k) for k in ks]
        read = functools.partial(scatter, op=self.op)
        return self._message(ks, terms, self.size, shapes, self.outs[ks[0]].dtype, read)

    def _message(
        self,
        ks: list[int],
        members: Sequence[torch.Tensor],
        ranks: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        read: Callable[..., None],
    ) -> Message:
        """A message with a row for each of `ranks` ranks.

        `read` takes the symmetric memory, the packed message, the flat tensors that it fills, which become the values,
        and the number of elements that each has for a rank.
        """
        sizes = [self.parts[k] for k in ks]
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
            read(self.buffer.ready, send_buffer, outs, sizes, spins=SPINS)

        def finish(received: torch.Tensor) -> None:
            self._filled(fill, read_dtype, shapes, values)

        return Message(send_buffer, values, pack, lambda: send_buffer, finish)
