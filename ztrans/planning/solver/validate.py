"""validate: whether a schedule keeps every limit of its problem but that of memory, which `evaluate` counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ..buffers import Buffer, live_by_slot
from .problem import Bucket, Gather, Problem, Reduction, Schedule


class ScheduleError(ValueError):
    """A schedule does not belong to its problem."""


def validate(problem: Problem, schedule: Schedule) -> None:
    """Verify that a schedule keeps every limit of a problem, except that of memory.

    Raises:
        ScheduleError: a limit is not kept; the message names members and places.
    """
    _check_levers(problem, schedule)
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


def _names(messages: Sequence[Gather | Reduction], members: Sequence[int]) -> str:
    """The members of a bucket by name, or else by number."""
    return f"[{', '.join(messages[i].name or str(i) for i in members)}]"


def _check_levers(problem: Problem, schedule: Schedule) -> None:
    """No other lever drops a gather in whose place one sends another."""
    times = Counter(i for lever in schedule.levers for i in problem.levers[lever].dropped)
    sent = [i for lever in schedule.levers for i in problem.levers[lever].sent]
    replaced = {problem.gathers[i].instead for i in sent}
    twice = [i for i, count in times.items() if count > 1 and i in replaced]
    if twice:
        names = _names(problem.gathers, twice)
        raise ScheduleError(
            f"the gather {names} is replaced by another one, and dropped or replaced again"
        )


def _check_buckets(
    problem: Problem,
    kind: str,
    buckets: Sequence[Bucket],
    messages: Sequence[Gather] | Sequence[Reduction],
    absent: frozenset[int],
) -> None:
    """Every message is in one bucket, with others of its key; buckets are in the order of their start."""
    times = Counter(i for bucket in buckets for i in bucket.members)
    odd = [i for i in range(len(messages)) if times[i] != (i not in absent)]
    if odd or not times.keys() <= {*range(len(messages))}:
        raise ScheduleError(f"not every {kind} is in one bucket: {_names(messages, odd)}")
    for bucket in buckets:
        names = _names(messages, bucket.members)
        if len({messages[i].key for i in bucket.members}) != 1:
            raise ScheduleError(f"{kind}s of several kinds share the bucket {names}")
        if not 0 <= bucket.start <= bucket.wait <= len(problem.seconds):
            raise ScheduleError(
                f"the {kind} {names} starts {problem.place(bucket.start)}, and is waited for "
                f"{problem.place(bucket.wait)}: out of order"
            )
    _check_order(kind, buckets, messages)


def _check_order(
    kind: str, buckets: Sequence[Bucket], messages: Sequence[Gather] | Sequence[Reduction]
) -> None:
    for a, b in pairwise(buckets):
        if a.start > b.start:
            first = _names(messages, a.members)
            second = _names(messages, b.members)
            raise ScheduleError(f"the {kind} {second} stands after {first} and starts before it")


def _check_gather(problem: Problem, bucket: Bucket) -> None:
    members = [problem.gathers[i] for i in bucket.members]
    names = _names(problem.gathers, bucket.members)
    use = min(g.use for g in members)
    release = max(g.release for g in members)
    if bucket.wait != use:
        raise ScheduleError(
            f"the gather {names} is first used {problem.place(use)}, and not waited for there"
        )
    if bucket.start < release:
        raise ScheduleError(
            f"the gather {names} starts {problem.place(bucket.start)}, and may start "
            f"{problem.place(release)} at the earliest"
        )


def _check_reduction(problem: Problem, bucket: Bucket) -> None:
    members = [problem.reductions[i] for i in bucket.members]
    names = _names(problem.reductions, bucket.members)
    born = max(r.born for r in members) + 1
    need = min(len(problem.seconds), *(r.need for r in members))
    if bucket.start != born:
        start = problem.place(born)
        raise ScheduleError(
            f"the reduction {names} has its last gradient {start}, and does not start there"
        )
    if bucket.wait > need:
        raise ScheduleError(
            f"the reduction {names} is waited for {problem.place(bucket.wait)}, and needed "
            f"{problem.place(need)}"
        )


def _check_in_flight(
    problem: Problem,
    kind: str,
    buckets: Sequence[Bucket],
    messages: Sequence[Gather] | Sequence[Reduction],
    limit: float,
) -> None:
    """Bytes started and not yet waited for."""
    under_way = []
    for bucket in buckets:
        size = sum(messages[i].bytes for i in bucket.members)
        under_way.append(Buffer(size, bucket.start, bucket.wait - 1))
    flight = live_by_slot(under_way, len(problem.seconds) + 1)
    if flight.max() > limit:
        where = problem.place(int(flight.argmax()))
        raise ScheduleError(
            f"{flight.max()} bytes of {kind} are under way {where}, and {limit} may be"
        )


def _check_between(problem: Problem, schedule: Schedule) -> None:
    """Matmuls between two starts of reductions."""
    places = problem.without_start(bucket.start for bucket in schedule.reductions)
    if places is not None:
        first, second = map(problem.place, places)
        raise ScheduleError(
            f"no reduction starts between the places {first} and {second}, which more than "
            f"{problem.max_between} matmuls part"
        )
