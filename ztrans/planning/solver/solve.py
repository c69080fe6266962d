"""solve: choose a schedule of collectives for a problem.

Memory is a hard limit. Live bytes are counted by slot (see `slots`), and the program in the order of a schedule never
has more of them live than its schedule counts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple

from .evaluation import evaluate, issued, played
from .loads import Loads, kept
from .local_search import Moves, Search
from .lower_bound import bound
from .problem import Bucket, Problem, Schedule
from .slots import by_operation
from .validate import validate

EFFORT = 15_000  # messages that the search places: about half a second
ENOUGH = 0.0025  # a schedule this close to the lower bound, as a share of it, ends the search


class Infeasible(Exception):
    """No schedule fits the memory: every one has at least `needs` bytes live at operation `at`."""

    def __init__(self, needs: int, at: int) -> None:
        super().__init__(f"{needs} bytes are needed at operation {at}, whatever the schedule")
        self.needs, self.at = needs, at


def one_ahead(problem: Problem, best: Schedule) -> Schedule | None:
    """Every message in a bucket of its own, started or waited for one message ahead; None if that does not fit."""
    dropped = kept(problem, ())
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
    """Start every gather at the last place before its transfer begins.

    Fewer bytes are live then. Where sending costs no compute, nothing else changes.
    """
    times, _ = played(problem, schedule)
    last: dict[str, int] = {}  # by lane, where the message after starts
    ours = set(map(id, schedule.gathers))
    gathers = []
    for (bucket, message), begin in reversed(list(zip(issued(problem, schedule), times.begin))):
        start = message.issue
        if bucket is not None and id(bucket) in ours:
            start = max(
                start, min(bisect_right(times.arrive, begin) - 1, bucket.wait, last.get(message.lane, bucket.wait))
            )
            gathers.append(replace(bucket, start=start))
        last[message.lane] = start - (bucket is None)  # at one place, what no schedule places is sent first
    return replace(schedule, gathers=tuple(sorted(reversed(gathers), key=lambda bucket: bucket.start)))


MOVES = Moves(finish=(one_ahead, later))


class Needs(NamedTuple):
    """The memory that every schedule of a problem needs."""

    bytes: int
    at: int  # the operation at which that much is live


def needs(problem: Problem) -> Needs:
    """Count the bytes that are live in every schedule of a problem."""
    least = by_operation(Loads(problem).alone(kept(problem, ())))
    return Needs(int(least.max(initial=0)), int(least.argmax()) if len(least) else 0)


def solve(problem: Problem, effort: int = EFFORT, moves: Moves = MOVES) -> Schedule:
    """Find the fastest schedule whose peak fits the memory.

    The same problem has the same schedule on every rank, because effort is counted and not timed.

    Args:
        problem: what is to be scheduled.
        effort: messages that the search may place.
        moves: what the search tries.

    Raises:
        Infeasible: no schedule fits the memory.
    """
    least = needs(problem)
    if least.bytes > problem.memory:
        raise Infeasible(*least)
    search = Search(problem, bound(problem).seconds * (1 + ENOUGH), effort, moves)
    search.sow()
    if not search.done:
        search.merge()
        search.climb()
    best = search.best.schedule
    choices = [best, *(finish(problem, best) for finish in moves.finish)]
    outcomes = [(evaluate(problem, schedule), schedule) for schedule in choices if schedule is not None]
    fitting = [(outcome.seconds, schedule) for outcome, schedule in outcomes if outcome.peak <= problem.memory]
    return min(reversed(fitting), key=lambda pair: pair[0])[1]
