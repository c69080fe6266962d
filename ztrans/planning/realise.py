"""realise: write a program in the order that a schedule gives it.

The planned collectives return to the program as buckets. With eager updates, the update of a parameter may follow the
reduction of its gradient at once. The order depends on the program and the schedule only, so it is the same on every
rank.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Literal

from ..ir.collectives import coalesce
from ..ir.graph import Eqn, Graph, Var, rename
from ..ir.relations import grouped
from .program_order import Planned, Skeleton
from .solver.problem import Bucket, Schedule


def realise(s: Skeleton, schedule: Schedule, update: str, kept: Mapping[int, int]) -> Graph:
    """Write a program with its planned collectives where `schedule` puts them.

    Args:
        s: the program without its planned collectives.
        schedule: the buckets, their places, and the gathers that are dropped.
        update: "eager" runs equations of the update as soon as the reductions that they need have been waited for;
            "last" leaves them at their places.
        kept: for each dropped gather, by index, the gather whose value is read instead (`Problem.keepers`).

    Returns:
        The program, which has no hints and is not verified.
    """
    replaced = {s.gathers[i].value: s.gathers[keeper].value for i, keeper in kept.items()}
    emit = _Emission(s, replaced, update == "eager")
    gather_starts, uses = _by_place(schedule.gathers, "start"), _waits_by_use(s, schedule)
    reduction_starts, reduction_waits = (_by_place(schedule.reductions, which) for which in ("start", "wait"))
    # At a place, gathers start before eager updates run, so they overlap. If gathers under way are limited, they start
    # after the updates.
    limited = any(p.order.in_flight is not None for p in s.gathers)
    for k in range(len(s.ops) + 1):
        waits = deque(reduction_waits.get(k, ()))
        for bucket in reduction_starts.get(k, ()):
            while waits and waits[0] is not bucket and not emit.fits(bucket):
                emit.wait(waits.popleft())
            emit.reduce(bucket)
        starts = [coalesce([s.gathers[i].start for i in bucket.members]) for bucket in gather_starts.get(k, ())]
        if not limited:
            emit.all(starts)
        for bucket in waits:
            emit.wait(bucket)
        emit.second(k)
        if k in uses:
            emit.ready_updates()
        emit.all([*starts, *uses.get(k, ())])
        if k < len(s.ops):
            emit(s.ops[k])
    return rename(s.graph.replace(eqns=tuple(emit.eqns)), replaced)


def _by_place(buckets: Iterable[Bucket], which: Literal["start", "wait"]) -> dict[int, list[Bucket]]:
    """Buckets by the place at which they start, or are waited for."""
    return grouped((getattr(bucket, which), bucket) for bucket in buckets)


def _waits_by_use(s: Skeleton, schedule: Schedule) -> dict[int, list[Eqn]]:
    """For each place, the waits for the gathers whose value the next operation is the first to read."""
    return grouped((s.use[i], s.gathers[i].wait) for bucket in schedule.gathers for i in bucket.members)


class _Emission:
    """The equations that have been written so far, and the reductions that are under way behind them."""

    def __init__(self, s: Skeleton, replaced: Mapping[Var, Var], eager: bool) -> None:
        self.s = s
        self.eqns: list[Eqn] = []
        self.written: set[Eqn] = set()
        self.updates = _ReadyUpdates(s, replaced, eager)
        self.under_way = 0  # the bytes of gradients whose reduction is under way
        self.second_buckets: list[list[Planned]] = []  # the buckets whose second reduction is under way

    def __call__(self, e: Eqn) -> None:
        """Write an equation, unless it has been written already."""
        if e not in self.written:
            self.written.add(e)
            self.eqns.append(e)
            self.updates.follow(e)

    def all(self, eqns: Iterable[Eqn]) -> None:
        """Write several equations."""
        for e in eqns:
            self(e)

    def fits(self, bucket: Bucket) -> bool:
        """Whether a bucket of gradients may start while those under way still are."""
        most, more = self.s.in_flight, sum(self.s.held[i] for i in bucket.members)
        return most is None or self.under_way + more <= most

    def reduce(self, bucket: Bucket) -> None:
        """Start a bucket of reductions."""
        self(coalesce([self.s.reductions[i].start for i in bucket.members]))
        self.under_way += sum(self.s.held[i] for i in bucket.members)

    def wait(self, bucket: Bucket) -> None:
        """Wait for a bucket of reductions, start its second reduction if it has one, and write updates that can run."""
        members = [self.s.reductions[i] for i in bucket.members]
        self.ready_updates()
        self.all(p.wait for p in members)
        self.under_way -= sum(self.s.held[i] for i in bucket.members)
        if members[0].then is not None:
            self(coalesce([p.then[0] for p in members if p.then]))
            self.second_buckets.append(members)
        if len(self.second_buckets) > 1:
            self._wait_second()
        self.ready_updates()

    def second(self, place: int) -> None:
        """Wait for the second reductions that are needed at this place."""
        while self.second_buckets and place >= min(self.s.needed[p] for p in self.second_buckets[0]):
            self._wait_second()
            self.ready_updates()

    def _wait_second(self) -> None:
        self.all(p.then[1] for p in self.second_buckets.pop(0) if p.then)

    def ready_updates(self) -> None:
        """Write every equation of the update that can run now."""
        while (e := self.updates.next()) is not None:
            self.all(self.updates.prerequisites(e))
            self(e)


class _ReadyUpdates:
    """A queue of the equations of an eager update: each is ready when everything that it depends on has been written.

    An equation depends on the values that it reads. If it reads a leaf of the state, it may overwrite the leaf, so it
    also depends on every other reader of that leaf or of a view of it. A gather reads its shard until it has been
    waited for.
    """

    def __init__(self, s: Skeleton, replaced: Mapping[Var, Var], eager: bool) -> None:
        self.places = s.places
        movable, self.free = s.floating if eager else ({}, {})
        self.bound: set[Var] = set(s.graph.inputs)
        self.reads = _state_reads(s, replaced, {*movable, *self.free.values()})
        self.readers = Counter(leaf for leaves in self.reads.values() for leaf in leaves)
        self.ready: list[tuple[int, Eqn]] = []  # a heap: the equation with the lowest place runs first
        self.missing: dict[Eqn, int] = {}  # for each equation, the number of dependencies that have not been met
        self.dependents: dict[Var, list[Eqn]] = {}  # the equations that wait for a value, or for the readers of a leaf
        for e in movable:
            values = {v for v in e.ins if v not in self.bound and v not in self.free}
            leaves = {leaf for leaf in s.waits[e] if self.readers[leaf]}
            self.missing[e] = len(values | leaves)
            for v in values | leaves:
                self.dependents.setdefault(v, []).append(e)

    def follow(self, e: Eqn) -> None:
        """Note that an equation has been written: its values are bound, and the state that it reads has been read."""
        for out in e.outs:
            if out is not None:
                self.bound.add(out)
                self._meet(out)
        for leaf in self.reads.get(e, ()):
            self.readers[leaf] -= 1
            if not self.readers[leaf]:
                self._meet(leaf)

    def _meet(self, dependency: Var) -> None:
        for e in self.dependents.pop(dependency, ()):
            self.missing[e] -= 1
            if not self.missing[e]:
                heapq.heappush(self.ready, (self.places[e], e))

    def next(self) -> Eqn | None:
        """Take the first equation that is ready."""
        return heapq.heappop(self.ready)[1] if self.ready else None

    def prerequisites(self, e: Eqn) -> list[Eqn]:
        """The equations that `e` needs and that depend on the state only; each runs when an update first needs it."""
        makers = dict.fromkeys(self.free[v] for v in e.ins if v not in self.bound and v in self.free)
        return [x for maker in makers for x in (*self.prerequisites(maker), maker)]


def _state_reads(s: Skeleton, replaced: Mapping[Var, Var], floating: set[Eqn]) -> dict[Eqn, set[Var]]:
    """For each equation that updates must follow, the leaves of the state that it reads."""
    root, state = s.live.root, set(s.graph.inputs[: s.graph.num_state])
    leaves = lambda values: {root[v] for v in values} & state
    gathers = {p.wait: leaves(p.start.ins) for p in s.gathers if p.value not in replaced}
    return gathers | {e: leaves(e.ins) for e in s.ops if e not in floating}
