"""Play operations and messages: when each of them runs or arrives, given its seconds.

Operations run one after the other in the compute queue. A message is issued just before an operation and joins its lane
(see `network`); a later operation waits for it. `simulate` plays the program of one rank. The solver plays schedules,
which have no program, by the same rules (`solver/place.py`), and bounds the time of all of them (`solver/bound.py`).
The tests of the solver compare the three.
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
        start: for each place, when everything is sent, waited for and unpacked there.
        begin: for each message, when it is at the head of its lane and may be sent.
        end: for each message, when it has arrived.
        stall: for each message, the seconds that compute waited for it.
        lost: for each message, the end of the wait for it, and the seconds that compute has lost to it, charged then.
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
        # The first message to arrive is unpacked while the others are still under way.
        waiting = list(needed.get(k, ()))
        while waiting:
            rank.wait(waiting.pop(rank.first_of(waiting)))
        start.append(rank.clock)
    return rank.played(arrive, start)


class Rank:
    """A simulated rank: the clock of its compute queue, and its messages."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.network = Network()
        self.numbers = [0] * len(messages)  # of the messages in the network
        self.stall = [0.0] * len(messages)
        self.lost = [(0.0, 0.0)] * len(messages)
        self.stalls = Stalls()
        self.clock = 0.0

    def send(self, i: int) -> None:
        self.clock += self.messages[i].overhead
        self.network.run(self.clock)
        self.numbers[i] = self.network.issue(self.messages[i], self.clock)

    def first_of(self, waiting: Sequence[int]) -> int:
        """The position of the message that arrives first."""
        return self.network.first_of([self.numbers[i] for i in waiting])

    def wait(self, i: int) -> None:
        """Let compute stand still until message `i` has arrived, and unpack it."""
        end = self.network.arrival(self.numbers[i])
        if end > self.clock:
            self.stall[i] = end - self.clock
            self.stalls.add(self.clock, end)
            self.clock = end
        lost_seconds = self.stalls.lost(self.network, self.numbers[i], self.clock)
        self.lost[i] = self.clock, lost_seconds
        self.clock += lost_seconds + self.messages[i].unpack

    def played(self, arrive: Sequence[float], start: Sequence[float]) -> Played:
        """When everything happened, at the end."""
        # The last messages may still be under way; their arrival ends the step.
        end = tuple(self.network.arrival(i) for i in self.numbers)
        return Played(
            arrive=tuple(arrive),
            start=tuple(start),
            begin=tuple(self.network.begin[i] for i in self.numbers),
            end=end,
            stall=tuple(self.stall),
            lost=tuple(self.lost),
            inside=tuple(self.network.first_level(i) for i in self.numbers),
        )
