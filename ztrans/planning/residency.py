"""residency: the bytes that a program has live, apart from what its planned collectives hold while they are under way.

A value that an operation at a fixed place computes is live up to the last operation at a fixed place that needs it, in
every order. How long reduced values live, and what eager updates allocate, depends on where reductions are waited for.
These bytes are counted from the wait on, until the last place or wait at which they may be needed. So no order has more
bytes live than its schedule counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..ir.collectives import rules
from ..ir.donation import donation
from ..ir.graph import Eqn, Var, variables
from ..ir.relations import grouped
from .cost import Held, held, local_bytes
from .eager_updates import Group
from .program_order import Planned, Skeleton
from .solver.problem import Problem
from .solver.slots import summed

_Span = tuple[
    int, int, bool
]  # the first operation, the one behind the last, and whether the place before that counts
_More = tuple[int, str, Any]  # a reduction, a field of it, and what is added to that field


def residency(s: Skeleton, problem: Problem, groups: Sequence[Group]) -> Problem:
    """Add to the problem of a program the bytes that are live, by operation and by place, and those of reduced values.

    Args:
        s: the program without its planned collectives.
        problem: its gathers and reductions.
        groups: the equations of the update that leave their places.
    """
    storages, n = _Storages(s, groups), len(s.ops)
    every, reductions = held(s.graph, storages.given), [*problem.reductions]
    more = [*_of_waits(s), *_of_results(storages), *_of_temporaries(storages)]
    gradients = ((storages.gradient[h.value], h) for h in every if h.value in storages.gradient)
    more += [(latest, "waiting", _shared(problem, latest, h)) for latest, h in gradients]
    for i, field, amount in more:
        known = getattr(reductions[i], field)
        # Updates run one after the other, so only the most temporaries count.
        total = max(known, amount) if field == "updating" else known + amount
        reductions[i] = reductions[i]._replace(**{field: total})
    fixed = [
        (*span, h.bytes)
        for h in every
        for span in _fixed(storages, problem, h)
        if span[0] < span[1]
    ]
    live = summed(((max(first, 0), end, size) for first, end, _, size in fixed), n)
    across = summed(
        ((first + 1, end + (at_end or end == n), size) for first, end, at_end, size in fixed), n + 1
    )
    return dataclasses.replace(
        problem,
        live=tuple(live.tolist()),
        across=tuple(across.tolist()),
        reductions=tuple(reductions),
    )


class _UpdateStorages:
    """The storages that eager updates need, each by the first value that has it."""

    def __init__(self, s: Skeleton, groups: Sequence[Group]) -> None:
        self.s, self.groups, self.given = s, groups, donation(s.graph)
        # For each group, the last reduction that it needs; -1 if it needs none.
        self.latest = [max(group.after, default=-1) for group in groups]
        # For each equation of an eager update, its group.
        self.floating = {e: u for u, group in enumerate(groups) for e in group.eqns}
        # For each storage that eager updates need, their groups.
        self.readers = grouped(
            (storage, u) for e, u in self.floating.items() for storage in self.of(e)
        )
        # For each storage that an eager update allocates after a reduction, its group.
        self.update = {
            v: u for e, u in self.floating.items() if groups[u].after for v in self.allocated(e)
        }
        # The storages of values that eager updates need and that depend on the state only.
        self.state_only = {
            v for e in s.floating[1].values() if e in self.floating for v in self.allocated(e)
        }

    def of(self, e: Eqn) -> set[Var]:
        """The storages that an equation reads or writes."""
        return {self.given.owner[v] for v in (*e.ins, *e.results)}

    def allocated(self, e: Eqn) -> list[Var]:
        """The storages that an equation allocates."""
        return [v for v in e.results if self.given.owner[v] is v]


class _Storages(_UpdateStorages):
    """All storages of a program, and the parts of it that need them."""

    def __init__(self, s: Skeleton, groups: Sequence[Group]) -> None:
        super().__init__(s, groups)
        owner = self.given.owner
        # For each storage that an operation at a fixed place needs, the place behind the last one.
        operations = ((k, e) for k, e in enumerate(s.ops) if e not in self.floating)
        self.fixed = {storage: k + 1 for k, e in operations for storage in self.of(e)}
        # For each storage that a planned gather sends, the place of the last wait for one that does, as `use` ascends.
        self.sent = {owner[p.start.ins[0]]: use for p, use in zip(s.gathers, s.use)}
        # For each result of a planned gather, the gather.
        self.gather = {v: i for i, p in enumerate(s.gathers) for v in (p.start.out, p.wait.out)}
        # For each storage of gradients, the last reduction of one of them; for each of a reduced value, its reduction.
        self.gradient = {owner[p.start.ins[0]]: i for i, p in enumerate(s.reductions)}
        self.reduced = {owner[p.value]: i for i, p in enumerate(s.reductions)}
        # The results of planned reductions.
        self.planned = {e.out for p in s.reductions for e in (p.start, p.wait, *(p.then or ()))}
        # The storages of the results of the program.
        self.outputs = {owner[v] for v in variables(s.graph.outputs)}

    def outlives(self, storage: Var) -> bool:
        """Whether something else than the group that allocates a storage needs it."""
        elsewhere = any(storage in needed for needed in (self.outputs, self.fixed, self.sent))
        return elsewhere or len({*self.readers[storage]}) > 1


def _fixed(storages: _Storages, problem: Problem, h: Held) -> Iterator[_Span]:
    """The operations during which a storage is live in every order."""
    s, v = storages.s, h.value
    n, first, end = len(s.ops), s.before[h.first], s.before[h.last + 1]
    if v in s.graph.inputs:
        yield -1, n, True
    elif (
        v in storages.state_only
    ):  # it is computed at its place, or before that by the first group that needs it
        yield first if v in storages.update else min(first, s.born[0] + 1), n, True
    elif v in storages.gather:
        i = storages.gather[v]
        after = max(problem.gathers[i].last + 1, first)
        # A result that overwrites the value needs memory of its own if the value is kept for a later gather.
        kept = end > after and any(g.again == i for g in problem.gathers)
        yield after - kept, max(after, end), False
    elif v in storages.gradient:
        latest = storages.gradient[v]
        born, shared = s.born[latest], _shared(problem, latest, h) > 0
        yield first, born + shared, shared or first < born
        yield born + 1, storages.fixed.get(v, 0), False
    elif v not in storages.update and v not in storages.planned:
        sent = storages.sent.get(v, -1)
        yield first, n if v in storages.readers else max(end, sent), sent >= end


def _shared(problem: Problem, latest: int, h: Held) -> int:
    """The bytes of other gradients in the storage of a gradient, which its reduction does not count."""
    return max(h.bytes - problem.reductions[latest].held, 0)


def _of_waits(s: Skeleton) -> Iterator[_More]:
    """The bytes that the waits for reductions allocate."""
    axes, root, size = s.graph.axes, s.live.root, local_bytes(s.graph)
    allocated = lambda wait: size(wait.out) if root[wait.out] is wait.out else 0
    received = lambda start: rules(start).received_bytes(start, 0, axes)
    for i, p in enumerate(s.reductions):
        yield i, "value", allocated(p.wait)
        if p.then is not None:
            start, wait = p.then
            first = allocated(p.wait) or received(p.start)
            yield (
                i,
                "second",
                first + rules(start).sent_bytes(start, axes) + received(start) + allocated(wait),
            )


def _of_results(storages: _Storages) -> Iterator[_More]:
    """The bytes of reduced values and of the results of eager updates, with the reduction that is waited for."""
    s, latest, size = storages.s, storages.latest, local_bytes(storages.s.graph)
    slots = [
        *(2 * k + 2 for k in s.born),
        0,
    ]  # for each reduction, the first slot at which it may be waited for
    reduced = (
        (storage, i, _reduced_bytes(s, s.reductions[i])) for storage, i in storages.reduced.items()
    )
    for storage, i, allocated in [
        *reduced,
        *((v, latest[u], size(v)) for v, u in storages.update.items()),
    ]:
        others = {latest[u] for u in storages.readers.get(storage, ())} - {i}
        until = max([_end(storages, storage), *(slots[other] for other in others)])
        if until > slots[i] + 1:
            yield i, "results", ((allocated, until),)
        if storage in storages.update and storages.outlives(storage):
            yield i, "updated", allocated
        for other in others:
            yield other, "waiting", allocated
            yield other, "second", allocated if s.reductions[other].then else 0


def _of_temporaries(storages: _Storages) -> Iterator[_More]:
    """The temporaries of eager updates, with the last reduction that each group needs."""
    for group, i in zip(storages.groups, storages.latest):
        if group.after:
            most = _temporaries(storages, group)
            late = group.release > storages.s.born[i] + 1
            yield (i, "released", ((most, group.release),)) if late else (i, "updating", most)
            yield i, "second", most if storages.s.reductions[i].then else 0


def _end(storages: _Storages, storage: Var) -> int:
    """The slot from which on no place, gather or release needs a storage."""
    releases = (2 * storages.groups[u].release + 1 for u in storages.readers.get(storage, ()))
    fixed = (
        2 * len(storages.s.ops) + 2
        if storage in storages.outputs
        else 2 * storages.fixed.get(storage, 0)
    )
    return max([fixed, 2 * storages.sent.get(storage, -1) + 1, *releases])


def _reduced_bytes(s: Skeleton, p: Planned) -> int:
    """The bytes of the storage of a reduced value, which may be the buffer in which it was received."""
    start = (p.then or (p.start,))[0]
    received = s.live.root[p.value] is not p.value
    return (
        rules(start).received_bytes(start, 0, s.graph.axes)
        if received
        else local_bytes(s.graph)(p.value)
    )


def _temporaries(storages: _Storages, group: Group) -> int:
    """The most bytes of temporaries that the equations of a group have live at once."""
    size = local_bytes(storages.s.graph)
    last = {storage: i for i, e in enumerate(group.eqns) for storage in storages.of(e)}
    total = most = 0
    for i, e in enumerate(group.eqns):
        total += sum(size(v) for v in storages.allocated(e) if not storages.outlives(v))
        most = max(most, total)
        freed = (
            v
            for v in storages.of(e)
            if v in storages.update and last[v] == i and not storages.outlives(v)
        )
        total -= sum(map(size, freed))
    return most
