"""Verify that a schedule keeps every limit of its problem but memory.

Memory is counted in the program that is written from the schedule (see `cost.memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..buffers import Buffer, live_by_slot
from .problem import Bucket, Gather, Problem, Reduction, Schedule


class ScheduleError(ValueError):
    """A schedule does not belong to its problem."""


def validate(problem: Problem, schedule: Schedule) -> None:
    """Verify that a schedule keeps every limit of a problem but memory.

    Raises:
        ScheduleError: a limit is not kept. The text names members and places.
    """
    check_levers(problem, schedule.levers)
    dropped = problem.dropped(schedule.levers)
    _check_buckets(problem, "gather", schedule.gathers, problem.gathers, dropped)
    _check_buckets(problem, "reduction", schedule.reductions, problem.reductions, frozenset())
    for bucket in schedule.gathers:
        _check_gather(problem, bucket)
    for bucket in schedule.reductions:
        _check_reduction(problem, bucket)
    _check_in_flight(
        problem, "gathers", schedule.gathers, problem.gathers, problem.gathers_in_flight
    )
    _check_in_flight(
        problem, "gradients", schedule.reductions, problem.reductions, problem.reductions_in_flight
    )
    _check_between(problem, schedule)


def check_levers(problem: Problem, levers: Iterable[int]) -> None:
    """Verify that at most one lever drops each gather, and keeps either the whole value for it or a part.

    Raises:
        ScheduleError: two levers drop the same gather.
    """
    times = Counter(problem.levers[i].drops for i in levers)
    dropped_twice = [i for i, count in times.items() if count > 1]
    if dropped_twice:
        names = _names(problem.gathers, dropped_twice)
        raise ScheduleError(
            f"the gather {names} is replaced by another one, and dropped or replaced again"
        )


def _names(messages: Sequence[Gather | Reduction], members: Sequence[int]) -> str:
    """The members of a bucket by name, or by number if they have none."""
    return f"[{', '.join(messages[i].name or str(i) for i in members)}]"


def _check_buckets(
    problem: Problem,
    kind: str,
    buckets: Sequence[Bucket],
    messages: Sequence[Gather] | Sequence[Reduction],
    dropped: frozenset[int],
) -> None:
    """Verify that every message is in one bucket, with others of its key, and that buckets are ordered by start."""
    times = Counter(i for bucket in buckets for i in bucket.members)
    misplaced: list[int] = []
    for i in range(len(messages)):
        expected = 0 if i in dropped else 1
        if times[i] != expected:
            misplaced.append(i)
    unknown = times.keys() - range(len(messages))
    if unknown and not misplaced:
        raise ScheduleError(
            f"not every {kind} is in one bucket: the problem has none with the number {min(unknown)}"
        )
    if misplaced:
        raise ScheduleError(f"not every {kind} is in one bucket: {_names(messages, misplaced)}")

    for bucket in buckets:
        names = _names(messages, bucket.members)
        if len({messages[i].key for i in bucket.members}) != 1:
            raise ScheduleError(f"{kind}s of several kinds share the bucket {names}")
        if not 0 <= bucket.start <= bucket.wait <= len(problem.seconds):
            raise ScheduleError(
                f"the {kind} {names} starts {problem.place_text(bucket.start)}, and is waited for "
                f"{problem.place_text(bucket.wait)}: out of order"
            )
    _check_order(kind, buckets, messages)


def _check_order(
    kind: str, buckets: Sequence[Bucket], messages: Sequence[Gather] | Sequence[Reduction]
) -> None:
    """Verify that buckets are in the order of their starts."""
    for a, b in pairwise(buckets):
        if a.start > b.start:
            first = _names(messages, a.members)
            second = _names(messages, b.members)
            raise ScheduleError(f"the {kind} {second} stands after {first} and starts before it")


def _check_gather(problem: Problem, bucket: Bucket) -> None:
    """Verify that a bucket of gathers is waited for at its first use, and does not start before its release."""
    members = [problem.gathers[i] for i in bucket.members]
    names = _names(problem.gathers, bucket.members)
    use = min(g.use for g in members)
    release = max(g.release for g in members)
    if bucket.wait != use:
        raise ScheduleError(
            f"the gather {names} is first used {problem.place_text(use)}, and not waited for there"
        )
    if bucket.start < release:
        raise ScheduleError(
            f"the gather {names} starts {problem.place_text(bucket.start)}, and may start "
            f"{problem.place_text(release)} at the earliest"
        )


def _check_reduction(problem: Problem, bucket: Bucket) -> None:
    """Verify that a bucket of reductions starts after its last gradient, and is waited for by its deadline."""
    members = [problem.reductions[i] for i in bucket.members]
    names = _names(problem.reductions, bucket.members)
    born = max(r.born for r in members) + 1
    deadline = min(len(problem.seconds), *(r.deadline for r in members))
    if bucket.start != born:
        start = problem.place_text(born)
        raise ScheduleError(
            f"the reduction {names} has its last gradient {start}, and does not start there"
        )
    if bucket.wait > deadline:
        raise ScheduleError(
            f"the reduction {names} is waited for {problem.place_text(bucket.wait)}, and needed "
            f"{problem.place_text(deadline)}"
        )


def _check_in_flight(
    problem: Problem,
    kind: str,
    buckets: Sequence[Bucket],
    messages: Sequence[Gather] | Sequence[Reduction],
    limit: float,
) -> None:
    """Verify that no more bytes than the limit are under way: started and not yet waited for."""
    if limit == float("inf"):
        return
    buffers = []
    for bucket in buckets:
        size = sum(messages[i].bytes for i in bucket.members)
        buffers.append(Buffer(size, bucket.start, bucket.wait - 1))
    under_way = live_by_slot(buffers, len(problem.seconds) + 1)
    if under_way.max() > limit:
        where = problem.place_text(int(under_way.argmax()))
        raise ScheduleError(
            f"{under_way.max()} bytes of {kind} are under way {where}, and the limit is {limit}"
        )


def _check_between(problem: Problem, schedule: Schedule) -> None:
    """Verify that few enough matmuls are between two starts of reductions."""
    places = problem.gap_between_starts(bucket.start for bucket in schedule.reductions)
    if places is not None:
        first, second = (problem.place_text(k).removeprefix("at ") for k in places)
        raise ScheduleError(
            f"more than {problem.max_between} matmuls run between {first} and {second}, and no "
            f"reduction starts there"
        )
