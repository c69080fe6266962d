"""outcome: what a schedule of collectives comes to: its seconds, its peak of memory, and whether it is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .play import Message, Played, play
from .problem import Bucket, Problem, Schedule
from .sending import sending
from .slots import by_operation, fixed, gathering, reducing, summed
from .updates import Updates


@dataclass(frozen=True)
class Outcome:
    """`messages` are in the order of their issue, as in `issued`; `played` has the places that one of them
    is issued at or waited for, in order. `memory[k]` is what operation k has live."""

    seconds: float
    peak: int
    messages: tuple[Message, ...]
    played: Played
    memory: np.ndarray

    @property
    def at(self) -> int:
        """The operation at which memory peaks."""
        return int(self.memory.argmax()) if len(self.memory) else 0


def keepers(problem: Problem, schedule: Schedule) -> dict[int, int]:
    """For each dropped gather, the earlier gather whose value is kept for it."""
    keeper: dict[int, int] = {}
    for i in sorted(schedule.dropped):
        earlier = problem.gathers[i].again
        if earlier is None:
            raise ValueError(f"gather {i} is dropped, and repeats none")
        keeper[i] = keeper.get(earlier, earlier)
    return keeper


def memory(problem: Problem, schedule: Schedule) -> np.ndarray:
    """The bytes live while each operation runs, or at the place before it."""
    after = [gather.last + 1 for gather in problem.gathers]
    for i, keeper in keepers(problem, schedule).items():
        after[keeper] = max(after[keeper], problem.gathers[i].last + 1)
    spans = [(2 * b.start, 2 * after[i], problem.gathers[i].held) for b in schedule.gathers for i in b.members]
    for b in schedule.gathers:
        spans += gathering(problem, [problem.gathers[i] for i in b.members], b.start, b.wait)
    for b in schedule.reductions:
        spans += reducing([problem.reductions[i] for i in b.members], b.start, b.wait)
    slots = fixed(problem)
    return by_operation(slots + summed(spans, len(slots)))


def message(problem: Problem, bucket: Bucket, members: tuple) -> Message:
    """The message that a bucket is; `members` are its gathers or reductions."""
    wire, seconds, host, unpack = sending(problem, members)
    return Message(bucket.start, bucket.wait, wire.lane, wire.link, wire.latency, seconds, host, unpack)


def issued(problem: Problem, schedule: Schedule) -> list[tuple[Bucket | None, Message]]:
    """Every message in the order of issue, with its bucket; those that no schedule places have none."""
    sent: list[tuple[Bucket | None, Message]] = [(None, other) for other in problem.others]
    for buckets, things in ((schedule.gathers, problem.gathers), (schedule.reductions, problem.reductions)):
        sent += [(bucket, message(problem, bucket, tuple(things[i] for i in bucket.members))) for bucket in buckets]
    return sorted(sent, key=lambda each: each[1].issue)


def played(problem: Problem, schedule: Schedule, places: Sequence[int] | None = None) -> tuple[Played, float]:
    """A schedule as it is played (see `play`), and the seconds that the whole step takes."""
    sent, updates, reduces = issued(problem, schedule), Updates(problem), set(map(id, schedule.reductions))
    members = [bucket.members if id(bucket) in reduces else () for bucket, _ in sent]
    times = play(problem.seconds, [m for _, m in sent], places, lambda i, place: updates.follow(members[i], place))
    return times, max(times.start[-1] + updates.left, *times.end, 0.0)


def evaluate(problem: Problem, schedule: Schedule) -> Outcome:
    """Play a schedule."""
    messages = tuple(m for _, m in issued(problem, schedule))
    places = sorted({0, len(problem.seconds), *(m.issue for m in messages), *(m.need for m in messages)})
    times, seconds = played(problem, schedule, places)
    live = memory(problem, schedule)
    return Outcome(seconds, int(live.max(initial=0)), messages, times, live)


def validate(problem: Problem, schedule: Schedule) -> None:
    """Raise a ValueError that says why `schedule` is none of `problem`."""
    n = len(problem.seconds)
    keeper = keepers(problem, schedule)
    for what, buckets, things, absent in (
        ("gather", schedule.gathers, problem.gathers, schedule.dropped),
        ("reduction", schedule.reductions, problem.reductions, frozenset()),
    ):
        members = [i for bucket in buckets for i in bucket.members]
        if sorted(members) != [i for i in range(len(things)) if i not in absent]:
            raise ValueError(f"not every {what} is in one bucket: {sorted(members)}")
        for bucket in buckets:
            if len({things[i].key for i in bucket.members}) != 1:
                raise ValueError(f"{what}s of several keys in {bucket}")
            if not 0 <= bucket.start <= bucket.wait <= n:
                raise ValueError(f"out of order: {bucket}")
        if any(a.start > b.start for a, b in pairwise(buckets)):
            raise ValueError(f"buckets of {what}s are not in the order of their start")
    for bucket in schedule.gathers:
        if bucket.wait != min(problem.gathers[i].use for i in bucket.members):
            raise ValueError(f"not waited for at its first use: {bucket}")
        if bucket.start < max(problem.gathers[i].release for i in bucket.members):
            raise ValueError(f"started before it is released: {bucket}")
    for i, earlier in keeper.items():
        if earlier in schedule.dropped:
            raise ValueError(f"gather {i} is dropped, and nothing is kept for it")
    for bucket in schedule.reductions:
        members = [problem.reductions[i] for i in bucket.members]
        if bucket.start != max(m.born for m in members) + 1:
            raise ValueError(f"not started when its last member is born: {bucket}")
        if bucket.wait > min(n if m.need is None else m.need for m in members):
            raise ValueError(f"waited for after it is needed: {bucket}")
    limits = (
        ("gathers", problem.gathers_in_flight, schedule.gathers, problem.gathers),
        ("reductions", problem.reductions_in_flight, schedule.reductions, problem.reductions),
    )
    for what, limit, buckets, things in limits:
        flight = np.zeros(n + 1, dtype=np.int64)
        for bucket in buckets:
            held = sum(things[i].held for i in bucket.members)
            flight[bucket.start] += held
            flight[bucket.wait] -= held
        flight = flight.cumsum()
        if limit is not None and flight.max() > limit:
            raise ValueError(f"more than {limit} bytes of {what} are under way at operation {flight.argmax()}")
    if problem.max_between is not None:
        births = sorted({reduction.born + 1 for reduction in problem.reductions})
        for a, b in pairwise(sorted({*births[:1], *(bucket.start for bucket in schedule.reductions)})):
            if problem.matmuls[b] - problem.matmuls[a] > problem.max_between and any(a < birth < b for birth in births):
                raise ValueError(f"no reduction starts between places {a} and {b}, more than max_between matmuls")
