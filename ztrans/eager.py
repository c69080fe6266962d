"""Eager updates: what of the update leaves its place, and runs when its reductions have been waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .graph import Eqn, Var, is_view
from .problem import Gather, Update
from .schedule import Skeleton


@dataclass(frozen=True)
class Group:
    """Equations of the update, in order, that need the same reductions and may run from the same place on."""

    after: tuple[int, ...]
    release: int
    eqns: tuple[Eqn, ...]

    def update(self, cost: Mapping[Eqn, float]) -> Update:
        """The group as a part of the problem."""
        return Update(sum(cost[e] for e in self.eqns), self.after, self.release)


def groups(s: Skeleton, gathers: Sequence[Gather]) -> tuple[Group, ...]:
    """The equations of the update that leave their places, in groups.

    What an operation at a fixed place yields after the last reduction was waited for, as the scale of a global
    norm, comes with no reduction: the equations that need it stay.
    """
    movable, free = s.floating
    alone = tuple(dict.fromkeys(free.values()))
    release = _releases(s, gathers, {*movable, *alone})
    after = {p.value: frozenset([i]) for i, p in enumerate(s.reductions)}
    found: dict[tuple[frozenset[int], int], list[Eqn]] = {}
    latest = max(s.need, default=0)
    for e in movable:
        reductions = frozenset[int]().union(*(after.get(v, ()) for v in e.ins))
        place = max(release.get(v, 0) for v in e.ins)
        if place > latest:
            place = s.places[e] + 1
        else:
            found.setdefault((reductions, place), []).append(e)
        for out in filter(None, e.outs):
            after[out], release[out] = reductions, place
    together = (Group(tuple(sorted(reductions)), place, tuple(eqns)) for (reductions, place), eqns in found.items())
    return (*together, *([Group((), 0, alone)] if alone else []))


def _releases(s: Skeleton, gathers: Sequence[Gather], floating: set[Eqn]) -> dict[Var, int]:
    """The place from which a value is there; of a leaf of the state, from which nothing at a fixed place reads it."""
    state = set(s.graph.inputs[: s.graph.num_state])
    release: dict[Var, int] = {}
    for k, e in enumerate(s.ops):
        if e not in floating:
            release.update((v, k + 1) for v in (*e.ins, *filter(None, e.outs)) if v in state or v in e.outs)
    for p, g in zip(s.gathers, gathers):
        release[p.value] = g.use + 1
        if g.again is None:  # a plan may drop the others
            release.update((v, max(release.get(v, 0), g.use + 1)) for v in p.start.ins)
    return release


def deadline(s: Skeleton, floating: set[Eqn], born: int, need: int) -> int:
    """The place at which a reduction must have been waited for: right before the equations that leave their places."""
    while need > born + 1 and (s.ops[need - 1] in floating or is_view(s.ops[need - 1])):
        need -= 1
    return need
