"""planner: a schedule of collectives for a problem, as near to its bound as the effort allows."""

from __future__ import annotations

from .outcome import evaluate
from .problem import Bucket, Problem, Schedule


class Infeasible(Exception):
    """No schedule fits: at operation `at` the least of them needs `needs` bytes."""

    def __init__(self, needs: int, at: int) -> None:
        super().__init__(f"{needs} bytes are needed at operation {at}, whatever the schedule")
        self.needs, self.at = needs, at


def solve(problem: Problem, effort: int = 400) -> Schedule:
    """The best schedule found in `effort` evaluations; it never needs more than `problem.memory`."""
    dropped = frozenset(
        i
        for i, gather in enumerate(problem.gathers)
        if gather.again is not None and gather.use <= problem.gathers[gather.again].last + 1
    )
    gathers = sorted(
        (Bucket((i,), gather.use, gather.use) for i, gather in enumerate(problem.gathers) if i not in dropped),
        key=lambda bucket: bucket.start,
    )
    reductions = sorted(
        (Bucket((i,), reduction.born + 1, reduction.born + 1) for i, reduction in enumerate(problem.reductions)),
        key=lambda bucket: bucket.start,
    )
    least = Schedule(tuple(gathers), tuple(reductions), dropped)
    outcome = evaluate(problem, least)
    if outcome.peak > problem.memory:
        raise Infeasible(outcome.peak, outcome.at)
    best = least
    if problem.gathers_in_flight is None:
        ahead = [
            Bucket(b.members, max(min(a.wait, b.wait), problem.gathers[b.members[0]].release), b.wait)
            for a, b in zip([Bucket((), 0, 0), *gathers], gathers)
        ]
        early = Schedule(tuple(sorted(ahead, key=lambda bucket: bucket.start)), tuple(reductions), dropped)
        if evaluate(problem, early).peak <= problem.memory:
            best = early
    if problem.reductions_in_flight is None:
        ends = [
            min([len(problem.seconds), *(x for i in b.members if (x := problem.reductions[i].need) is not None)])
            for b in reductions
        ]
        waits = [min(b.start, end) for b, end in zip(reductions[1:], ends)] + ends[-1:]
        late = Schedule(
            best.gathers, tuple(Bucket(b.members, b.start, max(b.start, w)) for b, w in zip(reductions, waits)), dropped
        )
        if evaluate(problem, late).peak <= problem.memory:
            best = late
    return best
