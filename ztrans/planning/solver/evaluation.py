"""evaluation: the seconds that a schedule of collectives takes, and its peak of live bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..event_simulator import Message, Played, play
from .problem import Bucket, Problem, Schedule
from .sending import sending
from .slots import by_operation, fixed, gathering, reducing, second_reductions, summed
from .updates import Updates


@dataclass(frozen=True)
class Outcome:
    """The result of playing a schedule."""

    seconds: float
    peak: int  # the most of `memory`
    messages: tuple[Message, ...]  # in the order of their issue
    played: Played  # at the places where one of them is issued or waited for
    memory: np.ndarray  # by operation: live bytes

    @property
    def at(self) -> int:
        """The operation at which memory peaks."""
        return int(self.memory.argmax()) if len(self.memory) else 0


def memory(problem: Problem, schedule: Schedule) -> np.ndarray:
    """The bytes live while each operation runs, or at the place before it."""
    last = problem.last_uses(schedule.dropped)
    spans = [(2 * b.start, 2 * last[i] + 2, problem.gathers[i].held) for b in schedule.gathers for i in b.members]
    for b in schedule.gathers:
        spans += gathering(problem, [problem.gathers[i] for i in b.members], b.start, b.wait)
    reductions = [([problem.reductions[i] for i in b.members], b.start, b.wait) for b in schedule.reductions]
    for members, start, wait in reductions:
        spans += reducing(members, start, wait)
    spans += second_reductions(problem, [(members, wait) for members, _, wait in reductions])
    slots = fixed(problem)
    return by_operation(slots + summed(spans, len(slots)))


def message(problem: Problem, bucket: Bucket, members: tuple) -> Message:
    """A bucket as a message; `members` are its gathers or reductions."""
    wire, seconds, host, unpack = sending(problem, members)
    return Message(bucket.start, bucket.wait, wire.lane, wire.link, wire.latency, seconds, host, unpack)


def issued(problem: Problem, schedule: Schedule) -> list[tuple[Bucket | None, Message]]:
    """Every message in the order of issue, with its bucket; those that no schedule places have none."""
    sent: list[tuple[Bucket | None, Message]] = [(None, other) for other in problem.others]
    for buckets, messages in ((schedule.gathers, problem.gathers), (schedule.reductions, problem.reductions)):
        sent += [(bucket, message(problem, bucket, tuple(messages[i] for i in bucket.members))) for bucket in buckets]
    return sorted(sent, key=lambda each: each[1].issue)


def played(problem: Problem, schedule: Schedule, places: Sequence[int] | None = None) -> tuple[Played, float]:
    """Play a schedule (see `play`); the second result is the seconds of the whole step."""
    sent, updates, reductions = issued(problem, schedule), Updates(problem), set(map(id, schedule.reductions))

    def follows(i: int, place: int) -> float:
        bucket = sent[i][0]
        if bucket is None or id(bucket) not in reductions:
            return 0.0
        updates.meet(bucket.members)
        return updates.seconds(place)

    times = play(problem.seconds, [m for _, m in sent], places, follows, updates.seconds)
    return times, max(times.start[-1] + updates.left, *times.end, 0.0)


def evaluate(problem: Problem, schedule: Schedule) -> Outcome:
    """Play a schedule."""
    messages = tuple(m for _, m in issued(problem, schedule))
    releases = (update.release for update in problem.updates)
    places = sorted({0, len(problem.seconds), *releases, *(m.issue for m in messages), *(m.need for m in messages)})
    times, seconds = played(problem, schedule, places)
    live = memory(problem, schedule)
    return Outcome(seconds, int(live.max(initial=0)), messages, times, live)
