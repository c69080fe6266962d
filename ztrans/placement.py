"""placement: where given buckets start and are waited for, so that they fit and as little as possible waits.

The program is played, and what happens decides. What is live in every schedule with these buckets is
taken from the budget first: gathers from their use on, gradients until they are sent. Two things
share what is left. A reduction holds its gradients until it has come, or until they no longer fit,
and is waited for there. The next gather of each lane starts once it is due and fits until its use.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from .play import Message, Network
from .problem import Bucket, Problem, Schedule, Wire

Members = tuple[int, ...]
_COME, _GATHER, _REDUCE, _WAIT = range(4)  # what happens at one place, in this order
_NEVER = float("inf")
_ENDLESS = 2**52  # bytes: more than there are, and exact as a float


class Choice(NamedTuple):
    """Buckets, by index; what is dropped; when a gather is due: `lead` times its transfer before its use.
    It starts then if, as long as there may be gradients, `reserve` bytes are left for them."""

    gathers: tuple[Members, ...]
    reductions: tuple[Members, ...]
    dropped: frozenset[int]
    lead: float = 1.0
    reserve: float = 0.0


class Placed(NamedTuple):
    """A choice, played: its buckets in order of use and of birth, and the places found for them."""

    seconds: float
    peak: int
    choice: Choice
    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]

    @property
    def schedule(self) -> Schedule:
        starts = sorted(self.gathers, key=lambda bucket: bucket.start)
        return Schedule(tuple(starts), self.reductions, self.choice.dropped)


class _Load(NamedTuple):
    """A bucket as a message: a gather's `place` is its use, and `bound` its release; a reduction's `place` is
    its start, and `bound` its need. `change` is what it adds to the memory of its members alone."""

    members: Members
    place: int
    bound: int
    held: int
    size: int  # with what is live in flight
    wire: Wire
    seconds: float
    change: tuple[tuple[int, ...], tuple[int, ...]]


class Placement:
    """Places buckets of one problem, many times."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.before = [*accumulate(problem.seconds, initial=0.0)]
        self.memory = min(problem.memory, _ENDLESS)
        self.matmuls = [*accumulate(problem.matmul, initial=0)]
        self.starts = sorted({r.born + 1 for r in problem.reductions})
        self._gathers: dict[Members, _Load | None] = {}
        self._reductions: dict[Members, _Load | None] = {}
        self._alone: dict[frozenset[int], np.ndarray] = {}

    def gather(self, members: Members) -> _Load | None:
        """A bucket of gathers; None: one is released after another is used."""
        if members not in self._gathers:
            things = [self.problem.gathers[i] for i in members]
            use, release = min(g.use for g in things), max(g.release for g in things)
            held = sum(g.held for g in things)
            wire = self.problem.wires[things[0].key]
            change = ((use, *(g.use for g in things)), (held, *(-g.held for g in things)))
            load = _Load(members, use, release, held, held, wire, wire.pace * sum(g.wire for g in things), change)
            self._gathers[members] = load if release <= use else None
        return self._gathers[members]

    def reduction(self, members: Members) -> _Load | None:
        """A bucket of reductions; None: one is needed before another is born."""
        if members not in self._reductions:
            things, n = [self.problem.reductions[i] for i in members], len(self.problem.seconds)
            start, need = max(r.born for r in things) + 1, min(n if r.need is None else r.need for r in things)
            held, flight = sum(r.held for r in things), sum(r.flight for r in things)
            wire = self.problem.wires[things[0].key]
            change = ((start, *(r.born + 1 for r in things)), (-held, *(r.held for r in things)))
            load = _Load(
                members, start, need, held, held + flight, wire, wire.pace * sum(r.wire for r in things), change
            )
            self._reductions[members] = load if start <= need else None
        return self._reductions[members]

    def alone(self, dropped: frozenset[int]) -> np.ndarray:
        """By operation: what is live when every message is alone, and starts and is waited for at one place."""
        if dropped not in self._alone:
            p, change = self.problem, np.zeros(len(self.problem.seconds) + 1)
            last, keeper = [g.last for g in p.gathers], {}
            for i in sorted(dropped):
                kept = keeper[i] = keeper.get(p.gathers[i].again, p.gathers[i].again)
                last[kept] = max(last[kept], p.gathers[i].last)
            for i, g in enumerate(p.gathers):
                if i not in dropped:
                    change[g.use] += g.held
                    change[last[i] + 1] -= g.held
            for r in p.reductions:
                change[r.born] += r.held
                change[r.born + 1] -= r.held
            self._alone[dropped] = np.array(p.live, dtype=float) + change.cumsum()[:-1]
        return self._alone[dropped]

    def __call__(self, choice: Choice, limit: float = _NEVER) -> Placed | None:
        """Play a choice; None if it does not fit, or is seen to take longer than `limit`."""
        gathers = [self.gather(members) for members in choice.gathers]
        reductions = [self.reduction(members) for members in choice.reductions]
        if None in gathers or None in reductions:
            return None
        gathers.sort(key=lambda load: load.place)
        reductions.sort(key=lambda load: load.place)
        if not self._often(reductions):
            return None
        changes = [load.change for load in (*gathers, *reductions) if len(load.members) > 1]
        places = [k for where, _ in changes for k in where]
        bytes_ = [b for _, what in changes for b in what]
        n = len(self.problem.seconds)
        used = self.alone(choice.dropped) + np.bincount(places, bytes_, n + 1).cumsum()[:n]
        room = self.memory - used
        if room.min(initial=0) < 0:
            return None
        seconds = _Play(self, choice, gathers, reductions, room, limit)
        return seconds.placed()

    def _often(self, reductions: Sequence[_Load]) -> bool:
        """Whether reductions start as often as they must."""
        most = self.problem.max_between
        if most is None:
            return True
        begin = sorted({load.place for load in reductions})
        return all(
            self.matmuls[b] - self.matmuls[a] <= most or bisect_left(self.starts, b) - bisect_right(self.starts, a) == 0
            for a, b in pairwise(begin)
        )


