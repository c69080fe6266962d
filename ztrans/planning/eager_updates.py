"""Which equations of the update leave their places, and from where on they may run.

With eager updates, the update of a parameter runs where the last of the reductions that it needs is waited for, which
frees its gradient. Where that is depends on the schedule; here are the conditions. The equations that leave their
places are called floating. `early_updates` does the same for a program that reduces no gradient, where no wait decides
when an update runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import rules
from ..ir.dependencies import needed
from ..ir.donation import donation
from ..ir.graph import Eqn, Var, users, variables
from ..ir.op_facts import is_random
from .skeleton import Skeleton


class Movable(NamedTuple):
    """The equations that an eager update may take from their places.

    Attributes:
        after_reductions: the equations that depend on a planned reduction, in order.
        of_state: the equations that depend on the state only, by the values that they compute.
    """

    after_reductions: tuple[Eqn, ...]
    of_state: Mapping[Var, Eqn]


@dataclass(frozen=True)
class EagerGroup:
    """Equations of the update that need the same reductions and may run from the same place on."""

    after: tuple[int, ...]  # the indices of these reductions
    release: int  # the first place at which they may run
    eqns: tuple[Eqn, ...]  # in program order


_GroupKey = tuple[frozenset[int], int]  # the reductions that a group needs, and its release


@cached_on_graph
def movable_eqns(s: Skeleton) -> Movable:
    """The equations that an eager update may take from their places.

    Random draws and the step's own collectives stay at their places, and so does everything that depends on them.
    """
    state = set(s.graph.inputs)
    reduced = {collective.value for collective in s.reductions}
    after_reductions: list[Eqn] = []
    of_state: dict[Var, Eqn] = {}
    for e in s.ops:
        if e.region != "update" or rules(e).remote or is_random(e):
            continue
        if any(v in reduced for v in e.ins):
            after_reductions.append(e)
            reduced.update(e.results)
        elif all(v in state or v in of_state for v in e.ins):
            of_state.update((out, e) for out in e.results)
    return Movable(tuple(after_reductions), of_state)


@cached_on_graph
def eager_groups(s: Skeleton) -> tuple[EagerGroup, ...]:
    """The equations of the update that leave their places, in groups.

    An equation may need a value that an operation at a fixed place computes after the last reduction was waited for,
    such as the scale of a global norm. No reduction is waited for after that, so the equation stays at its place.
    """
    movable = movable_eqns(s)
    awaited = _awaited_values(s, movable)
    leaving = set(movable.after_reductions)
    while True:
        groups = _by_need(s, movable, awaited, leaving)
        grouped_eqns = set(chain.from_iterable(groups.values()))
        if leaving <= grouped_eqns:
            break
        # What stays reads the state at its place, so more equations may have to stay.
        leaving = grouped_eqns

    for key, eqns in _state_computations(movable.of_state, groups).items():
        groups.setdefault(key, []).extend(eqns)
    update: list[EagerGroup] = []
    for (reductions, release), eqns in groups.items():
        in_order = tuple(sorted(eqns, key=s.places.__getitem__))
        update.append(EagerGroup(tuple(sorted(reductions)), release, in_order))
    return tuple(update)


def _awaited_values(s: Skeleton, movable: Movable) -> dict[Eqn, set[Var]]:
    """For each equation after reductions, the values that other equations must have read before it runs.

    These are the leaves of the state that it reads, and other values whose storage it takes, because it may overwrite
    them. An equation that computes a temporary from values that are live anyway also waits for the values that all its
    readers wait for: if it ran earlier, its result would only take memory.
    """
    root = s.lifetimes.root
    owner = donation(s.graph).owner
    readers = users(s.graph)
    state = set(s.graph.inputs[: s.graph.num_state])
    outputs = set(variables(s.graph.outputs))
    available = _available(s, movable, outputs)
    awaited: dict[Eqn, set[Var]] = {}
    temporary = available - outputs
    for e in reversed(movable.after_reductions):
        overwritten = {owner[out] for out in e.results}
        awaited[e] = set()
        for v in e.ins:
            if root[v] in state or owner[v] in overwritten:
                awaited[e].add(root[v])

        of_readers = []
        for out in e.results:
            of_readers += [awaited.get(reader, set()) for reader in readers.get(out, ())]
        if of_readers and temporary.issuperset(e.results):
            awaited[e] |= set.intersection(*of_readers)
    return awaited


def _available(s: Skeleton, movable: Movable, outputs: set[Var]) -> set[Var]:
    """Values that are live anyway while updates run, or are computed from such values and scalars only."""
    available = {*s.graph.inputs, *outputs, *movable.of_state}
    for e in movable.after_reductions:
        if all(v in available or v.numel == 1 for v in e.ins):
            available.update(e.results)
    return available


def _by_need(
    s: Skeleton, movable: Movable, awaited: Mapping[Eqn, set[Var]], leaving: set[Eqn]
) -> dict[_GroupKey, list[Eqn]]:
    """The equations among `leaving` that can leave their places, by what they need."""
    exists, last_read = _fixed_places(s, needed(leaving, movable.of_state))
    latest = max(s.need, default=0)
    needed_reductions: dict[Var, frozenset[int]] = {}
    for i, collective in enumerate(s.reductions):
        needed_reductions[collective.value] = frozenset([i])
    groups: dict[_GroupKey, list[Eqn]] = {}
    for e in movable.after_reductions:
        if e not in leaving:
            continue
        reductions = _union([needed_reductions[v] for v in e.ins if v in needed_reductions])

        # It may run once its arguments exist, and once all that must read the old state has done so.
        place = max([exists.get(v, 0) for v in e.ins], default=0)
        for v in awaited[e]:
            place = max(place, last_read.get(v, 0))
        if place > latest:
            place = s.places[e] + 1
        else:
            groups.setdefault((reductions, place), []).append(e)

        for out in e.results:
            needed_reductions[out] = reductions
            exists[out] = place
    return groups


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """The union of sets; one of them itself, if it has all members.

    What follows from a norm of all gradients needs all reductions, and shares one set of them.
    """
    largest = max(sets, key=len, default=frozenset[int]())
    if all(each <= largest for each in sets):
        return largest
    return largest.union(*sets)


def _state_computations(
    of_state: Mapping[Var, Eqn], groups: Mapping[_GroupKey, Sequence[Eqn]]
) -> dict[_GroupKey, list[Eqn]]:
    """The equations that depend on the state only, by the group that needs them.

    An equation that several groups need is in a group without reductions. One that no group needs stays at its place.
    """
    keys: dict[Eqn, list[_GroupKey]] = {}
    for key, eqns in groups.items():
        for e in needed(eqns, of_state).difference(eqns):
            keys.setdefault(e, []).append(key)

    without_reductions = (frozenset[int](), 0)
    computations: dict[_GroupKey, list[Eqn]] = {}
    for e, needing in keys.items():
        key = needing[0] if len(needing) == 1 else without_reductions
        computations.setdefault(key, []).append(e)
    return computations


def _fixed_places(s: Skeleton, floating: set[Eqn]) -> tuple[dict[Var, int], dict[Var, int]]:
    """For each value, the first place at which it exists, and the place after its last reader at a fixed place.

    A gather has no fixed place. Its value exists, and its shard has been read, after the operation that first uses it.
    """
    root = s.lifetimes.root
    exists: dict[Var, int] = {}
    last_read: dict[Var, int] = {}
    for k, e in enumerate(s.ops):
        if e not in floating:
            exists.update((out, k + 1) for out in e.results)
            last_read.update((root[v], k + 1) for v in e.ins)

    for collective, use in zip(s.gathers, s.use):
        place_after = min(use + 1, len(s.ops))
        exists[collective.value] = place_after
        for v in collective.start.ins:
            last_read[root[v]] = max(last_read.get(root[v], 0), place_after)
    return exists, last_read
