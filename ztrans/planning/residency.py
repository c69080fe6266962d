"""Residency: the bytes that the operations of a program have live, its planned collectives aside.

A `Problem` counts what gathers and reductions hold from the places that a schedule gives them. Everything else
is here: what is live at each operation and at each place, what a reduced value holds after it has come, and what
the equations of an eager update hold while they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..ir.collectives import received_bytes
from ..ir.donation import Donation, donation
from ..ir.graph import Eqn, Var
from .cost import held, local_bytes
from .eager_updates import Group
from .program_order import Skeleton


class Value(NamedTuple):
    """A reduced value: its bytes, and whether they are those it was received in; the place until which something
    at a fixed place needs it, or 0; the bytes that the equations which follow it hold while they run."""

    bytes: int
    received: bool
    until: int
    updating: int


@dataclass(frozen=True)
class Residency:
    """`live[k]` and `across[k]` are those of a `Problem`; `values` are those of the reductions."""

    live: tuple[int, ...]
    across: tuple[int, ...]
    values: tuple[Value, ...]


def residency(s: Skeleton, last: Sequence[int], groups: Iterable[Group]) -> Residency:
    """The residency of a program.

    `last` has the last operation that uses each gather, `groups` what of the update leaves its place.
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
    """For every storage that a floating operation needs, the place after the last one at a fixed place that does."""
    storages = lambda e: {given.owner[v] for v in (*e.ins, *filter(None, e.outs))}
    needed = {v for e in floating for v in storages(e)}
    ends = dict.fromkeys(needed, 0)
    for k, e in enumerate(s.ops):
        if e not in floating:
            ends.update((v, k + 1) for v in storages(e) if v in needed)
    return ends


def _met(s: Skeleton, groups: Iterable[Group], given: Donation) -> dict[Var, int]:
    """For every reduced value that an update reads together with one that is born later, the place after that birth."""
    found: dict[Var, int] = {}
    born = {p.value: k + 1 for p, k in zip(s.reductions, s.born)}
    for group in groups:
        last = max((s.born[i] + 1 for i in group.after), default=0)
        for v in (v for e in group.eqns for v in e.ins if born.get(v, last) < last):
            found[given.owner[v]] = max(found.get(given.owner[v], 0), last)
    return found


def _counted(s: Skeleton, last: Sequence[int], given: Donation) -> dict[Var, tuple[int, int]]:
    """The storages that a problem counts for its gathers and reductions, and the operations at which it does."""
    n, at = len(s.ops), {e: i for i, e in enumerate(s.graph.eqns)}
    found: dict[Var, tuple[int, int]] = {}
    for p, k in zip(s.gathers, last):
        found.update(dict.fromkeys((*p.start.outs, *p.wait.outs), (0, k + 1)))
    for p, born in zip(s.reductions, s.born):
        again = s.before[at[p.wait]] if max(given.last[given.owner[v]] for v in p.start.ins) > at[p.wait] else n
        found.update((given.owner[v], (born, again)) for v in reversed(p.start.ins) if given.owner[v] not in found)
        collectives = (p.start, p.wait, *(p.then or ()))
        found.update(dict.fromkeys((v for e in collectives for v in e.outs), (0, n)))
    return found


def _values(
    s: Skeleton, given: Donation, fixed: Mapping[Var, int], updating: Sequence[int]
) -> Iterator[Value]:
    graph, root, size = s.graph, s.live.root, local_bytes(s.graph)
    for p, more in zip(s.reductions, updating):
        received, owner = root[p.value] is not p.value, given.owner[p.value]
        until = fixed.get(owner, s.before[min(given.last[owner] + 1, len(graph.eqns))])
        start = (p.then or (p.start,))[0]
        yield Value(received_bytes(start, 0, graph.axes) if received else size(p.value), received, until, more)


def _updating(s: Skeleton, groups: Iterable[Group], given: Donation) -> list[int]:
    """By reduction, the most bytes that the equations which follow it have of their own."""
    size, at = local_bytes(s.graph), {e: i for i, e in enumerate(s.graph.eqns)}
    found = [0] * len(s.reductions)
    for group in groups:
        ends: dict[int, int] = {}  # by equation, what dies with it
        total = most = 0
        for e in group.eqns:
            for out in e.outs:
                if out is not None and given.owner[out] is out:
                    total += size(out)
                    ends[given.last[out]] = ends.get(given.last[out], 0) + size(out)
            most = max(most, total)
            total -= ends.pop(at[e], 0)
        if group.after:
            found[max(group.after)] += most
    return found
