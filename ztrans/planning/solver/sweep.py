"""Choices from a few scalars: the number of levers, how full buckets are, and when gathers start.

The search begins with these choices. It changes one scalar at a time, and keeps each value that gives a better choice
(see `search.Search.sweep`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..buffers import by_operation
from .changes import in_order
from .full_buckets import FULL, gather_buckets, reduction_buckets
from .loads import Loads
from .problem import Choice, Levers, Problem

# The room of a bucket of regathers, as a share of the room of a bucket of first gathers.
_ROOM_OF_REGATHERS = 0.4


class Scalars(NamedTuple):
    """The scalars that determine a choice.

    Attributes:
        shares: by the name of a kind of lever, the share to pull of all that fit. None of the other kinds are pulled.
        full_gathers, full_reductions: the transfer of a full bucket, in latencies of a message.
        room_of_gathers, room_of_reductions: the most bytes of a bucket, as a share of the free memory.
        lead, reserve, waited_together: as in `Choice`.
    """

    shares: Mapping[str, float] = MappingProxyType({})
    full_gathers: float = FULL
    full_reductions: float = FULL
    room_of_gathers: float = 0.3
    room_of_reductions: float = 0.2
    lead: float = 2.0
    reserve: bool = True
    waited_together: int = 1

    def with_value(self, name: str, value: Any) -> Scalars:
        """The scalars with another value for the scalar, or for the share of the kind of lever, with this name."""
        if name in self._fields:
            return self._replace(**{name: value})
        return self._replace(shares={**self.shares, name: value})


# The values that the search tries for each scalar, without the shares of levers, which `values_of` adds.
# `benchmarks/plans/ablations.py` measures the gain of each scalar.
VALUES: Mapping[str, Sequence[Any]] = {
    "full_gathers": (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    "full_reductions": (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    "lead": (0.0, 1.0, 2.0, 4.0, 1e6),
    "waited_together": (1, 2, 4, 8),
    "room_of_gathers": (0.12, 0.3, 0.6),
    "room_of_reductions": (0.1, 0.2, 0.4),
    "reserve": (False, True),
}


def values_of(problem: Problem) -> Mapping[str, Sequence[Any]]:
    """The values that the search tries for each scalar of a problem, the shares of its levers first."""
    shares = {kind.name: kind.shares for kind in problem.lever_kinds}
    return {**shares, **VALUES}


class FullChoices:
    """The choices of one problem by their scalars."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.problem = loads.problem
        self._levers: dict[tuple[float, ...], Levers] = {}

    def choice(self, scalars: Scalars) -> Choice:
        """The choice with full buckets of everything that the pulled levers do not drop."""
        problem = self.problem
        levers = self.levers(scalars.shares)
        live = by_operation(self.loads.bytes_unbucketed(levers))
        room = (self.loads.memory - live).tolist()
        dropped = problem.dropped(levers)
        first_gathers: list[int] = []
        regathers: list[int] = []
        for i, gather in enumerate(problem.gathers):
            if i in dropped:
                continue
            if gather.repeats is None:
                first_gathers.append(i)
            else:
                regathers.append(i)
        full = scalars.full_gathers
        portion = scalars.room_of_gathers
        gathers = gather_buckets(problem, first_gathers, room, portion, full)
        gathers += gather_buckets(problem, regathers, room, portion * _ROOM_OF_REGATHERS, full)
        reductions = reduction_buckets(
            problem, room, scalars.room_of_reductions, scalars.full_reductions
        )
        return Choice(
            in_order(problem, gathers),
            tuple(reductions),
            levers,
            scalars.lead,
            scalars.reserve,
            scalars.waited_together,
        )

    def levers(self, shares: Mapping[str, float]) -> Levers:
        """The levers to pull: these shares of all that fit, the first ones of each kind first."""
        kinds = self.problem.lever_kinds
        key = tuple(shares.get(kind.name, 0.0) for kind in kinds)
        if key not in self._levers:
            levers = self.problem.free_levers
            # The first kind comes last, because it may replace the others.
            for share, more in reversed(list(zip(key, kinds.values()))):
                levers = self._with_share(more, share, levers)
            self._levers[key] = levers
        return self._levers[key]

    def _with_share(self, more: Iterable[int], share: float, pulled: Levers) -> Levers:
        """The pulled levers, and a share of `more`, of all that fit."""
        if share == 0:
            return pulled
        with_all = self._with_all_that_fit(more, pulled)
        new_levers = [i for i in more if i in with_all and i not in pulled]
        count = math.ceil(share * len(new_levers))
        return self._with_all_that_fit(new_levers[:count], pulled)

    def _with_all_that_fit(self, more: Iterable[int], pulled: Levers) -> Levers:
        """The pulled levers, and as many of `more` as fit the memory, the first ones first."""
        levers = self.problem.levers
        room = self.loads.memory - self.loads.bytes_unbucketed(pulled)
        for i in more:
            rivals = self.problem.rivals[i] & pulled
            # Levers are in the order of their kinds: the ones after this kind are replaced, the ones before it are not.
            if any(rival < i or levers[rival].kind == levers[i].kind for rival in rivals):
                continue
            new_room = room.copy()
            for kept_buffer in self.problem.lever_buffers([i]):
                new_room[kept_buffer.first : kept_buffer.last + 1] -= kept_buffer.bytes
            for freed_buffer in self.problem.lever_buffers(rivals):
                new_room[freed_buffer.first : freed_buffer.last + 1] += freed_buffer.bytes
            if new_room.min(initial=0) >= 0:
                room = new_room
                pulled = pulled - rivals | {i}
        return pulled
