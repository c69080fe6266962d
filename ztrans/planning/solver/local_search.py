"""local_search: improve a choice of buckets step by step.

A choice is as good as the time that its placement takes. Times below `enough` count as equal; then fewer live bytes are
better, then fewer buckets. The search begins with full buckets, once with no values kept from forward to backward and
once with as many as fit. It merges buckets of gathers, many at once where that is no loss. Then it changes single
buckets at random. The random numbers have a fixed seed, and the effort is counted in messages placed, so the same
problem has the same result everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from .bucketing import FIRST_GATHERS, FULL, REDUCTIONS, REGATHERS, by_key, gather_buckets, reduction_buckets
from .list_scheduler import Placed, Placement
from .loads import Choice, Members, kept
from .problem import Gather, Problem, Reduction

_LEADS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 1e6)
_LITTLE = 2000  # messages that the smallest problem may place; the first choices alone take hundreds


class Search:
    """The best choice so far, and the effort that is left."""

    def __init__(self, problem: Problem, enough: float, effort: int, moves: Moves) -> None:
        self.problem, self.enough, self.moves = problem, enough, moves
        self.place = Placement(problem)
        self.loads = self.place.loads
        self.chance = random.Random(0)
        count = len(problem.gathers) + len(problem.reductions)
        self.effort = min(effort, _LITTLE + (4 * count + 8) * (count + 8)) if count else 0
        self.seen: set[Choice] = set()
        self.free = kept(problem, ())
        self.granule = max(1.0, self.loads.alone(self.free).max(initial=0.0) / 64)
        alone = self.place(self._alone())
        if alone is None:
            raise ValueError("search: the memory is less than every schedule needs.")
        self.best = alone

    def _alone(self) -> Choice:
        """Every message alone, every gather at its use."""
        gathers, reductions = self.problem.gathers, self.problem.reductions
        among: list[Members] = [(i,) for i in range(len(gathers)) if i not in self.free]
        return Choice(self._sorted(among), tuple((i,) for i in range(len(reductions))), self.free, lead=0.0)

    def _sorted(self, buckets: list[Members]) -> tuple[Members, ...]:
        """Buckets of gathers by key, and by use within a key."""
        keys = by_key(self.problem.gathers, (members[0] for members in sorted(buckets)))
        rank = {key: k for k, key in enumerate(keys)}
        return tuple(sorted(buckets, key=lambda members: (rank[self.problem.gathers[members[0]].key], members)))

    @property
    def done(self) -> bool:
        """Whether the best is good enough, or the effort spent."""
        return self.effort <= 0 or self.best.seconds <= self.enough

    def rank(self, placed: Placed) -> tuple[float, int, int]:
        """Sort key: smaller is better."""
        buckets = len(placed.gathers) + len(placed.reductions)
        return max(placed.seconds, self.enough), math.ceil(placed.peak / self.granule), buckets

    def try_(self, choice: Choice, slower: float = math.inf) -> Placed | None:
        """Place a choice. None if it was tried before, does not fit, or takes longer than `slower` seconds."""
        self.effort -= 8
        if choice in self.seen:
            return None
        self.seen.add(choice)
        placed = self.place(choice, max(slower, self.enough))
        if placed is not None:
            self.effort -= len(choice.gathers) + len(choice.reductions)
            if self.rank(placed) < self.rank(self.best):
                self.best = placed
        return placed

    def begin(self) -> None:
        """Try full buckets: with no values kept, and with as many as fit."""
        for dropped, full in product((self.free, self._dropped())[: 1 + self.moves.keep], self.moves.full):
            if not self.done:
                self.try_(self._full(dropped, full))

    def _dropped(self) -> frozenset[int]:
        """The gathers that are dropped if as many values are kept as fit.

        Values with a short time to their next use come first, because they take memory for a short time.
        """
        gathers, room = self.problem.gathers, self.loads.memory - self.loads.alone(self.free)
        spans = [
            (gathers[g.again].last, g.use, i)  # the last use of the earlier value, and the first of this one
            for i, g in enumerate(gathers)
            if g.again is not None and i not in self.free
        ]
        dropped = set(self.free)
        for last, use, i in sorted(spans, key=lambda span: span[1] - span[0]):
            between = room[2 * last + 2 : 2 * use]
            if between.min() >= gathers[i].held:
                between -= gathers[i].held
                dropped.add(i)
        return kept(self.problem, dropped)

    def _full(self, dropped: frozenset[int], full: float) -> Choice:
        """Full buckets of everything that is not dropped."""
        room = self.loads.room(dropped).tolist()
        buckets: list[Members] = []
        for portion, is_first in ((FIRST_GATHERS, True), (REGATHERS, False)):
            among = [
                i for i, g in enumerate(self.problem.gathers) if i not in dropped and (g.again is None) == is_first
            ]
            buckets += gather_buckets(self.problem, among, room, portion, full)
        reductions = reduction_buckets(self.problem, room, REDUCTIONS, full)
        return Choice(self._sorted(buckets), tuple(reductions), dropped, lead=2.0)

    def merge(self) -> None:
        """Merge neighbouring buckets of gathers: all pairs at once, then halves of them where that is a loss."""
        improved = True
        while improved and not self.done:
            improved, parts = False, [self._pairs(self.best.choice.gathers)]
            while parts and self.effort > 0:
                part, before = parts.pop(0), self.best
                self.try_(before.choice._replace(gathers=_merged(before.choice.gathers, set(part))), before.seconds)
                if self.best is not before:
                    improved = True
                elif len(part) > 1:
                    parts += [part[: len(part) // 2], part[len(part) // 2 :]]

    def _pairs(self, buckets: Sequence[Members]) -> list[int]:
        """The first members of buckets that can be merged with the next one."""
        pairs: list[int] = []
        previous = None  # the bucket before, if it is in no pair
        for members in buckets:
            if previous is not None and self._share_key(self.problem.gathers, previous, members):
                pairs.append(previous[0])
                previous = None
            else:
                previous = members
        return pairs

    @staticmethod
    def _share_key(messages: Sequence[Gather | Reduction], first: Members, second: Members) -> bool:
        return messages[first[0]].key == messages[second[0]].key

    def climb(self) -> None:
        """Change the best choice at random while effort is left."""
        current, total = self.best, self.effort
        while self.moves.changes and not self.done:
            limit = current.seconds * (1 + self.moves.slower * self.effort / total)
            placed = self.try_(self._neighbour(current.choice), limit)
            if placed is not None and placed.seconds <= limit:
                current = placed

    def _neighbour(self, choice: Choice) -> Choice:
        """A choice with one to three random changes."""
        changes, weights = zip(*self.moves.changes)
        for change in self.chance.choices(changes, weights, k=self.chance.choice((1, 1, 2, 3))):
            choice = change(self, choice)
        return choice

    def pick(self, choice: Choice) -> tuple[bool, list[Members], int]:
        """Pick a bucket at random: whether it is one of gathers, the buckets of its kind, and its number among them."""
        number, count = self.chance.randrange(len(choice.gathers) + len(choice.reductions)), len(choice.gathers)
        return (True, [*choice.gathers], number) if number < count else (False, [*choice.reductions], number - count)

    def cuts(self, members: Members, gathers: bool) -> Iterator[int]:
        """Where a bucket may be cut: members of one operation stay together."""
        problem = self.problem
        at = lambda i: (problem.gathers[i].use, problem.gathers[i].release) if gathers else problem.reductions[i].born
        return (k for k in range(1, len(members)) if at(members[k]) != at(members[k - 1]))

    def can_join(self, buckets: Sequence[Members], k: int, gathers: bool) -> bool:
        """Whether a bucket has the key of the next one."""
        messages = self.problem.gathers if gathers else self.problem.reductions
        return k + 1 < len(buckets) and self._share_key(messages, buckets[k], buckets[k + 1])


Change = Callable[[Search, Choice], Choice]


def split(search: Search, choice: Choice) -> Choice:
    """Split a bucket."""
    gathers, buckets, k = search.pick(choice)
    if cuts := [*search.cuts(buckets[k], gathers)]:
        cut = search.chance.choice(cuts)
        buckets[k : k + 1] = [buckets[k][:cut], buckets[k][cut:]]
    return _with_buckets(choice, gathers, buckets)


def join(search: Search, choice: Choice) -> Choice:
    """Merge a bucket with the next one."""
    gathers, buckets, k = search.pick(choice)
    if search.can_join(buckets, k, gathers):
        buckets[k : k + 2] = [buckets[k] + buckets[k + 1]]
    return _with_buckets(choice, gathers, buckets)


def move_border(search: Search, choice: Choice) -> Choice:
    """Move members between a bucket and the next one: often a few of them, sometimes any number."""
    gathers, buckets, k = search.pick(choice)
    if search.can_join(buckets, k, gathers):
        both, border = buckets[k] + buckets[k + 1], len(buckets[k])
        cuts = sorted((cut for cut in search.cuts(both, gathers) if cut != border), key=lambda cut: abs(cut - border))
        if cuts:
            cut = search.chance.choice(cuts[:4] if search.chance.random() < 0.5 else cuts)
            buckets[k : k + 2] = [both[:cut], both[cut:]]
    return _with_buckets(choice, gathers, buckets)


def change_start(search: Search, choice: Choice) -> Choice:
    """Change when gathers start."""
    return choice._replace(lead=search.chance.choice(_LEADS), reserve=search.chance.choice((False, True)))


@dataclass(frozen=True)
class Moves:
    """What a search tries. `benchmarks/ablations.py` leaves each of them out, to see what it gains."""

    keep: bool = True  # begin also with as many values kept from forward to backward as fit
    full: tuple[float, ...] = FULL  # latencies that the transfer of a bucket takes at the beginning
    merge: bool = True  # merge buckets of gathers, many at once
    changes: tuple[tuple[Change, int], ...] = (  # each with its weight
        (split, 20),
        (join, 30),
        (move_border, 50),
        (change_start, 6),
    )
    slower: float = 0.0003  # the share by which a change may be slower at first; it falls to 0
    one_ahead: bool = True  # compare with the schedule that sends every message alone, one message ahead


MOVES = Moves()


def _merged(buckets: Sequence[Members], firsts: set[int]) -> tuple[Members, ...]:
    """Buckets of which those with these first members are merged with the next one."""
    merged: list[Members] = []
    into_last = False
    for members in buckets:
        if into_last:
            merged[-1] += members
        else:
            merged.append(members)
        into_last = not into_last and members[0] in firsts
    return tuple(merged)


def _with_buckets(choice: Choice, gathers: bool, buckets: list[Members]) -> Choice:
    """A choice with other buckets of gathers, or of reductions."""
    return choice._replace(gathers=tuple(buckets)) if gathers else choice._replace(reductions=tuple(buckets))
