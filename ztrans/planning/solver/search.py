"""search: find a schedule of collectives for a problem.

Memory is a hard limit. Live bytes are counted by slot (see `buffers`), and the program in the order of a schedule never
has more of them live than its schedule counts.

A choice of buckets and of levers is as good as the time that its placement takes. Times below `enough` count
as equal; then fewer live bytes are better, then fewer buckets.

The search begins with full buckets, once with only the levers pulled that cost nothing, and once with as many as fit.
It merges buckets, many at once where that is no loss. Then it climbs: it makes random changes, and keeps a change that
is not slower. Of the choices that take nearly as little time as the best one, the result is the one with the fewest
live bytes. The random numbers have a fixed seed, and the effort is counted in messages placed, so the same problem has
the same result everywhere.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from random import Random
from typing import NamedTuple

from ...ir.relations import grouped
from ..buffers import by_operation
from .bound import bound
from .place import Choice, Loads, MemberIndices, Placed, place_choice
from .problem import NO_LEVERS, Gather, Levers, Problem, Reduction, Schedule

EFFORT = 20_000  # messages that the search places: about a second
NEARLY = 0.0025  # schedules whose times differ by less than this share count as equal; the lower bound's is enough
FULL = 16.0  # latencies that the transfer of a full bucket takes
# Portions of the memory that is left where a bucket is needed, which a bucket may take.
FIRST_GATHERS = 0.3
REGATHERS = 0.12
REDUCTIONS = 0.2
# Without an improvement the search ends after this many messages, and this many more for each message of the problem.
PATIENCE = 500
PATIENCE_FOR_EACH = 100
LITTLE = 4000  # messages that the smallest problem may place; the first choices alone take hundreds


class Infeasible(Exception):
    """No schedule fits the memory: with every message alone, `needs` bytes are live at `operation`."""

    def __init__(self, needs: int, operation: int) -> None:
        super().__init__(
            f"{needs} bytes are needed at operation {operation}, even if every message is sent alone"
        )
        self.needs = needs
        self.operation = operation


class Needs(NamedTuple):
    """The memory that a problem needs."""

    bytes: int
    operation: int  # the operation at which that much is live


def needs(problem: Problem) -> Needs:
    """Find the least memory for which every message can be sent alone (see `place.first_waits`).

    If that fits the memory of the problem, these are the bytes that are live then.
    """
    least = _unbucketed_needs(problem)
    if least.bytes <= problem.memory:
        return least
    low = int(problem.memory)
    while low + 1 < least.bytes:
        middle = (low + least.bytes) // 2
        needed = _unbucketed_needs(replace(problem, memory=middle))
        if needed.bytes <= middle:
            least = Needs(middle, needed.operation)
        else:
            low = middle
    return least


def _unbucketed_needs(problem: Problem) -> Needs:
    """The bytes that are live if every message is sent alone, and is waited for as early as the memory allows."""
    live = by_operation(Loads(problem).bytes_unbucketed(NO_LEVERS))
    return Needs(int(live.max(initial=0)), int(live.argmax()) if len(live) else 0)


# Random changes. Each takes a source of random numbers, the problem and a choice, and returns another choice, or the
# same where it cannot be made.
Change = Callable[[Random, Problem, Choice], Choice]
_LEADS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 1e6)
_COUNTS = (1, 2, 4, 8)  # of levers that are pulled at once


def split(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Split a bucket."""
    kind, buckets, k = _pick(chance, choice)
    cuts = _cuts(problem, buckets[k], kind)
    if cuts:
        cut = chance.choice(cuts)
        buckets[k : k + 1] = [buckets[k][:cut], buckets[k][cut:]]
    return with_buckets(choice, kind, buckets)


