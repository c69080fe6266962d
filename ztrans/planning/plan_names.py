"""plan_names: translate between a schedule, which has indices of a program, and the names in a plan.

A plan identifies a gather or a reduction by its future, and a place by the first result of the operation behind it. If
the program does not have a name, or the name is at a wrong place, an error says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .program_order import Planned, Skeleton
from .solver.problem import Bucket, Problem, Schedule
from .solver.validate import ScheduleError, validate

Members = tuple[str, ...]
Named = tuple[tuple[Members, str], ...]


def named(s: Skeleton, schedule: Schedule) -> tuple[Named, Named, Members]:
    """Name a schedule: its gathers and where each starts, its reductions and their waits, and the dropped gathers."""
    members = lambda planned, indices: tuple(planned[i].start.out.name for i in indices)
    return (
        tuple((members(s.gathers, b.members), s.names[b.start]) for b in schedule.gathers),
        tuple((members(s.reductions, b.members), s.names[b.wait]) for b in schedule.reductions),
        members(s.gathers, sorted(schedule.dropped)),
    )


def resolve(
    s: Skeleton, problem: Problem, gathers: Named, reductions: Named, dropped: Members
) -> Schedule:
    """Translate names to a schedule of a program.

    Raises:
        ScheduleError: a name or a place is wrong.
    """
    places = {name: k for k, name in enumerate(s.names)}
    check_members(s, gathers, reductions, dropped)
    gather, reduction = index(s.gathers), index(s.reductions)
    gather_buckets, reduction_buckets = [], []
    for names, at in gathers:
        members, start = tuple(gather[m] for m in names), _place(places, at, names)
        gather_buckets.append(Bucket(members, start, min(s.use[i] for i in members)))
    for names, at in reductions:
        members, wait = tuple(reduction[m] for m in names), _place(places, at, names)
        reduction_buckets.append(Bucket(members, max(s.born[i] for i in members) + 1, wait))
    schedule = Schedule(
        tuple(gather_buckets), tuple(reduction_buckets), frozenset(gather[m] for m in dropped)
    )
    validate(problem, schedule)
    return schedule


def index(planned: Sequence[Planned]) -> dict[str, int]:
    """The index of each planned collective by its name."""
    return {p.start.out.name: i for i, p in enumerate(planned)}


def check_members(s: Skeleton, gathers: Named, reductions: Named, dropped: Members) -> None:
    """Verify that buckets and dropped gathers are the collectives of a program, each once."""
    _check_once(
        "gather", index(s.gathers), [*(m for members, _ in gathers for m in members), *dropped]
    )
    _check_once("reduction", index(s.reductions), [m for members, _ in reductions for m in members])


def _check_once(kind: str, known: Mapping[str, int], names: Iterable[str]) -> None:
    """Verify that every name is known, that none occurs twice, and that none is missing."""
    seen: set[str] = set()
    for each in names:
        if each not in known:
            raise ScheduleError(f"the program has no {kind} {each!r}")
        if each in seen:
            raise ScheduleError(f"the {kind} {each!r} is there twice")
        seen.add(each)
    missing = next((each for each in known if each not in seen), None)
    if missing is not None:
        raise ScheduleError(f"the {kind} {missing!r} is missing")


def _place(places: Mapping[str, int], at: str, names: Members) -> int:
    if at not in places:
        raise ScheduleError(
            f"the program has no operation {at!r}, by which [{', '.join(names)}] is placed"
        )
    return places[at]
