"""Simulate messages under way, each in the lane of its communicator and over a link that lanes may share.

A lane is first in, first out, and independent of the others. Messages of different lanes that cross the same link at
the same time share its bandwidth equally. All times are in seconds.

Between CPUs, compute packs a message before its issue and unpacks it after the wait. A GPU does both beside compute: a
packing queue packs the messages of all lanes, one after the other, and the lane of a message unpacks it. A hierarchical
message has two levels, inside hosts and between them, each with a lane and a link. Both lanes keep the order of issue.

While a message is under way on a GPU, its kernels take a share of the processor. Compute loses that share of its speed,
which is charged when the message is waited for. While compute stands still, it loses nothing: `Stalls` has these times.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

NEVER = float("inf")


class Level(NamedTuple):
    """One level of a message: the whole message, or its part inside hosts or between them."""

    lane: str
    link: str
    latency: float
    seconds: float
    unpack_beside: float = 0.0


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
    overhead: float = 0.0  # seconds of compute to send it
    unpack: float = 0.0  # seconds of compute to turn the received bytes into values, after the wait
    # The same beside compute: in the packing queue before it is sent, and in its lane after its bytes have moved.
    pack_beside: float = 0.0
    unpack_beside: float = 0.0
    inside: Level | None = None
    taken: float = 0.0  # the share of compute that it takes while it is under way

    @property
    def alone(self) -> float:
        """The seconds from its issue to its arrival if no other message is under way."""
        first_level = in_lane(self.inside) if self.inside else 0.0
        return self.pack_beside + first_level + in_lane(self)


def in_lane(level: Level | Message) -> float:
    """The seconds for which a message, or its first level, occupies its lane."""
    return level.latency + level.seconds + level.unpack_beside


class Network:
    """The messages under way. The head of each lane first waits for its latency, then moves its bytes.

    Each level of a message has a number; the number of a message is the number of its last level. `begin` and `end` are
    `NEVER` until the level begins or ends.
    """

    def __init__(self) -> None:
        self.levels: list[Level | Message] = []
        # When each level may begin: once its message is packed, or for a second level, once the first has ended.
        self.ready: list[float] = []
        self.begin: list[float] = []
        self.end: list[float] = []
        # From the number of a first level to the number of the second, and back.
        self.second: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.packed = 0.0  # when the packing queue is empty
        # By lane, the numbers of its levels; the first one is being sent.
        self.queued: defaultdict[str, deque[int]] = defaultdict(deque)
        # A heap of (time, number of a level, ends). At that time the level has been unpacked and ends if `ends`;
        # otherwise its bytes begin to move.
        self.timed: list[tuple[float, int, bool]] = []
        self.links: defaultdict[str, _Link] = defaultdict(_Link)
        self.next = NEVER  # the time of the next event

    def issue(self, message: Message, now: float) -> int:
        """Issue a message at time `now`, and return its number. `run` must have played up to `now`."""
        self.packed = max(self.packed, now) + message.pack_beside
        if message.inside is None:
            return self._join_lane(message, self.packed, now)

        first = self._join_lane(message.inside, self.packed, now)
        second = self._join_lane(message, NEVER, now)
        self.second[first] = second
        self.first[second] = first
        return second

    def run(self, until: float) -> None:
        """Let time pass up to `until`."""
        while self.next <= until:
            self._step()

    def arrival(self, i: int) -> float:
        """Let time pass until message `i` has arrived, and return the time of its arrival."""
        while self.end[i] == NEVER:
            self._step()
        return self.end[i]

    def first_of(self, numbers: Sequence[int]) -> int:
        """Let time pass until one of several messages has arrived, and return its position among them."""
        if len(numbers) == 1:
            self.arrival(numbers[0])
            return 0
        while True:
            ends = [self.end[i] for i in numbers]
            first = min(ends)
            if first != NEVER:
                return ends.index(first)
            self._step()

    def first_level(self, i: int) -> tuple[float, float] | None:
        """When the first level of message `i` began and ended; None if it has one level."""
        first = self.first.get(i)
        return None if first is None else (self.begin[first], self.end[first])

    def _join_lane(self, level: Level | Message, ready: float, now: float) -> int:
        """Put a level at the end of its lane, and return its number."""
        i = len(self.levels)
        self.levels.append(level)
        self.ready.append(ready)
        self.begin.append(NEVER)
        self.end.append(NEVER)
        lane = self.queued[level.lane]
        lane.append(i)
        if len(lane) == 1:
            self._begin_head(i, now)
        return i

    def _begin_head(self, i: int, now: float) -> None:
        """Begin to send the head of a lane. A second level begins when its first one ends."""
        ready = self.ready[i]
        if ready != NEVER:
            self.begin[i] = max(ready, now)
            self._add_event(self.begin[i] + self.levels[i].latency, i, False)

    def _add_event(self, time: float, i: int, ends: bool) -> None:
        heapq.heappush(self.timed, (time, i, ends))
        if time < self.next:
            self.next = time

    def _step(self) -> None:
        """Play the next event."""
        now = self.next
        timed = self.timed
        if timed and timed[0][0] <= now:
            _, i, ends = heapq.heappop(timed)
            if ends:
                self._end(i, now)
            else:
                level = self.levels[i]
                self.links[level.link].join(i, level.seconds, now)
        else:
            # The bytes of one message have moved.
            for link in self.links.values():
                if link.next <= now:
                    break
            i = link.leave(now)
            unpack = self.levels[i].unpack_beside
            if unpack:
                self._add_event(now + unpack, i, True)
            else:
                self._end(i, now)
        next_time = timed[0][0] if timed else NEVER
        for link in self.links.values():
            if link.next < next_time:
                next_time = link.next
        self.next = next_time

    def _end(self, i: int, now: float) -> None:
        """End a level: free its lane, and let its second level follow."""
        self.end[i] = now
        lane = self.queued[self.levels[i].lane]
        lane.popleft()
        if lane:
            self._begin_head(lane[0], now)

        second = self.second.get(i)
        if second is not None:
            self.ready[second] = now
            if self.queued[self.levels[second].lane][0] == second:
                self._begin_head(second, now)


class Stalls:
    """The times in which compute stands still, in their order."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        # The total seconds of the stalls before each one; the last entry is the total of all.
        self.seconds_before = [0.0]

    def add(self, begin: float, end: float) -> None:
        """Add a stall from `begin` to `end`, after all earlier ones."""
        self.begins.append(begin)
        self.ends.append(end)
        self.seconds_before.append(self.seconds_before[-1] + end - begin)

    def lost(self, network: Network, i: int, share: float, now: float) -> float:
        """The seconds that compute has lost until `now` to message `i`, which takes a share of it and has arrived."""
        lost = 0.0
        first = network.first.get(i)
        levels = (i,) if first is None else (first, i)
        for level in levels:
            begin = network.begin[level]
            end = min(network.end[level], now)
            if begin < end:
                stalled_before = self._seconds_until(begin)
                stalled_until_end = self._seconds_until(end)
                lost += share * (end - begin - stalled_until_end + stalled_before)
        return lost

    def _seconds_until(self, time: float) -> float:
        """The seconds of stalls until `time`."""
        k = bisect_right(self.begins, time)
        if not k:
            return 0.0
        return self.seconds_before[k] - max(self.ends[k - 1] - time, 0.0)


class _Link:
    """The messages that move bytes over one link, in equal shares.

    This is processor sharing. `served` is its virtual time: the seconds of exclusive use that each active message has
    had. A message that joins is done when `served` has grown by its own seconds. `since` is the time of the last
    change; `idle` is the total time until then without an active message.
    """

    __slots__ = ("active", "idle", "next", "served", "since")

    def __init__(self) -> None:
        # In order: the value of `served` at which a message is done, and its number.
        self.active: list[tuple[float, int]] = []
        self.served = 0.0
        self.idle = 0.0
        self.since = 0.0
        self.next = NEVER  # the time at which the first of them is done

    def join(self, i: int, seconds: float, now: float) -> None:
        active = self.active
        if active:
            # Until now, each active message had an equal share of the link.
            self.served += (now - self.since) / len(active)
        else:
            self.idle += now - self.since
        insort(active, (self.served + seconds, i))
        self.since = now
        self.next = now + (active[0][0] - self.served) * len(active)

    def leave(self, now: float) -> int:
        active = self.active
        self.served, i = active.pop(0)
        self.since = now
        self.next = now + (active[0][0] - self.served) * len(active) if active else NEVER
        return i
