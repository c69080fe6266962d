"""simulate: predict how long the program of one rank takes on a cluster, and which communication compute waits for.

Operations run one after the other in the compute queue. A message is issued just before an operation and joins its
lane; a later operation waits for it. Each communicator has a lane. A lane is first in, first out, and independent of
the others. Messages of different lanes that cross the same link at the same time share its bandwidth equally. All times
are in seconds.

In a program, every equation is an operation. Its duration was measured, or follows from the roofline. Every started
collective is a message. Each axis has a lane for gathers, one for reductions, and one for the step's own collectives.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ..ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, lane, rules
from ..ir.copies import is_copy
from ..ir.graph import DTYPES, Eqn, Graph, Primitive, Var
from ..ir.layout import local_shape
from ..ir.micro_batches import parts
from ..ir.op_facts import is_matmul
from ..ir.pairing import pair
from ..ir.printer import op_name
from ..ir.relations import grouped
from .buffers import local_bytes
from .cluster import Cluster, Device
from .cost import flops, launches, memory, traffic
from .timeline import COMPUTE, Event, Timeline, one_by_one

NEVER = float("inf")


class Message(NamedTuple):
    """One started collective.

    Place k is before operation k, and the place after the last operation is the end. At one place, messages are issued
    before others are waited for.
    """

    issue: int  # the place at which it is issued
    need: int  # the place at which it is waited for
    lane: str  # the queue of its communicator
    link: str  # the wire, which messages of other lanes may share
    latency: float  # seconds before bytes move
    seconds: float  # seconds in which they move if no other message uses the link
    host: float = 0.0  # seconds of compute to send it
    unpack: float = 0.0  # seconds of compute to turn the received bytes into values, after the wait


@dataclass(frozen=True)
class Played:
    """When everything happened."""

    arrive: tuple[float, ...]  # for each place, when compute reaches it
    # For each place, when all that is sent, waited for and unpacked there is done.
    start: tuple[float, ...]
    begin: tuple[float, ...]  # for each message, when it is at the head of its lane
    end: tuple[float, ...]  # for each message, when it has arrived
    stall: tuple[float, ...]  # for each message, the seconds that compute waited for it

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return max((self.start[-1], *self.end))


class Network:
    """The messages that are under way. The head of each lane first waits for its latency, then moves its bytes.

    `begin` and `end` of a message are infinite until it begins or ends.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.begin: list[float] = []
        self.end: list[float] = []
        self.queued: defaultdict[str, deque[int]] = defaultdict(deque)
        # A heap of (time at which bytes begin to move, message).
        self.starting: list[tuple[float, int]] = []
        self.links: defaultdict[str, _Link] = defaultdict(_Link)
        self.next = NEVER  # the time of the next event

    def issue(self, message: Message, now: float) -> int:
        """Issue a message at time `now`, up to which `run` must have played; return its number."""
        i = len(self.messages)
        self.messages.append(message)
        self.begin.append(NEVER)
        self.end.append(NEVER)
        lane = self.queued[message.lane]
        lane.append(i)
        if len(lane) == 1:
            self._head(i, now)
        return i

    def run(self, until: float) -> None:
        """Let time pass up to `until`."""
        while self.next <= until:
            self._step()

    def arrival(self, i: int) -> float:
        """Let time pass until message `i` has arrived, and return when it did."""
        while self.end[i] == NEVER:
            self._step()
        return self.end[i]

    def _head(self, i: int, now: float) -> None:
        self.begin[i] = now
        moves = now + self.messages[i].latency
        heapq.heappush(self.starting, (moves, i))
        if moves < self.next:
            self.next = moves

    def _step(self) -> None:
        now = self.next
        starting = self.starting
        if starting and starting[0][0] <= now:
            i = heapq.heappop(starting)[1]
            message = self.messages[i]
            self.links[message.link].join(i, message.seconds, now)
        else:
            for link in self.links.values():
                if link.next <= now:
                    break
            i = link.leave(now)
            self.end[i] = now
            lane = self.queued[self.messages[i].lane]
            lane.popleft()
            if lane:
                self._head(lane[0], now)
        soon = starting[0][0] if starting else NEVER
        for link in self.links.values():
            if link.next < soon:
                soon = link.next
        self.next = soon


