"""Predict how long the program of one rank takes on a cluster, and which communication compute waits for.

Every equation is an operation of the compute queue. Its duration was measured, or follows from the roofline. Every
started collective is a message. Each axis has a lane for gathers, one for reductions, and one for the step's own
collectives; on GPUs of several hosts, also one for the first level of reductions. `play` says when they all happen. On
a GPU, messages and kernels share the bandwidth of the memory (see `contention`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

from ..ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, lane, rules
from ..ir.copies import is_copy
from ..ir.graph import DTYPES, Eqn, Graph, Primitive, Var
from ..ir.layout import local_shape
from ..ir.micro_batches import micro_batch_programs
from ..ir.pairing import pair
from ..ir.printer import op_name
from ..report.event import COMPUTE, Event
from ..report.timeline import Timeline, one_by_one
from .buffers import local_bytes
from .cluster import Cluster
from .contention import TOUCHED, Transfer, contended
from .cost import bytes_of_others, launches, memory, memory_traffic
from .network import Level, Message
from .play import Played, play
from .roofline import memory_seconds, queue_seconds, roofline_seconds


class Sent(NamedTuple):
    """A message of a program."""

    eqn: Eqn  # starts it
    message: Message
    bytes: int  # that a rank receives


# The seconds of equations.


def equation_seconds(graph: Graph, cluster: Cluster) -> list[float]:
    """The time that each equation takes of the compute queue.

    Collectives take what sending needs, and between CPUs also packing and unpacking.
    """
    measured = dict(cluster.measured)
    waits = pair(graph).waits
    every_launch = launches(graph)
    device = cluster.device

    def seconds_of(e: Eqn) -> float:
        wait = waits.get(e)
        of_e = rules(e)
        if of_e.copies:
            return device.kernel_gap * every_launch[e].kernels
        if wait and wait.member:
            return 0.0  # the wait for the first member unpacks the whole bucket
        if measured:
            name = signature(wait.start, graph) + " wait" if wait else signature(e, graph)
            if name in measured:
                return measured[name]
        if wait:
            return _after_wait(wait.start, graph, cluster)
        if of_e.packs:
            return _before_issue(e, graph, cluster)
        if of_e.shares_storage(e):
            return device.call_overhead * every_launch[e].calls
        return queue_seconds(device, every_launch[e].kernels, roofline_seconds(e, graph, device))

    return list(map(seconds_of, graph.eqns))


def shared_launch_seconds(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds that its launch adds to the work of an update. Equal updates that stand together share it.

    A measured duration has no launch of its own.
    """
    if not launches(graph)[e].kernels or signature(e, graph) in dict(cluster.measured):
        return 0.0
    work = roofline_seconds(e, graph, cluster.device)
    return queue_seconds(cluster.device, 1, work) - work


def signature(eqn: Eqn, graph: Graph) -> str:
    """Everything that the duration of an operation depends on, as text: its name, local types and literals."""
    first_rank = dict.fromkeys(graph.axes, 0)

    def show(x: Any) -> str:
        if isinstance(x, Var):
            return f"{DTYPES.get(x.dtype, x.dtype)}{list(local_shape(x, graph.axes, first_rank))}"
        if isinstance(x, torch.Tensor):
            return f"constant{list(x.shape)}"
        if isinstance(x, (list, tuple)):
            return f"[{' '.join(map(show, x))}]"
        return str(x)

    texts = list(map(show, eqn.args))
    texts += (f"{name}={show(x)}" for name, x in eqn.kwargs.items() if x is not None)
    return f"{op_name(eqn.op)}({', '.join(texts)})"


