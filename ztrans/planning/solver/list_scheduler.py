"""list_scheduler: where given buckets start and are waited for, so that they fit and as little as possible waits.

The program is played, and what happens decides. What is live in every schedule with these buckets is
taken from the budget first: gathers from their use on, gradients until they are sent. Two things
share what is left. A reduction holds its gradients until it has come, or until they no longer fit,
and is waited for there. The next gather of each lane starts once it is due and fits until its use.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from typing import NamedTuple

import numpy as np

from ..event_simulator import Message, Network
from .loads import Choice, Load, Loads
from .problem import Bucket, Problem, Schedule
from .updates import Updates

_COME, _ISSUE, _GATHER, _REDUCE, _WAIT = range(5)  # what happens at one place, in this order
_NEVER = float("inf")


class Placed(NamedTuple):
    """A choice, played: its buckets in order of issue, and the places found for them."""

    seconds: float
    peak: int
    choice: Choice
    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]

    @property
    def schedule(self) -> Schedule:
        starts = sorted(self.gathers, key=lambda bucket: bucket.start)
        return Schedule(tuple(starts), self.reductions, self.choice.dropped)


class Placement:
    """Places buckets of one problem, many times."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.loads = problem, Loads(problem)

    def __call__(self, choice: Choice, limit: float = _NEVER) -> Placed | None:
        """Play a choice; None if it does not fit, or is seen to take longer than `limit`."""
        loads = self.loads.of(choice)
        if loads is None:
            return None
        try:
            return _Play(self, choice, *loads, limit).placed()
        except _TooLong:
            return None


class _TooLong(Exception):
    """A choice takes longer than another."""


