"""in_flight: the messages of one schedule while it is played, and the lanes that they travel on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..event_simulator import Message
from .load import Load


@dataclass(slots=True, eq=False)
class InFlight:
    """A message that is, or will be, on its way.

    Of messages that arrive at the same time, the one with the lowest `turn` is unpacked first.
    """

    turn: int
    message: Message
    number: int = field(
        default=-1, init=False
    )  # of the message in the network, once it has been sent


@dataclass(slots=True, eq=False)
class GatherInFlight(InFlight):
    """A bucket of gathers. It is `due` at the last place from which it and those after it arrive in time."""

    load: Load
    due: int = 0
    start: int = 0  # its place, once it has been sent


@dataclass(slots=True, eq=False)
class ReductionInFlight(InFlight):
    """A bucket of reductions. There is room for its gradients up to place `until`."""

    index: int
    load: Load
    until: int = 0
    wait: int = -1  # the place at which it is waited for; -1 until that is decided
    expected: float = 0.0  # the time at which it should have arrived


@dataclass(slots=True, eq=False)
class Lane:
    """A communicator: the gathers that it has not sent yet, and what is known of those that it has."""

    name: str
    queue: deque[GatherInFlight] = field(default_factory=deque)
    next: int = 0  # the place at which the first of the queue is considered
    last: int | None = None  # the number of the last message
    clear: float = 0.0  # when that message has arrived, if no other lane slows it down
    work: float = 0.0  # seconds of all its messages, and seconds in which it was idle so far
