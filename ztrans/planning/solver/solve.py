"""solve: choose a schedule of collectives for a problem.

Memory is a hard limit. Live bytes are counted by slot (see `slots`), and the program in the order of a schedule never
has more of them live than its schedule counts.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

from .evaluation import evaluate
from .loads import Loads, kept
from .local_search import Search
from .lower_bound import bound
from .moves import MOVES, Moves
from .problem import Bucket, Problem, Schedule
from .slots import by_operation
from .validate import ScheduleError, validate

EFFORT = 20_000  # messages that the search places: about a second


class Infeasible(Exception):
    """No schedule fits the memory: with every message alone, `needs` bytes are live at operation `at`."""

    def __init__(self, needs: int, at: int) -> None:
        super().__init__(
            f"{needs} bytes are needed at operation {at}, even if every message is sent alone"
        )
        self.needs, self.at = needs, at


class Needs(NamedTuple):
    """The memory that a problem needs."""

    bytes: int
    at: int  # the operation at which that much is live


def needs(problem: Problem) -> Needs:
    """Find the least memory for which every message can be sent alone (see `first_waits`).

    If that fits the memory of the problem, these are the bytes that are live then.
    """
    least = _alone(problem)
    if least.bytes <= problem.memory:
        return least
    low = int(problem.memory)
    while low + 1 < least.bytes:
        middle = (low + least.bytes) // 2
        within = _alone(replace(problem, memory=middle))
        if within.bytes <= middle:
            least = Needs(middle, within.at)
        else:
            low = middle
    return least


def _alone(problem: Problem) -> Needs:
    """The bytes that are live if every message is sent alone, and is waited for as early as the memory allows."""
    live = by_operation(Loads(problem).alone(kept(problem, ())))
    return Needs(int(live.max(initial=0)), int(live.argmax()) if len(live) else 0)


@functools.lru_cache(maxsize=32)
def solve(problem: Problem, effort: int = EFFORT, moves: Moves = MOVES) -> Schedule:
    """Find the fastest schedule whose peak fits the memory.

    The same problem has the same schedule on every rank, because effort is counted and not timed. The schedules of the
    last problems are kept, for a step that is decorated again, as in a notebook.

    Args:
        problem: the operations, the messages and the limits.
        effort: messages that the search may place.
        moves: the moves of the search.

    Raises:
        Infeasible: no schedule fits the memory.
    """
    least = needs(problem)
    if least.bytes > problem.memory:
        raise Infeasible(*least)
    search = Search(problem, bound(problem).seconds, effort, moves)
    search.begin()
    for gathers in moves.merge:
        search.merge(gathers)
    search.climb()
    simple = one_ahead(problem) if moves.one_ahead else None
    if simple is not None and evaluate(problem, simple).seconds < search.best.seconds:
        return simple
    return search.result.schedule


def one_ahead(problem: Problem) -> Schedule | None:
    """The schedule with every message alone, started or waited for one message ahead; None if it is not allowed.

    In small problems, where to send a message takes much compute, it may be faster than what the search finds.
    """
    dropped, end = kept(problem, ()), len(problem.seconds)
    order = sorted((g.use, i) for i, g in enumerate(problem.gathers) if i not in dropped)
    gathers = [
        Bucket((i,), min(max(before, problem.gathers[i].release), use), use)
        for (before, _), (use, i) in zip([(0, 0), *order], order)
    ]
    starts = [r.born + 1 for r in problem.reductions]
    reductions = [
        Bucket((i,), start, min(after, r.need))
        for i, (r, start, after) in enumerate(zip(problem.reductions, starts, [*starts[1:], end]))
    ]
    schedule = Schedule(
        tuple(sorted(gathers, key=lambda bucket: bucket.start)), tuple(reductions), dropped
    )
    try:
        validate(problem, schedule)
    except ScheduleError:
        return None
    return schedule if evaluate(problem, schedule).peak <= problem.memory else None