class _TooLong(Exception):
    """A choice takes longer than another."""


class _Play:
    """One choice, played."""

    def __init__(
        self,
        placement: Placement,
        choice: Choice,
        gathers: list[_Load],
        reductions: list[_Load],
        room: np.ndarray,
        limit: float,
    ) -> None:
        self.before, self.limits = placement.before, placement.problem
        self.choice, self.gathers, self.reductions, self.room, self.limit = choice, gathers, reductions, room, limit
        self.memory = placement.memory
        self.gradients = placement.starts[0] if placement.starts else len(self.before)
        self.start = [0] * len(gathers)
        self.wait = [-1] * len(reductions)  # its place, once that is sure
        self.until = [0] * len(reductions)  # the place up to which there is room for its gradients
        self.sent: dict[int, int] = {}  # numbers of messages: of gather g, and of reduction r at ~r
        self.eta = [0.0] * len(reductions)
        self.ahead: list[int] = []  # gathers on their way
        self.behind: list[int] = []  # reductions on their way
        self.lanes: dict[str, deque[int]] = {}  # gathers to come
        for g, load in enumerate(gathers):
            self.lanes.setdefault(load.wire.lane, deque()).append(g)
        self.due = self._due()
        self.tried = {lane: max(self.due[queue[0]], gathers[queue[0]].bound) for lane, queue in self.lanes.items()}
        self.work: dict[str, float] = {}
        for load in (*gathers, *reductions):
            self.work[load.wire.lane] = self.work.get(load.wire.lane, 0.0) + load.wire.latency + load.seconds
        self.clear: dict[str, float] = {}  # when a lane has sent what is queued, if others let it
        self.last: dict[str, int] = {}
        self.network, self.clock, self.at = Network(), 0.0, 0
        self.agenda: list[tuple[int, int, int | str]] = [
            *((load.place, _WAIT, g) for g, load in enumerate(gathers)),
            *((load.place, _REDUCE, r) for r, load in enumerate(reductions)),
            *((place, _GATHER, lane) for lane, place in self.tried.items()),
        ]
        heapq.heapify(self.agenda)

    def _due(self) -> list[int]:
        """The last place at which each gather, and those of its lane after it, come in time if nothing else waits."""
        due = [0] * len(self.gathers)
        for queue in self.lanes.values():
            latest = _NEVER
            for g in reversed(queue):
                load = self.gathers[g]
                latest = min(self.before[load.place], latest) - self.choice.lead * (load.wire.latency + load.seconds)
                due[g] = min(max(0, bisect_right(self.before, latest) - 1), load.place)
        return due

    def placed(self) -> Placed | None:
        happens = (self._come, self._gather, self._reduce, self._wait)
        try:
            if any(work > self.limit for work in self.work.values()):
                return None
            while self.agenda:
                place, kind, which = heapq.heappop(self.agenda)
                self.clock += self.before[place] - self.before[self.at]
                self.at = place
                self.network.run(self.clock)
                happens[kind](which, place)
        except _TooLong:
            return None
        end = self.clock + self.before[-1] - self.before[self.at]
        return Placed(
            end,
            int(self.memory - self.room.min(initial=self.memory)),
            self.choice,
            tuple(Bucket(load.members, start, load.place) for load, start in zip(self.gathers, self.start)),
            tuple(Bucket(load.members, load.place, wait) for load, wait in zip(self.reductions, self.wait)),
        )

    def _send(self, load: _Load, place: int) -> int:
        wire = load.wire
        lane = wire.lane
        if lane in self.last:
            idle = self.clock - self.network.end[self.last[lane]]
        else:
            idle = self.clock
        if idle > 0:
            self.work[lane] += idle
            if self.work[lane] > self.limit:
                raise _TooLong
        self.clear[lane] = max(self.clear.get(lane, 0.0), self.clock) + wire.latency + load.seconds
        message = Message(place, place, lane, wire.link, wire.latency, load.seconds)
        self.last[lane] = self.network.issue(message, self.clock)
        return self.last[lane]

    def _gather(self, lane: str, place: int) -> None:
        """Start the gathers of a lane whose time has come."""
        queue = self.lanes[lane]
        while queue and self.tried[lane] == place:
            g = queue[0]
            load = self.gathers[g]
            start = self._earliest(g, place)
            if start > place:
                self.tried[lane] = start
                heapq.heappush(self.agenda, (start, _GATHER, lane))
                return
            queue.popleft()
            self.start[g] = place
            self.room[place : load.place] -= load.held
            self.sent[g] = self._send(load, place)
            self.ahead.append(g)

    def _earliest(self, g: int, place: int) -> int:
        load = self.gathers[g]
        use = load.place
        start = min(max(place, self.due[g], load.bound), use)
        most = self.limits.gathers_in_flight
        if most is not None and start < use:
            if load.held > most:
                return use
            others = [other for other in self.ahead if self.gathers[other].place > start]
            if sum(self.gathers[other].held for other in others) + load.held > most:
                return min(use, *(self.gathers[other].place for other in others))
        if start < use:
            full = self.room[start:use] < load.held + (self.choice.reserve if use >= self.gradients else 0.0)
            if full.any():
                start = use - int(full[::-1].argmax())
        return start

    def _reduce(self, r: int, place: int) -> None:
        """Start a reduction; wait for others first, if too many bytes are on their way."""
        load, most = self.reductions[r], self.limits.reductions_in_flight
        while most is not None and self.behind:
            if sum(self.reductions[other].held for other in self.behind) + load.held <= most:
                break
            self._settle(self.behind[0], place, stall=True)
        self.sent[~r] = self._send(load, place)
        self.eta[r] = self.clear[load.wire.lane]
        self.behind.append(r)
        self.until[r] = place
        if most is None or load.held <= most:
            self._hold(r, place)
        if self.until[r] == place:
            self._settle(r, place, stall=True)

    def _hold(self, r: int, place: int) -> None:
        """Make room for the gradients of a reduction until it should have come, or as long as there is any."""
        load = self.reductions[r]
        end = bisect_left(self.before, self.eta[r] - self.clock + self.before[place], place)
        end = min(max(end, place), load.bound)
        if end > place:
            full = self.room[place:end] < load.size
            if full.any():
                end = place + int(full.argmax())
            self.room[place:end] -= load.size
            self.until[r] = end
            if end > place:
                heapq.heappush(self.agenda, (end, _COME, r))

    def _settle(self, r: int, place: int, stall: bool) -> None:
        """Decide where a reduction is waited for."""
        self.behind.remove(r)
        self.wait[r] = place
        if self.until[r] > place:
            self.room[place : self.until[r]] += self.reductions[r].size
            for lane, queue in self.lanes.items():
                if queue and self.tried[lane] > place:
                    self.tried[lane] = place + stall
                    heapq.heappush(self.agenda, (self.tried[lane], _GATHER, lane))
        if stall:
            heapq.heappush(self.agenda, (place, _WAIT, ~r))

    def _come(self, r: int, place: int) -> None:
        """See whether a reduction has come by now."""
        if self.wait[r] >= 0:
            return
        if self.network.end[self.sent[~r]] <= self.clock:
            self._settle(r, place, stall=False)
        elif self.until[r] == place:
            self.eta[r] = max(self.eta[r], self.clock)
            if place < self.reductions[r].bound:
                self._hold(r, place)
            if self.until[r] == place:
                self._settle(r, place, stall=True)

    def _wait(self, which: int, place: int) -> None:
        """Stand still until a message has come."""
        if which >= 0:
            self.ahead.remove(which)
        end = self.network.come(self.sent[which])
        if end > self.clock:
            self.clock = end
            if self.clock + self.before[-1] - self.before[place] > self.limit:
                raise _TooLong
            for r in self.behind:
                if self.network.end[self.sent[~r]] <= end and self.until[r] > place:
                    heapq.heappush(self.agenda, (place + 1, _COME, r))
