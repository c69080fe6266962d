"""The seconds that a schedule takes, and the bytes that it has live.

A search counts both while it chooses places (`place.py` of the solver). This simulates the tape of a finished schedule,
which must come to the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ztrans.planning.buffers import Buffer, by_operation, live_by_slot
from ztrans.planning.network import Message
from ztrans.planning.play import Played, Rank
from ztrans.planning.solver.messages import (
    ReductionBytes,
    gather_buffers,
    message_of,
    reserved_for_second,
    second_buffer,
    second_message,
)
from ztrans.planning.solver.problem import Problem, Schedule
from ztrans.planning.solver.tape import Kind, tape

WAITS = {
    Kind.WAIT_GATHER: Kind.START_GATHER,
    Kind.WAIT_REDUCTION: Kind.START_REDUCTION,
    Kind.WAIT_SECOND: Kind.START_SECOND,
}


@dataclass(frozen=True)
class Outcome:
    """The result of simulating a schedule.

    Attributes:
        seconds: of the step.
        messages: the fixed ones, those of gathers, and those of reductions, each before its second one.
        played: what happened at the places where one of them is issued or waited for.
    """

    problem: Problem
    schedule: Schedule
    seconds: float
    messages: tuple[Message, ...]
    played: Played

    @functools.cached_property
    def memory(self) -> np.ndarray:
        """By operation, the live bytes. Most tests that compare many schedules need only their seconds."""
        return memory(self.problem, self.schedule)

    @property
    def peak(self) -> int:
        return int(self.memory.max(initial=0))


def evaluate(problem: Problem, schedule: Schedule) -> Outcome:
    """Simulate a schedule."""
    at_places = tape(problem, schedule)
    # The number of the message of each event that starts one, by member.
    number: dict[tuple[Kind, int], int] = {}
    messages: list[Message] = list(problem.fixed_messages)
    for kind, members, message in _messages(problem, schedule):
        for i in members:  # gathers that share a message are waited for at their own uses
            number[kind, i] = len(messages)
        messages.append(message)

    compute = problem.compute(schedule.levers)
    # Between two of these places nothing happens but compute.
    places = {0, len(compute), *problem.releases}
    for message in messages:
        places.update((message.issue, message.need))
    compute_before = [0.0, *accumulate(compute)]
    rank = Rank()
    sent = [0] * len(messages)  # by message, its number in the network
    waited_for: set[int] = set()
    updated: set[int] = set()
    now = 0
    arrive: list[float] = []
    start: list[float] = []
    for k in sorted(places):
        rank.clock += compute_before[k] - compute_before[now]
        now = k
        arrive.append(rank.clock)
        for i, message in enumerate(problem.fixed_messages):
            if message.issue == k:
                sent[i] = rank.send(message)
        for event in at_places.get(k, ()):
            if event.kind is Kind.UPDATE:
                rank.clock += problem.update_seconds(event.updates)
                updated.update(event.updates)
            elif event.kind not in WAITS:
                i = number[event.kind, event.members[0]]
                sent[i] = rank.send(messages[i])
            else:
                i = number[WAITS[event.kind], event.members[0]]
                if i not in waited_for:
                    rank.wait(sent[i])
                    waited_for.add(i)
        for i, message in enumerate(problem.fixed_messages):
            if message.need == k:
                rank.wait(sent[i])
        start.append(rank.clock)
    played = rank.played(sent, arrive, start)

    # The other updates run at their places in the program: for a schedule that is the end.
    others = [u for u in range(len(problem.updates)) if u not in updated]
    seconds = max(played.start[-1] + problem.update_seconds(others), *played.end, 0.0)
    return Outcome(problem, schedule, seconds, tuple(messages), played)


def _messages(
    problem: Problem, schedule: Schedule
) -> Iterator[tuple[Kind, tuple[int, ...], Message]]:
    """The messages of a schedule, each with the kind of the event that starts it, and its members."""
    for bucket in schedule.gathers:
        gathers = [problem.gathers[i] for i in bucket.members]
        message = message_of(problem, gathers, bucket.start, bucket.wait)
        yield Kind.START_GATHER, bucket.members, message
    for bucket in schedule.reductions:
        reductions = [problem.reductions[i] for i in bucket.members]
        message = message_of(problem, reductions, bucket.start, bucket.wait)
        yield Kind.START_REDUCTION, bucket.members, message
        second = second_message(problem, reductions, bucket.wait)
        if second is not None:
            yield Kind.START_SECOND, bucket.members, second


def memory(problem: Problem, schedule: Schedule) -> np.ndarray:
    """The bytes live while each operation runs, or at the place before it."""
    buffers = [Buffer(g.bytes, 2 * g.use, 2 * g.last + 1) for g in problem.values]
    buffers += problem.lever_buffers(schedule.levers)
    for bucket in schedule.gathers:
        gathers = [problem.gathers[i] for i in bucket.members]
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
