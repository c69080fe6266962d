"""When values of forward that wait for backward on the host are away from the device.

The link to the host has two lanes beside compute, one in each direction. Values leave in the order in which they are
computed, and return in the order in which backward needs them:

    out     a value starts to leave when it has been computed, and when those before it have left
    in      a value has returned when backward needs it, or when the next one must start to return

So a lane that is busy keeps a value on the device for longer, and compute waits for no copy. Where a limit asks for
more, compute waits: then a value is away from its last use in forward to its first use in backward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Literal, NamedTuple

# Whether compute hides the copies of a value, or waits for both.
Copied = Literal["hidden", "exposed"]
# The first and the last place at which a value is not on the device.
Absence = tuple[int, int]


class HostLink(NamedTuple):
    """The link between the device and its host, and the time that compute leaves to it.

    Attributes:
        clock: by place, and at the end, the seconds of compute before it.
        latency, pace: the seconds of a copy, and those for each of its bytes.
        call: the seconds of compute that the start of a copy takes.
        room: the bytes that values of forward may take on the host.
    """

    clock: tuple[float, ...]
    latency: float
    pace: float
    call: float
    room: float = float("inf")

    def seconds(self, size: int) -> float:
        """How long a copy of so many bytes takes its lane."""
        return self.latency + self.pace * size


class Stay(NamedTuple):
    """A value that waits on the host.

    Attributes:
        value: its index in the model.
        bytes: of each of its copies.
        born: the place of the operation that computes it.
        forward: the last place before backward that needs it.
        first: the first place in backward that needs it.
        copied: whether compute hides its copies.
    """

    value: int
    bytes: int
    born: int
    forward: int
    first: int
    copied: Copied


def absences(link: HostLink, stays: Iterable[Stay]) -> dict[int, Absence]:
    """For each value on the host, when it is not on the device. If that is never, its last place precedes its first."""
    absent: dict[int, Absence] = {}
    hidden: list[Stay] = []
    for stay in stays:
        absent[stay.value] = stay.forward + 1, stay.first - 1
        if stay.copied == "hidden":
            hidden.append(stay)

    # The lane out: `end` is when the values before have left.
    end = 0.0
    for stay in sorted(hidden, key=lambda stay: (stay.born, stay.value)):
        end = max(end, link.clock[stay.born + 1]) + link.seconds(stay.bytes)
        left = bisect_left(link.clock, end)
        absent[stay.value] = max(left, stay.forward + 1), stay.first - 1

    # The lane in, from the last value to the first: `begin` is when the next one must start to return.
    begin = float("inf")
    for stay in sorted(hidden, key=lambda stay: (-stay.first, -stay.value)):
        begin = min(begin, link.clock[stay.first]) - link.seconds(stay.bytes) - link.call
        returns = bisect_right(link.clock, begin) - 1
        absent[stay.value] = absent[stay.value][0], min(returns, stay.first) - 1
    return absent
