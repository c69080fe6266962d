"""Choices that follow from a few scalars: how many levers are pulled, how full buckets are, when gathers start.

The search begins with such choices. It changes one scalar at a time, and keeps each value that makes the choice better
(see `search.Search.sweep`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..buffers import by_operation
from .changes import in_order
from .full_buckets import FULL, gather_buckets, reduction_buckets
from .loads import Loads
from .problem import Choice, Levers

# A bucket of values that are gathered again may take this share of the room that a bucket of first gathers may take.
_ROOM_OF_REGATHERS = 0.4


class Scalars(NamedTuple):
    """The scalars from which a choice follows.

    Attributes:
        whole: the levers that keep whole values, as a share of those that fit.
        parts: the levers that keep parts of values, as a share of those that fit.
        full_gathers, full_reductions: the time that the transfer of a full bucket takes, in latencies of a message.
        room_of_gathers, room_of_reductions: the most that a bucket may take, as a share of the free memory.
        lead, reserve, waited_together: as in `Choice`.
    """

    whole: float = 0.0
    parts: float = 0.0
    full_gathers: float = FULL
    full_reductions: float = FULL
    room_of_gathers: float = 0.3
    room_of_reductions: float = 0.2
    lead: float = 2.0
    reserve: bool = True
    waited_together: int = 1


# The values that the search tries for each scalar. `benchmarks/ablations.py` shows what each scalar gains.
VALUES: Mapping[str, Sequence[Any]] = {
    "whole": (0.0, 0.125, 0.25, 0.5, 0.75, 1.0),
    "parts": (0.0, 0.5, 1.0),
    "full_gathers": (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    "full_reductions": (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    "lead": (0.0, 1.0, 2.0, 4.0, 1e6),
    "waited_together": (1, 2, 4, 8),
    "room_of_gathers": (0.12, 0.3, 0.6),
    "room_of_reductions": (0.1, 0.2, 0.4),
    "reserve": (False, True),
}


class FullChoices:
    """The choices of one problem that follow from scalars."""

    def __init__(self, loads: Loads) -> None:
        self.loads = loads
        self.problem = loads.problem
        self._levers: dict[tuple[float, float], Levers] = {}

    def choice(self, scalars: Scalars) -> Choice:
        """Full buckets of everything that the pulled levers do not drop."""
        problem = self.problem
        levers = self.levers(scalars.parts, scalars.whole)
        live = by_operation(self.loads.bytes_unbucketed(levers))
        room = (self.loads.memory - live).tolist()
        dropped = problem.dropped(levers)
        first: list[int] = []
        regathers: list[int] = []
        for i, gather in enumerate(problem.gathers):
            if i not in dropped:
                same = first if gather.repeats is None else regathers
                same.append(i)
        full = scalars.full_gathers
        portion = scalars.room_of_gathers
        gathers = gather_buckets(problem, first, room, portion, full)
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

    def levers(self, parts: float, whole: float) -> Levers:
        """The levers to pull: these shares of the ones that fit, in their order."""
        if (parts, whole) not in self._levers:
            levers = self._share(self.problem.part_levers, parts, self.problem.free_levers)
            self._levers[parts, whole] = self._share(self.problem.whole_levers, whole, levers)
        return self._levers[parts, whole]

    def _share(self, more: Iterable[int], share: float, pulled: Levers) -> Levers:
        """The pulled levers, and this share of the further ones that fit."""
        if share == 0:
            return pulled
        all_that_fit = self._with_levers_that_fit(more, pulled)
        new = [i for i in more if i in all_that_fit and i not in pulled]
        count = math.ceil(share * len(new))
        return self._with_levers_that_fit(new[:count], pulled)

    def _with_levers_that_fit(self, more: Iterable[int], pulled: Levers) -> Levers:
        """As many more levers as fit the memory, the first ones first. Whole values take the place of parts."""
        room = self.loads.memory - self.loads.bytes_unbucketed(pulled)
        for i in more:
            rivals = self.problem.rivals[i] & pulled
            if rivals and self.problem.levers[i].sends is not None:
                continue
            left = room.copy()
            for kept in self.problem.lever_buffers([i]):
                left[kept.first : kept.last + 1] -= kept.bytes
            for freed in self.problem.lever_buffers(rivals):
                left[freed.first : freed.last + 1] += freed.bytes
            if left.min(initial=0) >= 0:
                room = left
                pulled = pulled - rivals | {i}
        return pulled
