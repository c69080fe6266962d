"""Slow kernels down while messages use the same device memory.

A message reads the bytes that it sends and writes the bytes that it receives, while compute goes on. A kernel that
computes for longer than its bytes move has time to spare. A kernel that waits for memory ends later, by the seconds in
which messages had the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Transfer(NamedTuple):
    """A message while its bytes move."""

    begin: float
    end: float
    bytes: float  # read and written in the memory of a rank


def contended(
    starts: Sequence[float],
    durations: Sequence[float],
    memory_seconds: Sequence[float],
    transfers: Sequence[Transfer],
    bandwidth: float,
) -> list[float]:
    """The durations of operations that share the memory with messages.

    Args:
        starts, durations: the start and the seconds of each operation, if it had the memory to itself.
        memory_seconds: the seconds in which each operation moves bytes, within its duration.
        transfers: the messages.
        bandwidth: bytes/s of the memory.

    >>> contended([0.0, 1.0], [1.0, 1.0], [1.0, 0.2], [Transfer(0.0, 2.0, 4e9)], 10e9)
    [1.2, 1.0]
    """
    moving = [
        transfer for transfer in transfers if transfer.bytes and transfer.end > transfer.begin
    ]
    if not moving:
        return list(durations)

    # The share of the bandwidth that all messages use together, from each time at which it changes.
    begin, end, moved_bytes = np.array(moving).T
    share = moved_bytes / (end - begin) / bandwidth
    times = np.concatenate([begin, end])
    change = np.concatenate([share, -share])
    order = np.argsort(times, kind="stable")
    times = times[order]
    total_share = change[order].cumsum()

    # The seconds of the memory that messages have used up to each of these times, and during each operation.
    seconds_used = np.concatenate([[0.0], (total_share[:-1] * np.diff(times)).cumsum()])
    first = np.asarray(starts)
    last = first + durations
    used_meanwhile = np.interp(last, times, seconds_used) - np.interp(first, times, seconds_used)

    # An operation moves its bytes while messages leave the memory free. One without bytes is not slowed down.
    own_seconds = np.asarray(memory_seconds)
    with_messages = np.maximum(durations, own_seconds + used_meanwhile)
    return np.where(own_seconds > 0, with_messages, durations).tolist()