class _Link:
    """The messages that move bytes over one link, in equal shares.

    `served` is the service that a message active from the start would have had up to time `since`, in seconds with the
    link to itself.
    """

    __slots__ = ("active", "next", "served", "since")

    def __init__(self) -> None:
        # In order: the value of `served` at which a message is done, and its number.
        self.active: list[tuple[float, int]] = []
        self.served = 0.0
        self.since = 0.0
        self.next = NEVER  # the time at which the first of them is done

    def join(self, i: int, seconds: float, now: float) -> None:
        active = self.active
        if active:
            # Until now, each of them had an equal share of the link.
            self.served += (now - self.since) / len(active)
        insort(active, (self.served + seconds, i))
        self.since = now
        self.next = now + (active[0][0] - self.served) * len(active)

    def leave(self, now: float) -> int:
        active = self.active
        self.served, i = active.pop(0)
        self.since = now
        self.next = now + (active[0][0] - self.served) * len(active) if active else NEVER
        return i


def play(
    compute: Sequence[float],
    messages: Sequence[Message],
    places: Sequence[int] | None = None,
    follows: Callable[[int, int], float] = lambda message, place: 0.0,
    precedes: Callable[[int], float] = lambda place: 0.0,
) -> Played:
    """Simulate a program.

    Args:
        compute: the seconds of each operation.
        messages: in the order in which they are issued.
        places: the places that are simulated, and for which times are returned; by default all. It is faster to leave
            out those at which no message is issued or needed. A message at a place that is left out is not sent.
        follows: `follows(i, k)` is the seconds of further compute that run after message i was waited for at place k.
        precedes: `precedes(k)` is the seconds of further compute at place k, before any message is waited for there.

    >>> gather = Message(issue=0, need=1, lane="gather", link="wire", latency=0.0, seconds=3.0)
    >>> played = play([1.0, 1.0], [gather])
    >>> played.seconds, played.stall
    (4.0, (2.0,))
    """
    compute_before = [0.0, *accumulate(compute)]
    if places is None:
        places = range(len(compute_before))
    issued = grouped((m.issue, i) for i, m in enumerate(messages))
    needed = grouped((m.need, i) for i, m in enumerate(messages))
    network = Network()
    number = [0] * len(messages)
    stall = [0.0] * len(messages)
    clock = 0.0
    now = 0
    arrive: list[float] = []
    start: list[float] = []
    for k in places:
        clock += compute_before[k] - compute_before[now]
        now = k
        arrive.append(clock)
        for i in issued.get(k, ()):
            clock += messages[i].host
            network.run(clock)
            number[i] = network.issue(messages[i], clock)
        clock += precedes(k)
        # What has arrived first is unpacked while the others are still under way.
        for end, i in sorted((network.arrival(number[i]), i) for i in needed.get(k, ())):
            if end > clock:
                stall[i] = end - clock
                clock = end
            clock += messages[i].unpack + follows(i, k)
        start.append(clock)
    ends = tuple(network.arrival(i) for i in number)
    begins = tuple(network.begin[i] for i in number)
    return Played(tuple(arrive), tuple(start), begins, ends, tuple(stall))


# The messages and durations of a program.


def seconds(graph: Graph, cluster: Cluster) -> list[float]:
    """The time that each equation takes of the compute queue: collectives only what packing and unpacking need."""
    durations = dict(cluster.measured)
    waits = pair(graph).waits
    launched = launches(graph)
    device = cluster.device

    def duration(e: Eqn) -> float:
        wait = waits.get(e)
        if rules(e).copies:
            return device.launch * launched[e].kernels
        if wait and wait.member:
            return 0.0  # the wait for the first member unpacks the whole bucket
        if durations:
            name = signature(wait.start, graph) + " wait" if wait else signature(e, graph)
            if name in durations:
                return durations[name]
        if wait:
            return _unpacking(wait.start, graph, cluster)
        if rules(e).packs:
            return _packing(e, graph, cluster)
        if rules(e).shares(e):
            return device.call * launched[e].calls
        return device.launch * launched[e].kernels + _roofline(e, graph, device)

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


def _roofline(e: Eqn, graph: Graph, device: Device) -> float:
    """The seconds that a kernel runs: as long as its operations take, or its bytes."""
    return max(flops(e, graph) / device.rate(_rated(e)), traffic(e, graph) / device.bandwidth)


