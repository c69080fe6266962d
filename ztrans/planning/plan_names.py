"""Between a plan, which names collectives and places, and a schedule, which numbers them.

The errors here are those of a plan that was edited by hand: each names the member, the kinds, and the places that are
allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..ir.collectives import bucket_key
from ..ir.printer import fold, nearest
from .levers import all_gathers
from .plan import MemberNames, NamedBuckets, Plan, member_names
from .skeleton import Collective, Skeleton
from .solver.problem import Bucket, Levers, Problem, Schedule
from .solver.validate import ScheduleError, check_levers, validate

_WITH_NEXT = ", with the next"  # after the place of a reduction


def buckets_by_name(
    s: Skeleton, problem: Problem, schedule: Schedule
) -> tuple[NamedBuckets, NamedBuckets, MemberNames]:
    """A schedule by name: gathers and their starts, reductions and their waits, and dropped gathers."""
    places = s.place_names
    gathers = []
    for bucket in schedule.gathers:
        names = tuple(all_gathers(s)[i].name for i in bucket.members)
        gathers.append((names, places[bucket.start]))
    reductions = []
    for bucket in schedule.reductions:
        names = tuple(s.reductions[i].name for i in bucket.members)
        suffix = _WITH_NEXT if bucket.with_next else ""
        reductions.append((names, f"{places[bucket.wait]}{suffix}"))

    # In the order of the dropped gathers. A lever that sends others in their place has these in buckets.
    levers = sorted((problem.levers[i] for i in schedule.levers), key=lambda lever: lever.drops)
    dropped = tuple(lever.name for lever in levers if not lever.sends)
    return tuple(gathers), tuple(reductions), dropped


def schedule_of(plan: Plan, s: Skeleton, problem: Problem) -> Schedule:
    """The schedule of a plan, for a program that has its names.

    With another batch size, a program may have other operations between two landmarks. There a bucket moves to the
    nearest place between the same landmarks where it may start, or be waited for.

    Raises:
        ScheduleError: a name or a place is wrong.
    """
    gather = {collective.name: i for i, collective in enumerate(all_gathers(s))}
    reduction = {collective.name: i for i, collective in enumerate(s.reductions)}
    gather_names = (*member_names(plan.gathers), *plan.dropped)
    _check_names("gather", gather_names, gather, "reduction", reduction)
    _check_names("reduction", member_names(plan.reductions), reduction, "gather", gather)
    levers = _levers(plan, problem, gather)
    dropped = problem.dropped(levers)
    sent = [name for name, i in gather.items() if i not in dropped]
    _check_complete("gather", plan.gathers, sent)
    _check_complete("reduction", plan.reductions, reduction)

    gathers = []
    for names, place in plan.gathers:
        members = tuple(gather[name] for name in names)
        _check_kinds("gathers", [all_gathers(s)[i] for i in members])
        use = min(problem.gathers[i].use for i in members)
        release = max(problem.gathers[i].release for i in members)
        start = _place(s, place, f"the gather [{fold(names)}]", "start", release, use)
        gathers.append(Bucket(members, start, use))
    reductions = []
    for names, place in plan.reductions:
        members = tuple(reduction[name] for name in names)
        _check_kinds("reductions", [s.reductions[i] for i in members])
        start = max(problem.reductions[i].born for i in members) + 1
        deadline = min(len(s.ops), *(problem.reductions[i].deadline for i in members))
        at = place.removesuffix(_WITH_NEXT)
        wait = _place(s, at, f"the reduction [{fold(names)}]", "be waited for", start, deadline)
        reductions.append(Bucket(members, start, wait, place.endswith(_WITH_NEXT)))
    schedule = Schedule(tuple(gathers), tuple(reductions), levers)
    validate(problem, schedule)
    return schedule


def _levers(plan: Plan, problem: Problem, gather: Mapping[str, int]) -> Levers:
    """The levers that a plan pulls. `gather` has the index of each gather by name.

    Raises: ScheduleError if it drops a gather whose value no lever keeps, or two levers exclude each other.
    """
    # A plan names the levers that send nothing among what it drops, and of the others what they send.
    lever_of = {lever.name: i for i, lever in enumerate(problem.levers) if not lever.sends}
    levers = set()
    for name in plan.dropped:
        if name not in lever_of:
            droppable = f"it may drop {fold(list(lever_of))}" if lever_of else "it may drop none"
            raise ScheduleError(
                f"the gather [{name}] is dropped, and no value is kept for it: {droppable}"
            )
        levers.add(lever_of[name])
    for name in member_names(plan.gathers):
        if gather[name] in problem.sent_by:
            levers.add(problem.sent_by[gather[name]])
    check_levers(problem, levers)
    return frozenset(levers)


def _check_names(
    kind: str,
    names: Iterable[str],
    known: Mapping[str, int],
    other_kind: str,
    of_other_kind: Collection[str],
) -> None:
    """Check that a program has all names of one kind of collective, and that none comes twice.

    Raises: ScheduleError
    """
    earlier: set[str] = set()
    for name in names:
        if name in of_other_kind:
            raise ScheduleError(f"{name!r} is a {other_kind}, and stands among the {kind}s")
        if name not in known:
            raise ScheduleError(f"the program has no {kind} {name!r}{nearest(name, known)}")
        if name in earlier:
            raise ScheduleError(f"it names the {kind} {name!r} twice")
        earlier.add(name)


def _check_complete(kind: str, buckets: NamedBuckets, names: Iterable[str]) -> None:
    """Check that every name is in a bucket.

    Raises: ScheduleError if one is not.
    """
    placed_names = set(member_names(buckets))
    for name in names:
        if name not in placed_names:
            raise ScheduleError(f"the {kind} {name!r} is missing")


def _check_kinds(kind: str, members: list[Collective]) -> None:
    """Check that the members of a bucket can share a message.

    Raises: ScheduleError if two differ.
    """
    first, *others = members
    for other in others:
        differences = bucket_key(first.start).differences(bucket_key(other.start))
        if first.second and other.second:
            second_key = bucket_key(first.second[0])
            differences = differences or second_key.differences(bucket_key(other.second[0]))
        elif first.second or other.second:
            again = first.name if first.second else other.name
            differences = differences or f"only {again} is reduced again, over another axis"
        if first.micro_batches != other.micro_batches:
            numbers = f"micro-batches {first.micro_batches} and {other.micro_batches}"
            differences = differences or numbers
        if differences:
            raise ScheduleError(
                f"the {kind} {first.name!r} and {other.name!r} are of two kinds and cannot share a bucket: "
                f"{differences}"
            )


def _place(s: Skeleton, name: str, bucket: str, verb: str, earliest: int, latest: int) -> int:
    """The number of a place, moved between `earliest` and `latest` if its landmarks allow it.

    `verb` says what the bucket does at the place: start, or be waited for.

    Raises: ScheduleError if the program lacks the place, or the bucket may not be there.
    """
    places = s.place_names
    if earliest > latest:
        raise ScheduleError(
            f"{bucket} has no place: one member may {verb} at {places[earliest]!r} at the earliest, and another one "
            f"at {places[latest]!r} at the latest"
        )
    allowed = f"it may {verb} at {places[earliest]!r} only"
    if earliest < latest:
        allowed = f"it may {verb} from {places[earliest]!r} to {places[latest]!r}"
    place_range = s.place_range(name)
    if place_range is None:
        is_near = nearest(name, places)
        raise ScheduleError(f"{bucket}: the program has no place {name!r}{is_near}; {allowed}")
    place, first, last = place_range
    if last < earliest or latest < first:
        raise ScheduleError(f"{bucket} cannot {verb} at {name!r}: {allowed}")
    return min(max(place, earliest), latest)
