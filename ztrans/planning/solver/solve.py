"""solve: a schedule of collectives for a problem, as near to its bound as the effort brings it.

Memory is a constraint: no schedule is returned that needs more than there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from .evaluation import evaluate, issued, played
from .loads import Loads, kept
from .local_search import Search
from .lower_bound import bound
from .problem import Bucket, Problem, Schedule
from .slots import by_operation
from .validate import validate

EFFORT = 15_000  # messages placed in search: about half a second
ENOUGH = 0.0025  # above the bound, and there is nothing to win
FEW = 25  # schedules: those after the first look will not make up for what that lacks


class Infeasible(Exception):
    """No schedule fits: at operation `at` every one of them has at least `needs` bytes live."""

    def __init__(self, needs: int, at: int) -> None:
        super().__init__(f"{needs} bytes are needed at operation {at}, whatever the schedule")
        self.needs, self.at = needs, at


def solve(
    problem: Problem, effort: int = EFFORT, promising: Callable[[Schedule], bool] = lambda schedule: True
) -> Schedule:
    """The best schedule found. The same problem has the same one everywhere: effort is counted, not timed.

    Where the effort is enough for few, more than a first look is taken only if what that found is `promising`.

    Raises: Infeasible when no schedule fits the memory.
    """
    least = by_operation(Loads(problem).alone(kept(problem, ())))
    if least.max(initial=0) > problem.memory:
        raise Infeasible(int(least.max()), int(least.argmax()))
    search = Search(problem, bound(problem).seconds * (1 + ENOUGH), effort)
    search.sow()
    found = _chosen(search)
    few = effort < FEW * (len(problem.gathers) + len(problem.reductions))
    if search.done or (few and not promising(found)):
        return found
    search.merge()
    search.climb()
    return _chosen(search)


def _chosen(search: Search) -> Schedule:
    """The best that was found, or one that needs no search."""
    problem, found = search.problem, search.best.schedule
    choices = [later(problem, found), found, one_ahead(problem, search.free)]
    outcomes = [(evaluate(problem, s), s) for s in choices if s is not None]
    return min((each for each in outcomes if each[0].peak <= problem.memory), key=lambda each: each[0].seconds)[1]


def one_ahead(problem: Problem, dropped: frozenset[int]) -> Schedule | None:
    """Every message alone, started or waited for one message ahead; None when that does not fit."""
    order = sorted((i for i in range(len(problem.gathers)) if i not in dropped), key=lambda i: problem.gathers[i].use)
    gathers = [
        Bucket((i,), min(max(before, problem.gathers[i].release), problem.gathers[i].use), problem.gathers[i].use)
        for before, i in zip([0, *(problem.gathers[i].use for i in order)], order)
    ]
    starts = [r.born + 1 for r in problem.reductions]
    ends = [len(problem.seconds) if r.need is None else r.need for r in problem.reductions]
    reductions = [
        Bucket((i,), start, min(after, end))
        for i, (start, after, end) in enumerate(zip(starts, [*starts[1:], len(problem.seconds)], ends))
    ]
    schedule = Schedule(tuple(sorted(gathers, key=lambda b: b.start)), tuple(reductions), dropped)
    try:
        validate(problem, schedule)
    except ValueError:
        return None
    return schedule if evaluate(problem, schedule).peak <= problem.memory else None


def later(problem: Problem, schedule: Schedule) -> Schedule:
    """Every gather started at the last place before its transfer begins: less is live, and where sending costs no
    compute, nothing else changes."""
    times, _ = played(problem, schedule)
    last: dict[str, int] = {}  # by lane, where the message after starts
    ours = set(map(id, schedule.gathers))
    gathers = []
    for (bucket, message), begin in reversed(list(zip(issued(problem, schedule), times.begin))):
        start = message.issue
        if id(bucket) in ours:
            start = max(
                start, min(bisect_right(times.arrive, begin) - 1, bucket.wait, last.get(message.lane, bucket.wait))
            )
            gathers.append(replace(bucket, start=start))
        last[message.lane] = start - (bucket is None)  # at one place, what no schedule places is sent first
    return replace(schedule, gathers=tuple(sorted(reversed(gathers), key=lambda bucket: bucket.start)))
