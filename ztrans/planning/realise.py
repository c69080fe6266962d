"""realise: write a program in the order that a schedule gives it.

The planned collectives return to the program as buckets. With eager updates, the update of a parameter may follow the
reduction of its gradient at once. The order depends on the program and the schedule only, so it is the same on every
rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from ..ir.collectives import coalesce
from ..ir.graph import Eqn, Graph, rename
from ..ir.relations import grouped
from .eager_updates import groups
from .program_order import Planned, Skeleton
from .solver.problem import Bucket, Problem, Schedule
from .solver.updates import Updates


def realise(s: Skeleton, schedule: Schedule, problem: Problem) -> Graph:
    """Write a program with its planned collectives where `schedule` puts them.

    Args:
        s: the program without its planned collectives.
        schedule: the buckets, their places, and the gathers that are dropped.
        problem: the problem of the program. Its updates run as soon as the reductions that they need have been waited
            for; where it has none, all equations of the update stay at their places.

    Returns:
        The program, which has no hints and is not verified.
    """
    emit = _Emission(s, problem)
    gather_starts, uses = _by_place(schedule.gathers, "start"), _waits_by_use(s, schedule)
    reduction_starts, reduction_waits = (_by_place(schedule.reductions, which) for which in ("start", "wait"))
    # At a place, gathers start before eager updates run, so they overlap. If gathers under way are limited, they start
    # after the updates.
    limited = any(p.order.in_flight is not None for p in s.gathers)
    for k in range(len(s.ops) + 1):
        waits = deque(reduction_waits.get(k, ()))
        for bucket in reduction_starts.get(k, ()):
            while waits and waits[0] is not bucket and not emit.fits(bucket):
                emit.wait(waits.popleft(), k)
            emit.reduce(bucket)
        starts = [coalesce([s.gathers[i].start for i in bucket.members]) for bucket in gather_starts.get(k, ())]
        if not limited:
            emit.all(starts)
        emit.update(k)
        for bucket in waits:
            emit.wait(bucket, k)
        emit.second(k)
        emit.all([*starts, *uses.get(k, ())])
        if k < len(s.ops):
            emit(s.ops[k])
    replaced = {s.gathers[i].value: s.gathers[keeper].value for i, keeper in problem.keepers(schedule.dropped).items()}
    return rename(s.graph.replace(eqns=tuple(emit.eqns)), replaced)


def _by_place(buckets: Iterable[Bucket], which: Literal["start", "wait"]) -> dict[int, list[Bucket]]:
    """Buckets by the place at which they start, or are waited for."""
    return grouped((getattr(bucket, which), bucket) for bucket in buckets)


def _waits_by_use(s: Skeleton, schedule: Schedule) -> dict[int, list[Eqn]]:
    """For each place, the waits for the gathers whose value the next operation is the first to read."""
    return grouped((s.use[i], s.gathers[i].wait) for bucket in schedule.gathers for i in bucket.members)


class _Emission:
    """The equations that have been written so far, and the reductions that are under way behind them."""

    def __init__(self, s: Skeleton, problem: Problem) -> None:
        self.s = s
        self.eqns: list[Eqn] = []
        self.written: set[Eqn] = set()
        self.groups = groups(s) if problem.updates else ()
        self.updates = Updates(problem)
        self.under_way = 0  # the bytes of gradients whose reduction is under way
        self.second_buckets: list[Bucket] = []  # the buckets whose second reduction is under way

    def __call__(self, e: Eqn) -> None:
        """Write an equation, unless it has been written already."""
        if e not in self.written:
            self.written.add(e)
            self.eqns.append(e)

    def all(self, eqns: Iterable[Eqn]) -> None:
        """Write several equations."""
        for e in eqns:
            self(e)

    def planned(self, bucket: Bucket) -> list[Planned]:
        """The members of a bucket of reductions."""
        return [self.s.reductions[i] for i in bucket.members]

    def fits(self, bucket: Bucket) -> bool:
        """Whether a bucket of gradients may start while those under way still are."""
        most, more = self.s.in_flight, sum(self.s.held[i] for i in bucket.members)
        return most is None or self.under_way + more <= most

    def reduce(self, bucket: Bucket) -> None:
        """Start a bucket of reductions."""
        self(coalesce([p.start for p in self.planned(bucket)]))
        self.under_way += sum(self.s.held[i] for i in bucket.members)

    def wait(self, bucket: Bucket, place: int) -> None:
        """Wait for a bucket of reductions, start its second reduction if it has one, and write updates that can run."""
        members = self.planned(bucket)
        self.all(p.wait for p in members)
        self.under_way -= sum(self.s.held[i] for i in bucket.members)
        if members[0].then is None:
            self.updates.meet(bucket.members)
        else:
            self(coalesce([p.then[0] for p in members if p.then]))
            self.second_buckets.append(bucket)
        if len(self.second_buckets) > 1:
            self._wait_second()
        self.update(place)

    def second(self, place: int) -> None:
        """Wait for the second reductions that are needed at this place."""
        needed = self.s.needed
        while self.second_buckets and place >= min(needed[p] for p in self.planned(self.second_buckets[0])):
            self._wait_second()
            self.update(place)

    def _wait_second(self) -> None:
        bucket = self.second_buckets.pop(0)
        self.all(p.then[1] for p in self.planned(bucket) if p.then)
        self.updates.meet(bucket.members)

    def update(self, place: int) -> None:
        """Write the updates that can run at a place, one after the other, so that few of their temporaries live."""
        ready = [self.groups[u] for u in self.updates.run(place)]
        for group in sorted(ready, key=lambda group: (max(group.after, default=-1), len(group.after), group.release)):
            self.all(group.eqns)
