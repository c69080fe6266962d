"""When operations run, and when messages arrive, given the seconds of each.

Operations run one after the other in the compute queue. A message is issued just before an operation and joins its lane
(see `network`); a later operation waits for it. `simulate` plays the program of one rank. The solver plays schedules,
which have no program: `solver/place.py` keeps the same rules, and `solver/bound.py` bounds all of them. The tests of
the solver compare the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..ir.dependencies import grouped
from .network import Message, Network, Stalls


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


def play(compute: Sequence[float], messages: Sequence[Message]) -> Played:
    """Simulate operations and messages.

    Args:
        compute: the seconds of each operation.
        messages: in the order in which they are issued.

    >>> gather = Message(issue=0, need=1, lane="gather", link="wire", latency=0.0, seconds=3.0)
    >>> played = play([1.0, 1.0], [gather])
    >>> played.seconds, played.stall
    (4.0, (2.0,))
    """
    issued = grouped((message.issue, i) for i, message in enumerate(messages))
    needed = grouped((message.need, i) for i, message in enumerate(messages))
    rank = Rank(messages)
    compute_before = [0.0, *accumulate(compute)]
    arrive: list[float] = []
    start: list[float] = []
    for k, before in enumerate(compute_before):
        # A difference of sums, as in `solver/place.py`.
        rank.clock += before - compute_before[max(k - 1, 0)]
        arrive.append(rank.clock)
        for i in issued.get(k, ()):
            rank.send(i)
        # What has arrived first is unpacked while the others are still under way.
        waiting = list(needed.get(k, ()))
        while waiting:
            rank.wait(waiting.pop(rank.first_of(waiting)))
        start.append(rank.clock)
    return rank.played(arrive, start)


class Rank:
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
