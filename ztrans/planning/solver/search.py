"""Search for a fast schedule of a problem within its memory.

Memory is a hard limit. Live bytes are counted by slot (see `buffers`), and a program in the order of a schedule never
has more live bytes than its schedule counts.

A choice of buckets and levers is ranked by the seconds of its placement. Choices within a small share of the lower
bound count as equally fast. Then fewer live bytes are better, then fewer buckets.

The search begins with choices from a few scalars, such as how full buckets are and how many levers are pulled. It
changes one scalar at a time as long as that helps (see `sweep`). Then it climbs: it makes random changes, and keeps a
change that is not slower. A climb that finds nothing better ends, and another one begins from the best choice, until
the effort is spent. Of the choices that are nearly as fast as the best one, the result is the one with the lowest peak.
The random numbers have a fixed seed, and the effort is counted in messages placed, so the same problem has the same
result everywhere.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..buffers import by_operation
from .bound import bound
from .changes import CHANGES, Change, in_order
from .loads import Loads
from .place import Placed, place_choice
from .problem import NO_LEVERS, Choice, Problem, Schedule
from .sweep import FullChoices, Scalars, values_of

# The effort of a search, in messages placed: about a second.
EFFORT = 15_000
# With this effort, every message is sent alone.
WITHOUT_SEARCH = 0
# Schedules whose seconds differ by less than this share count as equal. A schedule this near the bound is good enough.
EQUAL_SHARE = 0.0025
# Without an improvement a climb ends after this many messages, and this many more for each message of the problem.
PATIENCE = 500
PATIENCE_PER_MESSAGE = 15
# The effort for the smallest problem. The first choices alone place hundreds of messages.
LEAST_EFFORT = 4000


def least_memory(problem: Problem) -> int:
    """The least memory in which every message can be sent alone (see `loads.first_waits`), to one part in 16384.

    If the memory of the problem is enough, it is the peak with that memory.
    """
    least = _unbucketed_peak(problem)
    if least <= problem.memory:
        return least
    # With less memory some waits move to later places, where fewer bytes are live, so the peak may be lower.
    low = int(problem.memory)
    while low + 1 + (least >> 14) < least:
        middle = (low + least) // 2
        if _unbucketed_peak(replace(problem, memory=middle)) <= middle:
            least = middle
        else:
            low = middle
    return least


def _unbucketed_peak(problem: Problem) -> int:
    """The peak if every message is sent alone, and is waited for as early as the memory allows."""
    live = by_operation(Loads(problem).bytes_unbucketed(NO_LEVERS))
    return int(live.max(initial=0))


class Search:
    """The state of a search: the best choice so far, and the effort that is left.

    Attributes:
        enough: the seconds at which a choice is good enough.
        attempted: the choices that have been tried.
        effort, effort_at_improvement: the effort that is left now, and that was left at the last improvement.
        patience: the effort without an improvement after which a climb ends.
        granule: peaks that differ by less than these bytes count as equal, so that the number of buckets decides.
        front: the choices near the best that no other one beats in both seconds and peak.
    """

    def __init__(self, problem: Problem, least_seconds: float, effort: int) -> None:
        self.problem = problem
        self.enough = least_seconds * (1 + EQUAL_SHARE)
        self.loads = Loads(problem)
        self.attempted: set[Choice] = set()
        # With a fixed seed, every rank finds the same schedule.
        self.chance = random.Random(0)

        # A small problem has few choices, so it needs less effort.
        count = len(problem.gathers) + len(problem.reductions)
        self.effort = 0
        if count:
            # Enough for 8 attempts for each message and 16 more, each at its full price of `count + 8`.
            self.effort = min(effort, LEAST_EFFORT + (8 * count + 16) * (count + 8))
        self.effort_at_improvement = self.effort
        self.patience = PATIENCE + PATIENCE_PER_MESSAGE * count
        self.granule = max(1.0, self.loads.bytes_unbucketed(NO_LEVERS).max(initial=0.0) / 64)
        unbucketed = place_choice(self.loads, self._unbucketed_choice())
        if unbucketed is None:
            raise ValueError(
                f"solve: the memory of {problem.memory:.0f} bytes is too small to send every message alone; "
                f"{least_memory(problem)} bytes are enough."
            )
        self.best = unbucketed
        self.front = [unbucketed]

    def _unbucketed_choice(self) -> Choice:
        """The choice in which every message is sent alone, and every gather starts at its use."""
        levers = self.problem.free_levers
        dropped = self.problem.dropped(levers)
        gathers = [(i,) for i in range(len(self.problem.gathers)) if i not in dropped]
        reductions = tuple((i,) for i in range(len(self.problem.reductions)))
        return Choice(in_order(self.problem, gathers), reductions, levers, lead=0.0)

    @property
    def finished(self) -> bool:
        """Whether the best choice is good enough, or the effort is spent."""
        return self.effort <= 0 or self.best.seconds <= self.enough

    @property
    def near_best(self) -> float:
        """The most seconds of a choice that is nearly as fast as the best one."""
        return max(self.best.seconds * (1 + EQUAL_SHARE), self.enough)

    @property
    def result(self) -> Placed:
        """The choice with the lowest peak, of all that are nearly as fast as the best one."""
        fast_enough = [placed for placed in self.front if placed.seconds <= self.near_best]
        return min(fast_enough, key=lambda placed: placed.peak)

    def rank(self, placed: Placed) -> tuple[float, int, int]:
        """Sort key: smaller is better."""
        buckets = len(placed.choice.gathers) + len(placed.choice.reductions)
        return max(placed.seconds, self.enough), math.ceil(placed.peak / self.granule), buckets

    def attempt(self, choice: Choice, most_seconds: float = math.inf) -> Placed | None:
        """Place a choice. None if it was tried before, does not fit, or takes longer than `most_seconds`."""
        # Any attempt takes about as long as placing 8 messages, whatever its size.
        self.effort -= 8
        if choice in self.attempted:
            return None
        self.attempted.add(choice)
        placed = place_choice(self.loads, choice, max(most_seconds, self.enough))
        if placed is not None:
            self.effort -= len(choice.gathers) + len(choice.reductions)
            if self.rank(placed) < self.rank(self.best):
                self.best = placed
            self._add_to_front(placed)
        return placed

    def _add_to_front(self, placed: Placed) -> None:
        near_best = self.near_best
        if placed.seconds > near_best or any(_beats(rival, placed) for rival in self.front):
            return
        front = []
        for rival in self.front:
            if rival.seconds <= near_best and not _beats(placed, rival):
                front.append(rival)
        self.front = [*front, placed]
        self.effort_at_improvement = self.effort

    def sweep(self, values: Mapping[str, Sequence[Any]] | None = None) -> Scalars:
        """Change one scalar at a time while that gives a better choice, and return the scalars of the best one.

        Args:
            values: the values that it tries for each scalar, by default `values_of` the problem.
        """
        values = values_of(self.problem) if values is None else values
        choices = FullChoices(self.loads)
        scalars = Scalars(shares={kind.name: 0.0 for kind in self.problem.lever_kinds})
        current = None if self.finished else self.attempt(choices.choice(scalars))
        improved = True
        while improved and not self.finished:
            improved = False
            for name, values_of_name in values.items():
                for value in values_of_name:
                    changed = scalars.with_value(name, value)
                    if changed == scalars or self.finished:
                        continue
                    placed = self.attempt(choices.choice(changed))
                    if placed is None:
                        continue
                    if current is None or self.rank(placed) < self.rank(current):
                        current = placed
                        scalars = changed
                        improved = True
        return scalars

    def climb(self, changes: Sequence[tuple[Change, int]] = CHANGES) -> None:
        """Change the best choice at random, while effort is left and an improvement can be expected.

        The climb ends if the last improvement is too far back: further in a large problem, or if it came late.
        """
        current = self.best
        total = self.effort
        self.effort_at_improvement = total
        while changes and not self.finished:
            until_improved = total - self.effort_at_improvement
            since_improved = self.effort_at_improvement - self.effort
            if since_improved > self.patience + 3 * until_improved:
                break
            placed = self.attempt(self._neighbour(current.choice, changes), current.seconds)
            if placed is not None and placed.seconds <= current.seconds:
                current = placed

    def _neighbour(self, choice: Choice, changes: Sequence[tuple[Change, int]]) -> Choice:
        """A choice with one to three random changes."""
        kinds, weights = zip(*changes)
        # One change is the most frequent. Several at once can improve a choice that no single change improves.
        count = self.chance.choice((1, 1, 2, 3))
        for change in self.chance.choices(kinds, weights, k=count):
            # If levers have dropped all messages, there is nothing to change.
            if choice.gathers or choice.reductions:
                choice = change(self.chance, self.problem, choice)
        return choice


def _beats(a: Placed, b: Placed) -> bool:
    return a.seconds <= b.seconds and a.peak <= b.peak


# The results of the last problems, by digest. They are reused by a step that is decorated again, as in a notebook, and
# by variants of a step with equal problems. They consist of numbers, and keep no program alive.
_placed: OrderedDict[bytes, Placed] = OrderedDict()
_MOST_PLACED = 32


def best_placed(
    problem: Problem,
    effort: int = EFFORT,
    changes: tuple[tuple[Change, int], ...] = CHANGES,
    values: Mapping[str, Sequence[Any]] | None = None,
) -> Placed:
    """Find a fast schedule that fits the memory, with its seconds and its peak.

    The same problem has the same schedule on every rank, because effort is counted and not timed.

    Args:
        problem: the operations, the messages and the limits.
        effort: the number of messages that the search may place.
        changes: the random changes of a climb, with their weights.
        values: the scalars of the sweep, each with the values that it tries; by default `values_of` the problem.

    Raises:
        ValueError: the memory is too small to send every message alone; see `least_memory`.
    """
    digest = hashlib.sha256(repr((problem, effort, changes, values)).encode()).digest()
    placed = _placed.pop(digest, None)
    if placed is None:
        placed = _searched(problem, effort, changes, values)
    _placed[digest] = placed
    while len(_placed) > _MOST_PLACED:
        _placed.popitem(last=False)
    return placed


def _searched(
    problem: Problem,
    effort: int,
    changes: tuple[tuple[Change, int], ...],
    values: Mapping[str, Sequence[Any]] | None,
) -> Placed:
    """Search for a schedule until the effort is spent."""
    search = Search(problem, bound(problem).seconds, effort)
    search.sweep(values)
    while changes and not search.finished:
        search.climb(changes)
    return search.result


def solve(
    problem: Problem,
    effort: int = EFFORT,
    changes: tuple[tuple[Change, int], ...] = CHANGES,
    values: Mapping[str, Sequence[Any]] | None = None,
) -> Schedule:
    """The schedule of `best_placed`."""
    return best_placed(problem, effort, changes, values).schedule
