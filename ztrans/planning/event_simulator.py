"""event_simulator: compute when everything happens on one rank, which has a compute queue and lanes for messages.

Operations run one after the other in the compute queue. A message is issued just before an operation and joins its
lane; a later operation waits for it. Each communicator has a lane. A lane is first in, first out, and independent of
the others. Messages of different lanes that cross the same link at the same time share its bandwidth equally. All times
are in seconds.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..ir.relations import grouped

_NEVER = float("inf")


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
    start: tuple[
        float, ...
    ]  # for each place, when all that is sent, waited for and unpacked there is done
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
        self.starting: list[
            tuple[float, int]
        ] = []  # a heap of (time at which bytes begin to move, message)
        self.links: defaultdict[str, _Link] = defaultdict(_Link)
        self.next = _NEVER  # the time of the next event

    def issue(self, message: Message, now: float) -> int:
        """Issue a message at time `now`, up to which `run` must have played; return its number."""
        i = len(self.messages)
        self.messages.append(message)
        self.begin.append(_NEVER)
        self.end.append(_NEVER)
        lane = self.queued[message.lane]
        lane.append(i)
        if len(lane) == 1:
            self._head(i, now)
        return i

    def run(self, until: float) -> None:
        """Let time pass up to `until`."""
        while self.next <= until:
            self._step()

    def come(self, i: int) -> float:
        """Let time pass until message `i` has arrived, and return when it did."""
        while self.end[i] == _NEVER:
            self._step()
        return self.end[i]

    def _head(self, i: int, now: float) -> None:
        self.begin[i] = now
        moves = now + self.messages[i].latency
        heapq.heappush(self.starting, (moves, i))
        if moves < self.next:
            self.next = moves

    def _step(self) -> None:
        now, starting = self.next, self.starting
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
        soon = starting[0][0] if starting else _NEVER
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
        self.active: list[
            tuple[float, int]
        ] = []  # (`served` at which it is done, message), in order
        self.served = self.since = 0.0
        self.next = _NEVER  # the time at which the first of them is done

    def join(self, i: int, seconds: float, now: float) -> None:
        active = self.active
        if active:
            self.served += (now - self.since) / len(active)
        insort(active, (self.served + seconds, i))
        self.since = now
        self.next = now + (active[0][0] - self.served) * len(active)

    def leave(self, now: float) -> int:
        active = self.active
        self.served, i = active.pop(0)
        self.since = now
        self.next = now + (active[0][0] - self.served) * len(active) if active else _NEVER
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
        places: the places for which times are returned, by default all. To leave out places at which nothing is issued
            or needed is faster.
        follows: `follows(i, k)` is the seconds of further compute that run after message i was waited for at place k.
        precedes: `precedes(k)` is the seconds of further compute at place k, before any message is waited for there.

    >>> gather = Message(issue=0, need=1, lane="gather", link="wire", latency=0.0, seconds=3.0)
    >>> played = play([1.0, 1.0], [gather])
    >>> played.seconds, played.stall
    (4.0, (2.0,))
    """
    before = [0.0, *accumulate(compute)]
    if places is None:
        places = range(len(before))
    issued = grouped((m.issue, i) for i, m in enumerate(messages))
    needed = grouped((m.need, i) for i, m in enumerate(messages))
    network, number, stall = Network(), [0] * len(messages), [0.0] * len(messages)
    clock, at = 0.0, 0
    arrive, start = [], []
    for k in places:
        clock += before[k] - before[at]
        at = k
        arrive.append(clock)
        for i in issued.get(k, ()):
            clock += messages[i].host
            network.run(clock)
            number[i] = network.issue(messages[i], clock)
        clock += precedes(k)
        for end, i in sorted((network.come(number[i]), i) for i in needed.get(k, ())):
            if end > clock:
                stall[i] = end - clock
                clock = end
            clock += messages[i].unpack + follows(i, k)
        start.append(clock)
    ends = tuple(network.come(i) for i in number)
    begins = tuple(network.begin[i] for i in number)
    return Played(tuple(arrive), tuple(start), begins, ends, tuple(stall))
