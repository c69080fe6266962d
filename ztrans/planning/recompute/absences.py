"""The times at which values of forward are not on the device, because they wait for backward on the host.

The link to the host has two lanes beside compute, one in each direction. Values leave in the order of their
computation, and return in the order of their first use in backward:

    out     a value starts to leave when it has been computed, and the values before it have left
    in      a value has returned when backward needs it, or when the next one must start to return

If a lane is busy, a value stays on the device for longer, and compute does not wait for its copy. If a limit asks for
more, compute waits: then the value is away from its last use in forward to its first use in backward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Literal, NamedTuple

# How the two copies of a value are made: compute hides them, or waits for both.
Copied = Literal["hidden", "exposed"]
# The first and the last place at which a value is not on the device.
Absence = tuple[int, int]


class HostLink(NamedTuple):
    """The link between the device and its host, and the clock of compute.

    Attributes:
        clock: by place, and at the end, the seconds of compute before it.
        latency, pace: the seconds of a copy, and of each of its bytes.
        call: the seconds of compute to start a copy.
        room: the bytes on the host for values of forward.
    """

    clock: tuple[float, ...]
    latency: float
    pace: float
    call: float
    room: float = float("inf")

    def seconds(self, size: int) -> float:
        """The seconds of a copy of `size` bytes on its lane."""
        return self.latency + self.pace * size


class Stay(NamedTuple):
    """A value that waits on the host.

    Attributes:
        value: its index in the model.
        bytes: the size of each copy.
        born: the place of the operation that computes it.
        forward: the last place before backward that needs it.
        first: the first place in backward that needs it.
        copied: whether compute hides its copies, or waits for them.
    """

    value: int
    bytes: int
    born: int
    forward: int
    first: int
    copied: Copied


def absences(link: HostLink, stays: Iterable[Stay]) -> dict[int, Absence]:
    """The absence of each value on the host. If a value is never away, its last place precedes its first one."""
    absent: dict[int, Absence] = {}
    hidden: list[Stay] = []
    for stay in stays:
        absent[stay.value] = stay.forward + 1, stay.first - 1
        if stay.copied == "hidden":
            hidden.append(stay)

    # The lane out. At `end`, the values so far have left.
    end = 0.0
    for stay in sorted(hidden, key=lambda stay: (stay.born, stay.value)):
        end = max(end, link.clock[stay.born + 1]) + link.seconds(stay.bytes)
        left = bisect_left(link.clock, end)
        absent[stay.value] = max(left, stay.forward + 1), stay.first - 1

    # The lane in, from the last value to the first. At `begin`, the next value must start to return.
    begin = float("inf")
    for stay in sorted(hidden, key=lambda stay: (-stay.first, -stay.value)):
        begin = min(begin, link.clock[stay.first]) - link.seconds(stay.bytes) - link.call
        returns = bisect_right(link.clock, begin) - 1
        absent[stay.value] = absent[stay.value][0], min(returns, stay.first) - 1
    return absent
