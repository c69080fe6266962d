"""realise: write a program in the order that a schedule gives it.

The planned collectives return to the program as buckets. With eager updates, the update of a parameter may follow the
reduction of its gradient at once. The order depends on the program and the schedule only, so it is the same on every
rank.
"""

from __future__ import annotations

from collections import deque

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
    gather_starts = grouped(
        (b.start, coalesce([s.gathers[i].start for i in b.members])) for b in schedule.gathers
    )
    gather_waits = grouped(
        (s.use[i], s.gathers[i].wait) for bucket in schedule.gathers for i in bucket.members
    )
    reduction_starts = grouped((bucket.start, bucket) for bucket in schedule.reductions)
    reduction_waits = grouped((bucket.wait, bucket) for bucket in schedule.reductions)
    # At a place, gathers start before eager updates run, so they overlap. If gathers under way are limited, they start
    # after the updates.
    limited = problem.gathers_in_flight < float("inf")
    for k in range(len(s.ops) + 1):
        waits = deque(reduction_waits.get(k, ()))
        for bucket in reduction_starts.get(k, ()):
            while waits and waits[0] is not bucket and not emit.fits(bucket):
                emit.wait(waits.popleft(), k)
            emit.reduce(bucket)
        starts = gather_starts.get(k, ())
        if not limited:
            emit.write(*starts)
        emit.update(k)
        for bucket in waits:
            emit.wait(bucket, k)
        emit.second(k)
        emit.write(*starts, *gather_waits.get(k, ()), *s.ops[k : k + 1])
    replaced = {
        s.gathers[i].value: s.gathers[keeper].value
        for i, keeper in problem.keepers(schedule.dropped).items()
    }
    return rename(s.graph.replace(eqns=tuple(emit.eqns)), replaced)


class _Emission:
    """The equations that have been written so far, and the reductions that are under way behind them."""

    def __init__(self, s: Skeleton, problem: Problem) -> None:
        self.s, self.problem = s, problem
        self.eqns: dict[Eqn, None] = {}
        self.groups = groups(s) if problem.updates else ()
        self.updates = Updates(problem)
        self.under_way = 0  # the bytes of gradients whose reduction is under way
        self.second_buckets: list[Bucket] = []  # the buckets whose second reduction is under way

    def write(self, *eqns: Eqn) -> None:
        """Write equations, except those that have been written already."""
        self.eqns.update(dict.fromkeys(eqns))

    def planned(self, bucket: Bucket) -> list[Planned]:
        """The members of a bucket of reductions."""
        return [self.s.reductions[i] for i in bucket.members]

    def _held(self, bucket: Bucket) -> int:
        return sum(self.problem.reductions[i].held for i in bucket.members)

    def fits(self, bucket: Bucket) -> bool:
        """Whether a bucket of gradients may start while those under way still are."""
        return self.under_way + self._held(bucket) <= self.problem.reductions_in_flight

    def reduce(self, bucket: Bucket) -> None:
        """Start a bucket of reductions."""
        self.write(coalesce([p.start for p in self.planned(bucket)]))
        self.under_way += self._held(bucket)

    def wait(self, bucket: Bucket, place: int) -> None:
        """Wait for a bucket of reductions, start its second reduction if it has one, and write updates that can run."""
        members = self.planned(bucket)
        self.write(*(p.wait for p in members))
        self.under_way -= self._held(bucket)
        if members[0].then is None:
            self.updates.meet(bucket.members)
        else:
            self.write(coalesce([p.then[0] for p in members if p.then]))
            self.second_buckets.append(bucket)
        if len(self.second_buckets) > 1:
            self._wait_second()
        self.update(place)

    def second(self, place: int) -> None:
        """Wait for the second reductions that are needed at this place."""
        while self.second_buckets and place >= min(
            self.s.need[i] for i in self.second_buckets[0].members
        ):
            self._wait_second()
            self.update(place)

    def _wait_second(self) -> None:
        bucket = self.second_buckets.pop(0)
        self.write(*(p.then[1] for p in self.planned(bucket) if p.then))
        self.updates.meet(bucket.members)

    def update(self, place: int) -> None:
        """Write the updates that can run at a place, one after the other, so that few of their temporaries live."""
        ready = [self.groups[u] for u in self.updates.run(place)]
        for group in sorted(
            ready, key=lambda group: (max(group.after, default=-1), len(group.after), group.release)
        ):
            self.write(*group.eqns)
