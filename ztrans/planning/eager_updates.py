"""Find the equations of the update that may leave their places, and the first place where each may run.

With eager updates, a parameter is updated at the wait for the last reduction that it needs, which frees its gradient.
The schedule decides where that is; this module has the conditions. Equations that leave their places are called
floating. `early_updates` does the same for a program that reduces no gradient, where no wait decides when an update
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import rules
from ..ir.copies import returns_to_device
from ..ir.dependencies import needed
from ..ir.donation import donation
from ..ir.graph import Eqn, Var, users, variables
from ..ir.op_facts import is_random
from .skeleton import Skeleton


class Movable(NamedTuple):
    """The equations that an eager update may take from their places.

    Attributes:
        after_reductions: the equations that depend on a planned reduction, in order.
        state_only: the equations that depend on the state only, by the values that they compute.
    """

    after_reductions: tuple[Eqn, ...]
    state_only: Mapping[Var, Eqn]


@dataclass(frozen=True)
class EagerGroup:
    """Equations of the update that need the same reductions and may run from the same place on."""

    after: tuple[int, ...]  # the reductions, by index
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
    state_only: dict[Var, Eqn] = {}
    for e in s.ops:
        if e.region != "update" or rules(e).remote or is_random(e) or returns_to_device(e):
            continue
        if any(v in reduced for v in e.ins):
            after_reductions.append(e)
            reduced.update(e.results)
        elif all(v in state or v in state_only for v in e.ins):
            state_only.update((out, e) for out in e.results)
    return Movable(tuple(after_reductions), state_only)


@cached_on_graph
def eager_groups(s: Skeleton) -> tuple[EagerGroup, ...]:
    """The equations of the update that leave their places, in groups.

    An equation may need a value that an operation at a fixed place computes after the last wait for a reduction, such
    as the scale of a global norm. Eager updates run after waits, and no wait comes later, so it stays at its place.
    """
    movable = movable_eqns(s)
    awaited = _awaited_values(s, movable)
    leaving = set(movable.after_reductions)
    while True:
        groups = _by_need(s, movable, awaited, leaving)
        grouped_eqns = set(chain.from_iterable(groups.values()))
        if leaving <= grouped_eqns:
            break
        # Equations that stay read the state at their places, so more equations may have to stay.
        leaving = grouped_eqns

    for key, eqns in _state_computations(movable.state_only, groups).items():
        groups.setdefault(key, []).extend(eqns)
    eager: list[EagerGroup] = []
    for (reductions, release), eqns in groups.items():
        in_order = tuple(sorted(eqns, key=lambda e: s.places[e]))
        eager.append(EagerGroup(tuple(sorted(reductions)), release, in_order))
    return tuple(eager)


def _awaited_values(s: Skeleton, movable: Movable) -> dict[Eqn, set[Var]]:
    """For each equation after reductions, the values that other equations must have read before it runs.

    These are the values that it may overwrite: the leaves of the state that it reads, and values whose storage its
    results are in. An equation that computes a temporary from values that are live anyway also waits for the values
    that all its readers wait for: earlier, its result would only occupy memory.
    """
    root = s.lifetimes.root
    owner = donation(s.graph).owner
    readers = users(s.graph)
    state = set(s.graph.state)
    outputs = set(variables(s.graph.outputs))
    available = _available(s, movable, outputs)
    temporaries = available - outputs
    awaited: dict[Eqn, set[Var]] = {}
    for e in reversed(movable.after_reductions):
        overwritten = {owner[out] for out in e.results}
        awaited[e] = set()
        for v in e.ins:
            if root[v] in state or owner[v] in overwritten:
                awaited[e].add(root[v])

        awaited_by_readers = []
        for out in e.results:
            awaited_by_readers += [awaited.get(reader, set()) for reader in readers.get(out, ())]
        if awaited_by_readers and temporaries.issuperset(e.results):
            awaited[e] |= set.intersection(*awaited_by_readers)
    return awaited


def _available(s: Skeleton, movable: Movable, outputs: set[Var]) -> set[Var]:
    """The values that are live anyway while updates run, and the values computed only from these and scalars."""
    available = {*s.graph.inputs, *outputs, *movable.state_only}
    for e in movable.after_reductions:
        if all(v in available or v.numel == 1 for v in e.ins):
            available.update(e.results)
    return available


def _by_need(
    s: Skeleton, movable: Movable, awaited: Mapping[Eqn, set[Var]], leaving: set[Eqn]
) -> dict[_GroupKey, list[Eqn]]:
    """The equations among `leaving` that can leave their places, by the reductions that they need and their release."""
    exists_at, last_read = _fixed_places(s, needed(leaving, movable.state_only))
    latest = max(s.need, default=0)
    needed_reductions: dict[Var, frozenset[int]] = {}
    for i, collective in enumerate(s.reductions):
        needed_reductions[collective.value] = frozenset([i])
    groups: dict[_GroupKey, list[Eqn]] = {}
    for e in movable.after_reductions:
        if e not in leaving:
            continue
        reductions = _union([needed_reductions[v] for v in e.ins if v in needed_reductions])

        # It may run once its arguments exist, and all readers of what it overwrites have run.
        place = max([exists_at.get(v, 0) for v in e.ins], default=0)
        for v in awaited[e]:
            place = max(place, last_read.get(v, 0))
        if place > latest:
            place = s.places[e] + 1  # no reduction is waited for that late: it stays
        else:
            groups.setdefault((reductions, place), []).append(e)

        for out in e.results:
            needed_reductions[out] = reductions
            exists_at[out] = place
    return groups


def _union(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    """The union of sets; the largest of them itself, if it contains the others.

    Equations after a norm of all gradients need all reductions, and so share one set of them.
    """
    largest = max(sets, key=len, default=frozenset[int]())
    if all(members <= largest for members in sets):
        return largest
    return largest.union(*sets)


def _state_computations(
    state_only: Mapping[Var, Eqn], groups: Mapping[_GroupKey, Sequence[Eqn]]
) -> dict[_GroupKey, list[Eqn]]:
    """The equations that depend on the state only, by the group that needs them.

    An equation that several groups need is in a group without reductions. One that no group needs stays at its place.
    """
    keys: dict[Eqn, list[_GroupKey]] = {}
    for key, eqns in groups.items():
        for e in needed(eqns, state_only).difference(eqns):
            keys.setdefault(e, []).append(key)

    without_reductions = (frozenset[int](), 0)
    computations: dict[_GroupKey, list[Eqn]] = {}
    for e, needing_groups in keys.items():
        key = needing_groups[0] if len(needing_groups) == 1 else without_reductions
        computations.setdefault(key, []).append(e)
    return computations


def _fixed_places(s: Skeleton, floating: set[Eqn]) -> tuple[dict[Var, int], dict[Var, int]]:
    """For each value, the first place at which it exists; for each storage, the place after its last fixed reader.

    A gather has no fixed place. Its value exists, and its shard has been read, after the operation that first uses it.
    """
    root = s.lifetimes.root
    exists_at: dict[Var, int] = {}
    last_read: dict[Var, int] = {}
    for k, e in enumerate(s.ops):
        if e not in floating:
            exists_at.update((out, k + 1) for out in e.results)
            last_read.update((root[v], k + 1) for v in e.ins)

    for collective, use in zip(s.gathers, s.use):
        place_after = min(use + 1, len(s.ops))
        exists_at[collective.value] = place_after
        for e in (collective.start, *(collective.arrival or ())):
            for v in e.ins:
                last_read[root[v]] = max(last_read.get(root[v], 0), place_after)
    return exists_at, last_read
