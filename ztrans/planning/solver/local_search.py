"""local_search: improve a choice of buckets step by step.

A choice is as good as the time that its placement takes. Times below `enough` count as equal; then fewer live bytes are
better, then fewer buckets. The search begins with full buckets, once with no values kept from forward to backward and
once with as many as fit. It merges buckets, many at once where that is no loss. Then it makes random changes, as
simulated annealing does: at first it also accepts a change that is a little slower. Of the choices that take nearly as
little time as the best one, the result is the one with the fewest live bytes. The random numbers have a fixed seed, and
the effort is counted in messages placed, so the same problem has the same result everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

from .bucketing import (
    FIRST_GATHERS,
    REDUCTIONS,
    REGATHERS,
    gather_buckets,
    in_order,
    reduction_buckets,
)
from .list_scheduler import Placed, place_choice
from .load import Members
from .loads import Choice, Loads, kept
from .moves import Moves, can_join, with_buckets
from .problem import Problem
from .slots import by_operation

NEARLY = 0.0025  # schedules whose times differ by less than this share count as equal; the lower bound's is enough
# Without an improvement the search ends after this many messages, and this many more for each message of the problem.
_PATIENCE = 500, 100
_LITTLE = (
    4000  # messages that the smallest problem may place; the first choices alone take hundreds
)


class Search:
    """The best choice so far, and the effort that is left: now, and at the last improvement."""

    def __init__(self, problem: Problem, least: float, effort: int, moves: Moves) -> None:
        self.problem, self.moves = problem, moves
        self.enough = least * (1 + NEARLY)
        self.loads = Loads(problem)
        self.chance = random.Random(0)
        count = len(problem.gathers) + len(problem.reductions)
        self.effort = min(effort, _LITTLE + (8 * count + 16) * (count + 8)) if count else 0
        self.improved, self.patience = self.effort, _PATIENCE[0] + _PATIENCE[1] * count
        self.seen: set[Choice] = set()
        self.free = kept(problem, ())
        self.granule = max(1.0, self.loads.alone(self.free).max(initial=0.0) / 64)
        alone = place_choice(self.loads, self._alone())
        if alone is None:
            raise ValueError("search: the memory is less than every schedule needs.")
        self.best = alone
        self.front = [
            alone
        ]  # those that are near the best, and that no other beats in both seconds and bytes

    def _alone(self) -> Choice:
        """Every message alone, every gather at its use."""
        gathers, reductions = self.problem.gathers, self.problem.reductions
        among: list[Members] = [(i,) for i in range(len(gathers)) if i not in self.free]
        return Choice(
            in_order(self.problem, among),
            tuple((i,) for i in range(len(reductions))),
            self.free,
            lead=0.0,
        )

    @property
    def done(self) -> bool:
        """Whether the best is good enough, or the effort spent."""
        return self.effort <= 0 or self.best.seconds <= self.enough

    @property
    def limit(self) -> float:
        """The seconds up to which a choice takes nearly as little time as the best one."""
        return max(self.best.seconds * (1 + NEARLY), self.enough)

    @property
    def result(self) -> Placed:
        """Of the choices that take nearly as little time as the best one, the one with the fewest live bytes."""
        return min(
            (placed for placed in self.front if placed.seconds <= self.limit),
            key=lambda placed: placed.peak,
        )

    def rank(self, placed: Placed) -> tuple[float, int, int]:
        """Sort key: smaller is better."""
        buckets = len(placed.choice.gathers) + len(placed.choice.reductions)
        return max(placed.seconds, self.enough), math.ceil(placed.peak / self.granule), buckets

    def try_(self, choice: Choice, slower: float = math.inf) -> Placed | None:
        """Place a choice. None if it was tried before, does not fit, or takes longer than `slower` seconds."""
        self.effort -= 8
        if choice in self.seen:
            return None
        self.seen.add(choice)
        placed = place_choice(self.loads, choice, max(slower, self.enough))
        if placed is not None:
            self.effort -= len(choice.gathers) + len(choice.reductions)
            if self.rank(placed) < self.rank(self.best):
                self.best = placed
            self._to_front(placed)
        return placed

    def _to_front(self, placed: Placed) -> None:
        limit, beats = self.limit, lambda a, b: a.seconds <= b.seconds and a.peak <= b.peak
        if placed.seconds <= limit and not any(beats(other, placed) for other in self.front):
            others = (
                other for other in self.front if other.seconds <= limit and not beats(placed, other)
            )
            self.front, self.improved = [*others, placed], self.effort

    def begin(self) -> None:
        """Try full buckets: with no values kept, and with as many as fit."""
        for dropped, full in product(
            (self.free, self._dropped())[: 1 + self.moves.keep], self.moves.full
        ):
            if not self.done:
                self.try_(self._full(dropped, full))

    def _dropped(self) -> frozenset[int]:
        """The gathers that are dropped if as many values are kept as fit."""
        gathers, room = self.problem.gathers, self.loads.memory - self.loads.alone(self.free)
        dropped = set(self.free)
        for i in (i for i in self.problem.repeats if i not in self.free):
            between = room[2 * (gathers[i].use - self.problem.idle(i)) + 2 : 2 * gathers[i].use]
            if between.min() >= gathers[i].held:
                between -= gathers[i].held
                dropped.add(i)
        return kept(self.problem, dropped)

    def _full(self, dropped: frozenset[int], full: float) -> Choice:
        """Full buckets of everything that is not dropped."""
        room = (self.loads.memory - by_operation(self.loads.alone(dropped))).tolist()
        buckets: list[Members] = []
        for portion, is_first in ((FIRST_GATHERS, True), (REGATHERS, False)):
            among = [
                i
                for i, g in enumerate(self.problem.gathers)
                if i not in dropped and (g.again is None) == is_first
            ]
            buckets += gather_buckets(self.problem, among, room, portion, full)
        reductions = reduction_buckets(self.problem, room, REDUCTIONS, full)
        return Choice(in_order(self.problem, buckets), tuple(reductions), dropped, lead=2.0)

    def merge(self, gathers: bool) -> None:
        """Merge neighbouring buckets of one kind: all pairs at once, then halves of them where that is a loss."""
        improved = True
        while improved and not self.done:
            improved, parts = False, [self._pairs(self._buckets(gathers), gathers)]
            while parts and self.effort > 0:
                part, before = parts.pop(0), self.best
                merged = _merged(self._buckets(gathers), set(part))
                self.try_(with_buckets(before.choice, gathers, merged), before.seconds)
                if self.best is not before:
                    improved = True
                elif len(part) > 1:
                    parts += [part[: len(part) // 2], part[len(part) // 2 :]]

    def _buckets(self, gathers: bool) -> tuple[Members, ...]:
        return self.best.choice.gathers if gathers else self.best.choice.reductions

    def _pairs(self, buckets: Sequence[Members], gathers: bool) -> list[int]:
        """The first members of buckets that can be merged with the next one."""
        pairs, joins = list[int](), False
        for k, members in enumerate(buckets):
            joins = not joins and can_join(self.problem, buckets, k, gathers)
            if joins:
                pairs.append(members[0])
        return pairs

    def climb(self) -> None:
        """Change the best choice at random, while effort is left and an improvement can be expected.

        After a time without one the search ends. That time is longer in a large problem, and if the last came late.
        """
        current, total = self.best, self.effort
        self.improved = total
        while self.moves.changes and not self.done:
            if self.improved - self.effort > self.patience + 3 * (total - self.improved):
                break
            limit = current.seconds * (1 + self.moves.slower * self.effort / total)
            placed = self.try_(self._neighbour(current.choice), limit)
            if placed is not None and placed.seconds <= limit:
                current = placed

    def _neighbour(self, choice: Choice) -> Choice:
        """A choice with one to three random changes."""
        changes, weights = zip(*self.moves.changes)
        for change in self.chance.choices(changes, weights, k=self.chance.choice((1, 1, 2, 3))):
            choice = change(self.chance, self.problem, choice)
        return choice


def _merged(buckets: Sequence[Members], firsts: set[int]) -> list[Members]:
    """Buckets of which those with these first members are merged with the next one."""
    merged: list[Members] = []
    for members in buckets:
        if merged and merged[-1][0] in firsts:
            firsts.remove(merged[-1][0])
            merged[-1] += members
        else:
            merged.append(members)
    return merged
