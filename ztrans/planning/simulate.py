"""simulate: predict how long the program of one rank takes on a cluster, and which communication compute waits for.

Operations run one after the other in the compute queue. A message is issued just before an operation and joins its lane
(see `network`); a later operation waits for it. On a GPU, messages and kernels share the bandwidth of the memory
(see `contention`).

In a program, every equation is an operation. Its duration was measured, or follows from the roofline. Every started
collective is a message. Each axis has a lane for gathers, one for reductions, and one for the step's own collectives;
on GPUs of several hosts, also one for the first level of reductions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any, NamedTuple

import torch

from ..ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, lane, rules
from ..ir.copies import is_copy
from ..ir.donation import donation
from ..ir.graph import DTYPES, Eqn, Graph, Primitive, Var
from ..ir.layout import local_shape
from ..ir.liveness import liveness
from ..ir.micro_batches import parts
from ..ir.pairing import pair
from ..ir.printer import op_name
from ..ir.relations import grouped
from ..report.event import COMPUTE, Event
from ..report.timeline import Timeline, one_by_one
from .buffers import by_memory, live_bytes, local_bytes, storages
from .cluster import Cluster
from .contention import TOUCHED, Stream, contended
from .cost import launches, memory, traffic
from .fusion import IsCompiled, Kernel, kernels
from .kernels import launched, memory_seconds, roofline
from .network import Level, Message, Network, Stalls, Successors

NO_SUCCESSORS: Mapping[int, int] = {}
_Sent = tuple[Eqn, Message, int]  # what starts a message, the message, and the bytes that it moves


@dataclass(frozen=True)
class Played:
    """When everything happened."""

    arrive: tuple[float, ...]  # for each place, when compute reaches it
    # For each place, when all that is sent, waited for and unpacked there is done.
    start: tuple[float, ...]
    begin: tuple[
        float, ...
    ]  # for each message, when it is at the head of its lane, and may be sent
    end: tuple[float, ...]  # for each message, when it has arrived
    stall: tuple[float, ...]  # for each message, the seconds that compute waited for it
    # For each message, when it had been waited for, and the seconds that it had taken from compute, which pass then.
    lost: tuple[tuple[float, float], ...]
    # For each message, when its first level began and ended; None if it has one level.
    inside: tuple[tuple[float, float] | None, ...]

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return max((self.start[-1], *self.end))


def play(
    compute: Sequence[float],
    messages: Sequence[Message],
    places: Sequence[int] | None = None,
    follows: Callable[[int, int], float] = lambda message, place: 0.0,
    precedes: Callable[[int], float] = lambda place: 0.0,
    successor: Mapping[int, int] = NO_SUCCESSORS,
) -> Played:
    """Simulate a program.

    Args:
        compute: the seconds of each operation.
        messages: in the order in which they are issued.
        places: the places that are simulated, and for which times are returned; by default all. It is faster to leave
            out those at which no message is issued or needed. A message at a place that is left out is not sent.
        follows: `follows(i, k)` is the seconds of further compute that run after message i was waited for at place k.
        precedes: `precedes(k)` is the seconds of further compute at place k, before any message is waited for there.
        successor: for some messages, the one that is sent right after it has been waited for. The next successor that
            is sent, or else the place where it is needed, ends the time in which it is under way (see `Successors`).

    >>> gather = Message(issue=0, need=1, lane="gather", link="wire", latency=0.0, seconds=3.0)
    >>> played = play([1.0, 1.0], [gather])
    >>> played.seconds, played.stall
    (4.0, (2.0,))
    """
    compute_before = [0.0, *accumulate(compute)]
    if places is None:
        places = range(len(compute_before))
    at_places = set(range(len(messages))).difference(successor.values())
    issued = grouped((messages[i].issue, i) for i in sorted(at_places))
    needed = grouped((messages[i].need, i) for i in sorted(at_places))
    under_way: Successors[int] = Successors()
    rank = _Rank(messages)
    now = 0
    arrive: list[float] = []
    start: list[float] = []
    for k in places:
        rank.clock += compute_before[k] - compute_before[now]
        now = k
        arrive.append(rank.clock)
        for i in issued.get(k, ()):
            rank.send(i)
        rank.clock += precedes(k)
        # What has arrived first is unpacked while the others are still under way.
        waiting = list(needed.get(k, ()))
        while waiting:
            i = rank.first_of(waiting)
            waiting.remove(i)
            rank.wait(i)
            rank.clock += follows(i, k)
            if i in successor:
                j = successor[i]
                rank.send(j)
                for earlier in under_way.add(j, messages[j].need):
                    rank.wait(earlier)
                    rank.clock += follows(earlier, k)
        for i in under_way.needed(k):
            rank.wait(i)
            rank.clock += follows(i, k)
        start.append(rank.clock)
    return rank.played(arrive, start)


class _Rank:
    """One rank while it is simulated: the time of its compute queue, and its messages."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.network = Network()
        self.number = [0] * len(messages)
        self.stall = [0.0] * len(messages)
        self.lost = [(0.0, 0.0)] * len(messages)
        self.stalls = Stalls()
        self.clock = 0.0

    def send(self, i: int) -> None:
        self.clock += self.messages[i].host
        self.network.run(self.clock)
        self.number[i] = self.network.issue(self.messages[i], self.clock)

    def first_of(self, waiting: Sequence[int]) -> int:
        """The first of some messages to arrive."""
        first = self.network.first_arrival([self.number[i] for i in waiting])
        return next(i for i in waiting if self.network.end[self.number[i]] == first)

    def wait(self, i: int) -> None:
        """Let compute stand still until message `i` has arrived, and unpack it."""
        end = self.network.arrival(self.number[i])
        if end > self.clock:
            self.stall[i] = end - self.clock
            self.stalls.add(self.clock, end)
            self.clock = end
        self.lost[i] = self.clock, self.stalls.lost(self.network, self.number[i], self.clock)
        self.clock += self.lost[i][1] + self.messages[i].unpack

    def played(self, arrive: Sequence[float], start: Sequence[float]) -> Played:
        """When everything happened, at the end."""
        ends = tuple(self.network.arrival(i) for i in self.number)
        begins = tuple(self.network.begin[i] for i in self.number)
        inside = tuple(self.network.first_level(i) for i in self.number)
        stall = tuple(self.stall)
        return Played(tuple(arrive), tuple(start), begins, ends, stall, tuple(self.lost), inside)


