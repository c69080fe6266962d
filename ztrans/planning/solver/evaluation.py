"""evaluation: the seconds that a schedule of collectives takes, and its peak of live bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..event_simulator import Message, Played, play
from .problem import Problem, Schedule
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


def memory(problem: Problem, schedule: Schedule) -> np.ndarray:
    """The bytes live while each operation runs, or at the place before it."""
    last = problem.last_uses(schedule.dropped)
    spans = [
        (2 * b.start, 2 * last[i] + 2, problem.gathers[i].held)
        for b in schedule.gathers
        for i in b.members
    ]
    for b in schedule.gathers:
        spans += gathering(problem, [problem.gathers[i] for i in b.members], b.start, b.wait)
    reductions = [
        ([problem.reductions[i] for i in b.members], b.start, b.wait) for b in schedule.reductions
    ]
    for members, start, wait in reductions:
        spans += reducing(members, start, wait)
    spans += second_reductions(problem, [(members, wait) for members, _, wait in reductions])
    slots = fixed(problem)
    return by_operation(slots + summed(spans, len(slots)))


def evaluate(problem: Problem, schedule: Schedule) -> Outcome:
    """Play a schedule."""
    sent, updates = _issued(problem, schedule), Updates(problem)
    messages = tuple(message for message, _ in sent)

    def follows(i: int, place: int) -> float:
        updates.meet(sent[i][1])
        return updates.seconds(place)

    releases = (update.release for update in problem.updates)
    places = sorted(
        {
            0,
            len(problem.seconds),
            *releases,
            *(m.issue for m in messages),
            *(m.need for m in messages),
        }
    )
    played = play(problem.seconds, messages, places, follows, updates.seconds)
    seconds = max(played.start[-1] + updates.left, *played.end, 0.0)
    live = memory(problem, schedule)
    return Outcome(seconds, int(live.max(initial=0)), messages, played, live)


def _issued(problem: Problem, schedule: Schedule) -> list[tuple[Message, tuple[int, ...]]]:
    """Every message in the order of issue, with the reductions that are its members."""
    sent: list[tuple[Message, tuple[int, ...]]] = [(other, ()) for other in problem.others]
    for b in schedule.gathers:
        sent.append(
            (sending(problem, [problem.gathers[i] for i in b.members], b.start, b.wait), ())
        )
    for b in schedule.reductions:
        sent.append(
            (
                sending(problem, [problem.reductions[i] for i in b.members], b.start, b.wait),
                b.members,
            )
        )
    return sorted(sent, key=lambda each: each[0].issue)
