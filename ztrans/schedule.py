"""schedule: a program without its planned collectives, and with them put back where a plan wants them.

Transforms that schedule only write hints on equations; this solves them all at once, so the order
in which they were applied cannot matter. `hoist` moves what is marked `birth` to where its inputs
are made. `skeleton` then takes the planned collectives out: what is left, the operations, keeps its
order. A gather must come before the place of its first use, a reduction after the operation that
makes its gradient. `realise` puts them back, as buckets, at the places of a `Schedule`; a gradient's
update may follow its reduction at once. The result is the same on every rank, and with it the order
of the collectives.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .coalesce import coalesce
from .collectives import WAIT, is_start
from .graph import Eqn, Graph, Var, is_random, producers, rename, users
from .groups import is_users
from .problem import Schedule

Key = tuple[int, int, int]  # position of the equation it is placed at; at it (0), after it (1); own position


def hoist(graph: Graph) -> Graph:
    """Move every equation marked `birth`, and every planned reduction, right after the last of its inputs is made."""
    moved = {e for e in graph.eqns if e.order is not None and e.order.place in ("birth", "reduce")}
    if not moved:
        return graph
    made = producers(graph.eqns)
    keys: dict[Eqn, Key] = {}
    for i, e in enumerate(graph.eqns):
        born = max((keys[made[v]][0] for v in e.ins if v in made), default=-1)
        keys[e] = (born, 1, i) if e in moved else (i, 0, i)
    eqns = _sorted(graph, keys, made)
    return graph.replace(eqns=tuple(e.replace(order=None) if e.order and e.order.place == "birth" else e for e in eqns))


def _sorted(graph: Graph, keys: Mapping[Eqn, Key], made: Mapping[Var, Eqn]) -> list[Eqn]:
    """The least order by key that respects data flow."""
    used = users(graph)
    missing = {e: len({made[v] for v in e.ins if v in made}) for e in graph.eqns}
    rank = {e: i for i, e in enumerate(graph.eqns)}
    ready = [(keys[e], i, e) for e, i in rank.items() if not missing[e]]
    heapq.heapify(ready)
    order: list[Eqn] = []
    while ready:
        _, _, e = heapq.heappop(ready)
        order.append(e)
        for reader in dict.fromkeys(u for out in e.outs if out is not None for u in used.get(out, ())):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (keys[reader], rank[reader], reader))
    return order


@dataclass(frozen=True, eq=False)
class Planned:
    """A collective that a plan places: its start, the wait for it, and, where a second reduction follows
    the first (over the replicated axis), that one's start and wait."""

    start: Eqn
    wait: Eqn
    then: tuple[Eqn, Eqn] | None = None

    @property
    def value(self) -> Var:
        """What it yields."""
        return (self.then[1] if self.then else self.wait).outs[0]


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A program without its planned collectives: `ops[k]` is operation k, and comes after place k."""

    graph: Graph  # hoisted, collectives in it
    ops: tuple[Eqn, ...]
    gathers: tuple[Planned, ...]  # in order of first use
    reductions: tuple[Planned, ...]  # in order of birth
    use: tuple[int, ...]  # by gather: the first operation that reads it
    born: tuple[int, ...]  # by reduction: the operation that makes the gradient
    need: tuple[int, ...]  # by reduction: the first operation that reads it

    @functools.cached_property
    def places(self) -> dict[Eqn, int]:
        return {e: k for k, e in enumerate(self.ops)}

    @functools.cached_property
    def floating(self) -> tuple[dict[Eqn, None], dict[Var, Eqn]]:
        """The equations of the update that depend on a planned reduction, in order; and, by what they make, those
        that depend on state alone. An eager update takes them from their places. Random draws and the step's own
        collectives stay, and so does what depends on them."""
        state, after = set(self.graph.inputs), {p.value for p in self.reductions}
        movable: dict[Eqn, None] = {}
        free: dict[Var, Eqn] = {}
        for e in self.ops:
            if e.region != "update" or is_random(e.op) or is_start(e) or is_users(e) or e.op is WAIT:
                continue
            outs = [o for o in e.outs if o is not None]
            if any(v in after for v in e.ins):
                movable[e] = None
                after.update(outs)
            elif all(v in state or v in free for v in e.ins):
                free.update((o, e) for o in outs)
        return movable, free


def skeleton(graph: Graph) -> Skeleton:
    """Take the planned collectives out of a program."""
    graph = hoist(graph)
    used, made = users(graph), producers(graph.eqns)
    hinted = [e for e in graph.eqns if is_start(e) and e.order is not None]
    # What a reduction yields may be reduced again, over the replicated axis: that one follows it. A gather
    # of it has nowhere to go, and stays where it is.
    second = {e: made[e.ins[0]] for e in hinted if e.ins[0] in made and made[e.ins[0]].op is WAIT}
    waited = {e: used[e.outs[0]][0] for e in hinted}
    following = {first: e for e, first in second.items() if e.order.place == "reduce"}
    planned = {}
    for e in hinted:
        if e not in second:
            then = following.get(waited[e])
            planned[e] = Planned(e, waited[e], (then, waited[then]) if then is not None else None)
    out = {x for p in planned.values() for x in (p.start, p.wait, *(p.then or ()))}
    ops = tuple(e for e in graph.eqns if e not in out)
    place = {e: k for k, e in enumerate(ops)}
    end = len(ops)

    def first(v: Var) -> int:
        return min((place.get(u, end) for u in used.get(v, ())), default=end)

    def after(v: Var) -> int:
        return place.get(made[v], -1) if v in made else -1

    gathers = [p for p in planned.values() if p.start.order.place == "gather"]
    reductions = [p for p in planned.values() if p.start.order.place == "reduce"]
    gathers.sort(key=lambda p: first(p.value))  # stable: at one use, as they were
    reductions.sort(key=lambda p: max(map(after, p.start.ins)))
    return Skeleton(
        graph,
        ops,
        tuple(gathers),
        tuple(reductions),
        tuple(first(p.value) for p in gathers),
        tuple(max(map(after, p.start.ins)) for p in reductions),
        tuple(first(p.value) for p in reductions),
    )


def realise(s: Skeleton, schedule: Schedule, update: str, kept: Mapping[int, int]) -> Graph:
    """The program with its collectives where `schedule` puts them.

    `kept` says for each dropped gather which one's value is read instead. With update="eager" the
    equations of the update run as soon as the reductions that they need have been waited for.
    """
    alias = {s.gathers[j].value: s.gathers[i].value for j, i in kept.items()}
    emit = _Emission(s, alias, update == "eager")
    starts: dict[int, list[Eqn]] = {}
    ends: dict[int, list[list[Planned]]] = {}
    for b in schedule.reductions:
        members = [s.reductions[i] for i in b.members]
        starts.setdefault(b.start, []).append(coalesce([p.start for p in members]))
        ends.setdefault(b.wait, []).append(members)
    for b in schedule.gathers:
        starts.setdefault(b.start, []).append(coalesce([s.gathers[i].start for i in b.members]))
    comes: dict[int, list[Eqn]] = {}
    for b in schedule.gathers:
        for i in b.members:
            comes.setdefault(s.use[i], []).append(s.gathers[i].wait)
    index = {p: i for i, p in enumerate(s.reductions)}
    following: list[list[Planned]] = []  # buckets whose second reduction is under way
    for k in range(len(s.ops) + 1):
        emit.all(starts.get(k, ()))
        for members in ends.get(k, ()):
            emit.all(p.wait for p in members)
            if members[0].then is not None:
                emit(coalesce([p.then[0] for p in members]))
                following.append(members)
            if len(following) > 1:
                emit.all(p.then[1] for p in following.pop(0))
            emit.updates()
        while following and k >= min(s.need[index[p]] for p in following[0]):
            emit.all(p.then[1] for p in following.pop(0))
            emit.updates()
        emit.all(comes.get(k, ()))
        if k < len(s.ops):
            emit(s.ops[k])
    return rename(s.graph.replace(eqns=tuple(emit.eqns)), alias)


class _Emission:
    """The program as it is written down, and the updates that what is there already allows.

    An update waits for what it reads to be made and, as it may be done in place, for every other
    reader of the state that it reads: a gather reads its shard until it has been waited for.
    """

    def __init__(self, s: Skeleton, alias: Mapping[Var, Var], eager: bool) -> None:
        self.eqns: list[Eqn] = []
        self.done: set[Eqn] = set()
        self.bound: set[Var] = set(s.graph.inputs)
        self.places = s.places
        self.ready: list[tuple[int, int, Eqn]] = []
        self.waiting: dict[Var, list[Eqn]] = {}
        movable, self.free = s.floating if eager else ({}, {})
        gathers = [p for p in s.gathers if p.value not in alias]
        self.reads = {p.wait: p.start.ins for p in gathers}
        self.reads.update((e, e.ins) for e in s.ops if e not in movable and not any(o in self.free for o in e.outs))
        state = set(s.graph.inputs[: s.graph.num_state])
        self.readers = Counter(v for ins in self.reads.values() for v in set(ins) & state)
        self.missing: dict[Eqn, int] = {}
        for e in movable:
            need = {v for v in e.ins if (v not in self.bound and v not in self.free) or self.readers[v]}
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
        for v in set(self.reads.get(e, ())):
            if self.readers[v]:
                self.readers[v] -= 1
                if not self.readers[v]:
                    self._met(v)

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