class _Play:
    """One choice, played: what is on its way, what has been decided, and the room that is left."""

    def __init__(
        self,
        placement: Placement,
        choice: Choice,
        gathers: list[Load],
        reductions: list[Load],
        room: np.ndarray,
        limit: float,
    ) -> None:
        self.problem, self.memory = placement.problem, placement.loads.memory
        self.before, self.expected = self.problem.before, self.problem.clock
        self.choice, self.gathers, self.reductions, self.room, self.limit = choice, gathers, reductions, room, limit
        self.gradients = min((r.born for r in self.problem.reductions), default=len(self.before))
        self.reserve = choice.reserve * max((load.size for load in reductions), default=0)
        self.network, self.clock, self.at = Network(), 0.0, 0
        # Numbers of messages: of gather g at g, of those that no schedule places after them, of reduction r at ~r.
        self.sent: dict[int, int] = {}
        self.updates = Updates(self.problem)
        self.ahead: list[int] = []  # gathers on their way
        self.behind: list[int] = []  # reductions on their way
        self.start = [0] * len(gathers)
        self.wait = [-1] * len(reductions)  # its place, once that is sure
        self.until = [0] * len(reductions)  # the place up to which there is room for its gradients
        self.eta = [0.0] * len(reductions)
        self.last: dict[str, int] = {}  # by lane: the last message
        self.clear: dict[str, float] = {}  # and when that has come, if no other lane is in its way
        self.work: dict[str, float] = {}  # and the seconds of its messages, with those in which it was idle
        for load in (*gathers, *reductions):
            self.work[load.wire.lane] = self.work.get(load.wire.lane, 0.0) + load.wire.latency + load.seconds
        self.queues: dict[str, deque[int]] = {}  # by lane: gathers to come
        for g, load in enumerate(gathers):
            self.queues.setdefault(load.wire.lane, deque()).append(g)
        self.due = self._due()
        self.next = {lane: max(self.due[queue[0]], gathers[queue[0]].bound) for lane, queue in self.queues.items()}
        self.agenda: list[tuple[int, int, int | str]] = [
            *((load.place, _WAIT, g) for g, load in enumerate(gathers)),
            *((load.place, _REDUCE, r) for r, load in enumerate(reductions)),
            *((place, _GATHER, lane) for lane, place in self.next.items()),
            *((other.issue, _ISSUE, o) for o, other in enumerate(self.problem.others, len(gathers))),
            *((other.need, _WAIT, o) for o, other in enumerate(self.problem.others, len(gathers))),
        ]
        heapq.heapify(self.agenda)

    def _due(self) -> list[int]:
        """The last place at which each gather, and those of its lane after it, come in time if nothing else waits."""
        due = [0] * len(self.gathers)
        for queue in self.queues.values():
            latest = _NEVER
            for g in reversed(queue):
                load = self.gathers[g]
                latest = min(self.expected[load.place], latest) - self.choice.lead * (load.wire.latency + load.seconds)
                due[g] = min(max(0, bisect_right(self.expected, latest) - 1), load.place)
        return due

    def placed(self) -> Placed:
        """Play it."""
        if max(self.work.values(), default=0.0) > self.limit:
            raise _TooLong
        happens = (self._come, self._issue, self._gather, self._reduce, self._wait)
        while self.agenda:
            place, kind, which = heapq.heappop(self.agenda)
            self.clock += self.before[place] - self.before[self.at]
            self.at = place
            self.network.run(self.clock)
            happens[kind](which, place)
        return Placed(
            self.clock + self.before[-1] - self.before[self.at] + self.updates.left,
            int(self.memory - self.room.min(initial=self.memory)),
            self.choice,
            tuple(
                Bucket(load.members, start, load.place)
                for load, start in ((self.gathers[g], self.start[g]) for g in self.sent if 0 <= g < len(self.gathers))
            ),
            tuple(Bucket(load.members, load.place, wait) for load, wait in zip(self.reductions, self.wait)),
        )

    def _send(self, load: Load, place: int) -> int:
        wire = load.wire
        lane = wire.lane
        self.clock += load.host
        self.network.run(self.clock)
        idle = self.clock - (self.network.end[self.last[lane]] if lane in self.last else 0.0)
        if idle > 0:
            self.work[lane] += idle
            if self.work[lane] > self.limit:
                raise _TooLong
        self.clear[lane] = max(self.clear.get(lane, 0.0), self.clock) + wire.latency + load.seconds
        message = Message(place, place, lane, wire.link, wire.latency, load.seconds)
        self.last[lane] = self.network.issue(message, self.clock)
        return self.last[lane]

    def _issue(self, o: int, place: int) -> None:
        """Send what is sent here whatever the schedule."""
        message = self.problem.others[o - len(self.gathers)]
        if message.lane in self.work:
            self.clear[message.lane] = (
                max(self.clear.get(message.lane, 0.0), self.clock) + message.latency + message.seconds
            )
        self.sent[o] = self.last[message.lane] = self.network.issue(message, self.clock)

    def _gather(self, lane: str, place: int) -> None:
        """Start the gathers of a lane whose time has come."""
        queue = self.queues[lane]
        while queue and self.next[lane] == place:
            g = queue[0]
            load = self.gathers[g]
            start = self._earliest(g, place)
            if start > place:
                self.next[lane] = start
                heapq.heappush(self.agenda, (start, _GATHER, lane))
                return
            queue.popleft()
            self.start[g] = place
            self.room[2 * place : 2 * load.place] -= load.size
            if place < load.place:
                self.room[2 * place] -= load.burst
            self.sent[g] = self._send(load, place)
            self.ahead.append(g)

    def _earliest(self, g: int, place: int) -> int:
        load = self.gathers[g]
        use = load.place
        start = min(max(place, self.due[g], load.bound), use)
        most = self.problem.gathers_in_flight
        if most is not None and start < use:
            if load.held > most:
                return use
            others = [other for other in self.ahead if self.gathers[other].place > start]
            if sum(self.gathers[other].held for other in others) + load.held > most:
                return min(use, *(self.gathers[other].place for other in others))
        if start < use:
            size = load.size + (self.reserve if use >= self.gradients else 0)
            full = (self.room[2 * start : 2 * use] < size)[::-1]
            last = int(full.argmax())  # 0 if none is
            if full[last]:
                start = use - last // 2
        if load.burst and start < use:
            fits = self.room[2 * start : 2 * use : 2] >= size + load.burst
            start = start + int(fits.argmax()) if fits.any() else use
        return start

    def _reduce(self, r: int, place: int) -> None:
        """Start a reduction; wait for others first, if too many bytes are on their way."""
        load, most = self.reductions[r], self.problem.reductions_in_flight
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
        end = bisect_left(self.expected, self.eta[r] - self.clock + self.expected[place], place)
        end = min(max(end, place), load.bound)
        if end > place:
            needs = np.full(2 * (end - place), load.size)
            needs[1::2] += load.burst
            full = self.room[2 * place + 1 : 2 * end + 1] < needs
            first = int(full.argmax())  # 0 if none is
            if full[first]:
                end = place + first // 2
            self.room[2 * place + 1 : 2 * end + 1] -= needs[: 2 * (end - place)]
            self.until[r] = end
            if end > place:
                heapq.heappush(self.agenda, (end, _COME, r))

    def _settle(self, r: int, place: int, stall: bool) -> None:
        """Decide where a reduction is waited for."""
        self.behind.remove(r)
        self.wait[r], load = place, self.reductions[r]
        self.room[2 * load.place + 2 : 2 * self.until[r] + 1 : 2] += load.burst
        if place > load.place:
            self.room[2 * place] -= load.burst
        if self.until[r] > place:
            self.room[2 * place + 1 : 2 * self.until[r] + 1] += load.size
            for lane, queue in self.queues.items():
                if queue and self.next[lane] > place:
                    self.next[lane] = place + stall
                    heapq.heappush(self.agenda, (self.next[lane], _GATHER, lane))
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
        """Stand still until the messages that are needed here have come, and unpack each when it has."""
        needed = [which]
        while self.agenda and self.agenda[0][:2] == (place, _WAIT):
            needed.append(heapq.heappop(self.agenda)[2])
        come, sent = self.network.come, self.sent
        if any(each < len(self.gathers) for each in needed):
            self.clock += self.updates.run(place)
            self.network.run(self.clock)
        for end, each in sorted((come(sent[each]), each) for each in needed):
            if end > self.clock:
                self.clock = end
                for r in self.behind:
                    if self.network.end[self.sent[~r]] <= end and self.until[r] > place:
                        heapq.heappush(self.agenda, (place + 1, _COME, r))
            self.clock += self._follows(each, place)
        if self.clock + self.before[-1] - self.before[place] > self.limit:
            raise _TooLong

    def _follows(self, each: int, place: int) -> float:
        """The compute that follows a message that has been waited for: unpacking, and the updates that may run now."""
        if each >= len(self.gathers):
            return 0.0
        if each >= 0:
            self.ahead.remove(each)
            return self.gathers[each].unpack
        load = self.reductions[~each]
        return load.unpack + self.updates.follow(load.members, place)
