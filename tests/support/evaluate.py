"""The seconds that a schedule takes, and the bytes that it has live.

A search counts both while it chooses places (`place.py` of the solver). This simulates a finished schedule, which must
come to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ztrans.ir.dependencies import grouped
from ztrans.planning.buffers import Buffer, by_operation, live_by_slot
from ztrans.planning.network import Message
from ztrans.planning.play import Played, Rank
from ztrans.planning.solver.after_waits import PendingUpdates, SecondReductions
from ztrans.planning.solver.messages import (
    ReductionBytes,
    gather_buffers,
    message_of,
    reserved_for_second,
    second_buffer,
    second_message,
)
from ztrans.planning.solver.problem import Problem, Schedule


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
    with_next = {bucket.members for bucket in schedule.reductions if bucket.with_next}

    def follows(i: int, place: int) -> float:
        updates.complete(reduced[i])
        # No update follows a gather: those that can run then wait for the next reduction.
        runs_updates = reduced[i] and reduced[i] not in with_next
        return updates.seconds(place) if runs_updates else 0.0

    compute = problem.compute(schedule.levers)
    # Between two of these places nothing happens but compute.
    places = {0, len(compute), *problem.releases}
    for message in messages:
        places.update((message.issue, message.need))
    in_order = {i for i, members in enumerate(reduced) if members or i in successor}
    played = play_with_updates(
        compute, messages, sorted(places), follows, updates.seconds, successor, in_order
    )
    seconds = max(played.start[-1] + updates.seconds_left, *played.end, 0.0)
    bytes_live = memory(problem, schedule)
    return Outcome(seconds, int(bytes_live.max(initial=0)), messages, played, bytes_live)


def play_with_updates(
    compute: Sequence[float],
    messages: Sequence[Message],
    places: Sequence[int],
    follows: Callable[[int, int], float],
    updates_at: Callable[[int], float],
    successor: Mapping[int, int],
    in_order: Set[int] = frozenset(),
) -> Played:
    """As `play`, with compute that has no place of its own, and messages that follow others.

    Args:
        compute: the seconds of each operation.
        messages: in the order in which they are issued.
        places: the places that are simulated, and for which times are returned. A message at another place is not sent.
        follows: `follows(i, k)` is the seconds of further compute that run after message i was waited for at place k.
        updates_at: `updates_at(k)` is the seconds of further compute at place k, before any message is waited for
            there, and after all of them.
        successor: for some messages, the one that is sent right after it has been waited for. The next successor that
            is sent, or else the place where it is needed, ends the time in which it is under way (see `SecondReductions`).
        in_order: messages of which none is waited for before an earlier one that is needed at the same place.
    """
    compute_before = [0.0, *accumulate(compute)]
    at_places = set(range(len(messages))).difference(successor.values())
    issued = grouped((messages[i].issue, i) for i in sorted(at_places))
    needed = grouped((messages[i].need, i) for i in sorted(at_places))
    under_way: SecondReductions[int] = SecondReductions()
    rank = Rank(messages)
    now = 0
    arrive: list[float] = []
    start: list[float] = []
    for k in places:
        rank.clock += compute_before[k] - compute_before[now]
        now = k
        arrive.append(rank.clock)
        for i in issued.get(k, ()):
            rank.send(i)
        rank.clock += updates_at(k)

        # What has arrived first is unpacked while the others are still under way.
        waiting = list(needed.get(k, ()))
        while waiting:
            candidates = [i for i in waiting if i not in in_order]
            candidates += [i for i in waiting if i in in_order][:1]
            i = candidates[rank.first_of(candidates)]
            waiting.remove(i)
            rank.wait(i)
            rank.clock += follows(i, k)
            if i in successor:
                j = successor[i]
                rank.send(j)
                for earlier in under_way.add(j, messages[j].need):
                    rank.wait(earlier)
                    rank.clock += follows(earlier, k)
        rank.clock += updates_at(k)
        for i in under_way.needed(k):
            rank.wait(i)
            rank.clock += follows(i, k)
        start.append(rank.clock)
    return rank.played(arrive, start)


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
