"""A lower bound for the seconds of every schedule of a problem, whatever its buckets and its order.

A recursion over places finds the earliest time at which each operation can start: after all operations before it, and
after the arrival of every message that it needs. Three terms bound these arrivals, and the latest one counts:

    compute   each message alone: it is sent at the first place where it may start, and takes its own time
    wire      all messages that may not be sent before some place: they take turns on their link. One
              latency counts, because lanes that share a link overlap their latencies
    memory    as `wire`, from after each operation k on. It also counts the gathers that are needed after k
              and whose values have no room during k: they can neither be kept nor sent early

Sending, unpacking and eager updates take compute too. For a message that cannot be sent before an operation, they come
after that operation. An update may run in any stall after its reductions have arrived, so it has no place: it follows
its reductions, and its seconds are added to the sum of all compute.

Before the first gradient exists, gathers are the only messages that a schedule places. The share of compute that they
take is then added to the stalls (see `_Forward`).

A lever may drop a gather. If it sends others in its place, the least of all these messages counts. If it sends none,
only `memory` counts the gather: where there is no room for the value, or for the bytes that the lever keeps. The
compute of levers is left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from ...ir.dependencies import grouped
from ..buffers import Buffer, live_by_slot
from .messages import copy_seconds, is_decoded_at_wait
from .problem import Gather, Lever, Problem, Reduction

# Bytes without room need a message, with its latency. A share of bytes below this is a rounding error.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """The lower bound of a problem.

    Attributes:
        seconds: the bound by all three terms.
        compute, wire: the bound by the first term alone, and by the first two: compute <= wire <= seconds.
        binds: the first term with which the bound is within 1% of `seconds`.
    """

    seconds: float
    compute: float
    wire: float
    binds: Literal["compute", "wire", "memory"]


def bound(problem: Problem) -> Bound:
    """Compute the lower bound of a problem.

    >>> from ztrans.planning.solver.problem import Gather, Wire
    >>> wires = {"w": Wire(lane="all", link="all", latency=1.0, pace=1.0)}
    >>> bound(Problem((1.0, 1.0), (0, 0), (), (Gather("w", 2, 2, 0, 0), Gather("w", 6, 6, 1, 1)), (), wires))
    Bound(seconds=10.0, compute=8.0, wire=10.0, binds='wire')
    """
    jobs = _jobs(problem)
    compute = _earliest(problem, jobs, wire=False)
    wire = _earliest(problem, jobs)
    seconds = _earliest(problem, jobs, room=_room(problem))
    binds: Literal["compute", "wire", "memory"] = "memory"
    if compute > 0.99 * seconds:
        binds = "compute"
    elif wire > 0.99 * seconds:
        binds = "wire"
    return Bound(seconds, compute, wire, binds)


@dataclass(frozen=True)
class _Job:
    """A message that is sent at place `release` or later, and has arrived by place `deadline`.

    Attributes:
        link: the link that it crosses.
        latency: seconds before its bytes move.
        release, deadline: the first place of its start, and the last place of its wait.
        since: the first operation during which the value of a gather may be missing.
        seconds: how long its bytes move, if nothing else uses the link.
        overhead, unpack: seconds of compute to send it, and to turn its bytes into values.
        update_seconds: seconds of updates that no schedule runs before it has arrived.
        beside_compute: seconds of packing, unpacking and a first level, beside compute.
        lost_compute: seconds of compute that it takes while its bytes move, whether compute runs then or stands still.
        required: whether it must be sent. A gather is not sent if a lever drops it and sends nothing.
        value_bytes: the least bytes that are live during an operation after which a gather is not sent.
        key: the key of a gather.
    """

    link: str
    latency: float
    release: int
    deadline: int
    seconds: float
    overhead: float = 0.0
    unpack: float = 0.0
    update_seconds: float = 0.0
    beside_compute: float = 0.0
    lost_compute: float = 0.0
    required: bool = True
    since: int = 0
    value_bytes: int = 0
    key: Hashable = None

    @property
    def duration(self) -> float:
        """The seconds from its start until its values exist."""
        return self.overhead + self.latency + self.seconds + self.unpack + self.beside_compute


# The fields of a job by which the bound grows.
_COSTS = (
    "latency",
    "release",
    "seconds",
    "overhead",
    "unpack",
    "beside_compute",
    "lost_compute",
)


def _job(problem: Problem, member: Gather | Reduction, release: int, deadline: int) -> _Job:
    """The message of a member in a bucket of its own. A larger bucket saves its latency, and nothing else."""
    wire = problem.wires[member.key]
    overhead = wire.byte_overhead * member.wire
    unpack = wire.unpack * member.wire
    pack, copy = copy_seconds(wire, member)
    beside_compute = 0.0
    if is_decoded_at_wait(member):
        unpack += copy
        copy = 0.0
    if wire.beside:
        beside_compute = pack + copy
    else:
        overhead += pack
        unpack += copy
    seconds = wire.pace * member.wire
    moving = seconds
    if wire.inside is not None:
        inside_seconds = wire.inside.pace * member.wire
        beside_compute += wire.inside.latency + inside_seconds
        moving += inside_seconds
    return _Job(
        wire.link,
        wire.least_latency,
        release,
        deadline,
        seconds,
        overhead=overhead,
        unpack=unpack,
        beside_compute=beside_compute,
        lost_compute=wire.taken * moving,
    )


def _jobs(problem: Problem) -> list[_Job]:
    """All messages of a problem, if every member is a bucket of its own, in order of deadline."""
    jobs = [_Job(m.link, m.latency, m.issue, m.need, m.seconds) for m in problem.fixed_messages]
    end = len(problem.seconds)
    for i, r in enumerate(problem.reductions):
        groups = [problem.dependents[k] for k in problem.dependents_of.get(i, ())]
        update_seconds = sum(group.seconds for group in groups)
        deadline = min(end, r.deadline)
        job = _job(problem, r, r.born + 1, deadline)
        if r.second is not None:
            # The second reduction is sent after the first one has arrived, so its bytes move that much later.
            jobs.append(job)
            second = _job(problem, r.second, r.born + 1, deadline)
            job = replace(second, beside_compute=second.beside_compute + job.duration)
        jobs.append(replace(job, update_seconds=update_seconds))

    # Gathers that only levers send are numbered last, so `i` is also the number among all gathers.
    for i, (g, idle_since, size) in enumerate(_values(problem)):
        levers = [problem.levers[k] for k in problem.levers_of.get(i, ())]
        gather_job = _gather_job(problem, g, idle_since, size, levers)
        if gather_job is not None:
            jobs.append(gather_job)
    return sorted(jobs, key=lambda job: job.deadline)


def _gather_job(
    problem: Problem, g: Gather, idle_since: int, size: int, levers: Sequence[Lever]
) -> _Job | None:
    """The least message that brings the value of a gather, or None if a lever may save it at no cost.

    Args:
        problem, g: a gather that is sent unless a lever drops it.
        idle_since, size: as in `_values`.
        levers: the levers that drop it.
    """
    required = all(lever.sends for lever in levers)
    alternatives = [_job(problem, g, g.release, g.use)]
    for lever in levers:
        # The bytes that it keeps live during all operations without the value.
        kept_bytes = 0
        for buffer in lever.buffers:
            if buffer.first <= 2 * idle_since + 1 and 2 * g.use - 1 <= buffer.last:
                kept_bytes += buffer.bytes
        if not kept_bytes and not lever.sends:
            return None
        if kept_bytes:
            size = min(size, kept_bytes)
        if required or not kept_bytes:
            for k in lever.sends:
                other = problem.gathers[k]
                size = min(size, other.under_way)
                alternatives.append(_job(problem, other, other.release, g.use))
    if not required and not size:
        return None
    size = min(size, g.under_way)
    # Whichever of them is sent, it takes no less than the least of all in every respect.
    least: dict[str, Any] = {}
    for cost in _COSTS:
        least[cost] = min(getattr(job, cost) for job in alternatives)
    if len({job.link for job in alternatives}) > 1:
        least["seconds"] = 0.0  # no bytes are certain to move on one of the links
    return replace(
        alternatives[0],
        **least,
        required=required,
        since=idle_since,
        value_bytes=size,
        key=g.key,
    )


def _values(problem: Problem) -> Iterator[tuple[Gather, int, int]]:
    """The gathers that are sent unless a lever drops them, each with two numbers.

    The first one is the operation from which on the value of the gather may be idle: 0 at the first gather of a value.
    The second one is the least bytes of all gathers of that value so far.
    """
    # For each gather, the first gather of its value, which identifies the value.
    first_gathers: list[int] = []
    idle_since: dict[int, int] = {}
    least_bytes: dict[int, int] = {}
    for i, g in enumerate(problem.values):
        first = i if g.repeats is None else first_gathers[g.repeats]
        first_gathers.append(first)
        least_bytes[first] = min(least_bytes.get(first, g.bytes), g.bytes)
        yield g, idle_since.get(first, 0), least_bytes[first]
        idle_since[first] = max(idle_since.get(first, 0), g.last + 1)


def _room(problem: Problem) -> np.ndarray:
    """By operation, the memory that is left beside the bytes that are live in every schedule."""
    buffers = [Buffer(r.bytes, r.born, r.born) for r in problem.reductions if r.born >= 0]
    for g, idle_since, size in _values(problem):
        # A value that is live from an earlier gather has been counted up to its last use there.
        first = max(g.use, idle_since)
        if first <= g.last:
            buffers.append(Buffer(size, first, g.last))
    used_bytes = problem.live + live_by_slot(buffers, len(problem.live))
    return np.maximum(problem.memory - used_bytes, 0.0)


def _earliest(
    problem: Problem, jobs: list[_Job], wire: bool = True, room: np.ndarray | None = None
) -> float:
    """The earliest end of a schedule.

    Args:
        problem: the operations and updates.
        jobs: its messages, in order of deadline.
        wire: whether the load of each link counts, or only single messages.
        room: by operation, the bytes for gathered values. None leaves memory out.
    """
    seconds_before = np.array(problem.seconds_before)
    # By place, the earliest time at which compute reaches it. It is known up to the place `now`, which compute reaches
    # `delay` seconds after `seconds_before`.
    arrive = seconds_before.copy()
    now = 0
    delay = 0.0
    links: dict[str, _LinkLoad] = {}
    if wire:
        for name, link_jobs in grouped((job.link, job) for job in jobs).items():
            links[name] = _LinkLoad(problem, link_jobs, arrive, room)
    compute_from = _compute_from(problem, jobs)
    end = seconds_before[-1] + compute_from[0]
    forward = _Forward(problem)

    for place, group in groupby(jobs, key=lambda job: job.deadline):
        jobs_here = list(group)
        arrive[now + 1 : place + 1] += delay
        start = seconds_before[place] + delay
        for job in jobs_here:
            if job.required:
                arrival = arrive[job.release] + job.duration
                start = max(start, arrival)
                end = max(end, arrival + job.update_seconds)
            if wire:
                links[job.link].add(job)
        for link in links.values():
            start = max(start, link.clear(place))
        start = forward.earliest_after(place, jobs_here, start)
        delay = start - seconds_before[place]
        now = place
        end = max(end, seconds_before[-1] + delay + compute_from[place + 1])
    return float(end)


def _compute_from(problem: Problem, jobs: list[_Job]) -> np.ndarray:
    """By place, the seconds of sending, unpacking and updates that no schedule can run before it."""
    # A message that moves takes a share of compute. If compute stands still then, it loses at least as much. Only if
    # messages of many lanes moved at once could their shares add up to more than all of compute. So each message counts
    # with the factor `share`.
    lanes: set[str] = set()
    largest_share = 0.0
    for wire in problem.wires.values():
        lanes.add(wire.lane)
        if wire.inside is not None:
            lanes.add(wire.inside.lane)
        largest_share = max(largest_share, wire.taken)
    share = 1 / max(largest_share * len(lanes), 1.0)

    spent = np.zeros(len(problem.seconds) + 2)
    for job in jobs:
        if job.required:
            spent[job.release] += job.overhead + job.unpack + job.lost_compute * share
    launches: dict[int, tuple[int, float]] = {}
    for dependents in problem.dependents:
        for u in dependents.updates:
            update = problem.updates[u]
            place = max(update.release, dependents.born + 1)
            spent[place] += update.seconds
            for launch, seconds in update.launches:
                last, least = launches.get(launch, (0, seconds))
                launches[launch] = max(last, place), min(least, seconds)
    # Each launch is made at least once, at the last place of its updates or later.
    for last, least in launches.values():
        spent[last] += least
    return spent[::-1].cumsum()[::-1]


class _Forward:
    """The earliest times of the places before the first gradient, with the compute that gathers take.

    A gather takes a share of compute while its bytes move and compute runs. These seconds are spent where it is waited
    for. For a place, in seconds:

        T       the time at which compute passes it
        before  the operations before it
        S       the stalls before it
        O       compute without a place, such as updates
        lost    compute that the gathers up to it would take if compute never stood still

    All lanes together take at most `share` of the time in which compute runs. So two inequalities hold:

        T >= before + lost + (1 - share) S + O        a second of a stall saves at most `share` seconds
        (1 - share) S + O >= (1 - share) T - before   gathers have taken at most share (T - S) by T

    Attributes:
        share: the most that all lanes together take of compute.
        unshared: 1 - share, at least 0.
        lost: `lost` at the last place so far.
        stalls_and_others: a lower bound of (1 - share) S + O there.
    """

    def __init__(self, problem: Problem) -> None:
        self.seconds_before = problem.seconds_before
        self.last_place = problem.births[0] - 1 if problem.births else len(problem.seconds)
        self.uses = {gather.use for gather in problem.gathers}
        lanes: set[str] = set()
        largest_share = 0.0
        for gather in problem.gathers:
            wire = problem.wires[gather.key]
            lanes.add(wire.lane)
            if wire.inside is not None:
                lanes.add(wire.inside.lane)
            largest_share = max(largest_share, wire.taken)
        self.share = largest_share * len(lanes)
        self.unshared = max(1 - self.share, 0.0)
        self.lost = 0.0
        self.stalls_and_others = 0.0

    def earliest_after(self, place: int, jobs: list[_Job], start: float) -> float:
        """The earliest time at which compute passes a place.

        Args:
            place: a place with waits. Places come in order.
            jobs: the messages that are waited for there.
            start: a lower bound of that time.
        """
        if place > self.last_place:
            return start
        for job in jobs:
            if job.required:
                # If all lanes together could take more than all of compute, only that much is counted.
                self.lost += job.lost_compute / max(self.share, 1.0)
        # If all messages with a wait here are fixed and are also sent here, then compute stands still, or does other
        # work that counts, for as long as the longest one takes.
        if place not in self.uses and all(job.release == place for job in jobs):
            self.stalls_and_others += self.unshared * max(job.duration for job in jobs)
        before = self.seconds_before[place]
        self.stalls_and_others = max(self.stalls_and_others, self.unshared * start - before)
        return max(start, before + self.lost + self.stalls_and_others)


class _LinkLoad:
    """The load of one link: the seconds that it must carry from each place on, of the messages that are needed so far.

    Attributes:
        latency: the least latency of its messages.
        required: by place, the seconds of messages that are released there or later and must be sent.
        reductions: by place, the seconds of messages that are released there or later, without gathers.
        without_room: by key and operation, the seconds of gathers after it, if no value stays live across it.
        saved_by_byte: by key, the most seconds that a byte of room saves, in descending order.
    """

    def __init__(
        self, problem: Problem, jobs: list[_Job], arrive: np.ndarray, room: np.ndarray | None
    ) -> None:
        n = len(problem.seconds)
        self.arrive = arrive
        self.room = room
        self.latency = min(job.latency for job in jobs)
        self.required = np.zeros(n + 1)
        self.reductions = np.zeros(n + 1)
        saved: dict[Hashable, float] = {}
        for job in jobs:
            if job.value_bytes and job.seconds:
                saved[job.key] = max(saved.get(job.key, 0.0), job.seconds / job.value_bytes)
        self.saved_by_byte = dict(sorted(saved.items(), key=lambda item: -item[1]))
        self.without_room = {key: np.zeros(n) for key in saved}

    def add(self, job: _Job) -> None:
        """Add a message that is needed now."""
        if job.required:
            self.required[: job.release + 1] += job.seconds
        if not job.value_bytes:
            self.reductions[: job.release + 1] += job.seconds
        elif job.seconds:
            self.without_room[job.key][job.since : job.deadline] += job.seconds

    def clear(self, place: int) -> float:
        """The earliest time at which the link has carried everything that is needed at `place`."""
        carried = self._last(self.arrive[: place + 1], self.required[: place + 1])
        if self.room is None:
            return carried
        seconds = self.reductions[1 : place + 1].copy()
        room = self.room[:place].copy()
        # The room goes first to the keys where a byte saves the most seconds: no schedule can do better.
        for key, saved_by_byte in self.saved_by_byte.items():
            gather_seconds = self.without_room[key][:place]
            saved = np.minimum(gather_seconds, room * saved_by_byte)
            sent = gather_seconds - saved
            seconds += np.where(sent > ROUNDING * gather_seconds, sent, 0.0)
            room = np.maximum(room - saved / saved_by_byte, 0.0)
        return max(carried, self._last(self.arrive[1 : place + 1], seconds))

    def _last(self, arrive: np.ndarray, seconds: np.ndarray) -> float:
        """The earliest end of messages that take `seconds`, by place, and do not begin before the times `arrive`."""
        is_used = seconds > 0
        if not is_used.any():
            return 0.0
        return float((arrive + seconds)[is_used].max(initial=0.0)) + self.latency
