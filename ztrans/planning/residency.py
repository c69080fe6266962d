"""residency: the bytes that a program has live, apart from what its planned collectives hold while they are under way.

What an operation at a fixed place makes is live up to the last operation at a fixed place that needs it, in every
order. How long reduced values live, and what eager updates make of them, depends on where reductions are waited for:
those bytes are counted from a wait on, until the last place or wait at which something may need them. So no order has
more bytes live than its schedule counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..ir.collectives import rules
from ..ir.donation import Donation, donation
from ..ir.graph import Var, variables
from .cost import Held, held, local_bytes
from .eager_updates import Group
from .program_order import Planned, Skeleton
from .solver.problem import Gather

_Part = tuple[int, int, bool]  # the first operation, the one after the last, and whether the place before it counts


@dataclass
class Value:
    """The bytes of a reduced value, and of the updates that follow it, as in `Reduction`."""

    value: int
    second: int
    updated: int = 0
    updating: int = 0
    waiting: int = 0
    results: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Residency:
    """`live` and `across` of a `Problem`, and the values of its reductions."""

    live: tuple[int, ...]
    across: tuple[int, ...]
    values: tuple[Value, ...]


def residency(s: Skeleton, gathers: Sequence[Gather], groups: Iterable[Group]) -> Residency:
    """Count the residency of a program.

    Args:
        s: the program without its planned collectives.
        gathers: those of the problem.
        groups: the equations of the update that leave their places.
    """
    given, groups, n = donation(s.graph), tuple(groups), len(s.ops)
    uses = _Uses(s, given, gathers, groups)
    values = [_value(s, p) for p in s.reductions]
    _follow(s, uses, groups, values)
    live, across = [0] * (n + 1), [0] * (n + 3)
    for h in held(s.graph, given):
        for a, b, at_end in _fixed(s, uses, gathers, values, h):
            if a < b:
                live[max(a, 0)] += h.bytes
                live[b] -= h.bytes
                across[a + 1] += h.bytes
                across[b + (at_end or b == n)] -= h.bytes
    return Residency(tuple(accumulate(live[:n])), tuple(accumulate(across[: n + 1])), tuple(values))


class _Uses:
    """Who makes and needs each storage.

    Attributes:
        fixed: by storage, the place after the last operation at a fixed place that makes or reads it.
        groups: by storage, the groups of an eager update that do, by index.
        made: by storage that a group makes, that group.
        free: the storages of values that groups need and that depend on state alone.
        reduced: by storage of a reduced value, the reduction.
        planned: every result of a planned reduction.
        gathered: by result of a planned gather, the gather.
        repeated: the gathers whose values may be kept for later ones.
        gradients: by storage of gradients, their reductions.
        kept: the storages of outputs.
        gather: by storage that is gathered, the place of the last use.
    """

    def __init__(self, s: Skeleton, given: Donation, gathers: Sequence[Gather], groups: Sequence[Group]) -> None:
        self.owner = given.owner
        floating = {e: u for u, group in enumerate(groups) for e in group.eqns}
        on_state = set(s.floating[1].values())
        self.fixed: dict[Var, int] = {}
        self.groups: dict[Var, set[int]] = {}
        self.made: dict[Var, int] = {}
        self.free: set[Var] = set()
        for k, e in enumerate(s.ops):
            outs = [out for out in e.outs if out is not None]
            if e in floating:
                made = [out for out in outs if self.owner[out] is out]
                self.made.update(dict.fromkeys(made, floating[e]) if groups[floating[e]].after else {})
                self.free.update(made if e in on_state else ())
            for storage in {self.owner[v] for v in (*e.ins, *outs)}:
                if e in floating:
                    self.groups.setdefault(storage, set()).add(floating[e])
                else:
                    self.fixed[storage] = k + 1
        self.reduced = {self.owner[p.value]: i for i, p in enumerate(s.reductions)}
        self.planned = {v for p in s.reductions for e in (p.start, p.wait, *(p.then or ())) for v in e.results}
        self.gathered = {v: i for i, p in enumerate(s.gathers) for v in (*p.start.results, *p.wait.results)}
        self.repeated = {g.again for g in gathers}
        self.gradients: dict[Var, list[int]] = {}
        for i, p in enumerate(s.reductions):
            for storage in {self.owner[v] for v in p.start.ins}:
                self.gradients.setdefault(storage, []).append(i)
        self.kept = {self.owner[v] for v in variables(s.graph.outputs)}
        self.gather: dict[Var, int] = {}
        for p, use in zip(s.gathers, s.use):
            for storage in {self.owner[v] for v in p.start.ins}:
                self.gather[storage] = max(use, self.gather.get(storage, 0))


def _fixed(s: Skeleton, uses: _Uses, gathers: Sequence[Gather], values: Sequence[Value], h: Held) -> Iterator[_Part]:
    """The operations during which a storage is live whatever the schedule."""
    n, v = len(s.ops), h.value
    made, end = s.before[h.first], s.before[h.last + 1]
    if v in s.graph.inputs:
        yield -1, n, True
    elif v in uses.free:  # it is made at its place, or before it by the first group that needs it
        yield made if v in uses.made else min(made, s.born[0] + 1), n, True
    elif v in uses.gathered:
        i = uses.gathered[v]
        after = max(gathers[i].last + 1, made)
        # What takes its place there has room of its own if the value is kept for a later gather.
        yield after - (end > after and i in uses.repeated), max(after, end), False
    elif v in uses.gradients:
        latest = max(uses.gradients[v])
        born, shared = s.born[latest], max(h.bytes - s.held[latest], 0)
        values[latest].waiting += shared  # other gradients lie in this storage too
        yield made, born + bool(shared), shared > 0 or made < born
        yield born + 1, uses.fixed.get(v, 0), False
    elif v in uses.made or v in uses.planned:
        return
    else:
        use = uses.gather.get(v, -1)
        yield made, n if v in uses.groups else max(end, use), use >= end


def _value(s: Skeleton, p: Planned) -> Value:
    """What the waits for a reduction allocate."""
    graph, root, size = s.graph, s.live.root, local_bytes(s.graph)
    made = lambda wait: size(wait.out) if root[wait.out] is wait.out else 0
    if p.then is None:
        return Value(made(p.wait), 0)
    start, wait = p.then
    first = made(p.wait) or rules(p.start).received_bytes(p.start, 0, graph.axes)
    sent, received = rules(start).sent_bytes(start, graph.axes), rules(start).received_bytes(start, 0, graph.axes)
    return Value(made(p.wait), first + sent + received + made(wait))


def _follow(s: Skeleton, uses: _Uses, groups: Sequence[Group], values: Sequence[Value]) -> None:
    """Count what reduced values and eager updates leave after a wait, by the reduction whose wait it is."""
    latest = [max(group.after, default=-1) for group in groups]
    start = [*(2 * k + 2 for k in s.born), 0]  # slots
    size = local_bytes(s.graph)

    def until(storage: Var, wait: int) -> tuple[int, set[int]]:
        """The slot after which nothing needs a storage of a wait, and the other reductions for which it waits."""
        others = {latest[u] for u in uses.groups.get(storage, ())} - {wait}
        releases = (2 * groups[u].release + 1 for u in uses.groups.get(storage, ()))
        end = 2 * len(s.ops) + 2 if storage in uses.kept else 2 * uses.fixed.get(storage, 0)
        gather = 2 * uses.gather.get(storage, -1) + 1
        return max([end, gather, *releases, *(start[other] for other in others)]), others

    for storage, wait in [*uses.reduced.items(), *((v, latest[u]) for v, u in uses.made.items())]:
        end, others = until(storage, wait)
        bytes_ = _allocated(s, s.reductions[uses.reduced[storage]]) if storage in uses.reduced else size(storage)
        if end > start[wait] + 1:
            values[wait].results += ((bytes_, end),)
        if storage in uses.made and _stays(uses, storage):
            values[wait].updated += bytes_
        for other in others:
            values[other].waiting += bytes_
            values[other].second += bytes_ if s.reductions[other].then else 0
    for group, wait in zip(groups, latest):
        if group.after:
            most = _most(uses, group, size)
            values[wait].updating = max(values[wait].updating, most)
            values[wait].second += most if s.reductions[wait].then else 0
            if 2 * group.release > start[wait]:
                values[wait].results += ((most, 2 * group.release + 1),)


def _allocated(s: Skeleton, p: Planned) -> int:
    """The bytes of the storage of a reduced value, which may lie in the buffer in which it was received."""
    start = (p.then or (p.start,))[0]
    lies = s.live.root[p.value] is not p.value
    return rules(start).received_bytes(start, 0, s.graph.axes) if lies else local_bytes(s.graph)(p.value)


def _most(uses: _Uses, group: Group, size: Callable[[Var], int]) -> int:
    """The most bytes that the equations of a group have live of what they make for themselves alone."""
    owners = [{uses.owner[v] for v in (*e.ins, *e.results)} for e in group.eqns]
    last = {storage: i for i, storages in enumerate(owners) for storage in storages}
    total = most = 0
    for i, (e, storages) in enumerate(zip(group.eqns, owners)):
        total += sum(size(v) for v in e.results if uses.owner[v] is v and not _stays(uses, v))
        most = max(most, total)
        total -= sum(size(v) for v in storages if v in uses.made and last[v] == i and not _stays(uses, v))
    return most


def _stays(uses: _Uses, storage: Var) -> bool:
    """Whether something outside of its group needs a storage."""
    return any(storage in needed for needed in (uses.kept, uses.fixed, uses.gather)) or len(uses.groups[storage]) > 1
