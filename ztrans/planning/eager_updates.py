"""eager_updates: the equations of the update that leave their places.

Each of them runs as soon as the reductions that it needs have been waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ..ir.graph import Eqn, Var
from ..ir.relations import grouped, needed
from .program_order import Skeleton

_Key = tuple[
    frozenset[int], int
]  # the reductions that a group needs, and the first place at which it may run


@dataclass(frozen=True)
class Group:
    """Equations of the update that need the same reductions and may run from the same place on."""

    after: tuple[int, ...]  # the indices of these reductions
    release: int  # the first place at which they may run
    eqns: tuple[Eqn, ...]  # in program order


def groups(s: Skeleton) -> tuple[Group, ...]:
    """The equations of the update that leave their places, in groups.

    An equation may need a value that an operation at a fixed place computes after the last reduction was waited for,
    such as the scale of a global norm. No reduction is waited for after that, so the equation stays at its place.
    """
    movable, free = s.floating
    leaving = set(movable)
    while True:
        by_key = _by_key(s, leaving)
        if leaving <= (leave := {e for eqns in by_key.values() for e in eqns}):
            break
        leaving = (
            leave  # those that stay read the state at their places, so others may have to stay too
        )
    for key, eqns in _askers(free, by_key).items():
        by_key.setdefault(key, []).extend(eqns)
    in_order = lambda eqns: tuple(sorted(eqns, key=s.places.__getitem__))
    return tuple(
        Group(tuple(sorted(reductions)), place, in_order(eqns))
        for (reductions, place), eqns in by_key.items()
    )


def _by_key(s: Skeleton, leaving: set[Eqn]) -> dict[_Key, list[Eqn]]:
    """Those of some equations of the update that can leave their places, by what they need."""
    movable, free = s.floating
    release = _releases(s, needed(leaving, free))
    root, latest = s.live.root, max(s.need, default=0)
    after = {p.value: frozenset([i]) for i, p in enumerate(s.reductions)}
    by_key: dict[_Key, list[Eqn]] = {}
    for e in (e for e in movable if e in leaving):
        reductions = frozenset[int]().union(*(after.get(v, ()) for v in e.ins))
        places = [max(release.get(v, 0), release.get(root[v], 0)) for v in e.ins]
        place = max([*places, *(release.get(leaf, 0) for leaf in s.waits[e])])
        if place > latest:
            place = s.places[e] + 1
        else:
            by_key.setdefault((reductions, place), []).append(e)
        for out in e.results:
            after[out], release[out] = reductions, place
    return by_key


def _askers(
    free: Mapping[Var, Eqn], groups_by_key: Mapping[_Key, Sequence[Eqn]]
) -> dict[_Key, list[Eqn]]:
    """The equations that depend on the state only, by the group that needs them.

    An equation that several groups need is in a group without reductions. One that no group needs stays at its place.
    """
    asked = grouped(
        (e, key) for key, eqns in groups_by_key.items() for e in needed(eqns, free) - {*eqns}
    )
    return grouped(
        (keys[0] if len(keys) == 1 else (frozenset(), 0), e) for e, keys in asked.items()
    )


def _releases(s: Skeleton, floating: set[Eqn]) -> dict[Var, int]:
    """For each value, the first place at which it exists; for each leaf of the state, the place after its last reader
    at a fixed place."""
    root, state = s.live.root, set(s.graph.inputs[: s.graph.num_state])
    release: dict[Var, int] = {}
    for k, e in enumerate(s.ops):
        if e not in floating:
            release.update((root[v], k + 1) for v in e.ins if root[v] in state)
            release.update((out, k + 1) for out in e.results)
    for p, use in zip(s.gathers, s.use):
        after = min(use + 1, len(s.ops))
        release[p.value] = after
        release.update(
            (root[v], max(release.get(root[v], 0), after)) for v in p.start.ins if root[v] in state
        )
    return release


def deadlines(s: Skeleton, floating: Set[Eqn]) -> list[int]:
    """The last place to wait for each reduction: before what needs it, and before the floating equations there."""
    starts = [0]  # for each place, that of the first of the floating equations right before it
    for k, e in enumerate(s.ops):
        starts.append(starts[k] if e in floating else k + 1)
    return [max(starts[need], min(born + 1, need)) for born, need in zip(s.born, s.need)]