# The messages and durations of a program.


def seconds(graph: Graph, cluster: Cluster, fused: Sequence[Kernel] = ()) -> list[float]:
    """The time that each equation takes of the compute queue.

    Collectives take what sending needs, and between CPUs also packing and unpacking. The first
    equation of a fused kernel takes the time of all of it.
    """
    durations = dict(cluster.measured)
    kernel_of = {e: kernel for kernel in fused for e in kernel.eqns}
    waits = pair(graph).waits
    every_launch = launches(graph)
    device = cluster.device

    def duration(e: Eqn) -> float:
        wait = waits.get(e)
        if rules(e).copies:
            return device.launch * every_launch[e].kernels
        if wait and wait.member:
            return 0.0  # the wait for the first member unpacks the whole bucket
        if durations:
            name = signature(wait.start, graph) + " wait" if wait else signature(e, graph)
            if name in durations:
                return durations[name]
        if wait:
            return _after_wait(wait.start, graph, cluster)
        if rules(e).packs:
            return _before_issue(e, graph, cluster)
        if e in kernel_of:
            kernel = kernel_of[e]
            is_first = e is kernel.eqns[0]
            return launched(device, 1, memory_seconds(kernel.traffic, device)) if is_first else 0.0
        if rules(e).shares(e):
            return device.call * every_launch[e].calls
        kernels = every_launch[e].kernels
        return launched(device, kernels, roofline(e, graph, device))

    return list(map(duration, graph.eqns))


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
    host = link.call + link.host * rules(e).wire_bytes(e, graph.axes)
    if link.whole:
        return host
    return device.launch + host + (_packing(e, graph, cluster) if device.gloo else 0.0)


