"""loads: the buckets of a choice as messages, and the room that they leave at every slot."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from .first_waits import first_waits
from .load import Load, Members, gather_load, reduction_load
from .problem import Problem
from .slots import added_up, fixed, reducing, summed

_ENDLESS = 2**52  # bytes: more than there are, and exact as a float


class Choice(NamedTuple):
    """Buckets by index, in order of use and of birth within a key; dropped gathers; and when gathers start.

    A gather is due `lead` times its transfer before its use. If `reserve`, a gather that is used after the first
    gradient starts only where it leaves room for the largest reduction.
    """

    gathers: tuple[Members, ...]
    reductions: tuple[Members, ...]
    dropped: frozenset[int]
    lead: float = 1.0
    reserve: bool = True


def kept(problem: Problem, dropped: Collection[int]) -> frozenset[int]:
    """`dropped` with the gathers that cost nothing to drop then: their values are live anyway until their use."""
    last, keeper = problem.last_uses(dropped), problem.keepers(dropped)
    more = {
        i
        for i, g in enumerate(problem.gathers)
        if i not in keeper
        and g.again is not None
        and g.use <= last[keeper.get(g.again, g.again)] + 1
    }
    return kept(problem, {*dropped, *more}) if more else frozenset(dropped)


# The loads of a choice, gathers by use and reductions by birth, and the room by slot that they leave. The room is that
# where each gather starts at its use, and each reduction is waited for at its first wait.
Loaded = tuple[list[Load], list[Load], np.ndarray]


class Loads:
    """The loads of one problem's buckets, and the bytes that are live with them, by slot."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.memory = problem, int(min(problem.memory, _ENDLESS))
        self.fixed = fixed(problem)
        self.second = max((r.second for r in problem.reductions), default=0)
        self.waits = tuple(r.born + 1 for r in problem.reductions)
        self.waits = first_waits(problem, self._live(kept(problem, ())))
        # The bytes live by slot if every message is a bucket of its own, and is waited for as early as it can be.
        self.alone = functools.cache(self._live)
        self._gather = functools.cache(functools.partial(gather_load, problem))
        self._reduction = functools.cache(functools.partial(reduction_load, problem, self.waits))

    def of(self, choice: Choice) -> Loaded | None:
        """The loads of a choice; None if a bucket is not possible, or if there is too little room."""
        gathers = [load for load in map(self._gather, choice.gathers) if load is not None]
        reductions = [load for load in map(self._reduction, choice.reductions) if load is not None]
        complete = len(gathers) == len(choice.gathers) and len(reductions) == len(choice.reductions)
        if not complete or self.problem.without_start(load.place for load in reductions):
            return None
        changes = [load.changes for load in (*gathers, *reductions) if len(load.members) > 1]
        room = self.memory - self.alone(choice.dropped) - added_up(changes, len(self.fixed))
        if reductions:
            room[2 * self.problem.births[0] :] -= (
                max(load.second for load in reductions) - self.second
            )
        if room.min(initial=0) < 0:
            return None
        order = lambda load: (load.place, load.bound)
        return sorted(gathers, key=order), sorted(reductions, key=order), room

    def _live(self, dropped: frozenset[int]) -> np.ndarray:
        last, gathers = self.problem.last_uses(dropped), enumerate(self.problem.gathers)
        spans = [(2 * g.use, 2 * last[i] + 2, g.held) for i, g in gathers if i not in dropped]
        for r, wait in zip(self.problem.reductions, self.waits):
            spans += reducing([r], r.born + 1, wait)
        if self.second:  # between two waits, one second reduction is under way
            spans.append((2 * self.problem.births[0], len(self.fixed), self.second))
        return self.fixed + summed(spans, len(self.fixed))
