"""The seconds that a schedule takes, and the bytes that it has live.

A search does not ask here: `place` chooses places and counts seconds and bytes in one pass, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..buffers import Buffer, by_operation, live_by_slot
from ..network import Message
from ..play import Played, play
from .messages import (
    ReductionBytes,
    gather_buffers,
    message_of,
    reserved_for_second,
    second_buffer,
    second_message,
)
from .problem import PendingUpdates, Problem, Schedule


@dataclass(frozen=True)
class Outcome:
    """The result of simulating a schedule.

    Attributes:
        seconds: of the step.
        peak: the most of `memory`.
        messages: in the order of their issue.
        played: what happened at the places where one of them is issued or waited for.
        memory: by operation, the live bytes.
    """

    seconds: float
    peak: int
    messages: tuple[Message, ...]
    played: Played
    memory: np.ndarray


def evaluate(problem: Problem, schedule: Schedule) -> Outcome:
    """Simulate a schedule."""
    issued = _issued(problem, schedule)
    messages, reduced, successor = _with_successors(problem, issued)
    updates = PendingUpdates(problem)

    def follows(i: int, place: int) -> float:
        updates.complete(reduced[i])
        return updates.seconds(place)

    compute = problem.compute(schedule.levers)
    # Between two of these places nothing happens but compute.
    places = {0, len(compute)}
    places.update(update.release for update in problem.updates)
    for message in messages:
        places.update((message.issue, message.need))
    played = play(compute, messages, sorted(places), follows, updates.seconds, successor)
    seconds = max(played.start[-1] + updates.seconds_left, *played.end, 0.0)
    bytes_live = memory(problem, schedule)
    return Outcome(seconds, int(bytes_live.max(initial=0)), messages, played, bytes_live)


def _with_successors(
    problem: Problem, issued: Sequence[tuple[Message, tuple[int, ...]]]
) -> tuple[tuple[Message, ...], list[tuple[int, ...]], dict[int, int]]:
    """All messages, the reductions that are complete after each, and the second reductions that follow some of them."""
    messages = [message for message, _ in issued]
    reduced = [members for _, members in issued]
    successor: dict[int, int] = {}
    for i, (message, members) in enumerate(issued):
        second = second_message(problem, [problem.reductions[r] for r in members], message.need)
        if second is not None:
            successor[i] = len(messages)
            messages.append(second)
            reduced[i] = ()
            reduced.append(members)
    return tuple(messages), reduced, successor


def _issued(problem: Problem, schedule: Schedule) -> list[tuple[Message, tuple[int, ...]]]:
    """Every message in the order of issue, with the reductions that are its members."""
    issued: list[tuple[Message, tuple[int, ...]]] = []
    for message in problem.fixed_messages:
        issued.append((message, ()))
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
    buffers = [Buffer(g.bytes, 2 * g.use, 2 * g.last + 1) for g in problem.values]
    buffers += problem.lever_buffers(schedule.levers)
    for bucket in schedule.gathers:
        gathers = [problem.gathers[i] for i in bucket.members]
        buffers += [Buffer(g.bytes, 2 * bucket.start, 2 * g.use - 1) for g in gathers]
        buffers += gather_buffers(problem, gathers, bucket.start, bucket.wait)
    reductions = []
    for bucket in schedule.reductions:
        members = [problem.reductions[i] for i in bucket.members]
        reductions.append(members)
        buffers += ReductionBytes(members).buffers(bucket.start, bucket.wait)
    second = reserved_for_second(reductions)
    if second:
        buffers.append(second_buffer(problem, second))
    return by_operation(problem.fixed_bytes + live_by_slot(buffers, len(problem.fixed_bytes)))
