"""lower_bound: the least time that any schedule of a problem can take, whatever its buckets and its order.

A recursion over places finds the earliest time at which each operation can start: everything before it has run, and
everything that it needs has arrived. The latter takes a link at least as long as

    compute   any one of those messages, from the place at which it may be sent
    wire      all of those that may be sent only from some place on, one after the other and with one
              latency (lanes that share a link overlap their latencies, and their bytes take turns)
    memory    the same, from after an operation k on, with all gathers for which k has no room: besides
              the values that k itself needs, only so many bytes can be live, sent early or kept

Each line includes those above it. Sending, unpacking and eager updates take compute too: for a message that cannot be
sent before an operation, they come after that operation. An update may run inside any stall that its reduction ends,
so it has no place; it follows its reductions, and counts to the sum of all compute.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from ...ir.relations import grouped
from .problem import Gather, Problem, Reduction
from .sending import copying
from .slots import summed

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
    jobs = _jobs(problem)
    compute = _earliest(problem, jobs, wire=False)
    wire = _earliest(problem, jobs)
    memory = _earliest(problem, jobs, room=_room(problem))
    binds: Literal["compute", "wire", "memory"]
    binds = "compute" if compute > 0.99 * memory else "wire" if wire > 0.99 * memory else "memory"
    return Bound(memory, compute, wire, memory, binds)


class _Job(NamedTuple):
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
    first: bool = True
    gathered: int = 0  # the bytes that a gather holds; other messages have none
    key: Hashable = None  # of a gather

    @property
    def takes(self) -> float:
        """Seconds from its release until its values exist."""
        return self.host + self.latency + self.seconds + self.unpack


def _jobs(problem: Problem) -> list[_Job]:
    """In order of need."""
    n, jobs = (
        len(problem.seconds),
        [_Job(m.link, m.latency, m.issue, m.need, m.seconds) for m in problem.others],
    )

    def job(x: Gather | Reduction, release: int, need: int, **more: Any) -> _Job:
        wire = problem.wires[x.key]
        pack, copy = copying(wire, x)
        host, unpack = wire.host * x.wire + pack, wire.unpack * x.wire + copy
        return _Job(
            wire.link, wire.latency, release, need, wire.pace * x.wire, host, unpack, **more
        )

    for i, r in enumerate(problem.reductions):
        follows = sum(problem.updates[u].seconds for u in problem.updated.get(i, ()))
        jobs.append(job(r, r.born + 1, min(n, r.need), follows=follows))
    for g, after, held in _values(problem):
        if after is None or held:  # a value that takes no room is kept
            release = g.release if after is None else after
            jobs.append(job(g, release, g.use, first=after is None, gathered=held, key=g.key))
    return sorted(jobs, key=lambda job: job.need)


def _values(problem: Problem) -> Iterator[tuple[Gather, int | None, int]]:
    """Every gather, the place after the last use of its value before, and the least that holding it takes."""
    first = problem.keepers(problem.repeats)
    after: dict[int, int] = {}
    held: dict[int, int] = {}
    for i, g in enumerate(problem.gathers):
        v = first.get(i, i)
        held[v] = min(held.get(v, g.held), g.held)
        yield g, after.get(v), held[v]
        after[v] = max(after.get(v, 0), g.last + 1)


def _room(problem: Problem) -> np.ndarray:
    """By operation: the bytes that are left besides those that every schedule has live there."""
    spans = [(max(g.use, after or 0), g.last + 1, held) for g, after, held in _values(problem)]
    spans += [(r.born, r.born + 1, r.held) for r in problem.reductions]
    used = problem.live + summed((span for span in spans if span[0] < span[1]), len(problem.live))
    return np.maximum(problem.memory - used, 0.0)


def _earliest(
    problem: Problem, jobs: list[_Job], wire: bool = True, room: np.ndarray | None = None
) -> float:
    """The earliest end: by single messages, with `wire` by all that a link carries, with `room` by memory too."""
    before = np.array(problem.before)
    arrive, delay, at = before.copy(), 0.0, 0
    by_link = grouped((job.link, job) for job in jobs) if wire else {}
    links = {name: _Link(problem, carried, arrive, room) for name, carried in by_link.items()}
    left = _left(problem, jobs)
    end = before[-1] + left[0]
    for need, group in groupby(jobs, key=lambda job: job.need):
        arrive[at + 1 : need + 1] += delay
        start = before[need] + delay
        for job in group:
            if job.first:
                arrival = arrive[job.release] + job.takes
                start, end = max(start, arrival), max(end, arrival + job.follows)
            if wire:
                links[job.link].add(job)
        delay, at = (
            max([start, *(link.clear(need) for link in links.values())]) - before[need],
            need,
        )
        end = max(end, before[-1] + delay + left[need + 1])
    return float(end)


def _left(problem: Problem, jobs: list[_Job]) -> np.ndarray:
    """By place: the compute of sending, unpacking and updating that no schedule can do before it."""
    spent = np.zeros(len(problem.seconds) + 2)
    for job in jobs:
        if job.first:
            spent[job.release] += job.host + job.unpack
    for update in problem.updates:
        spent[max([update.release, *(problem.reductions[r].born + 1 for r in update.after)])] += (
            update.seconds
        )
    return spent[::-1].cumsum()[::-1]


class _Link:
    """One link, and the seconds that it must carry from each place on, of messages that are needed by now."""

    def __init__(
        self, problem: Problem, jobs: list[_Job], arrive: np.ndarray, room: np.ndarray | None
    ) -> None:
        self.arrive, self.room, self.latency = arrive, room, min(job.latency for job in jobs)
        n = len(problem.seconds)
        self.sent, self.reduced = np.zeros(n + 1), np.zeros(n + 1)
        spares: dict[
            Hashable, float
        ] = {}  # by key: the seconds that a byte of room spares, at most
        for job in jobs:
            if job.gathered and job.seconds:
                spares[job.key] = max(spares.get(job.key, 0.0), job.seconds / job.gathered)
        self.spares = dict(sorted(spares.items(), key=lambda item: -item[1]))
        self.later = {
            key: np.zeros(n) for key in spares
        }  # by operation: gathers after it, without any room

    def add(self, job: _Job) -> None:
        """Count a message that is needed by now."""
        if job.first:
            self.sent[: job.release + 1] += job.seconds
        if not job.gathered:
            self.reduced[: job.release + 1] += job.seconds
        elif job.seconds:
            self.later[job.key][0 if job.first else job.release : job.need] += job.seconds

    def clear(self, place: int) -> float:
        """The earliest time at which the link has carried everything that is needed at `place`."""
        carried = self._last(self.arrive[: place + 1], self.sent[: place + 1])
        if self.room is not None:
            seconds, room = self.reduced[1 : place + 1].copy(), self.room[:place].copy()
            for key, spares in self.spares.items():
                later = self.later[key][:place]
                spared = np.minimum(later, room * spares)
                left = later - spared
                seconds += np.where(left > ROUNDING * later, left, 0.0)
                room = np.maximum(room - spared / spares, 0.0)
            carried = max(carried, self._last(self.arrive[1 : place + 1], seconds))
        return carried

    def _last(self, arrive: np.ndarray, seconds: np.ndarray) -> float:
        some = seconds > 0
        return (
            float((arrive + seconds)[some].max(initial=0.0)) + self.latency if some.any() else 0.0
        )
