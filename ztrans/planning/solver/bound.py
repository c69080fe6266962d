"""The least time that any schedule of a problem can take, whatever its buckets and its order.

A recursion over places finds the earliest time at which each operation can start: everything before it has run, and
every message that it needs has arrived. Three terms bound these arrivals, and the latest counts:

    compute   each message alone: it is sent at the first place where it may be, and takes its own time
    wire      all messages that may not be sent before some place: they take turns on their link. One
              latency counts, because lanes that share a link overlap theirs
    memory    as `wire`, from after each operation k on. It also counts the gathers that are needed after k
              and for whose values k leaves no room, neither to keep them nor to send them early

Sending, unpacking and eager updates take compute too: for a message that cannot be sent before an operation, they come
after that operation. An update may run inside any stall that its reduction ends, so it has no place; it follows its
reductions, and is added to the sum of all compute.

Until the first gradient exists, gathers are the only messages that a schedule places. What they take from compute then
adds to its stalls (see `_Forward`).

A lever may spare any gather of a value after the first, so only `memory` counts these gathers, where there is no room
to keep the value, or the part of it that a lever keeps. What it takes to copy such a part is left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np

from ...ir.dependencies import grouped
from ..buffers import Buffer, live_by_slot
from .messages import copy_seconds
from .problem import Gather, Problem, Reduction

# Bytes for which there is no room need a message with its latency. A share this small is the rounding of floats.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """The lower bound of a problem.

    Attributes:
        seconds: the bound by all three terms.
        compute, wire: the bound by the first term alone, and by the first two. They ascend up to `seconds`.
        binds: the first term with which the bound comes within a percent of `seconds`.
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
    """A message that is sent from place `release` on and has arrived by place `deadline`.

    Attributes:
        link: the wire that it crosses.
        latency: seconds before its bytes move.
        release, deadline: places.
        seconds: how long its bytes move, if nothing else uses the link.
        overhead, unpack: seconds of compute, to send it and to make values of it.
        follows: seconds of compute that no schedule runs before it has arrived.
        beside: seconds of packing, unpacking and a first level, beside compute.
        lost: seconds that it costs compute while its bytes move, whether compute runs then or stands still.
        required: whether it must be sent. A gather that repeats another need not be, if its value stays live.
        value_bytes, key: of a gather.
    """

    link: str
    latency: float
    release: int
    deadline: int
    seconds: float
    overhead: float = 0.0
    unpack: float = 0.0
    follows: float = 0.0
    beside: float = 0.0
    lost: float = 0.0
    required: bool = True
    value_bytes: int = 0
    key: Hashable = None

    @property
    def takes(self) -> float:
        """Seconds from its release until its values exist."""
        return self.overhead + self.latency + self.seconds + self.unpack + self.beside


def _job(problem: Problem, member: Gather | Reduction, release: int, deadline: int) -> _Job:
    """A member as a message of its own. A bucket saves its latency, and nothing else."""
    wire = problem.wires[member.key]
    overhead = wire.byte_overhead * member.wire
    unpack = wire.unpack * member.wire
    pack, copy = copy_seconds(wire, member)
    beside = 0.0
    if wire.beside:
        beside = pack + copy
    else:
        overhead += pack
        unpack += copy
    seconds = wire.pace * member.wire
    moving = seconds
    if wire.inside is not None:
        first = wire.inside.pace * member.wire
        beside += wire.inside.latency + first
        moving += first
    return _Job(
        wire.link,
        wire.least_latency,
        release,
        deadline,
        seconds,
        overhead=overhead,
        unpack=unpack,
        beside=beside,
        lost=wire.taken * moving,
    )


def _jobs(problem: Problem) -> list[_Job]:
    """Every message of a problem as one of its own, in order of deadline."""
    jobs = [_Job(m.link, m.latency, m.issue, m.need, m.seconds) for m in problem.fixed_messages]
    end = len(problem.seconds)
    for i, r in enumerate(problem.reductions):
        follows = sum(problem.dependents[k].seconds for k in problem.dependents_of.get(i, ()))
        deadline = min(end, r.deadline)
        job = _job(problem, r, r.born + 1, deadline)
        if r.second is not None:
            # The second reduction is sent after the first one has arrived, so its bytes move that much later.
            jobs.append(job)
            second = _job(problem, r.second, r.born + 1, deadline)
            job = replace(second, beside=second.beside + job.takes)
        jobs.append(replace(job, follows=follows))

    # Where a lever keeps a part of a value, its gather may be spared for as few bytes.
    part_bytes: dict[int, int] = {}
    for lever in problem.levers:
        if lever.sends is not None and lever.buffer is not None:
            part_bytes[lever.drops] = lever.buffer.bytes
    # Gathers that replace others are numbered last, so `i` is also the number among all gathers.
    for i, (g, idle_since, size) in enumerate(_values(problem)):
        if idle_since is not None and not size:
            continue  # a value that takes no room is kept
        size = min(size, part_bytes.get(i, size))
        # A regather may be sent once the earlier value is gone.
        release = g.release if idle_since is None else idle_since
        job = _job(problem, g, release, g.use)
        jobs.append(replace(job, required=idle_since is None, value_bytes=size, key=g.key))
    return sorted(jobs, key=lambda job: job.deadline)


