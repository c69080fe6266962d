"""bound: the least time that any schedule of a problem can take, whatever its buckets and its order.

A recursion over places finds the earliest time at which each operation can start: everything before it has run, and
everything that it needs has arrived. For these messages a link needs at least the largest of three times:

    compute   that of one message, from the place at which it may be sent
    wire      that of all messages which may be sent only from some place on, one after the other and
              with one latency (lanes that share a link overlap their latencies, and their bytes take
              turns)
    memory    the same, from after an operation k on, and also with the gathers for which k has no
              room: besides the values that k needs, only so many bytes can be live, sent early or kept

Sending, unpacking and eager updates take compute too: for a message that cannot be
sent before an operation, they come after that operation. An update may run inside any stall that its reduction ends,
so it has no place; it follows its reductions, and is added to the sum of all compute.

What levers save is taken off for all of them at once, and what they cost is left out. The exception is a lever that
keeps a value for a later gather, or a part of it: the line `memory` counts the bytes that it takes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np

from ...ir.relations import grouped
from ..buffers import Buffer, live_by_slot
from .messages import copy_seconds
from .problem import Gather, Lever, Problem, Reduction

# Bytes for which there is no room need a message with its latency. A share this small is the rounding of floats.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Bound:
    """The lower bound in seconds, and what it is with the first terms alone: `compute`, `wire` and `memory` ascend.

    `binds` names the first of them that comes within a percent of the bound.
    """

    seconds: float
    compute: float
    wire: float
    memory: float
    binds: Literal["compute", "wire", "memory"]


def bound(problem: Problem) -> Bound:
    """Compute the lower bound of a problem.

    >>> from ztrans.planning.solver.problem import Gather, Wire
    >>> wires = {"w": Wire(lane="all", link="all", latency=1.0, pace=1.0)}
    >>> bound(Problem((1.0, 1.0), (0, 0), (), (Gather("w", 2, 2, 0, 0), Gather("w", 6, 6, 1, 1)), (), wires))
    Bound(seconds=10.0, compute=8.0, wire=10.0, memory=10.0, binds='wire')
    """
    problem = _with_all_savings(problem)
    jobs = _jobs(problem)
    compute = _earliest(problem, jobs, wire=False)
    wire = _earliest(problem, jobs)
    memory = _earliest(problem, jobs, room=_room(problem))
    binds: Literal["compute", "wire", "memory"]
    if compute > 0.99 * memory:
        binds = "compute"
    elif wire > 0.99 * memory:
        binds = "wire"
    else:
        binds = "memory"
    return Bound(memory, compute, wire, memory, binds)


def _with_all_savings(problem: Problem) -> Problem:
    """The problem without the seconds and bytes that any of its levers saves."""
    seconds = list(problem.seconds)
    saved_buffers = []
    for lever in problem.levers:
        saved_buffers += [buffer for buffer in lever.buffers if buffer.bytes < 0]
        for place, more in lever.seconds:
            seconds[place] += min(more, 0.0)
    if not saved_buffers and seconds == list(problem.seconds):
        return problem
    saved_bytes = live_by_slot(saved_buffers, 2 * len(seconds) + 1)[1::2]
    live = problem.live + saved_bytes
    return replace(problem, seconds=tuple(seconds), live=tuple(live.tolist()))


@dataclass(frozen=True)
class _Job:
    """A message that is sent from place `release` on and has arrived by place `need`.

    A gather that is not the `first` of its value is not needed if the value is live at each place in between.
    """

    link: str
    latency: float
    release: int
    need: int
    seconds: float
    host: float = 0.0  # of compute, to send it
    unpack: float = 0.0  # of compute, to make values of it
    follows: float = 0.0  # of compute, which no schedule runs before it has arrived
    beside: float = 0.0  # of packing, unpacking and a first level, beside compute
    lost: float = 0.0  # of compute that runs or stands still while its bytes move
    first: bool = True
    value_bytes: int = 0  # of a gather
    key: Hashable = None  # of a gather

    @property
    def takes(self) -> float:
        """Seconds from its release until its values exist."""
        return self.host + self.latency + self.seconds + self.unpack + self.beside


def _job(problem: Problem, member: Gather | Reduction, release: int, need: int) -> _Job:
    """A member as a message of its own. A bucket saves its latency, and nothing else."""
    wire = problem.wires[member.key]
    host = wire.byte_overhead * member.wire
    unpack = wire.unpack * member.wire
    pack, copy = copy_seconds(wire, member)
    beside = 0.0
    if wire.beside:
        beside = pack + copy
    else:
        host += pack
        unpack += copy
    seconds = wire.pace * member.wire
    moving = seconds
    if wire.inside is not None:
        first = wire.inside.pace * member.wire
        beside += wire.inside.latency + first
        moving += first
    lost = wire.taken * moving
    return _Job(
        wire.link, wire.least_latency, release, need, seconds, host, unpack, 0.0, beside, lost
    )


def _jobs(problem: Problem) -> list[_Job]:
    """In order of need."""
    jobs = [_Job(m.link, m.latency, m.issue, m.need, m.seconds) for m in problem.fixed_messages]
    end = len(problem.seconds)
    for i, r in enumerate(problem.reductions):
        follows = sum(problem.needs[k].seconds for k in problem.needs_with.get(i, ()))
        job = _job(problem, r, r.born + 1, min(end, r.need))
        if r.again is not None:
            jobs.append(job)
            second = _job(problem, r.again, r.born + 1, min(end, r.need))
            job = replace(second, beside=second.beside + job.takes)
        jobs.append(replace(job, follows=follows))
    dropped_by = grouped((i, lever) for lever in problem.levers for i in lever.dropped)
    for i, (g, idle_since, size) in enumerate(_values(problem)):
        if idle_since is not None and not size:
            continue  # a value that takes no room is kept
        levers = dropped_by.get(i, ())
        size = min([size, *_parts(levers)])
        # A regather may be sent once the earlier value is gone.
        if _must_send(g.use, idle_since, size, levers):
            job = _job(problem, g, g.release if idle_since is None else idle_since, g.use)
            jobs.append(replace(job, first=idle_since is None, value_bytes=size, key=g.key))
    return sorted(jobs, key=lambda job: job.need)


def _must_send(use: int, idle_since: int | None, size: int, levers: Sequence[Lever]) -> bool:
    """Whether a gather is sent with every lever, except with those that keep its value while it is idle."""
    if idle_since is None:
        return not levers
    if idle_since >= use:
        return True
    return all(_keeps(lever, size, 2 * idle_since + 1, 2 * use - 1) for lever in levers)


def _parts(levers: Sequence[Lever]) -> Iterator[int]:
    """The bytes of the part of its value that each rank keeps, for each lever that sends a gather of such parts."""
    for lever in levers:
        if lever.sent:
            yield max((buffer.bytes for buffer in lever.buffers), default=0)


def _keeps(lever: Lever, size: int, first: int, last: int) -> bool:
    """Whether a lever counts so many bytes as live from one slot to another."""
    spans = [buffer for buffer in lever.buffers if buffer.bytes >= size]
    return any(buffer.first <= first and buffer.last >= last for buffer in spans)


def _values(problem: Problem) -> Iterator[tuple[Gather, int | None, int]]:
    """Every gather, the place after the last use of its value before, and the least bytes that its value takes."""
    first: list[int] = []  # for each gather, the first one of its value
    idle_since: dict[int, int] = {}
    least: dict[int, int] = {}
    for i, g in enumerate(problem.values):
        v = i if g.repeats is None else first[g.repeats]
        first.append(v)
        least[v] = min(least.get(v, g.bytes), g.bytes)
        yield g, idle_since.get(v), least[v]
        idle_since[v] = max(idle_since.get(v, 0), g.last + 1)


def _room(problem: Problem) -> np.ndarray:
    """By operation: the bytes that are left besides those that every schedule has live there."""
    buffers = []
    for g, idle_since, size in _values(problem):
        buffers.append(Buffer(size, max(g.use, idle_since or 0), g.last))
    buffers += [Buffer(r.bytes, r.born, r.born) for r in problem.reductions]
    some = [buffer for buffer in buffers if buffer.first <= buffer.last]
    used_bytes = problem.live + live_by_slot(some, len(problem.live))
    return np.maximum(problem.memory - used_bytes, 0.0)


def _earliest(
    problem: Problem, jobs: list[_Job], wire: bool = True, room: np.ndarray | None = None
) -> float:
    """The earliest end: by single messages, with `wire` by all that a link carries, with `room` by memory too."""
    seconds_before = np.array(problem.seconds_before)
    arrive = seconds_before.copy()  # by place: the earliest time at which compute reaches it
    delay = 0.0  # of the last place that was considered, `now`
    now = 0
    by_link = grouped((job.link, job) for job in jobs) if wire else {}
    links = {name: _Link(problem, carried, arrive, room) for name, carried in by_link.items()}
    seconds_left = _seconds_left(problem, jobs)
    end = seconds_before[-1] + seconds_left[0]
    for need, group in groupby(jobs, key=lambda job: job.need):
        arrive[now + 1 : need + 1] += delay
        start = seconds_before[need] + delay
        for job in group:
            if job.first:
                arrival = arrive[job.release] + job.takes
                start = max(start, arrival)
                end = max(end, arrival + job.follows)
            if wire:
                links[job.link].add(job)
        delay = max([start, *(link.clear(need) for link in links.values())]) - seconds_before[need]
        now = need
        end = max(end, seconds_before[-1] + delay + seconds_left[need + 1])
    return float(end)


def _seconds_left(problem: Problem, jobs: list[_Job]) -> np.ndarray:
    """By place: the compute of sending, unpacking and updating that no schedule can do before it."""
    spent = np.zeros(len(problem.seconds) + 2)
    # While the bytes of a message move, it takes a part of compute, or compute stands still, which is no less: unless
    # messages of so many lanes move then that together they take all of it.
    lanes = {wire.lane for wire in problem.wires.values()}
    lanes.update(wire.inside.lane for wire in problem.wires.values() if wire.inside is not None)
    taken = max((wire.taken for wire in problem.wires.values()), default=0.0)
    share = 1 / max(taken * len(lanes), 1.0)
    for job in jobs:
        if job.first:
            spent[job.release] += job.host + job.unpack + job.lost * share
    for need in problem.needs:
        for u in need.updates:
            update = problem.updates[u]
            spent[max(update.release, need.born + 1)] += update.seconds
    return spent[::-1].cumsum()[::-1]


class _Link:
    """One link, and the seconds that it must carry from each place on, of messages that are needed by now.

    Attributes:
        first: seconds of all messages that no value in memory replaces.
        reductions: seconds of all messages that are no gathers.
        without_room: by key and operation, the seconds of gathers after it, if no value stays live across it.
        saved: by key, the seconds that a byte of room saves, at most.
    """

    def __init__(
        self, problem: Problem, jobs: list[_Job], arrive: np.ndarray, room: np.ndarray | None
    ) -> None:
        n = len(problem.seconds)
        self.arrive = arrive
        self.room = room
        self.latency = min(job.latency for job in jobs)
        self.first = np.zeros(n + 1)
        self.reductions = np.zeros(n + 1)
        saved: dict[Hashable, float] = {}
        for job in jobs:
            if job.value_bytes and job.seconds:
                saved[job.key] = max(saved.get(job.key, 0.0), job.seconds / job.value_bytes)
        self.saved = dict(sorted(saved.items(), key=lambda item: -item[1]))
        self.without_room = {key: np.zeros(n) for key in saved}

    def add(self, job: _Job) -> None:
        """Count a message that is needed by now."""
        if job.first:
            self.first[: job.release + 1] += job.seconds
        if not job.value_bytes:
            self.reductions[: job.release + 1] += job.seconds
        elif job.seconds:
            since = 0 if job.first else job.release
            self.without_room[job.key][since : job.need] += job.seconds

    def clear(self, place: int) -> float:
        """The earliest time at which the link has carried everything that is needed at `place`."""
        carried = self._last(self.arrive[: place + 1], self.first[: place + 1])
        if self.room is None:
            return carried
        seconds = self.reductions[1 : place + 1].copy()
        room = self.room[:place].copy()
        # The room is spent first where a byte of it saves the most seconds, as no schedule can do better.
        for key, saved in self.saved.items():
            gathers = self.without_room[key][:place]
            spared = np.minimum(gathers, room * saved)
            not_kept = gathers - spared
            seconds += np.where(not_kept > ROUNDING * gathers, not_kept, 0.0)
            room = np.maximum(room - spared / saved, 0.0)
        return max(carried, self._last(self.arrive[1 : place + 1], seconds))

    def _last(self, arrive: np.ndarray, seconds: np.ndarray) -> float:
        some = seconds > 0
        if not some.any():
            return 0.0
        return float((arrive + seconds)[some].max(initial=0.0)) + self.latency
