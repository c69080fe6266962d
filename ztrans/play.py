"""play: what happens when, for one rank: a queue of compute and one FIFO for each communicator.

Operations run one after the other. A message is issued just before an operation, joins its lane,
and another operation waits for it. Lanes are independent; messages of different lanes that cross
the same link at the same time share its bandwidth equally. All times are in seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Message(NamedTuple):
    """One started collective. `issue` and `need` are places between operations: place k is before
    operation k, and the place after the last is the end. At one place, issues come before waits."""

    issue: int
    need: int
    lane: str  # the communicator: first in, first out
    link: str  # the wire that it shares
    latency: float  # seconds before bytes move
    seconds: float  # seconds in which they do, with the link to itself


@dataclass(frozen=True)
class Played:
    """When everything happened: `arrive[k]` and `start[k]` of place k (they differ by its stall), the
    `begin` and `end` of each message, and the seconds that compute stood still for it."""

    arrive: tuple[float, ...]
    start: tuple[float, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]
    stall: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return max((self.start[-1], *self.end))


class _Network:
    """The messages under way: the head of each lane first waits out its latency, then moves bytes."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.now = 0.0
        self.begin, self.end = [0.0] * len(messages), [0.0] * len(messages)
        self.done = [False] * len(messages)
        self.queued: dict[str, deque[int]] = {}
        self.starting: list[tuple[float, int]] = []  # (time at which bytes begin to move, message)
        self.moving: dict[str, dict[int, float]] = {}  # by link: seconds left, with the link to itself

    def issue(self, i: int) -> None:
        lane = self.queued.setdefault(self.messages[i].lane, deque())
        lane.append(i)
        if len(lane) == 1:
            self._head(i)

    def _head(self, i: int) -> None:
        self.begin[i] = self.now
        heapq.heappush(self.starting, (self.now + self.messages[i].latency, i))

    def run(self, until: float, message: int | None = None) -> None:
        """Let time pass, to `until` or, when that is later, to the end of `message`."""
        while message is not None or self.now < until:
            event, at, who = None, float("inf"), -1
            if self.starting:
                at, who = self.starting[0]
                event = "move"
            for active in self.moving.values():
                if active:
                    i = min(active, key=active.__getitem__)
                    finish = self.now + active[i] * len(active)
                    if finish < at:
                        event, at, who = "finish", finish, i
            if at > until and (message is None or self.done[message]):
                self._pass(until)
                return
            assert event is not None, "waiting for a message that was never issued"
            self._pass(at)
            if event == "move":
                heapq.heappop(self.starting)
                m = self.messages[who]
                self.moving.setdefault(m.link, {})[who] = m.seconds
            else:
                self._finish(who)
            if message is not None and self.done[message]:
                if self.now >= until:
                    return
                message = None

    def _pass(self, to: float) -> None:
        passed, self.now = to - self.now, max(to, self.now)
        for active in self.moving.values():
            if active and passed > 0:
                share = passed / len(active)
                for i in active:
                    active[i] -= share

    def _finish(self, i: int) -> None:
        m = self.messages[i]
        del self.moving[m.link][i]
        self.done[i], self.end[i] = True, self.now
        lane = self.queued[m.lane]
        lane.popleft()
        if lane:
            self._head(lane[0])


def play(compute: Sequence[float], messages: Sequence[Message], places: Sequence[int] | None = None) -> Played:
    """Play a program: `compute[k]` seconds of operation k, and `messages` in the order of their issue.

    Times are given for `places`, by default every one; places at which nothing is issued or needed
    may be left out, which makes it faster.

    >>> gather = Message(issue=0, need=1, lane="gather", link="wire", latency=0.0, seconds=3.0)
    >>> played = play([1.0, 1.0], [gather])
    >>> played.seconds, played.stall
    (4.0, (2.0,))
    """
    before = [0.0, *accumulate(compute)]
    if places is None:
        places = range(len(before))
    issued: dict[int, list[int]] = {}
    needed: dict[int, list[int]] = {}
    for i, m in enumerate(messages):
        issued.setdefault(m.issue, []).append(i)
        needed.setdefault(m.need, []).append(i)
    network, stall = _Network(messages), [0.0] * len(messages)
    clock, at = 0.0, 0
    arrive, start = [], []
    for k in places:
        clock += before[k] - before[at]
        at = k
        network.run(clock)
        arrive.append(clock)
        for i in issued.get(k, ()):
            network.issue(i)
        for i in needed.get(k, ()):
            if not network.done[i]:
                network.run(clock, i)
        for end, i in sorted((network.end[i], i) for i in needed.get(k, ())):
            if end > clock:
                stall[i] = end - clock
                clock = end
        start.append(clock)
    for i in range(len(messages)):
        if not network.done[i]:
            network.run(clock, i)
    return Played(tuple(arrive), tuple(start), tuple(network.begin), tuple(network.end), tuple(stall))
