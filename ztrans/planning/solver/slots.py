"""slots: the points at which the bytes of a schedule are counted.

Slot 2k is place k, where messages start and are waited for. Slot 2k + 1 is operation k. Small members of one bucket
share a buffer. For gathers, the whole buffer is live where they start and where they are waited for, and this rank's
part of it in between. Reductions make the buffer where they start; the gradients that were copied into it are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from .problem import Gather, Problem, Reduction

Span = tuple[int, int, int]  # the first slot, the one after the last, the bytes that are live there
Member = TypeVar("Member", Gather, Reduction)
NOTHING = -(2**52)  # bytes at a place for which none are known: no limit is reached there


def shared(members: Sequence[Member]) -> list[Member]:
    """The members of a bucket that share a buffer: the small ones, if there are several."""
    small = [member for member in members if member.small]
    return small if len(small) > 1 else []


def buffers(problem: Problem, members: Sequence[Gather]) -> tuple[int, int]:
    """The bytes of the buffer that a bucket of gathers shares, and of this rank's part of it."""
    packed = sum(member.held for member in shared(members))
    return packed, packed // problem.wires[members[0].key].ranks


def gathering(problem: Problem, members: Sequence[Gather], start: int, wait: int) -> Iterator[Span]:
    """The bytes that a bucket of gathers has live from its start to its wait, besides the values themselves."""
    packed, part = buffers(problem, members)
    if packed:
        yield 2 * wait, 2 * wait + 1, packed + part
        if start < wait:
            yield 2 * start, 2 * start + 1, packed
            yield 2 * start, 2 * wait, part


def reducing(members: Sequence[Reduction], start: int, wait: int) -> Iterator[Span]:
    """The bytes that a bucket of reductions has live: gradients, buffers, reduced values, and updates."""
    for r in members:
        yield 2 * r.born + 1, 2 * start, r.held
        yield 2 * r.born + 2, 2 * wait + 1, r.waiting
        yield from (
            (2 * wait + 1, until, size) for size, until in r.results if until > 2 * wait + 1
        )
        yield from ((2 * place, 2 * place + 1, size) for size, place in r.released if place > wait)
    begins, ends = sending_bytes(members), waited(members, wait)
    if start == wait:
        yield 2 * start, 2 * start + 1, max(begins, ends)
    else:
        yield 2 * start, 2 * start + 1, begins
        yield 2 * start + 1, 2 * wait, under_way(members)
        yield 2 * wait, 2 * wait + 1, ends


def sending_bytes(members: Sequence[Reduction]) -> int:
    """The bytes that a bucket of reductions has live where it starts."""
    return sum(r.held + r.sent + r.received for r in members) + copied(members)


def under_way(members: Iterable[Reduction]) -> int:
    """The bytes that reductions have live between their start and their wait."""
    return sum(r.held - r.freed + r.sent + r.received for r in members)


def waited(members: Sequence[Reduction], wait: int) -> int:
    """The most bytes that a bucket of reductions has live at its wait.

    Its members are waited for one after the other. What was sent from a buffer is freed after the first wait, a
    gradient that was sent from its own storage after its own. Then the updates run that may, one after the other.
    """
    packed, buffer = bool(shared(members)), sum(r.sent for r in members) + copied(members)
    live = most = under_way(members)
    for r in members:
        most = max(most, live + r.value)
        gradient = 0 if r.small and packed else r.held - r.freed
        live += r.value - gradient - (r.received if r.value else 0) - buffer
        buffer = 0
    stay = live + sum(r.updated + r.second for r in members)
    released = (size for r in members for size, place in r.released if place <= wait)
    return max(most, stay + max(*(r.updating for r in members), *released, 0))


def copied(members: Sequence[Reduction]) -> int:
    """The bytes of gradients that are copied because their bucket has several small ones."""
    return sum(r.held - r.freed for r in shared(members))


def second_reductions(
    problem: Problem, buckets: Sequence[tuple[Sequence[Reduction], int]]
) -> Iterator[Span]:
    """The bytes of second reductions, given the members of each bucket and its wait."""
    waits = sorted(
        (wait, sum(r.second for r in members)) for members, wait in buckets if members[0].second
    )
    for (wait, size), (end, _) in zip(waits, [*waits[1:], (len(problem.seconds), 0)]):
        yield 2 * wait + 1, 2 * end + 1, size


def fixed(problem: Problem) -> np.ndarray:
    """By slot: the bytes that are live in every schedule."""
    n = len(problem.live)
    slots = np.full(2 * n + 1, NOTHING, dtype=np.int64)
    slots[1::2] = problem.live
    if problem.across:
        slots[::2] = problem.across
    return slots


def changes(spans: Iterable[Span]) -> np.ndarray:
    """Two rows: the slots at which spans begin or end, and the bytes that are more there than at the slot before."""
    first, end, size = np.array([*spans, (0, 0, 0)], dtype=np.int64).T
    return np.concatenate([[first, size], [end, -size]], axis=1)


def added_up(several: Sequence[np.ndarray], count: int) -> np.ndarray:
    """By slot, the bytes after several `changes`."""
    slots, sizes = np.concatenate([*several, changes(())], axis=1)
    change = np.bincount(np.minimum(slots, count), sizes, count + 1)
    return change.cumsum()[:count].astype(np.int64)  # sums of bytes are exact as floats


def summed(spans: Iterable[Span], count: int) -> np.ndarray:
    """By slot, or by whatever else the spans are given, the bytes of all spans."""
    return added_up([changes(spans)], count)


def by_operation(slots: np.ndarray) -> np.ndarray:
    """By operation: the most bytes live while it runs or at the place before it. The end counts with the last one."""
    most = np.maximum(slots[1::2], slots[:-1:2])
    if len(most):
        most[-1] = max(most[-1], slots[-1])
    return most