def join(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Merge a bucket with the next one."""
    kind, buckets, k = _pick(chance, choice)
    if can_join(problem, buckets, k, kind):
        buckets[k : k + 2] = [buckets[k] + buckets[k + 1]]
    return with_buckets(choice, kind, buckets)


def move_border(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Move members between a bucket and the next one: often a few of them, sometimes any number."""
    kind, buckets, k = _pick(chance, choice)
    if can_join(problem, buckets, k, kind):
        pair_members = buckets[k] + buckets[k + 1]
        border = len(buckets[k])
        cuts = [
            new_border for new_border in _cuts(problem, pair_members, kind) if new_border != border
        ]
        cuts.sort(key=lambda new_border: abs(new_border - border))
        if cuts:
            new_border = chance.choice(cuts[:4] if chance.random() < 0.5 else cuts)
            buckets[k : k + 2] = [pair_members[:new_border], pair_members[new_border:]]
    return with_buckets(choice, kind, buckets)


def change_start(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Change when gathers start."""
    return choice._replace(lead=chance.choice(_LEADS), reserve=chance.choice((False, True)))


def pull_more(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Pull a few more levers: any that send gathers of parts, or of all others the first ones first."""
    count = chance.choice(_COUNTS)
    of_parts = problem.levers_of_parts
    if of_parts and chance.random() < 0.5:
        more = [i for i in of_parts if i not in choice.levers]
        first = chance.randrange(max(len(more), 1))
        more = more[first : first + count]
    else:
        others = (i for i in range(len(problem.levers)) if i not in of_parts)
        more = [i for i in others if i not in choice.levers][:count]
    levers = choice.levers.union(more)
    for i in more:
        levers -= _rivals(problem, levers, i)
    return with_levers(problem, choice, levers)


def _rivals(problem: Problem, pulled: Levers, lever: int) -> set[int]:
    """The levers among `pulled` that cannot be pulled with another one.

    Only one may drop a gather if one of them sends another gather in its place.
    """
    rivals: set[int] = set()
    if not problem.levers_of_parts:
        return rivals
    new = problem.levers[lever]
    dropped = set(new.dropped)
    for i in pulled - {lever}:
        old = problem.levers[i]
        if (new.sent or old.sent) and not dropped.isdisjoint(old.dropped):
            rivals.add(i)
    return rivals


def with_levers(problem: Problem, choice: Choice, levers: Levers) -> Choice:
    """A choice with other levers, in which no bucket has a gather that these drop.

    Gathers that are sent in place of those of a bucket share a bucket, and so do those that take the place of kept
    values.
    """
    dropped = problem.dropped(levers)
    buckets = []
    for members in choice.gathers:
        remaining = tuple(i for i in members if i not in dropped)
        if remaining:
            buckets.append(remaining)
    sent = [i for lever in sorted(levers) for i in problem.levers[lever].sent]
    missing = set(sent).difference(*buckets)
    if missing:
        bucket_of: dict[int | None, int] = {}
        for k, members in enumerate(choice.gathers):
            bucket_of.update(dict.fromkeys(members, k))
        new_buckets = grouped(
            ((problem.gathers[i].key, bucket_of.get(problem.gathers[i].instead)), i)
            for i in sorted(missing)
        )
        buckets = list(in_order(problem, [*buckets, *map(tuple, new_buckets.values())]))
    return choice._replace(gathers=tuple(buckets), levers=levers)


# Each change with its weight. `benchmarks/ablations.py` leaves each of them out, to see what it gains.
CHANGES: tuple[tuple[Change, int], ...] = (
    (split, 20),
    (join, 30),
    (move_border, 50),
    (change_start, 6),
    (pull_more, 8),
)

Kind = str  # "gathers" or "reductions", as the fields of a problem and of a choice


def _pick(chance: Random, choice: Choice) -> tuple[Kind, list[MemberIndices], int]:
    """Pick a bucket: its kind, the buckets of that kind, and its number among them."""
    count = len(choice.gathers)
    number = chance.randrange(count + len(choice.reductions))
    if number < count:
        return "gathers", list(choice.gathers), number
    return "reductions", list(choice.reductions), number - count


def _cuts(problem: Problem, members: MemberIndices, kind: Kind) -> list[int]:
    """Where a bucket may be cut: members of one operation stay together."""
    if kind == "gathers":
        marks = [(problem.gathers[i].use, problem.gathers[i].release) for i in members]
    else:
        marks = [(problem.reductions[i].born, 0) for i in members]
    return [k for k in range(1, len(members)) if marks[k] != marks[k - 1]]


def can_join(problem: Problem, buckets: Sequence[MemberIndices], k: int, kind: Kind) -> bool:
    """Whether a bucket has the key of the next one."""
    messages = getattr(problem, kind)
    return k + 1 < len(buckets) and messages[buckets[k][0]].key == messages[buckets[k + 1][0]].key


def with_buckets(choice: Choice, kind: Kind, buckets: Iterable[MemberIndices]) -> Choice:
    """A choice with other buckets of a kind."""
    if kind == "gathers":
        return choice._replace(gathers=tuple(buckets))
    return choice._replace(reductions=tuple(buckets))


# Full buckets, with which the search begins.


def in_order(problem: Problem, gathers: Iterable[MemberIndices]) -> tuple[MemberIndices, ...]:
    """Buckets of gathers in order: by key, and by use within a key."""
    buckets = grouped((problem.gathers[members[0]].key, members) for members in sorted(gathers))
    return tuple(chain.from_iterable(buckets.values()))


def gather_buckets(
    problem: Problem,
    among: Iterable[int],
    room: Sequence[float],
    portion: float,
    full: float = FULL,
) -> list[MemberIndices]:
    """Make full buckets of some gathers, in order of use.

    Neighbours of one key share a bucket until it is full: its transfer takes some times the latency of a message, or
    its bytes take a portion of the room at its first use.

    Args:
        problem: the gathers and their limits.
        among: the gathers, by index.
        room: for each operation, the bytes that are left while it runs.
        portion: the part of them that a bucket may take.
        full: the latencies that the transfer of a full bucket takes.
    """

    def fits(members: Sequence[int]) -> bool:
        gathers = [problem.gathers[i] for i in members]
        use = min(g.use for g in gathers)
        # A small member is live twice where it is unpacked: in the buffer that it shares, and as its value.
        size = sum(g.bytes * (1 + g.small) for g in gathers)
        most = min(portion * room[use], problem.gathers_in_flight)
        return max(g.release for g in gathers) <= use and size <= most

    buckets: list[MemberIndices] = []
    for indices in grouped((problem.gathers[i].key, i) for i in among).values():
        # The last uses come first: a bucket is waited for at its first use, so its last member is the one that fits.
        filled = _filled(problem, problem.gathers, indices[::-1], full, fits)
        buckets += [members[::-1] for members in filled][::-1]
    return buckets


def reduction_buckets(
    problem: Problem, room: Sequence[float], portion: float, full: float = FULL
) -> list[MemberIndices]:
    """Make full buckets of all reductions likewise; they start as often as `max_between` asks."""
    keys = grouped((r.key, i) for i, r in enumerate(problem.reductions))
    births = sorted({r.born for r in problem.reductions})
    previous_birth = dict(zip(births[1:], births))
    # For each reduction, the birth of the one before it with its key.
    born_before: dict[int, int] = {}
    for indices in keys.values():
        for i, j in pairwise(indices):
            born_before[j] = problem.reductions[i].born

    def fits(members: Sequence[int]) -> bool:
        reductions = [problem.reductions[i] for i in members]
        first = reductions[0].born
        last = reductions[-1].born
        # The latest at which the bucket before this one starts.
        start = born_before.get(members[0], previous_birth.get(first, first))
        matmuls = problem.matmuls[last + 1] - problem.matmuls[start + 1]
        most = min(portion * room[last], problem.reductions_in_flight)
        return (
            (matmuls <= problem.max_between or first == last)
            and all(last + 1 <= r.need for r in reductions)
            and sum(r.bytes for r in reductions) <= most
        )

    buckets: list[MemberIndices] = []
    for indices in keys.values():
        buckets += _filled(problem, problem.reductions, indices, full, fits)
    return buckets


def _filled(
    problem: Problem,
    messages: Sequence[Gather | Reduction],
    indices: Sequence[int],
    full: float,
    fits: Callable[[Sequence[int]], bool],
) -> Iterator[MemberIndices]:
    """Buckets of neighbours: each is full once its transfer takes long enough, or nothing more fits."""
    wire = problem.wires[messages[indices[0]].key]
    bucket: list[int] = []
    seconds = 0.0
    for i in indices:
        if bucket and (seconds > full * wire.latency or not fits([*bucket, i])):
            yield tuple(bucket)
            bucket = []
            seconds = 0.0
        bucket.append(i)
        seconds += wire.pace * messages[i].wire
    if bucket:
        yield tuple(bucket)


# The search.


class Search:
    """The best choice so far, and the effort that is left: now, and at the last improvement."""

    def __init__(self, problem: Problem, least: float, effort: int) -> None:
        self.problem = problem
        self.enough = least * (1 + NEARLY)
        self.loads = Loads(problem)
        self.chance = random.Random(0)
        count = len(problem.gathers) + len(problem.reductions)
        # A small problem has few choices, so it needs less effort.
        self.effort = min(effort, LITTLE + (8 * count + 16) * (count + 8)) if count else 0
        self.improved = self.effort
        self.patience = PATIENCE + PATIENCE_FOR_EACH * count
        self.seen: set[Choice] = set()
        # Peaks that differ by less count as equal, so the number of buckets decides.
        self.granule = max(1.0, self.loads.bytes_unbucketed(NO_LEVERS).max(initial=0.0) / 64)
        unbucketed = place_choice(self.loads, self._unbucketed_choice())
        if unbucketed is None:
            raise ValueError("search: the memory is less than every schedule needs.")
        self.best = unbucketed
        self.first = unbucketed  # the choice with which the climb begins
        # The choices near the best that no other beats in both seconds and bytes.
        self.front = [unbucketed]

    def _unbucketed_choice(self) -> Choice:
        """Every message alone, every gather at its use."""
        levers = self.problem.free_levers
        dropped = self.problem.dropped(levers)
        gathers = [(i,) for i in range(len(self.problem.gathers)) if i not in dropped]
        reductions = tuple((i,) for i in range(len(self.problem.reductions)))
        return Choice(in_order(self.problem, gathers), reductions, levers, lead=0.0)

    @property
    def finished(self) -> bool:
        """Whether the best is good enough, or the effort spent."""
        return self.effort <= 0 or self.best.seconds <= self.enough

    @property
    def limit(self) -> float:
        """The seconds up to which a choice takes nearly as little time as the best one."""
        return max(self.best.seconds * (1 + NEARLY), self.enough)

    @property
    def result(self) -> Placed:
        """Of the choices that take nearly as little time as the best one, the one with the fewest live bytes."""
        near_best = [placed for placed in self.front if placed.seconds <= self.limit]
        return min(near_best, key=lambda placed: placed.peak)

    def rank(self, placed: Placed) -> tuple[float, int, int]:
        """Sort key: smaller is better."""
        buckets = len(placed.choice.gathers) + len(placed.choice.reductions)
        return max(placed.seconds, self.enough), math.ceil(placed.peak / self.granule), buckets

    def attempt(self, choice: Choice, limit: float = math.inf) -> Placed | None:
        """Place a choice. None if it was tried before, does not fit, or takes longer than `limit` seconds."""
        self.effort -= 8  # a choice by itself takes about as long as placing 8 messages
        if choice in self.seen:
            return None
        self.seen.add(choice)
        placed = place_choice(self.loads, choice, max(limit, self.enough))
        if placed is not None:
            self.effort -= len(choice.gathers) + len(choice.reductions)
            if self.rank(placed) < self.rank(self.best):
                self.best = placed
            self._add_to_front(placed)
        return placed

    def _add_to_front(self, placed: Placed) -> None:
        limit = self.limit
        if placed.seconds <= limit and not any(_beats(rival, placed) for rival in self.front):
            near_best = [rival for rival in self.front if rival.seconds <= limit]
            self.front = [*(rival for rival in near_best if not _beats(placed, rival)), placed]
            self.improved = self.effort

    def begin(self) -> None:
        """Try full buckets: with no levers pulled, except those that cost nothing, and with as many as fit.

        If each rank may keep parts of values, try it with as many parts as fit, and then with as many whole values in
        place of them.
        """
        levers = self.problem.levers
        keeping = [i for i, each in enumerate(levers) if not (each.seconds or each.messages)]
        of_parts = self.problem.levers_of_parts
        free = self.problem.free_levers
        starts = [free, self._with_levers_that_fit(keeping, free)]
        if of_parts:
            parts = self._with_levers_that_fit(of_parts, free)
            starts += [parts, self._with_levers_that_fit(keeping, parts)]
        for start in starts:
            if not self.finished:
                self.first = self.attempt(self._full(start)) or self.first

    def _with_levers_that_fit(self, more: Iterable[int], pulled: Levers) -> Levers:
        """As many more levers as fit the memory, the first ones first. Whole values take the place of parts."""
        room = self.loads.memory - self.loads.bytes_unbucketed(pulled)
        for i in more:
            rivals = _rivals(self.problem, pulled, i)
            if rivals and self.problem.levers[i].sent:
                continue
            taken = [(b, b.bytes) for b in self.problem.lever_buffers([i])]
            taken += [(b, -b.bytes) for b in self.problem.lever_buffers(rivals)]
            spans = [(room[b.first : b.last + 1], size) for b, size in taken]
            for span, size in spans:
                span -= size
            if all(span.min(initial=0) >= 0 for span, _ in spans):
                pulled = pulled - rivals | {i}
            else:
                for span, size in spans:
                    span += size
        return pulled

    def _full(self, levers: Levers) -> Choice:
        """Full buckets of everything that is not dropped."""
        problem = self.problem
        room = (self.loads.memory - by_operation(self.loads.bytes_unbucketed(levers))).tolist()
        dropped = problem.dropped(levers)
        gathers = [(i, g) for i, g in enumerate(problem.gathers) if i not in dropped]
        first = [i for i, g in gathers if g.repeats is None]
        regathers = [i for i, g in gathers if g.repeats is not None]
        buckets = [
            *gather_buckets(problem, first, room, FIRST_GATHERS),
            *gather_buckets(problem, regathers, room, REGATHERS),
        ]
        reductions = reduction_buckets(problem, room, REDUCTIONS)
        return Choice(in_order(problem, buckets), tuple(reductions), levers, lead=2.0)

    def merge(self, kind: Kind) -> None:
        """Merge neighbouring buckets of a kind: all pairs at once, then halves of them where that is a loss."""
        improved = True
        while improved and not self.finished:
            improved = False
            parts = [self._pairs(kind)]
            while parts and self.effort > 0:
                part = parts.pop(0)
                previous_best = self.best
                merged = _merged(getattr(previous_best.choice, kind), set(part))
                self.attempt(
                    with_buckets(previous_best.choice, kind, merged), previous_best.seconds
                )
                if self.best is not previous_best:
                    improved = True
                elif len(part) > 1:
                    parts += [part[: len(part) // 2], part[len(part) // 2 :]]

    def _pairs(self, kind: Kind) -> list[int]:
        """The first members of buckets that can be merged with the next one."""
        buckets = getattr(self.best.choice, kind)
        pairs: list[int] = []
        joins = False
        for k, members in enumerate(buckets):
            joins = not joins and can_join(self.problem, buckets, k, kind)
            if joins:
                pairs.append(members[0])
        return pairs

    def climb(self, current: Placed, changes: Sequence[tuple[Change, int]] = CHANGES) -> None:
        """Change a choice at random, while effort is left and an improvement can be expected.

        After a time without one the climb ends. That time is longer in a large problem, and if the last came late.
        """
        total = self.effort
        self.improved = total
        while changes and not self.finished:
            if self.improved - self.effort > self.patience + 3 * (total - self.improved):
                break
            placed = self.attempt(self._neighbour(current.choice, changes), current.seconds)
            if placed is not None and placed.seconds <= current.seconds:
                current = placed

    def _neighbour(self, choice: Choice, changes: Sequence[tuple[Change, int]]) -> Choice:
        """A choice with one to three random changes."""
        kinds, weights = zip(*changes)
        # One change is the most frequent. Several at once leave a choice that no single change improves.
        for change in self.chance.choices(kinds, weights, k=self.chance.choice((1, 1, 2, 3))):
            # Levers may have dropped all messages. Then there is nothing left to change.
            if choice.gathers or choice.reductions:
                choice = change(self.chance, self.problem, choice)
        return choice


def _beats(a: Placed, b: Placed) -> bool:
    return a.seconds <= b.seconds and a.peak <= b.peak


def _merged(buckets: Sequence[MemberIndices], firsts: set[int]) -> list[MemberIndices]:
    """Buckets, of which the ones with these first members are merged with the next one."""
    merged: list[MemberIndices] = []
    for members in buckets:
        if merged and merged[-1][0] in firsts:
            firsts.remove(merged[-1][0])
            merged[-1] += members
        else:
            merged.append(members)
    return merged


@functools.lru_cache(maxsize=32)
def solve(
    problem: Problem, effort: int = EFFORT, changes: tuple[tuple[Change, int], ...] = CHANGES
) -> Schedule:
    """Find the fastest schedule whose peak fits the memory.

    The same problem has the same schedule on every rank, because effort is counted and not timed. The schedules of the
    last problems are kept, for a step that is decorated again, as in a notebook.

    Args:
        problem: the operations, the messages and the limits.
        effort: messages that the search may place.
        changes: the random changes that the search makes, with their weights.

    Raises:
        Infeasible: no schedule fits the memory.
    """
    least = needs(problem)
    if least.bytes > problem.memory:
        raise Infeasible(*least)
    search = Search(problem, bound(problem).seconds, effort)
    search.begin()
    search.merge("gathers")
    search.merge("reductions")
    search.climb(search.best, changes)
    # With the effort that is left, in case the first climb got stuck.
    search.climb(search.first, changes)
    return search.result.schedule