def _before_issue(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute that it takes to send a collective."""
    device = cluster.device
    link = cluster.link(e.kwargs["axis"])
    sending = link.overhead + link.byte_overhead * rules(e).wire_bytes(e, graph.axes)
    if link.includes_packing:
        return sending
    # A GPU packs beside compute: there the message has these seconds (see `messages`).
    packing = _packing(e, graph, cluster) if device.gloo else 0.0
    return device.kernel_gap + sending + packing


def _packing(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds that it takes to copy into the send buffer of a collective."""
    if cluster.link(e.kwargs["axis"]).includes_packing:
        return 0.0
    size = local_bytes(graph)
    copied = 0
    for k, v in enumerate(e.ins):
        if not rules(e).sends_without_copy(e, k, graph.axes):
            copied += size(v)
    return 2 * copied / cluster.device.bandwidth  # each byte is read and written


def _after_wait(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute that it takes to turn received bytes into values."""
    device = cluster.device
    measured_unpack = dict(cluster.link(e.kwargs["axis"]).unpack).get(op_name(e.op))
    if measured_unpack is not None:
        return device.kernel_gap + measured_unpack * rules(e).wire_bytes(e, graph.axes)
    return device.kernel_gap + (_unpacking(e, graph, cluster) if device.gloo else 0.0)


def _unpacking(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds that follow from the bytes that are moved to turn received bytes into values."""
    return UNPACKING.get(e.op, NO_UNPACKING).exact_bytes(e, graph) / cluster.device.bandwidth


def _terms_and_sums(e: Eqn, graph: Graph) -> int:
    """The bytes that a reduce_scatter reads, the terms of every rank, and writes, their sum."""
    size = local_bytes(graph)
    return sum(map(size, e.ins)) + sum(map(size, e.results))


class Unpacking(NamedTuple):
    """The bytes that are read and written to turn the received bytes of a collective into values.

    A simulation has the program and counts them. A plan decides what shares a message, so it estimates them.
    """

    exact_bytes: Callable[[Eqn, Graph], int]
    bytes_per_received_byte: int


NO_UNPACKING = Unpacking(lambda e, graph: 0, 0)
# The members of a packed gather are copied out of its buffer. The terms of a reduce_scatter are added up.
UNPACKING: Mapping[Any, Unpacking] = {
    ALL_GATHER: Unpacking(lambda e, graph: 2 * rules(e).unpacked_bytes(e, graph.axes), 2),
    REDUCE_SCATTER: Unpacking(_terms_and_sums, 1),
    ALL_REDUCE: NO_UNPACKING,
}


# The messages of a program.


def messages(graph: Graph, cluster: Cluster) -> list[Sent]:
    """Every started collective, and every copy between two memories. Their places count all equations."""
    every = []
    for e, started in pair(graph, include_user=True, include_copies=True).starts.items():
        if is_copy(e):
            size = rules(e).received_bytes(e, 0, graph.axes)
            copy = copy_message(e, size, started.index, started.first_wait, cluster)
            every.append(Sent(e, copy, size))
            continue
        axis = rules(e).axis(e)
        if axis not in graph.axes:
            continue  # over a group that is no axis of the mesh, so its link is unknown
        *inside, last = transfers(e, axis, graph, cluster)
        message = Message(
            issue=started.index + 1,
            need=started.first_wait,
            lane=last.lane,
            link=last.link,
            latency=last.latency,
            seconds=last.seconds,
            inside=inside[0] if inside else None,
            taken=cluster.device.taken,
        )
        if isinstance(e.op, Primitive) and not cluster.device.gloo:
            message = _packed_beside(message, e, graph, cluster)
        every.append(Sent(e, message, _kind_and_bytes(e, graph, graph.axes[axis])[1]))
    return every


def _packed_beside(message: Message, e: Eqn, graph: Graph, cluster: Cluster) -> Message:
    """A message of a GPU, which packs and unpacks it beside compute."""
    message = message._replace(pack_beside=_packing(e, graph, cluster))
    if cluster.link(e.kwargs["axis"]).includes_packing:
        return message
    unpack = _unpacking(e, graph, cluster)
    if message.inside is None:
        return message._replace(unpack_beside=unpack)
    # The terms are added up inside each host; the sums of hosts are few.
    return message._replace(inside=message.inside._replace(unpack_beside=unpack))


def copy_message(e: Eqn, size: int, index: int, wait: int, cluster: Cluster) -> Message:
    """A copy of `size` bytes that equation `index` starts, and equation `wait` waits for.

    Both directions have a link of their own.
    """
    latency, transfer = cluster.copy_seconds(size)
    return Message(index + 1, wait, lane(e), lane(e), latency, transfer)


def transfers(e: Eqn, axis: str, graph: Graph, cluster: Cluster) -> list[Level]:
    """The levels in which the bytes of a collective over an axis move: one, or two."""
    link = cluster.link(axis)
    ranks = graph.axes[axis]
    kind, size = _kind_and_bytes(e, graph, ranks)
    if not isinstance(e.op, Primitive):
        return [Level(lane(e), link.name, *link.seconds(kind, size, ranks))]

    levels = []
    if link.inside is not None and cluster.has_two_lanes(e, graph.axes):
        received = size * cluster.charge_factor_inside(e, graph.axes)
        latency, seconds = link.inside.seconds(kind, received, link.local)
        ranks //= link.local
        # It is sent as a message for each host.
        levels.append(Level(inside_lane(e), link.inside.name, latency * ranks, seconds))
        link = dataclasses.replace(link, inside=None, local=1)  # the second level, between hosts
    received = size * cluster.charge_factor(e, graph.axes)
    return [*levels, Level(lane(e), link.name, *link.seconds(kind, received, ranks))]


def inside_lane(eqn: Eqn) -> str:
    """The name of the queue of the first level of a collective."""
    return f"{lane(eqn)} inside hosts"


def _kind(e: Eqn) -> str:
    """The kind of a collective, planned or the step's own, by the names of the primitives."""
    if isinstance(e.op, Primitive):
        return e.op.name
    name = op_name(e.op)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        if name.startswith(kind):
            return kind
    return name


def _kind_and_bytes(e: Eqn, graph: Graph, ranks: int) -> tuple[str, int]:
    """The kind of a collective, planned or the step's own, and the bytes that a rank receives."""
    kind = _kind(e)
    if isinstance(e.op, Primitive):
        return kind, rules(e).wire_bytes(e, graph.axes)
    size = local_bytes(graph)
    largest = max(sum(map(size, e.ins)), sum(map(size, e.results)))
    passes = 2 if kind == "all_reduce" else 1
    return kind, largest * (ranks - 1) * passes // ranks


# The program as a timeline.


def simulate(graph: Graph, cluster: Cluster) -> Timeline:
    """Simulate a program on a cluster.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.
    """
    if graph.micro == 1:
        return timeline_of(graph, cluster, equation_seconds(graph, cluster))
    programs = micro_batch_programs(graph)
    timelines = {}
    for part, of_others in bytes_of_others(graph, programs).items():
        alone = simulate(part, cluster)
        curve = tuple((time, live + of_others) for time, live in alone.memory)
        timelines[part] = dataclasses.replace(alone, memory=curve)
    in_order = [timelines[part] for part in programs.in_order]
    return one_by_one(f"{graph.name}, simulated", in_order)


def timeline_of(graph: Graph, cluster: Cluster, seconds: Sequence[float]) -> Timeline:
    """Simulate a program whose equations take these seconds of the compute queue.

    A step that carries gathers or copies is the second of two: those of the first are under way when it begins.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.
    """
    every = messages(graph, cluster)
    if graph.carried_futures:
        seconds = [*seconds, *seconds]
        every = _of_two_steps(graph, every)
    sent = [each.message for each in every]
    played = play(seconds, sent)
    if not cluster.device.gloo:  # gloo's messages take compute instead (`Link.byte_overhead`)
        seconds = _sharing_memory(graph, cluster, seconds, every, played)
        played = play(seconds, sent)

    events = _events(graph, cluster, seconds, every, played)
    begin = 0.0
    length = played.seconds
    if graph.carried_futures:
        begin = played.arrive[len(graph.eqns)]
        length = played.arrive[-1] - begin
        events = _within(events, begin, length)
    times = [start - begin for start in played.start[-len(graph.eqns) - 1 :]]
    bytes_live = memory(graph)
    return Timeline(
        f"{graph.name}, simulated",
        length,
        tuple(events),
        tuple(zip(times, bytes_live.live)),
        host_memory=tuple(zip(times, bytes_live.live_on_host)),
        limit=graph.hints.memory_limit,
    )


def _events(
    graph: Graph, cluster: Cluster, seconds: Sequence[float], every: Sequence[Sent], played: Played
) -> list[Event]:
    """The equations and the messages of a program as bars of a timeline."""
    events = []
    eqns = list(islice(cycle(graph.eqns), len(seconds)))  # of one step, or of two
    for e, start, duration in zip(eqns, played.start, seconds):
        if duration > 0:
            events.append(Event(COMPUTE, start, duration, e))
    for k, (e, message, size) in enumerate(every):
        # What a message has taken from compute passes once it has been waited for.
        waited_for, lost = played.lost[k]
        if lost:
            has_wait = message.need < len(eqns)
            events.append(Event(COMPUTE, waited_for, lost, eqns[message.need] if has_wait else e))

        # Each level of a hierarchical collective has a bar, and the bytes that its link is charged with.
        first = played.inside[k]
        if message.inside is not None and first is not None:
            begin, end = first
            received = int(size * cluster.charge_factor_inside(e, graph.axes))
            events.append(Event(message.inside.lane, begin, end - begin, e, 0.0, received))
            size = int(size * cluster.charge_factor(e, graph.axes))
        begin = played.begin[k]
        events.append(Event(message.lane, begin, played.end[k] - begin, e, played.stall[k], size))
    return events


def _of_two_steps(graph: Graph, every: Sequence[Sent]) -> list[Sent]:
    """The messages of two steps in a row: what the first one carries, the second one needs."""
    count = len(graph.eqns)
    needed_in_next = {}
    for wait in pair(graph, include_copies=True).waits.values():
        if wait.started.index < 0:  # the step before has started it
            needed_in_next[wait.start] = wait.started.first_wait

    two_steps = []
    for e, message, size in every:
        need = count + needed_in_next[e] if e in needed_in_next else message.need
        two_steps.append(Sent(e, message._replace(need=need), size))
    after_the_end = 2 * count + 1
    for e, message, size in every:
        need = after_the_end if e in needed_in_next else count + message.need
        moved = message._replace(issue=count + message.issue, need=need)
        two_steps.append(Sent(e, moved, size))
    return two_steps


def _within(events: Iterable[Event], begin: float, length: float) -> list[Event]:
    """The parts of events that are in a step, in seconds from its start.

    A message that goes on in the next step has a bar in both. Its bytes count in the step in which it arrives.
    """
    inside = []
    for event in events:
        start = max(event.start - begin, 0.0)
        end = min(event.end - begin, length)
        if end > start:
            part = dataclasses.replace(event, start=start, seconds=end - start)
            if event.end - begin > length:
                part = dataclasses.replace(part, bytes=0, arrives=False)
            inside.append(part)
    return inside


def _sharing_memory(
    graph: Graph, cluster: Cluster, seconds: Sequence[float], every: Sequence[Sent], played: Played
) -> list[float]:
    """The seconds of equations while the messages of a simulation move through the same memory."""
    device = cluster.device
    moving = []
    for k, (e, message, size) in enumerate(every):
        begin = played.begin[k] + message.latency
        # Other kinds, such as an all_to_all, read what they send and write what they receive.
        moving.append(Transfer(begin, played.end[k], TOUCHED.get(_kind(e), 2.0) * size))

    # The seconds in which each equation itself needs the memory.
    measured = dict(cluster.measured)
    busy = []
    for e, duration in zip(cycle(graph.eqns), seconds):
        if not duration:
            busy.append(0.0)
        elif measured and signature(e, graph) in measured:
            busy.append(0.0)  # what was measured has shared the memory
        else:
            busy.append(min(duration, memory_seconds(memory_traffic(e, graph), device)))
    return contended(played.start[:-1], seconds, busy, moving, device.bandwidth)
