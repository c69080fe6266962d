"""residency: count the bytes that are live at each operation of a program, apart from its planned collectives.

A `Problem` counts the bytes of gathers and reductions, which depend on the places that a schedule gives them. This
module counts all other bytes: those live at each operation and at each place, those of reduced values, and those of
temporaries in eager updates. The bytes of eager updates depend on the whole order, so these figures are an estimate,
which guides the search. The memory analysis decides (`Problem.peak_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..ir.collectives import rules
from ..ir.donation import Donation, donation
from ..ir.graph import Eqn, Var
from .cost import held, local_bytes
from .eager_updates import Group
from .program_order import Skeleton


class Value(NamedTuple):
    """A reduced value, and the updates that follow it."""

    bytes: int
    received: bool  # whether it stays in the buffer in which it was received
    until: int  # the place behind the last operation at a fixed place that needs it, or 0
    updating: int  # the most bytes that are live in the updates that follow it


@dataclass(frozen=True)
class Residency:
    """`live` and `across` of a `Problem`, and the values of its reductions."""

    live: tuple[int, ...]
    across: tuple[int, ...]
    values: tuple[Value, ...]


def residency(s: Skeleton, last: Sequence[int], groups: Iterable[Group]) -> Residency:
    """Count the residency of a program.

    Args:
        s: the program without its planned collectives.
        last: for each gather, the last operation that reads its value.
        groups: the equations of the update that leave their places.
    """
    graph, given, groups = s.graph, donation(s.graph), tuple(groups)
    fixed = _fixed_ends(s, given, {e for group in groups for e in group.eqns})
    counted, before = _counted(s, last, given), s.before
    n, inputs = len(s.ops), set(graph.inputs)
    live, across = [0] * (n + 1), [0] * (n + 3)
    for h in held(graph, given):
        first, end = before[h.first], min(before[h.last + 1], fixed.get(h.value, n))
        parts = [(first, end)]
        if h.value in inputs:
            parts = [(-1, n)]
        elif h.value in counted:
            a, b = counted[h.value]
            parts = [(first, min(a, end)), (max(b, first), end)]
        for a, b in parts:
            if a < b:
                live[max(a, 0)] += h.bytes
                live[b] -= h.bytes
                across[a + 1] += h.bytes
                across[b + (b == n)] -= h.bytes
    values = _values(s, given, {**fixed, **_met(s, groups, given)}, _updating(s, groups, given))
    return Residency(tuple(accumulate(live[:n])), tuple(accumulate(across[: n + 1])), tuple(values))


def _fixed_ends(s: Skeleton, given: Donation, floating: set[Eqn]) -> dict[Var, int]:
    """For every storage that a floating operation needs, the place behind its last reader at a fixed place."""
    storages = lambda e: {given.owner[v] for v in (*e.ins, *e.results)}
    needed = {v for e in floating for v in storages(e)}
    ends = dict.fromkeys(needed, 0)
    for k, e in enumerate(s.ops):
        if e not in floating:
            ends.update((v, k + 1) for v in storages(e) if v in needed)
    return ends


def _met(s: Skeleton, groups: Iterable[Group], given: Donation) -> dict[Var, int]:
    """For each reduced value that an update reads together with one that is born later, the place behind that birth."""
    ends: dict[Var, int] = {}
    born = {p.value: k + 1 for p, k in zip(s.reductions, s.born)}
    for group in groups:
        last = max((s.born[i] + 1 for i in group.after), default=0)
        for v in (v for e in group.eqns for v in e.ins if born.get(v, last) < last):
            ends[given.owner[v]] = max(ends.get(given.owner[v], 0), last)
    return ends


def _counted(s: Skeleton, last: Sequence[int], given: Donation) -> dict[Var, tuple[int, int]]:
    """The storages that a `Problem` counts for its gathers and reductions, with the operations during which it does."""
    n, at = len(s.ops), {e: i for i, e in enumerate(s.graph.eqns)}
    counted: dict[Var, tuple[int, int]] = {}
    for p, k in zip(s.gathers, last):
        counted.update(dict.fromkeys((*p.start.results, *p.wait.results), (0, k + 1)))
    for p, born in zip(s.reductions, s.born):
        resumes = s.before[at[p.wait]] if max(given.last[given.owner[v]] for v in p.start.ins) > at[p.wait] else n
        members = [given.owner[v] for v in reversed(p.start.ins)]
        counted.update((v, (born, resumes)) for v in members if v not in counted)
        collectives = (p.start, p.wait, *(p.then or ()))
        counted.update(dict.fromkeys((v for e in collectives for v in e.results), (0, n)))
    return counted


def _values(s: Skeleton, given: Donation, fixed: Mapping[Var, int], updating: Sequence[int]) -> Iterator[Value]:
    graph, root, size = s.graph, s.live.root, local_bytes(s.graph)
    for p, updating_bytes in zip(s.reductions, updating):
        received, owner = root[p.value] is not p.value, given.owner[p.value]
        until = fixed.get(owner, s.before[min(given.last[owner] + 1, len(graph.eqns))])
        start = (p.then or (p.start,))[0]
        allocated = rules(start).received_bytes(start, 0, graph.axes) if received else size(p.value)
        yield Value(allocated, received, until, updating_bytes)


def _updating(s: Skeleton, groups: Iterable[Group], given: Donation) -> list[int]:
    """For each reduction, the most bytes of temporaries that are live in the updates that follow it."""
    size, at = local_bytes(s.graph), {e: i for i, e in enumerate(s.graph.eqns)}
    most_bytes = [0] * len(s.reductions)
    for group in groups:
        ends: dict[int, int] = {}  # for each equation, the bytes that are freed after it
        total = most = 0
        for e in group.eqns:
            for out in e.outs:
                if out is not None and given.owner[out] is out:
                    total += size(out)
                    ends[given.last[out]] = ends.get(given.last[out], 0) + size(out)
            most = max(most, total)
            total -= ends.pop(at[e], 0)
        if group.after:
            most_bytes[max(group.after)] += most
    return most_bytes