def _rated(e: Eqn) -> str:
    """The name of an operation's rate: the dtype of its result, or "tf32" if PyTorch runs this product in TF32."""
    dtype = next((DTYPES.get(o.dtype, "f32") for o in e.results), "f32")
    if dtype != "f32" or not is_matmul(e):
        return dtype
    if "convolution" in op_name(e.op):
        # The class that replaces this module at import has the attribute, and mypy reads the module.
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    else:
        precision = torch.backends.cuda.matmul.fp32_precision
    return "tf32" if precision == "tf32" else "f32"


def _packing(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute that it takes to copy into the send buffer of a collective, and to send."""
    link = cluster.link(e.kwargs["axis"])
    host = link.call + link.host * rules(e).wire_bytes(e, graph.axes)
    size = local_bytes(graph)
    in_place = [rules(e).sends_own(e, k, graph.axes) for k in range(len(e.outs))]
    copied = 2 * sum(size(v) for v, k in zip(e.ins, in_place) if not k)
    return cluster.device.launch + copied / cluster.device.bandwidth + host


def _unpacking(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute that it takes to turn received bytes into values.

    They were measured for this kind of collective, or follow from the bytes that are copied: the members of a packed
    gather are copied out of its buffer, and the terms of a reduce_scatter are added up.
    """
    measured_unpack = dict(cluster.link(e.kwargs["axis"]).unpack).get(op_name(e.op))
    if measured_unpack is not None:
        return cluster.device.launch + measured_unpack * rules(e).wire_bytes(e, graph.axes)
    copied = COPIES.get(e.op, NO_COPIES).exact(e, graph)
    return cluster.device.launch + copied / cluster.device.bandwidth


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
        link = cluster.link(axis)
        ranks = graph.axes[axis]
        kind, size = _kind_and_bytes(e, graph, ranks)
        weight = cluster.weight(e, graph.axes) if isinstance(e.op, Primitive) else 1.0
        latency, transfer = link.seconds(kind, size * weight, ranks)
        message = Message(
            started.index + 1, started.first_wait, lane(e), link.name, latency, transfer
        )
        every.append((e, message, size))
    return every


def copy_message(e: Eqn, size: int, index: int, wait: int, cluster: Cluster) -> Message:
    """A copy of `size` bytes that equation `index` starts, and equation `wait` waits for.

    Both directions have a link of their own.
    """
    latency, transfer = cluster.copy_seconds(size)
    return Message(index + 1, wait, lane(e), lane(e), latency, transfer)


def _kind_and_bytes(e: Eqn, graph: Graph, ranks: int) -> tuple[str, int]:
    """The kind of a collective, planned or the step's own, and the bytes that a rank receives."""
    if isinstance(e.op, Primitive):
        return e.op.name, rules(e).wire_bytes(e, graph.axes)
    size = local_bytes(graph)
    largest = max(sum(map(size, e.ins)), sum(map(size, e.results)))
    name = op_name(e.op)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    kind = next((kind for kind in kinds if name.startswith(kind)), name)
    return kind, largest * (ranks - 1) * (2 if kind == "all_reduce" else 1) // ranks


def simulate(graph: Graph, cluster: Cluster) -> Timeline:
    """Simulate a program on a cluster.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.
    """
    if graph.micro > 1:
        programs = parts(graph)
        timelines = {part: simulate(part, cluster) for part in programs.different}
        return one_by_one(
            f"{graph.name}, simulated", [timelines[part] for part in programs.in_order]
        )
    durations = seconds(graph, cluster)
    every = messages(graph, cluster)
    played = play(durations, [message for _, message, _ in every])
    events = []
    for e, start, duration in zip(graph.eqns, played.start, durations):
        if duration > 0:
            events.append(Event(COMPUTE, start, duration, e))
    for k, (e, message, size) in enumerate(every):
        begin = played.begin[k]
        events.append(Event(message.lane, begin, played.end[k] - begin, e, played.stall[k], size))
    both = memory(graph)
    curve = tuple(zip(played.start, both.live))
    host = tuple(zip(played.start, both.host))
    name = f"{graph.name}, simulated"
    limit = graph.hints.memory
    return Timeline(name, played.seconds, tuple(events), curve, host_memory=host, limit=limit)