def _values(problem: Problem) -> Iterator[tuple[Gather, int | None, int]]:
    """Each gather that is not sent in place of another, the place since which its value has been idle, and its bytes.

    The place is None at the first gather of a value. The bytes are the fewest of all gathers of that value so far.
    """
    # For each gather, the first one of its value. That one stands for the value.
    firsts: list[int] = []
    idle_since: dict[int, int] = {}
    fewest: dict[int, int] = {}
    for i, g in enumerate(problem.values):
        first = i if g.repeats is None else firsts[g.repeats]
        firsts.append(first)
        fewest[first] = min(fewest.get(first, g.bytes), g.bytes)
        yield g, idle_since.get(first), fewest[first]
        idle_since[first] = max(idle_since.get(first, 0), g.last + 1)


def _room(problem: Problem) -> np.ndarray:
    """By operation: the bytes that are left besides those that every schedule has live there."""
    buffers = [Buffer(r.bytes, r.born, r.born) for r in problem.reductions]
    for g, idle_since, size in _values(problem):
        # A value that is still live since an earlier use has been counted up to then.
        first = max(g.use, idle_since or 0)
        if first <= g.last:
            buffers.append(Buffer(size, first, g.last))
    used_bytes = problem.live + live_by_slot(buffers, len(problem.live))
    return np.maximum(problem.memory - used_bytes, 0.0)


def _earliest(
    problem: Problem, jobs: list[_Job], wire: bool = True, room: np.ndarray | None = None
) -> float:
    """The earliest end: by single messages, with `wire` by all that a link carries, with `room` by memory too."""
    seconds_before = np.array(problem.seconds_before)
    # By place: the earliest time at which compute reaches it. It is known up to the place `now`, which is late by
    # `delay`.
    arrive = seconds_before.copy()
    now = 0
    delay = 0.0
    links: dict[str, _LinkLoad] = {}
    if wire:
        for name, jobs_of_link in grouped((job.link, job) for job in jobs).items():
            links[name] = _LinkLoad(problem, jobs_of_link, arrive, room)
    compute_from = _compute_from(problem, jobs)
    end = seconds_before[-1] + compute_from[0]
    forward = _Forward(problem)

    for place, group in groupby(jobs, key=lambda job: job.deadline):
        jobs_here = list(group)
        arrive[now + 1 : place + 1] += delay
        start = seconds_before[place] + delay
        for job in jobs_here:
            if job.required:
                arrival = arrive[job.release] + job.takes
                start = max(start, arrival)
                end = max(end, arrival + job.follows)
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
    """By place: the seconds of sending, unpacking and updating that no schedule can do before it."""
    # A message that moves takes a share of compute. If compute stands still then, it loses at least as much. Only if
    # messages of many lanes move at once could their shares add up to more than all of compute. So each counts `share`
    # of what it takes.
    lanes: set[str] = set()
    taken = 0.0
    for wire in problem.wires.values():
        lanes.add(wire.lane)
        if wire.inside is not None:
            lanes.add(wire.inside.lane)
        taken = max(taken, wire.taken)
    share = 1 / max(taken * len(lanes), 1.0)

    spent = np.zeros(len(problem.seconds) + 2)
    for job in jobs:
        if job.required:
            spent[job.release] += job.overhead + job.unpack + job.lost * share
    launches: dict[int, tuple[int, float]] = {}
    for dependents in problem.dependents:
        for u in dependents.updates:
            update = problem.updates[u]
            place = max(update.release, dependents.born + 1)
            spent[place] += update.seconds
            for launch, seconds in update.launches:
                last, least = launches.get(launch, (0, seconds))
                launches[launch] = max(last, place), min(least, seconds)
    # Each launch is made at least once, where the last of its updates can run or later.
    for last, least in launches.values():
        spent[last] += least
    return spent[::-1].cumsum()[::-1]


