"""Play operations and messages: when each of them runs or arrives, given its seconds.

Operations run one after the other in the compute queue. A message is issued just before an operation and joins its lane
(see `network`); a later operation waits for it. `simulate` plays the program of one rank. The solver plays schedules,
which have no program, with the same `Rank` (`solver/place.py`), and bounds the time of all of them
(`solver/bound.py`). The tests of the solver compare the three.
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
    rank = Rank()
    numbers = [0] * len(messages)
    compute_before = [0.0, *accumulate(compute)]
    arrive: list[float] = []
    start: list[float] = []
    for k, before in enumerate(compute_before):
        # A difference of sums, as in `solver/place.py`.
        rank.clock += before - compute_before[max(k - 1, 0)]
        arrive.append(rank.clock)
        for i in issued.get(k, ()):
            numbers[i] = rank.send(messages[i])
        # The first message to arrive is unpacked while the others are still under way.
        waiting = [numbers[i] for i in needed.get(k, ())]
        while waiting:
            rank.wait(waiting.pop(rank.network.first_of(waiting)))
        start.append(rank.clock)
    return rank.played(numbers, arrive, start)


class Rank:
    """A simulated rank: the clock of its compute queue, its messages, and the times in which compute stands still.

    Messages are known by their numbers in the network.

    Attributes:
        sent: the messages.
        waited: for each message that was waited for, the seconds that compute stood still, the end of the wait, and the
            seconds that compute has lost to the message.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.network = Network()
        self.stalls = Stalls()
        self.sent: dict[int, Message] = {}
        self.waited: dict[int, tuple[float, float, float]] = {}

    def send(self, message: Message) -> int:
        """Send a message, and return its number."""
        self.clock += message.overhead
        self.network.run(self.clock)
        number = self.network.issue(message, self.clock)
        self.sent[number] = message
        return number

    def wait(self, number: int) -> bool:
        """Let compute stand still until a message has arrived, and unpack it. Return whether compute stood still."""
        end = self.network.arrival(number)
        stall = 0.0
        if end > self.clock:
            stall = end - self.clock
            self.stalls.add(self.clock, end)
            self.clock = end
        message = self.sent[number]
        lost_seconds = 0.0
        if message.taken:
            lost_seconds = self.stalls.lost(self.network, number, message.taken, self.clock)
        self.waited[number] = stall, self.clock, lost_seconds
        self.clock += lost_seconds
        self.clock += message.unpack
        return stall > 0

    def played(
        self, numbers: Sequence[int], arrive: Sequence[float], start: Sequence[float]
    ) -> Played:
        """When everything happened, at the end: to the messages with these numbers, and at each place."""
        # The last messages may still be under way; their arrival ends the step.
        end = tuple(map(self.network.arrival, numbers))
        never = 0.0, 0.0, 0.0
        waited = [self.waited.get(i, never) for i in numbers]
        return Played(
            arrive=tuple(arrive),
            start=tuple(start),
            begin=tuple(self.network.begin[i] for i in numbers),
            end=end,
            stall=tuple(stall for stall, _, _ in waited),
            lost=tuple((time, lost) for _, time, lost in waited),
            inside=tuple(self.network.first_level(i) for i in numbers),
        )
