"""moves: the random changes of a choice that a search tries, and which parts of a search are in use.

Every change takes a source of random numbers, the problem and a choice, and returns another choice. It returns the same
choice where it cannot be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from .bucketing import FULL, in_order
from .load import Members
from .loads import Choice, kept
from .problem import Problem

Change = Callable[[Random, Problem, Choice], Choice]

_LEADS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 1e6)
_COUNTS = (1, 2, 4, 8)  # of gathers that are dropped, or gathered again, at once


def split(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Split a bucket."""
    gathers, buckets, k = _pick(chance, choice)
    if cuts := [*_cuts(problem, buckets[k], gathers)]:
        cut = chance.choice(cuts)
        buckets[k : k + 1] = [buckets[k][:cut], buckets[k][cut:]]
    return with_buckets(choice, gathers, buckets)


def join(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Merge a bucket with the next one."""
    gathers, buckets, k = _pick(chance, choice)
    if can_join(problem, buckets, k, gathers):
        buckets[k : k + 2] = [buckets[k] + buckets[k + 1]]
    return with_buckets(choice, gathers, buckets)


def move_border(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Move members between a bucket and the next one: often a few of them, sometimes any number."""
    gathers, buckets, k = _pick(chance, choice)
    if can_join(problem, buckets, k, gathers):
        both, border = buckets[k] + buckets[k + 1], len(buckets[k])
        possible = (cut for cut in _cuts(problem, both, gathers) if cut != border)
        if cuts := sorted(possible, key=lambda cut: abs(cut - border)):
            cut = chance.choice(cuts[:4] if chance.random() < 0.5 else cuts)
            buckets[k : k + 2] = [both[:cut], both[cut:]]
    return with_buckets(choice, gathers, buckets)


def change_start(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Change when gathers start."""
    return choice._replace(lead=chance.choice(_LEADS), reserve=chance.choice((False, True)))


def keep_more(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Keep a few more values from forward to backward, those with a short time to their next use first."""
    more = [i for i in problem.repeats if i not in choice.dropped][: chance.choice(_COUNTS)]
    dropped = kept(problem, choice.dropped.union(more))
    gathers = (tuple(i for i in members if i not in dropped) for members in choice.gathers)
    return choice._replace(
        gathers=tuple(members for members in gathers if members), dropped=dropped
    )


def keep_fewer(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Gather a few more values a second time, each in a bucket of its own."""
    fewer = [i for i in problem.repeats if i in choice.dropped][-chance.choice(_COUNTS) :]
    dropped = kept(problem, choice.dropped.difference(fewer))
    alone = ((i,) for i in sorted(choice.dropped - dropped))
    return choice._replace(gathers=in_order(problem, [*choice.gathers, *alone]), dropped=dropped)


def _pick(chance: Random, choice: Choice) -> tuple[bool, list[Members], int]:
    """Pick a bucket: whether it is one of gathers, the buckets of its kind, and its number among them."""
    number, count = (
        chance.randrange(len(choice.gathers) + len(choice.reductions)),
        len(choice.gathers),
    )
    return (
        (True, [*choice.gathers], number)
        if number < count
        else (False, [*choice.reductions], number - count)
    )


def _cuts(problem: Problem, members: Members, gathers: bool) -> Iterator[int]:
    """Where a bucket may be cut: members of one operation stay together."""
    at = lambda i: (
        (problem.gathers[i].use, problem.gathers[i].release)
        if gathers
        else problem.reductions[i].born
    )
    return (k for k in range(1, len(members)) if at(members[k]) != at(members[k - 1]))


def can_join(problem: Problem, buckets: Sequence[Members], k: int, gathers: bool) -> bool:
    """Whether a bucket has the key of the next one."""
    messages = problem.gathers if gathers else problem.reductions
    return k + 1 < len(buckets) and messages[buckets[k][0]].key == messages[buckets[k + 1][0]].key


def with_buckets(choice: Choice, gathers: bool, buckets: Sequence[Members]) -> Choice:
    """A choice with other buckets of gathers, or of reductions."""
    return (
        choice._replace(gathers=tuple(buckets))
        if gathers
        else choice._replace(reductions=tuple(buckets))
    )


@dataclass(frozen=True)
class Moves:
    """What a search tries. `benchmarks/ablations.py` leaves each of them out, to see what it gains."""

    keep: bool = True  # begin also with as many values kept from forward to backward as fit
    full: tuple[float, ...] = FULL  # latencies that the transfer of a bucket takes at the beginning
    merge: tuple[bool, ...] = (
        True,
        False,
    )  # merge buckets, many at once: of gathers (True), then of reductions
    changes: tuple[tuple[Change, int], ...] = (  # each with its weight
        (split, 20),
        (join, 30),
        (move_border, 50),
        (change_start, 6),
        (keep_more, 8),
        (keep_fewer, 8),
    )
    slower: float = 0.01  # the share by which a change may be slower at first; it falls to 0
    one_ahead: bool = (
        True  # compare with the schedule that sends every message alone, one message ahead
    )


MOVES = Moves()
