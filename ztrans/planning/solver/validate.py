"""validate: whether a schedule keeps every limit of its problem, the seconds that it takes, and its live bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..buffers import Buffer, by_operation, live
from ..simulate import Message, Played, play
from .problem import (
    Bucket,
    Gather,
    PendingUpdates,
    Problem,
    Reduction,
    ReductionBytes,
    Schedule,
    gather_buffers,
    lever_buffers,
    message_of,
    reserved_for_second,
    second_buffer,
)


class ScheduleError(ValueError):
    """A schedule does not belong to its problem."""


def validate(problem: Problem, schedule: Schedule) -> None:
    """Verify that a schedule keeps every limit of a problem, except that of memory.

    Raises:
        ScheduleError: a limit is not kept; the message names members and places.
    """
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
    under_way = [
        Buffer(sum(messages[i].bytes for i in bucket.members), bucket.start, bucket.wait - 1)
        for bucket in buckets
    ]
    flight = live(under_way, len(problem.seconds) + 1)
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


@dataclass(frozen=True)
class Outcome:
    """The result of simulating a schedule."""

    seconds: float
    peak: int  # the most of `memory`
    messages: tuple[Message, ...]  # in the order of their issue
    played: Played  # at the places where one of them is issued or waited for
    memory: np.ndarray  # by operation: live bytes


def evaluate(problem: Problem, schedule: Schedule) -> Outcome:
    """Simulate a schedule."""
    issued = _issued(problem, schedule)
    messages = tuple(message for message, _ in issued)
    updates = PendingUpdates(problem)

    def follows(i: int, place: int) -> float:
        updates.complete(issued[i][1])
        return updates.seconds(place)

    compute = problem.compute(schedule.levers)
    places = {0, len(compute)}
    places.update(update.release for update in problem.updates)
    for message in messages:
        places.update((message.issue, message.need))
    played = play(compute, messages, sorted(places), follows, updates.seconds)
    seconds = max(played.start[-1] + updates.seconds_left, *played.end, 0.0)
    bytes_live = memory(problem, schedule)
    return Outcome(seconds, int(bytes_live.max(initial=0)), messages, played, bytes_live)


def _issued(problem: Problem, schedule: Schedule) -> list[tuple[Message, tuple[int, ...]]]:
    """Every message in the order of issue, with the reductions that are its members."""
    issued: list[tuple[Message, tuple[int, ...]]] = [(message, ()) for message in problem.others]
    for bucket in schedule.gathers:
        gathers = [problem.gathers[i] for i in bucket.members]
        issued.append((message_of(problem, gathers, bucket.start, bucket.wait), ()))
    for bucket in schedule.reductions:
        reductions = [problem.reductions[i] for i in bucket.members]
        message = message_of(problem, reductions, bucket.start, bucket.wait)
        issued.append((message, bucket.members))
    return sorted(issued, key=lambda each: each[0].issue)


def memory(problem: Problem, schedule: Schedule) -> np.ndarray:
    """The bytes live while each operation runs, or at the place before it."""
    buffers = [Buffer(g.bytes, 2 * g.use, 2 * g.last + 1) for g in problem.gathers]
    buffers += lever_buffers(problem, schedule.levers)
    for bucket in schedule.gathers:
        gathers = [problem.gathers[i] for i in bucket.members]
        buffers += [Buffer(g.bytes, 2 * bucket.start, 2 * g.use - 1) for g in gathers]
        buffers += gather_buffers(problem, gathers, bucket.start, bucket.wait)
    reductions = [[problem.reductions[i] for i in b.members] for b in schedule.reductions]
    for bucket, members in zip(schedule.reductions, reductions):
        buffers += ReductionBytes(members).buffers(bucket.start, bucket.wait)
    second = reserved_for_second(reductions)
    if second:
        buffers.append(second_buffer(problem, second))
    return by_operation(problem.fixed + live(buffers, len(problem.fixed)))