class _Forward:
    """When compute passes the places before the first gradient, with what gathers take from it.

    A gather takes a share of compute while its bytes move and compute runs. These seconds pass where it is waited for.
    For a place, these are seconds:

        T       when compute passes the place
        before  the operations before it
        S       the stalls before it
        O       compute that has no place, such as updates
        taken   what the gathers up to there would take if compute never stood still

    All lanes together take at most `share` of the time in which compute runs. So two facts hold:

        T >= before + taken + (1 - share) S + O       a second of a stall spares no more than `share`
        (1 - share) S + O >= (1 - share) T - before   what was taken by T is no more than share (T - S)

    Attributes:
        unspared: 1 - share.
        taken: seconds that the gathers up to the last place would take.
        stalls_and_others: a lower bound of (1 - share) S + O up to there.
    """

    def __init__(self, problem: Problem) -> None:
        self.seconds_before = problem.seconds_before
        self.last_place = problem.births[0] - 1 if problem.births else len(problem.seconds)
        self.uses = {gather.use for gather in problem.gathers}
        lanes: set[str] = set()
        taken = 0.0
        for gather in problem.gathers:
            wire = problem.wires[gather.key]
            lanes.add(wire.lane)
            if wire.inside is not None:
                lanes.add(wire.inside.lane)
            taken = max(taken, wire.taken)
        self.share = taken * len(lanes)
        self.unspared = max(1 - self.share, 0.0)
        self.taken = 0.0
        self.stalls_and_others = 0.0

    def earliest_after(self, place: int, jobs: list[_Job], start: float) -> float:
        """The earliest time at which compute passes a place.

        Args:
            place: with messages that are needed there; places come in order.
            jobs: these messages.
            start: a time before which compute does not pass the place.
        """
        if place > self.last_place:
            return start
        for job in jobs:
            if job.required:
                # If all lanes together could take more than all of compute, a part of it is counted.
                self.taken += job.lost / max(self.share, 1.0)
        # If only fixed messages are waited for here, and each is sent here, then compute stands still, or does other
        # work that counts, for as long as the longest takes.
        if place not in self.uses and all(job.release == place for job in jobs):
            self.stalls_and_others += self.unspared * max(job.takes for job in jobs)
        before = self.seconds_before[place]
        self.stalls_and_others = max(self.stalls_and_others, self.unspared * start - before)
        return max(start, before + self.taken + self.stalls_and_others)


class _LinkLoad:
    """One link, and the seconds that it must carry from each place on, of messages that are needed by now.

    Attributes:
        latency: the least of its messages.
        required: by place, the seconds of messages that are released there or later, and must be sent.
        reductions: by place, the seconds of messages that are released there or later, except for gathers.
        without_room: by key and operation, the seconds of gathers after it, if no value stays live across it.
        saved: by key, the most seconds that a byte of room saves. The keys for which it saves most come first.
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
        self.saved = dict(sorted(saved.items(), key=lambda item: -item[1]))
        self.without_room = {key: np.zeros(n) for key in saved}

    def add(self, job: _Job) -> None:
        """Count a message that is needed by now."""
        if job.required:
            self.required[: job.release + 1] += job.seconds
        if not job.value_bytes:
            self.reductions[: job.release + 1] += job.seconds
        elif job.seconds:
            since = 0 if job.required else job.release
            self.without_room[job.key][since : job.deadline] += job.seconds

    def clear(self, place: int) -> float:
        """The earliest time at which the link has carried everything that is needed at `place`."""
        carried = self._last(self.arrive[: place + 1], self.required[: place + 1])
        if self.room is None:
            return carried
        seconds = self.reductions[1 : place + 1].copy()
        room = self.room[:place].copy()
        # The room is spent first where a byte of it saves the most seconds, as no schedule can do better.
        for key, saved in self.saved.items():
            gathers = self.without_room[key][:place]
            spared = np.minimum(gathers, room * saved)
            sent = gathers - spared
            seconds += np.where(sent > ROUNDING * gathers, sent, 0.0)
            room = np.maximum(room - spared / saved, 0.0)
        return max(carried, self._last(self.arrive[1 : place + 1], seconds))

    def _last(self, arrive: np.ndarray, seconds: np.ndarray) -> float:
        """When the link has carried messages of so many seconds, by place, none of which begins before these times."""
        is_used = seconds > 0
        if not is_used.any():
            return 0.0
        return float((arrive + seconds)[is_used].max(initial=0.0)) + self.latency
