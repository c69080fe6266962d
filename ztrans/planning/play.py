"""When operations run, and when messages arrive, given the seconds of each.

Operations run one after the other in the compute queue. A message is issued just before an operation and joins its lane
(see `network`); a later operation waits for it. `simulate` plays the program of one rank. The solver plays schedules,
which have no program: `solver/place.py` keeps the same rules for partial ones, and `solver/bound.py` bounds all of
them. The tests of the solver compare the three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..ir.dependencies import grouped
from .network import Message, Network, Stalls, Successors

NO_SUCCESSORS: Mapping[int, int] = {}


@dataclass(frozen=True)
class Played:
    """When everything happened.

    Attributes:
        arrive: for each place, when compute reaches it.
        start: for each place, when all that is sent, waited for and unpacked there is done.
        begin: for each message, when it is at the head of its lane, and may be sent.
        end: for each message, when it has arrived.
        stall: for each message, the seconds that compute waited for it.
        lost: for each message, when it had been waited for, and the seconds that it had taken from compute, which pass
            then.
        inside: for each message, when its first level began and ended; None if it has one level.
    """

    arrive: tuple[float, ...]
    start: tuple[float, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]
    stall: tuple[float, ...]
    lost: tuple[tuple[float, float], ...]
    inside: tuple[tuple[float, float] | None, ...]

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return max((self.start[-1], *self.end))


def play(
    compute: Sequence[float],
    messages: Sequence[Message],
    places: Sequence[int] | None = None,
    follows: Callable[[int, int], float] = lambda message, place: 0.0,
    precedes: Callable[[int], float] = lambda place: 0.0,
    successor: Mapping[int, int] = NO_SUCCESSORS,
) -> Played:
    """Simulate operations and messages.

    Args:
        compute: the seconds of each operation.
        messages: in the order in which they are issued.
        places: the places that are simulated, and for which times are returned; by default all. It is faster to leave
            out those at which no message is issued or needed. A message at a place that is left out is not sent.
        follows: `follows(i, k)` is the seconds of further compute that run after message i was waited for at place k.
        precedes: `precedes(k)` is the seconds of further compute at place k, before any message is waited for there.
        successor: for some messages, the one that is sent right after it has been waited for. The next successor that
            is sent, or else the place where it is needed, ends the time in which it is under way (see `Successors`).

    >>> gather = Message(issue=0, need=1, lane="gather", link="wire", latency=0.0, seconds=3.0)
    >>> played = play([1.0, 1.0], [gather])
    >>> played.seconds, played.stall
    (4.0, (2.0,))
    """
    compute_before = [0.0, *accumulate(compute)]
    if places is None:
        places = range(len(compute_before))
    at_places = set(range(len(messages))).difference(successor.values())
    issued = grouped((messages[i].issue, i) for i in sorted(at_places))
    needed = grouped((messages[i].need, i) for i in sorted(at_places))
    under_way: Successors[int] = Successors()
    rank = _Rank(messages)
    now = 0
    arrive: list[float] = []
    start: list[float] = []
    for k in places:
        rank.clock += compute_before[k] - compute_before[now]
        now = k
        arrive.append(rank.clock)
        for i in issued.get(k, ()):
            rank.send(i)
        rank.clock += precedes(k)

        # What has arrived first is unpacked while the others are still under way.
        waiting = list(needed.get(k, ()))
        while waiting:
            i = waiting.pop(rank.first_of(waiting))
            rank.wait(i)
            rank.clock += follows(i, k)
            if i in successor:
                j = successor[i]
                rank.send(j)
                for earlier in under_way.add(j, messages[j].need):
                    rank.wait(earlier)
                    rank.clock += follows(earlier, k)
        for i in under_way.needed(k):
            rank.wait(i)
            rank.clock += follows(i, k)
        start.append(rank.clock)
    return rank.played(arrive, start)


class _Rank:
    """One rank while it is simulated: the time of its compute queue, and its messages."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.network = Network()
        self.number = [0] * len(messages)  # of each message in the network
        self.stall = [0.0] * len(messages)
        self.lost = [(0.0, 0.0)] * len(messages)
        self.stalls = Stalls()
        self.clock = 0.0

    def send(self, i: int) -> None:
        self.clock += self.messages[i].overhead
        self.network.run(self.clock)
        self.number[i] = self.network.issue(self.messages[i], self.clock)

    def first_of(self, waiting: Sequence[int]) -> int:
        """The position of the message that arrives first."""
        return self.network.first_of([self.number[i] for i in waiting])

    def wait(self, i: int) -> None:
        """Let compute stand still until message `i` has arrived, and unpack it."""
        end = self.network.arrival(self.number[i])
        if end > self.clock:
            self.stall[i] = end - self.clock
            self.stalls.add(self.clock, end)
            self.clock = end
        self.lost[i] = self.clock, self.stalls.lost(self.network, self.number[i], self.clock)
        self.clock += self.lost[i][1] + self.messages[i].unpack

    def played(self, arrive: Sequence[float], start: Sequence[float]) -> Played:
        """When everything happened, at the end."""
        # The last messages may still be under way; their arrival ends the step.
        end = tuple(self.network.arrival(i) for i in self.number)
        return Played(
            arrive=tuple(arrive),
            start=tuple(start),
            begin=tuple(self.network.begin[i] for i in self.number),
            end=end,
            stall=tuple(self.stall),
            lost=tuple(self.lost),
            inside=tuple(self.network.first_level(i) for i in self.number),
        )
