"""Choose what sends the messages of a program, and what makes its copies between device and host.

Between CPUs gloo sends them, or another backend of torch.distributed, along the routes of `ir.routes`. On GPUs they run
on streams beside compute. There NCCL carries a message, or symmetric memory, if all ranks have found it faster.

All ranks first `reserve` what a program needs: its channels, and symmetric memory on GPUs. Then each rank makes the
modules of its messages and copies. Only this file of `runtime` imports `runtime.cuda`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..ir.collectives import is_reduced_by_ranks, is_start, lane, rules, wire_format
from ..ir.graph import Eqn, Graph, Primitive
from ..ir.printer import format_bytes, format_seconds
from ..ir.routes import HIERARCHICAL, Route, is_gathered_whole, route_of
from ..ir.rules import Sizes
from ..ir.wire_format import Format
from ..ops import HALF
from .agreement import everywhere
from .channels import Channel
from .collectives import Start, channel_of
from .communicators import INSIDE
from .cuda.hierarchical import HierarchicalStart
from .cuda.host_copies import StreamedHostCopy
from .cuda.nccl import StreamedStart, Transport, Way
from .cuda.streams import Streams
from .cuda.symmetric import SymmetricMemory, Times, message_kind
from .cuda.symmetric_start import CopiedStart, SymmetricStart
from .host_copies import CarriedCopies, HostCopy, carried_copies
from .session import session_of

# A channel, an equation that it carries, the sizes of the axes, and the number of lanes under way at the same time.
Message = tuple[Channel, Eqn, Sizes, int]


class Transports:
    """What sends the messages of a program between CPUs, and copies its values.

    Attributes:
        are_beside_compute: whether copies may go on while the program computes, and after its call has returned.
        formats: formats that are used in place of others, which have the same bits, such as compiled ones.
    """

    are_beside_compute = False

    def __init__(self, formats: Mapping[Format, Format] = MappingProxyType({})) -> None:
        self.formats = formats

    def inside_channel(self, mesh: DeviceMesh, eqn: Eqn, sizes: Sizes) -> Channel | None:
        """The channel of the first level of a collective, if that level has its own; None for other collectives."""
        return None

    def reserve(self, mesh: DeviceMesh, messages: Iterable[Message]) -> None:
        """Allocate the memory that messages need on all ranks. All ranks of the mesh must call this together."""

    def start_module(
        self,
        eqn: Eqn,
        sizes: Mapping[str, int],
        coordinates: Mapping[str, int],
        channel: Channel | None,
        lanes: int,
        inside: Channel | None = None,
    ) -> Start:
        """The module that starts a collective equation.

        Making it sends nothing: `reserve` has decided what carries the messages.

        Args:
            eqn: the equation.
            sizes: the sizes of the mesh axes.
            coordinates: this rank's index along each of them.
            channel: the channel of the messages. Without one the module can be printed, not called.
            lanes: the number of lanes of the program.
            inside: the channel of the first level (see `inside_channel`).
        """
        return Start(eqn, sizes, coordinates, channel, self.formats)

    def copy_module(self, eqn: Eqn, device: torch.device | None) -> HostCopy:
        """The module that copies a value to the other memory, which is `device` or its host."""
        return HostCopy()

    def carried_copies(self) -> CarriedCopies:
        """The copies that a step on this device leaves to the next one: none on a CPU, where copies end at once."""
        return CarriedCopies()


class StreamTransports(Transports):
    """What sends the messages of a program between GPUs, and copies its values: streams beside compute."""

    are_beside_compute = True

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams

    def inside_channel(self, mesh: DeviceMesh, eqn: Eqn, sizes: Sizes) -> Channel | None:
        channel = channel_of(mesh, eqn)
        route = route_of(eqn, sizes, channel.hosts, gloo=False)
        if route.way != HIERARCHICAL or is_gathered_whole(eqn, sizes):
            return None
        return session_of(mesh).channel(channel.axis, f"{channel.purpose}{INSIDE}")

    def reserve(self, mesh: DeviceMesh, messages: Iterable[Message]) -> None:
        """Decide what carries the messages, and allocate the symmetric memory that they need."""
        if self.streams.symmetric is None:
            return
        kinds = []
        for channel, eqn, sizes, lanes in messages:
            kind = message_kind(eqn, sizes, lanes)
            if isinstance(kind, str):
                continue
            route = route_of(eqn, sizes, channel.hosts, gloo=False)
            wire = wire_format(eqn, eqn.ins[0])
            has_two = _has_two_ways(eqn.kwargs.get("op"), wire, route)
            if has_two and not is_gathered_whole(eqn, sizes):
                kinds.append((channel, kind))
        self.streams.symmetric.reserve(kinds, functools.partial(everywhere, mesh=mesh))

    def start_module(
        self,
        eqn: Eqn,
        sizes: Mapping[str, int],
        coordinates: Mapping[str, int],
        channel: Channel | None,
        lanes: int,
        inside: Channel | None = None,
    ) -> Start:
        if channel is None:
            return super().start_module(eqn, sizes, coordinates, channel, lanes)
        symmetric = self.streams.symmetric
        kind = message_kind(eqn, sizes, lanes)

        def times() -> Times | str:
            if symmetric is None:
                return "none was given"
            if isinstance(kind, str):
                return kind
            return symmetric.answer(channel, kind)

        collective: Any = eqn.op
        reduction = eqn.kwargs.get("op")
        wire = wire_format(eqn, eqn.ins[0])
        route = route_of(eqn, sizes, channel.hosts, gloo=False)
        is_whole = is_gathered_whole(eqn, sizes)
        transport = choose_transport(collective, reduction, wire, times, route, is_whole)
        common = eqn, sizes, coordinates, channel, self.streams, transport
        # A hierarchical reduction crosses hosts, and symmetric memory does not.
        if inside is not None:
            return HierarchicalStart(inside, *common)
        if symmetric is not None and not isinstance(kind, str):
            if transport.way == "copied":
                return CopiedStart(symmetric.buffer_of[channel, kind], *common)
            if transport.way == "symmetric":
                return SymmetricStart(symmetric.buffer_of[channel, kind], *common)
        return StreamedStart(*common)

    def copy_module(self, eqn: Eqn, device: torch.device | None) -> HostCopy:
        target = device if eqn.out.memory == "device" else None
        return StreamedHostCopy(lane(eqn), self.streams, target)

    def carried_copies(self) -> CarriedCopies:
        return carried_copies(self.streams.cuda, self.streams.cuda.current_device())


def transports_of(mesh: DeviceMesh | None, device: torch.device | None = None) -> Transports:
    """The transports of a program on a mesh, or of one process on a device: on CUDA devices, new streams."""
    if mesh is None:
        is_on_gpu = device is not None and device.type == "cuda"
        return StreamTransports(Streams()) if is_on_gpu else Transports()
    if mesh.device_type != "cuda":
        return Transports()
    session = session_of(mesh)
    if session.symmetric is None:
        session.symmetric = SymmetricMemory(timeout=session.timeout)
    return StreamTransports(Streams(symmetric=session.symmetric))


def reserve(
    mesh: DeviceMesh, graphs: Iterable[Graph], transports: Transports | None = None
) -> None:
    """Open the channels of programs, decide what carries their messages, and allocate the symmetric memory they need.

    All ranks of the mesh must call this together, for programs with the same messages, before they compile: a rank that
    then fails is not waited for.
    """
    transports = transports or transports_of(mesh)
    # All ranks open the channels in the order of the equations, because making a process group is collective.
    messages = []
    for graph in graphs:
        lanes = lane_count(graph, mesh, transports)
        for eqn in _starts(graph):
            messages.append((channel_of(mesh, eqn), eqn, graph.axes, lanes))
            transports.inside_channel(mesh, eqn, graph.axes)
    transports.reserve(mesh, messages)


def lane_count(graph: Graph, mesh: DeviceMesh | None, transports: Transports) -> int:
    """The number of lanes of a program, including the lanes of collectives that the user's step calls itself.

    On streams, hierarchical reductions have another lane for the level inside hosts.
    """
    lanes = {lane(eqn) for eqn in graph.eqns if rules(eqn).starts and rules(eqn).remote}
    inside = set()
    if mesh is not None:
        for eqn in _starts(graph):
            if transports.inside_channel(mesh, eqn, graph.axes) is not None:
                inside.add(lane(eqn))
    return len(lanes) + len(inside)


def _starts(graph: Graph) -> list[Eqn]:
    return [eqn for eqn in graph.eqns if is_start(eqn)]


# ---- what carries a message on GPUs


def choose_transport(
    collective: Primitive,
    reduction: str | None,
    wire: Format,
    times: Callable[[], Times | str],
    route: Route | None = None,
    is_whole: bool = False,
) -> Transport:
    """Choose what carries a collective, by its reduction, how it is sent, and its route.

    With `is_whole`, ranks gather the whole terms of an all_reduce. `times` returns the seconds of each way, or why
    symmetric memory cannot be used. It is called only if both ways give the same bits.

    >>> from ztrans.ir import ALL_GATHER
    >>> from ztrans.ir.wire_format import format_of
    >>> bf16 = format_of(torch.bfloat16)
    >>> print(choose_transport(ALL_GATHER, None, bf16, lambda: Times(12e-6, 21e-6, 2**20)))
    symmetric all_gather (moves bytes; 12.00 us for 1.00 MiB, NCCL 21.00 us)
    >>> print(choose_transport(ALL_GATHER, None, bf16, lambda: "ranks on 2 hosts"))
    nccl all_gather (moves bytes; no symmetric memory: ranks on 2 hosts)
    """
    work = _work(reduction, route)
    if is_whole:
        return Transport("terms", collective.name, _work(reduction, None))
    if route is not None and route.way == HIERARCHICAL:
        return Transport("hierarchical", collective.name, f"{work}; {route.reason}")
    if reduction is not None and not _has_two_ways(reduction, wire, route):
        if not is_reduced_by_ranks(reduction, wire):
            dtype = str(wire.carrier).removeprefix("torch.")
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


def _has_two_ways(reduction: str | None, wire: Format, route: Route | None) -> bool:
    """Whether symmetric memory gives the same bits as NCCL for a collective."""
    if reduction is None:  # it only moves bytes
        return True
    # NCCL itself would round half precision at every hop. So in both ways, ranks exchange terms and sum them in order.
    sums_half = reduction in ("sum", "mean") and wire.carrier in HALF
    return sums_half and (route is None or route.way != HIERARCHICAL)


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
