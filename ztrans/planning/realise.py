"""realise: a program with its planned collectives where a schedule puts them.

They come back as buckets; a gradient's update may follow its reduction at once. The result is the same on every
rank, and with it the order of the collectives.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Literal

from ..ir.collectives import coalesce
from ..ir.graph import Eqn, Graph, Var, rename
from .program_order import Planned, Skeleton
from .solver.problem import Bucket, Schedule


def realise(s: Skeleton, schedule: Schedule, update: str, kept: Mapping[int, int]) -> Graph:
    """The program with its collectives where `schedule` puts them.

    `kept` says for each dropped gather which one's value is read instead. With update="eager" the
    equations of the update run as soon as the reductions that they need have been waited for.
    """
    alias = {s.gathers[j].value: s.gathers[i].value for j, i in kept.items()}
    emit = _Emission(s, alias, update == "eager")
    begin, end = _by_place(schedule.reductions, "start"), _by_place(schedule.reductions, "wait")
    gathers, uses = _by_place(schedule.gathers, "start"), {}
    for b in schedule.gathers:
        for i in b.members:
            uses.setdefault(s.use[i], []).append(s.gathers[i].wait)
    for k in range(len(s.ops) + 1):
        due = deque(end.get(k, ()))
        for b in begin.get(k, ()):
            while due and due[0] is not b and not emit.fits(b):
                emit.wait(due.popleft())
            emit.reduce(b)
        emit.all(coalesce([s.gathers[i].start for i in b.members]) for b in gathers.get(k, ()))
        for b in due:
            emit.wait(b)
        emit.second(k)
        if k in uses:
            emit.updates()
        emit.all(uses.get(k, ()))
        if k < len(s.ops):
            emit(s.ops[k])
    return rename(s.graph.replace(eqns=tuple(emit.eqns)), alias)


def _by_place(buckets: Iterable[Bucket], which: Literal["start", "wait"]) -> dict[int, list[Bucket]]:
    """Buckets by the place at which they start, or are waited for."""
    found: dict[int, list[Bucket]] = {}
    for b in buckets:
        found.setdefault(getattr(b, which), []).append(b)
    return found


class _Emission:
    """The program as it is written down, and the updates that what is there already allows.

    An update waits for what it reads to be made and, as it may be done in place, for every other
    reader of the state that it reads, views included: a gather reads its shard until it has been waited for.
    """

    def __init__(self, s: Skeleton, alias: Mapping[Var, Var], eager: bool) -> None:
        self.s = s
        self.eqns: list[Eqn] = []
        self.under_way = 0  # bytes of gradients
        self.following: list[list[Planned]] = []  # buckets whose second reduction is under way
        self.done: set[Eqn] = set()
        self.bound: set[Var] = set(s.graph.inputs)
        self.places = s.places
        self.ready: list[tuple[int, int, Eqn]] = []
        self.waiting: dict[Var, list[Eqn]] = {}
        movable, self.free = s.floating if eager else ({}, {})
        root, state = s.live.root, set(s.graph.inputs[: s.graph.num_state])
        leaves = lambda values: {root[v] for v in values} & state
        self.reads = {p.wait: leaves(p.start.ins) for p in s.gathers if p.value not in alias}
        stay = (e for e in s.ops if e not in movable and not any(o in self.free for o in e.outs))
        self.reads.update((e, leaves(e.ins)) for e in stay)
        self.readers = Counter(v for read in self.reads.values() for v in read)
        self.missing: dict[Eqn, int] = {}
        for e in movable:
            need = {v for v in e.ins if v not in self.bound and v not in self.free}
            need.update(v for v in s.waits[e] if self.readers[v])
            self.missing[e] = len(need)
            for v in need:
                self.waiting.setdefault(v, []).append(e)

    def all(self, eqns: Iterable[Eqn]) -> None:
        for e in eqns:
            self(e)

    def __call__(self, e: Eqn) -> None:
        if e in self.done:
            return
        self.done.add(e)
        self.eqns.append(e)
        for out in e.outs:
            if out is not None:
                self.bound.add(out)
                self._met(out)
        for v in self.reads.get(e, ()):
            self.readers[v] -= 1
            if not self.readers[v]:
                self._met(v)

    def fits(self, bucket: Bucket) -> bool:
        """Whether a bucket of gradients may start beside those that are under way."""
        most, more = self.s.in_flight, sum(self.s.held[i] for i in bucket.members)
        return most is None or self.under_way + more <= most

    def reduce(self, bucket: Bucket) -> None:
        """Start a bucket of reductions."""
        self(coalesce([self.s.reductions[i].start for i in bucket.members]))
        self.under_way += sum(self.s.held[i] for i in bucket.members)

    def wait(self, bucket: Bucket) -> None:
        """Wait for a bucket of reductions, reduce it over the second axis if it has one, and run what follows."""
        members = [self.s.reductions[i] for i in bucket.members]
        self.updates()
        self.all(p.wait for p in members)
        self.under_way -= sum(self.s.held[i] for i in bucket.members)
        if members[0].then is not None:
            self(coalesce([p.then[0] for p in members]))
            self.following.append(members)
        if len(self.following) > 1:
            self.all(p.then[1] for p in self.following.pop(0))
        self.updates()

    def second(self, place: int) -> None:
        """Wait for the second reductions that an operation needs from this place on."""
        while self.following and place >= min(self.s.needed[p] for p in self.following[0]):
            self.all(p.then[1] for p in self.following.pop(0))
            self.updates()

    def _met(self, v: Var) -> None:
        for e in self.waiting.pop(v, ()):
            self.missing[e] -= 1
            if not self.missing[e]:
                heapq.heappush(self.ready, (self.places[e], len(self.ready), e))

    def updates(self) -> None:
        """Write down every update that can run now."""
        while self.ready:
            *_, e = heapq.heappop(self.ready)
            self._needed(e)
            self(e)

    def _needed(self, e: Eqn) -> None:
        """What depends on no gradient is made when an update first asks for it."""
        for v in e.ins:
            if v not in self.bound:
                self._needed(self.free[v])
                self(self.free[v])
