"""Predict how long a program takes on a cluster, and which messages compute waits for.

`durations` has the seconds of equations and messages, and `play` the times at which they run and arrive. On a GPU,
messages and kernels share the bandwidth of the memory (see `contention`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import cycle, islice

from ..ir.collectives import rules
from ..ir.graph import Graph
from ..ir.micro_batches import micro_batch_programs
from ..ir.pairing import pair
from ..report.event import COMPUTE, Event
from ..report.timeline import Timeline, one_by_one
from .cluster import Cluster
from .contention import Transfer, contended
from .cost import bytes_of_others, memory, memory_traffic
from .durations import Sent, equation_seconds, messages, signature
from .play import Played, play
from .roofline import memory_seconds


def simulate(graph: Graph, cluster: Cluster) -> Timeline:
    """Simulate a program on a cluster.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.
    """
    if graph.micro == 1:
        return timeline_of(graph, cluster, equation_seconds(graph, cluster))
    programs = micro_batch_programs(graph)
    timelines = {}
    for part, other_bytes in bytes_of_others(graph, programs).items():
        timeline = simulate(part, cluster)
        curve = tuple((time, live + other_bytes) for time, live in timeline.memory)
        timelines[part] = dataclasses.replace(timeline, memory=curve)
    in_order = [timelines[part] for part in programs.in_order]
    return one_by_one(f"{graph.name}, simulated", in_order)


def timeline_of(graph: Graph, cluster: Cluster, seconds: Sequence[float]) -> Timeline:
    """Simulate a program whose equations take these seconds of the compute queue.

    If a step carries gathers or copies, two steps are simulated, and the second one is returned: the messages of the
    first are under way when it begins.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.
    """
    all_sent = messages(graph, cluster, seconds)
    if graph.carried_futures:
        seconds = [*seconds, *seconds]
        all_sent = _messages_of_two_steps(graph, all_sent)
    sent_messages = [sent.message for sent in all_sent]
    played = play(seconds, sent_messages)
    if not cluster.device.gloo:  # gloo's messages take compute instead (`Link.byte_overhead`)
        seconds = _seconds_with_contention(graph, cluster, seconds, all_sent, played)
        played = play(seconds, sent_messages)

    events = _events(graph, cluster, seconds, all_sent, played)
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
        other_memories={
            kind: tuple(zip(times, live)) for kind, live in bytes_live.other_memories.items()
        },
        limit=graph.hints.memory_limit,
    )


def _events(
    graph: Graph,
    cluster: Cluster,
    seconds: Sequence[float],
    all_sent: Sequence[Sent],
    played: Played,
) -> list[Event]:
    """The equations and the messages of a program as bars of a timeline."""
    events = []
    eqns = list(islice(cycle(graph.eqns), len(seconds)))  # of one step, or of two
    for e, start, duration in zip(eqns, played.start, seconds):
        if duration > 0:
            events.append(Event(COMPUTE, start, duration, e))
    for k, (e, message, size) in enumerate(all_sent):
        # The seconds that compute has lost to a message pass after the wait for it.
        waited_for, lost = played.lost[k]
        if lost:
            has_wait = message.need < len(eqns)
            events.append(Event(COMPUTE, waited_for, lost, eqns[message.need] if has_wait else e))

        # Each level of a hierarchical collective has a bar, with the bytes that its link is charged with.
        first = played.inside[k]
        if message.inside is not None and first is not None:
            begin, end = first
            received = int(size * cluster.charge_factor_inside(e, graph.axes))
            events.append(Event(message.inside.lane, begin, end - begin, e, 0.0, received))
            size = int(size * cluster.charge_factor(e, graph.axes))
        begin = played.begin[k]
        events.append(Event(message.lane, begin, played.end[k] - begin, e, played.stall[k], size))
    return events


def _messages_of_two_steps(graph: Graph, all_sent: Sequence[Sent]) -> list[Sent]:
    """The messages of two steps in a row; the second step waits for the messages that the first one carries."""
    count = len(graph.eqns)
    needed_in_next = {}
    for wait in pair(graph, include_copies=True).waits.values():
        if wait.started.index < 0:  # the step before has started it
            needed_in_next[wait.start] = wait.started.first_wait

    two_steps = []
    for e, message, size in all_sent:
        need = count + needed_in_next[e] if e in needed_in_next else message.need
        two_steps.append(Sent(e, message._replace(need=need), size))
    after_the_end = 2 * count + 1
    for e, message, size in all_sent:
        need = after_the_end if e in needed_in_next else count + message.need
        second_message = message._replace(issue=count + message.issue, need=need)
        two_steps.append(Sent(e, second_message, size))
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


def _seconds_with_contention(
    graph: Graph,
    cluster: Cluster,
    seconds: Sequence[float],
    all_sent: Sequence[Sent],
    played: Played,
) -> list[float]:
    """The seconds of equations that share the memory with the messages of a simulation."""
    device = cluster.device
    transfers = []
    for k, (e, message, size) in enumerate(all_sent):
        begin = played.begin[k] + message.latency
        touched = rules(e).kind.touched * size
        transfers.append(Transfer(begin, played.end[k], touched))

    # The seconds in which each equation itself needs the memory.
    measured_seconds = dict(cluster.measured)
    own_seconds = []
    for e, duration in zip(cycle(graph.eqns), seconds):
        if not duration:
            own_seconds.append(0.0)
        elif measured_seconds and signature(e, graph) in measured_seconds:
            own_seconds.append(0.0)  # a measured operation has shared the memory already
        else:
            own_seconds.append(min(duration, memory_seconds(memory_traffic(e, graph), device)))
    return contended(played.start[:-1], seconds, own_seconds, transfers, device.bandwidth)
