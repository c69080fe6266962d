"""local_search: improve a choice of buckets step by step.

A choice is as good as the time that its placement takes. Times below `enough` count as equal; then fewer live bytes
are better, then fewer buckets. The search starts from seeds: exact buckets for several shares of the room, with more
and more values kept from forward to backward. Then it merges buckets, many at once where that does no harm, and
changes single ones at random. The random numbers have a fixed seed and the effort is counted in messages placed, so
the same problem has the same result everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from .bucketing import Cut, by_key, consecutive, gather_buckets, reduction_buckets
from .list_scheduler import Placed, Placement
from .loads import Choice, Members, kept
from .problem import Problem, Schedule

GATHERS, REDUCTIONS = range(2)  # the kinds of buckets
_LEADS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 1e6)
_RESERVES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
_LITTLE = 2000  # messages that the smallest problem may place; the seeds alone take hundreds


class Search:
    """The best choice so far, and the effort that is left."""

    def __init__(self, problem: Problem, enough: float, effort: int, moves: Moves) -> None:
        self.problem, self.enough, self.moves = problem, enough, moves
        self.place = Placement(problem)
        self.loads = self.place.loads
        self.chance = random.Random(0)
        count = len(problem.gathers) + len(problem.reductions)
        self.effort = min(effort, _LITTLE + (4 * count + 8) * (count + 8))
        self.seen: set[Choice] = set()
        self.at = [(g.use, g.release) for g in problem.gathers], [r.born for r in problem.reductions]
        self.free = kept(problem, ())
        self.last_read = {  # by gather that may be dropped: the operation that last reads the earlier value
            i: problem.gathers[g.again].last
            for i, g in enumerate(problem.gathers)
            if g.again is not None and i not in self.free
        }
        # Values with a short time to their next use come first, because they take room for a short time.
        self.order = sorted(self.last_read, key=lambda i: problem.gathers[i].use - self.last_read[i])
        self.granule = max(1.0, self.loads.alone(self.free).max(initial=0.0) / 64)
        alone = self.place(self._alone())
        if alone is None:
            raise ValueError("search: the memory is less than every schedule needs.")
        self.best = alone

    def _alone(self) -> Choice:
        """Every message alone, every gather at its use."""
        gathers, reductions = self.problem.gathers, self.problem.reductions
        among: list[Members] = [(i,) for i in range(len(gathers)) if i not in self.free]
        return Choice(self.sorted(among), tuple((i,) for i in range(len(reductions))), self.free, lead=0.0)

    def sorted(self, buckets: list[Members]) -> tuple[Members, ...]:
        """Buckets of gathers by key, and by use within a key."""
        groups = by_key(self.problem.gathers, (members[0] for members in sorted(buckets)))
        rank = {key: k for k, key in enumerate(groups)}
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

    def sow(self) -> None:
        """Try the seeds."""
        seeds = []
        for dropped in self._kept():
            for lead, reserve in self.moves.starts:
                placed = self._seed(dropped, (0.3, 0.12, 0.2), 1.0, lead, reserve)
                if placed is not None:
                    seeds.append((placed.seconds, dropped, lead, reserve))
                if self.done:
                    return
        seeds.sort(key=lambda seed: seed[0])
        for _, dropped, lead, reserve in seeds[:2]:
            for portions, share in product(self.moves.portions, self.moves.links):
                self._seed(dropped, portions, share, lead, reserve)
                if self.done:
                    return

    def _kept(self) -> Iterator[frozenset[int]]:
        """Sets of gathers to drop, from none to all whose values fit."""
        gathers = self.problem.gathers
        room, fit, total = self.loads.memory - self.loads.alone(self.free), [], [0]
        for i in self.order:
            a, b = 2 * self.last_read[i] + 2, 2 * gathers[i].use
            if room[a:b].min() >= gathers[i].held:
                room[a:b] -= gathers[i].held
                fit.append(i)
                total.append(total[-1] + gathers[i].held)
        shares = [share * total[-1] for share in self.moves.shares]
        for count in sorted({int(np.searchsorted(total, share, side="right")) - 1 for share in shares}):
            yield kept(self.problem, {*self.free, *fit[:count]})

    def _seed(
        self, dropped: frozenset[int], portions: tuple[float, float, float], share: float, lead: float, reserve: float
    ) -> Placed | None:
        room = self.loads.room(dropped).tolist()
        first, repeats = (
            [i for i, g in enumerate(self.problem.gathers) if i not in dropped and (g.again is None) == is_first]
            for is_first in (True, False)
        )
        cut = self.moves.cut
        buckets = [
            *gather_buckets(self.problem, first, room, portions[0], share, cut),
            *gather_buckets(self.problem, repeats, room, portions[1], share, cut),
        ]
        reductions = reduction_buckets(self.problem, room, portions[2], share, cut)
        return self.try_(
            Choice(self.sorted(buckets), tuple(reductions), dropped, lead, reserve), self.best.seconds * 1.1
        )

    def merge(self) -> None:
        """Merge neighbours: all pairs at once, then halves of them where that is no improvement."""
        for kind in self.moves.merged:
            improved = True
            while improved and self.effort > 0:
                improved, parts = False, [self._pairs(_buckets(self.best.choice, kind), kind)]
                while parts and self.effort > 0:
                    part = parts.pop(0)
                    if not part:
                        continue
                    before = self.best
                    self.try_(self._merged(before.choice, kind, set(part)), before.seconds)
                    if self.best is not before:
                        improved = True
                    elif len(part) > 1:
                        parts += [part[: len(part) // 2], part[len(part) // 2 :]]

    def _pairs(self, buckets: tuple[Members, ...], kind: int) -> list[int]:
        """The first members of buckets that can be merged with the next one."""
        things, pairs, i = (self.problem.gathers, self.problem.reductions)[kind], [], 0
        while i + 1 < len(buckets):
            if things[buckets[i][0]].key == things[buckets[i + 1][0]].key:
                pairs.append(buckets[i][0])
                i += 1
            i += 1
        return pairs

    def _merged(self, choice: Choice, kind: int, swallow: set[int]) -> Choice:
        buckets: list[Members] = []
        for members in _buckets(choice, kind):
            if buckets and buckets[-1][0] in swallow:
                swallow.discard(buckets[-1][0])
                buckets[-1] += members
            else:
                buckets.append(members)
        return _with_buckets(choice, kind, buckets)

    def climb(self) -> None:
        """Change the best choice at random while effort is left; at first, accept slightly slower ones."""
        current, total = self.best, max(self.effort, 1)
        while self.moves.changes and not self.done and (current.gathers or current.reductions):
            worse = 1 + self.moves.worse * max(0.0, self.effort / total - 0.1)
            placed = self.try_(self._neighbour(current.choice), current.seconds * worse)
            if placed is not None and placed.seconds <= current.seconds * worse:
                current = placed

    def _neighbour(self, choice: Choice) -> Choice:
        changes, weights = zip(*self.moves.changes)
        for change in self.chance.choices(changes, weights, k=self.chance.choice((1, 1, 2, 3))):
            choice = change(self, choice)
        return choice

    def pick(self, choice: Choice) -> tuple[int, list[Members], int]:
        """A bucket at random, out of a choice that has some: its kind, the buckets of that kind, and its number."""
        number = self.chance.randrange(len(choice.gathers) + len(choice.reductions))
        kind = int(number >= len(choice.gathers))
        return kind, list(_buckets(choice, kind)), number - kind * len(choice.gathers)

    def cuts(self, members: Members, kind: int) -> list[int]:
        """Where a bucket may be cut: members of one operation stay together."""
        at = self.at[kind]
        return [k for k in range(1, len(members)) if at[members[k]] != at[members[k - 1]]]

    def fit_together(self, kind: int, buckets: list[Members], i: int) -> bool:
        """Whether bucket number `i` is of one key with the next one."""
        things = (self.problem.gathers, self.problem.reductions)[kind]
        return i + 1 < len(buckets) and things[buckets[i][0]].key == things[buckets[i + 1][0]].key


Change = Callable[[Search, Choice], Choice]
Finish = Callable[[Problem, Schedule], Schedule | None]  # another schedule beside the best one, or None


def split(search: Search, choice: Choice) -> Choice:
    """Split a bucket."""
    kind, buckets, i = search.pick(choice)
    if cuts := search.cuts(buckets[i], kind):
        cut = search.chance.choice(cuts)
        buckets[i : i + 1] = [buckets[i][:cut], buckets[i][cut:]]
    return _with_buckets(choice, kind, buckets)


def join(search: Search, choice: Choice) -> Choice:
    """Merge a bucket with the next one."""
    kind, buckets, i = search.pick(choice)
    if search.fit_together(kind, buckets, i):
        buckets[i : i + 2] = [buckets[i] + buckets[i + 1]]
    return _with_buckets(choice, kind, buckets)


def move_border(search: Search, choice: Choice) -> Choice:
    """Move the border between a bucket and the next one, as often by a little as to anywhere."""
    kind, buckets, i = search.pick(choice)
    if search.fit_together(kind, buckets, i):
        both, border = buckets[i] + buckets[i + 1], len(buckets[i])
        cuts = sorted((cut for cut in search.cuts(both, kind) if cut != border), key=lambda cut: abs(cut - border))
        if cuts:
            cut = search.chance.choice(cuts[:4] if search.chance.random() < 0.5 else cuts)
            buckets[i : i + 2] = [both[:cut], both[cut:]]
    return _with_buckets(choice, kind, buckets)


def start_otherwise(search: Search, choice: Choice) -> Choice:
    """Change when gathers start."""
    return choice._replace(lead=search.chance.choice(_LEADS), reserve=search.chance.choice(_RESERVES))


def keep_otherwise(search: Search, choice: Choice) -> Choice:
    """Keep a few more values from forward to backward, or a few less."""
    some, problem = search.chance.choice((1, 1, 2, 4, 7)), search.problem
    if search.chance.random() < 0.5:
        more = [i for i in search.order if i not in choice.dropped][:some]
        dropped = kept(problem, choice.dropped.union(more))
        left = (tuple(i for i in members if i not in dropped) for members in choice.gathers)
        return choice._replace(gathers=tuple(members for members in left if members), dropped=dropped)
    fewer = [i for i in search.order if i in choice.dropped][-some:]
    dropped = kept(problem, choice.dropped.difference(fewer))
    back = by_key(problem.gathers, sorted(choice.dropped - dropped))
    return choice._replace(gathers=search.sorted([*choice.gathers, *map(tuple, back.values())]), dropped=dropped)


@dataclass(frozen=True)
class Moves:
    """What a search tries. `benchmarks/ablations.py` weighs each of the moves by leaving it out."""

    shares: tuple[float, ...] = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0)  # of the bytes that could be kept
    starts: tuple[tuple[float, float], ...] = ((1.0, 0.0), (2.0, 1.0))  # lead and reserve of the seeds
    portions: tuple[tuple[float, float, float], ...] = tuple(product((0.2, 0.4), (0.1, 0.2, 0.3), (0.1, 0.2, 0.35)))
    links: tuple[float, ...] = (1.0, 2.0)  # of the best seeds: 1 / the share of the link that buckets have
    cut: Cut = consecutive
    merged: tuple[int, ...] = (GATHERS, REDUCTIONS)
    changes: tuple[tuple[Change, int], ...] = (  # each with its weight
        (split, 20),
        (join, 30),
        (move_border, 50),
        (start_otherwise, 6),
        (keep_otherwise, 9),
    )
    worse: float = 0.0003  # the share by which a change may be slower while much effort is left
    finish: tuple[Finish, ...] = ()


def _buckets(choice: Choice, kind: int) -> tuple[Members, ...]:
    """The buckets of gathers, or of reductions."""
    return choice.reductions if kind == REDUCTIONS else choice.gathers


def _with_buckets(choice: Choice, kind: int, buckets: list[Members]) -> Choice:
    """A choice with other buckets of gathers, or of reductions."""
    return choice._replace(reductions=tuple(buckets)) if kind == REDUCTIONS else choice._replace(gathers=tuple(buckets))