def _packing(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds that it takes to copy into the send buffer of a collective."""
    if cluster.link(e.kwargs["axis"]).whole:
        return 0.0
    size = local_bytes(graph)
    in_place = [rules(e).sends_own(e, k, graph.axes) for k in range(len(e.outs))]
    copied = 2 * sum(size(v) for v, k in zip(e.ins, in_place) if not k)
    return copied / cluster.device.bandwidth


def _after_wait(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute that it takes to turn received bytes into values."""
    device = cluster.device
    measured_unpack = dict(cluster.link(e.kwargs["axis"]).unpack).get(op_name(e.op))
    if measured_unpack is not None:
        return device.launch + measured_unpack * rules(e).wire_bytes(e, graph.axes)
    return device.launch + (_unpacking(e, graph, cluster) if device.gloo else 0.0)


def _unpacking(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds that follow from the bytes that are copied to turn received bytes into values.

    The members of a packed gather are copied out of its buffer, and the terms of a reduce_scatter are added up.
    """
    return COPIES.get(e.op, NO_COPIES).exact(e, graph) / cluster.device.bandwidth


def _terms_and_sums(e: Eqn, graph: Graph) -> int:
    """The bytes that a reduce_scatter reads, the terms of every rank, and writes, their sum."""
    size = local_bytes(graph)
    return sum(map(size, e.ins)) + sum(map(size, e.results))


class Copies(NamedTuple):
    """The bytes that are copied to turn the received bytes of a collective into values."""

    exact: Callable[[Eqn, Graph], int]  # counts them
    times: int  # the planner's estimate of how often a received byte is copied


NO_COPIES = Copies(lambda e, graph: 0, 0)
COPIES: Mapping[Any, Copies] = {
    ALL_GATHER: Copies(lambda e, graph: 2 * rules(e).unpacked_bytes(e, graph.axes), 2),
    REDUCE_SCATTER: Copies(_terms_and_sums, 1),
    ALL_REDUCE: NO_COPIES,
}


def messages(graph: Graph, cluster: Cluster) -> list[tuple[Eqn, Message, int]]:
    """Every started collective, and every copy between two memories, as a message, with the bytes that it moves.

    Its places count all equations.
    """
    every = []
    for e, started in pair(graph, include_user=True, include_copies=True).starts.items():
        if is_copy(e):
            size = rules(e).received_bytes(e, 0, graph.axes)
            every.append(
                (e, copy_message(e, size, started.index, started.first_wait, cluster), size)
            )
            continue
        axis = rules(e).axis(e)
        if axis not in graph.axes:
            continue  # over a group that is no axis of the mesh, so its link is unknown
        *inside, last = transfers(e, axis, graph, cluster)
        message = Message(
            started.index + 1,
            started.first_wait,
            last.lane,
            last.link,
            last.latency,
            last.seconds,
            taken=cluster.device.taken,
        )
        if isinstance(e.op, Primitive) and not cluster.device.gloo:
            message = message._replace(pack_beside=_packing(e, graph, cluster))
            if not cluster.link(axis).whole:
                unpack = _unpacking(e, graph, cluster)
                if inside:  # the terms are added up inside each host; the sums of hosts are few
                    message = message._replace(inside=inside[0]._replace(unpack_beside=unpack))
                else:
                    message = message._replace(unpack_beside=unpack)
        every.append((e, message, _kind_and_bytes(e, graph, graph.axes[axis])[1]))
    return every


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
        received = size * cluster.weight_inside(e, graph.axes)
        latency, seconds = link.inside.seconds(kind, received, link.local)
        ranks //= link.local
        # It is sent as a message for each host.
        levels.append(Level(inside_lane(e), link.inside.name, latency * ranks, seconds))
        link = dataclasses.replace(link, inside=None, local=1)  # the second level, between hosts
    received = size * cluster.weight(e, graph.axes)
    return [*levels, Level(lane(e), link.name, *link.seconds(kind, received, ranks))]


def inside_lane(eqn: Eqn) -> str:
    """The name of the queue of the first level of a collective."""
    return f"{lane(eqn)} inside hosts"


def _kind(e: Eqn) -> str:
    if isinstance(e.op, Primitive):
        return e.op.name
    name = op_name(e.op)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return next((kind for kind in kinds if name.startswith(kind)), name)


def _kind_and_bytes(e: Eqn, graph: Graph, ranks: int) -> tuple[str, int]:
    """The kind of a collective, planned or the step's own, and the bytes that a rank receives."""
    kind = _kind(e)
    if isinstance(e.op, Primitive):
        return kind, rules(e).wire_bytes(e, graph.axes)
    size = local_bytes(graph)
    largest = max(sum(map(size, e.ins)), sum(map(size, e.results)))
    return kind, largest * (ranks - 1) * (2 if kind == "all_reduce" else 1) // ranks


def simulate(graph: Graph, cluster: Cluster, is_compiled: IsCompiled = lambda e: False) -> Timeline:
    """Simulate a program on a cluster.

    Args:
        graph: the program.
        cluster: the speeds.
        is_compiled: the equations that a compiler fuses with their neighbours; by default all run one by one.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.

    A step that carries gathers is the second of two: its first gathers are under way when it begins.
    """
    if graph.micro > 1:
        programs = parts(graph)
        timelines = {part: simulate(part, cluster, is_compiled) for part in programs.different}
        return one_by_one(
            f"{graph.name}, simulated", [timelines[part] for part in programs.in_order]
        )
    fused = kernels(graph, is_compiled)
    durations = seconds(graph, cluster, fused)
    every = messages(graph, cluster)
    if graph.carried:
        durations = durations * 2
        every = _of_two_steps(graph, every)
    sent = [message for _, message, _ in every]
    played = play(durations, sent)
    if not cluster.device.gloo:  # gloo's messages take compute instead (`Link.host`)
        durations = _sharing_memory(graph, cluster, durations, every, played)
        played = play(durations, sent)
    events = _events(graph, cluster, durations, every, played)
    begins = 0.0
    seconds_of_step = played.seconds
    if graph.carried:
        begins = played.arrive[len(graph.eqns)]
        seconds_of_step = played.arrive[-1] - begins
        events = _within(events, begins, seconds_of_step)
    times = [start - begins for start in played.start[-len(graph.eqns) - 1 :]]
    curve = tuple(zip(times, memory_of(graph, fused)))
    host = tuple(zip(times, memory(graph).host))
    name = f"{graph.name}, simulated"
    limit = graph.hints.memory
    return Timeline(name, seconds_of_step, tuple(events), curve, host_memory=host, limit=limit)


def _events(
    graph: Graph,
    cluster: Cluster,
    durations: Sequence[float],
    every: Sequence[_Sent],
    played: Played,
) -> list[Event]:
    """The equations and the messages of a program as bars of a timeline."""
    events = []
    for e, start, duration in zip(cycle(graph.eqns), played.start, durations):
        if duration > 0:
            events.append(Event(COMPUTE, start, duration, e))
    for k, (e, message, size) in enumerate(every):
        passes, lost = played.lost[k]
        if lost:
            events.append(Event(COMPUTE, passes, lost, e))
        first = played.inside[k]
        if message.inside is not None and first is not None:
            received = int(size * cluster.weight_inside(e, graph.axes))
            seconds_inside = first[1] - first[0]
            events.append(Event(message.inside.lane, first[0], seconds_inside, e, 0.0, received))
            size = int(size * cluster.weight(e, graph.axes))
        begin = played.begin[k]
        events.append(Event(message.lane, begin, played.end[k] - begin, e, played.stall[k], size))
    return events


def _of_two_steps(graph: Graph, every: Sequence[_Sent]) -> list[_Sent]:
    """The messages of two steps in a row: what the first one carries, the second one needs."""
    count = len(graph.eqns)
    needed_in_next = {}
    for wait in pair(graph).waits.values():
        if wait.started.index < 0:
            needed_in_next[wait.start] = wait.started.first_wait
    two_steps = []
    for e, message, size in every:
        need = count + needed_in_next[e] if e in needed_in_next else message.need
        two_steps.append((e, message._replace(need=need), size))
    after_the_end = 2 * count + 1
    for e, message, size in every:
        need = after_the_end if e in needed_in_next else count + message.need
        moved = message._replace(issue=count + message.issue, need=need)
        two_steps.append((e, moved, size))
    return two_steps


def _within(events: Iterable[Event], begins: float, length: float) -> list[Event]:
    """The parts of events that are in a step, in seconds from its start."""
    inside = []
    for event in events:
        start = max(event.start - begins, 0.0)
        end = min(event.start + event.seconds - begins, length)
        if end > start:
            inside.append(dataclasses.replace(event, start=start, seconds=end - start))
    return inside


def memory_of(graph: Graph, fused: Sequence[Kernel]) -> Sequence[int]:
    """The bytes that are live at each equation. What stays inside of a fused kernel takes no memory."""
    inside = {v for kernel in fused for v in kernel.inside}
    if not inside:
        return memory(graph).live
    owner = donation(graph).owner
    root = liveness(graph).root
    outside = {owner[v] for v in owner if root.get(v, v) not in inside}
    on_device, _ = by_memory(storages(graph, donation(graph)))
    return live_bytes(graph, [s for s in on_device if s.value in outside])


def _sharing_memory(
    graph: Graph,
    cluster: Cluster,
    durations: Sequence[float],
    every: Sequence[tuple[Eqn, Message, int]],
    played: Played,
) -> list[float]:
    """The durations of equations while the messages of a simulation move through the same memory."""
    device = cluster.device
    streams = []
    for k, (e, message, size) in enumerate(every):
        begin = played.begin[k] + message.latency
        streams.append(Stream(begin, played.end[k], TOUCHED.get(_kind(e), 2.0) * size))
    measured = dict(cluster.measured)
    busy = []
    for e, duration in zip(cycle(graph.eqns), durations):
        if not duration or (measured and signature(e, graph) in measured):
            busy.append(0.0)  # what was measured has shared the memory
        else:
            busy.append(min(duration, memory_seconds(traffic(e, graph), device)))
    return contended(played.start[:-1], durations, busy, streams, device.bandwidth)
