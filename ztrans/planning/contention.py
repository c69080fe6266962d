"""Messages and kernels share the memory of a device while they overlap.

A message reads what it sends and writes what it receives, while compute goes on. A kernel that computes for longer than
it needs its bytes loses nothing. One that waits for memory ends later, by the seconds in which the messages had the
memory for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Transfer(NamedTuple):
    """A message while its bytes move."""

    begin: float
    end: float
    bytes: float  # that it reads and writes in the memory of a rank


# The bytes of the memory that a message reads and writes, for each byte that a rank receives. In a ring, each received
# byte of a gather is written, and read to be passed on. In a reduction a rank reads its own term and the received sum,
# and writes the new one. An all_reduce is a reduction and then a gather. A copy to the host reads, and one from it
# writes.
TOUCHED = {
    "all_gather": 2.0,
    "reduce_scatter": 3.0,
    "all_reduce": 2.5,
    "to_host": 1.0,
    "to_device": 1.0,
}


def contended(
    starts: Sequence[float],
    durations: Sequence[float],
    memory_seconds: Sequence[float],
    transfers: Sequence[Transfer],
    bandwidth: float,
) -> list[float]:
    """The durations of operations that share the memory with messages.

    Args:
        starts, durations: of every operation, as if it had the memory for itself.
        memory_seconds: the part of each duration in which it moves bytes; the others overlap with that.
        transfers: the messages that move beside the operations.
        bandwidth: bytes/s of the memory.

    >>> contended([0.0, 1.0], [1.0, 1.0], [1.0, 0.2], [Transfer(0.0, 2.0, 4e9)], 10e9)
    [1.2, 1.0]
    """
    moving = [each for each in transfers if each.bytes and each.end > each.begin]
    if not moving:
        return list(durations)

    # The share of the memory that all messages together take, at the times at which it changes.
    begin, end, moved = np.array(moving).T
    share = moved / (end - begin) / bandwidth
    times = np.concatenate([begin, end])
    change = np.concatenate([share, -share])
    order = np.argsort(times, kind="stable")
    times = times[order]
    rate = change[order].cumsum()

    # The seconds that messages have taken of the memory, up to each of these times.
    taken = np.concatenate([[0.0], (rate[:-1] * np.diff(times)).cumsum()])
    first = np.asarray(starts)
    last = first + durations
    taken_meanwhile = np.interp(last, times, taken) - np.interp(first, times, taken)

    # The bytes of an operation move while messages leave the memory free. One without bytes is not slowed down.
    own = np.asarray(memory_seconds)
    longer = np.where(own > 0, np.maximum(durations, own + taken_meanwhile), durations)
    return longer.tolist()
