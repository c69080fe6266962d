"""Other choices of buckets and levers, near a given one.

A change takes a source of random numbers, the problem and a choice. It returns another choice, or the same where it
cannot be made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from random import Random
from typing import Literal

from ...ir.dependencies import grouped
from .problem import Choice, Levers, MemberIndices, Problem

Change = Callable[[Random, Problem, Choice], Choice]
# How early gathers may start, in times of their transfer (see `Choice`). The last one is as early as there is room.
_LEADS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 1e6)
# How many levers are pulled at once, and how many reductions are waited for at one place.
_COUNTS = (1, 2, 4, 8)


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
        cuts = [cut for cut in _cuts(problem, pair_members, kind) if cut != border]
        cuts.sort(key=lambda cut: abs(cut - border))
        if cuts:
            near = cuts[:4] if chance.random() < 0.5 else cuts
            new_border = chance.choice(near)
            buckets[k : k + 2] = [pair_members[:new_border], pair_members[new_border:]]
    return with_buckets(choice, kind, buckets)


def change_start(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Change when gathers start."""
    return choice._replace(lead=chance.choice(_LEADS), reserve=chance.choice((False, True)))


def change_waits(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Change how many reductions are waited for at one place."""
    return choice._replace(waited_together=chance.choice(_COUNTS)) if problem.updates else choice


def pull_more(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Pull a few more levers: any that keep parts, or of those that keep whole values the first ones."""
    count = chance.choice(_COUNTS)
    if problem.part_levers and chance.random() < 0.5:
        more = [i for i in problem.part_levers if i not in choice.levers]
        first = chance.randrange(max(len(more), 1))
        more = more[first : first + count]
    else:
        more = [i for i in problem.whole_levers if i not in choice.levers][:count]
    levers = choice.levers.union(more)
    for i in more:
        levers -= problem.rivals[i]
    return with_levers(problem, choice, levers)


def with_levers(problem: Problem, choice: Choice, levers: Levers) -> Choice:
    """A choice with other levers, in which no bucket has a gather that these drop.

    Gathers that replace those of one bucket share a bucket, and so do those that replace kept values.
    """
    dropped = problem.dropped(levers)
    buckets = []
    for members in choice.gathers:
        remaining = tuple(i for i in members if i not in dropped)
        if remaining:
            buckets.append(remaining)

    missing: set[int] = set()
    for i in levers:
        sends = problem.levers[i].sends
        if sends is not None:
            missing.add(sends)
    missing.difference_update(*buckets)
    if missing:
        bucket_of: dict[int | None, int] = {}
        for k, members in enumerate(choice.gathers):
            bucket_of.update(dict.fromkeys(members, k))
        new_buckets: dict[Hashable, list[int]] = {}
        for i in sorted(missing):
            gather = problem.gathers[i]
            new_buckets.setdefault((gather.key, bucket_of.get(gather.replaces)), []).append(i)
        buckets = list(in_order(problem, [*buckets, *map(tuple, new_buckets.values())]))
    return choice._replace(gathers=tuple(buckets), levers=levers)


# Each change with its weight. `benchmarks/ablations.py` leaves out one at a time, to see what it gains.
CHANGES: tuple[tuple[Change, int], ...] = (
    (split, 20),
    (join, 30),
    (move_border, 50),
    (change_start, 6),
    (change_waits, 4),
    (pull_more, 8),
)

# As the fields of a problem and of a choice.
Kind = Literal["gathers", "reductions"]


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
    if k + 1 == len(buckets):
        return False
    messages = getattr(problem, kind)
    return messages[buckets[k][0]].key == messages[buckets[k + 1][0]].key


def with_buckets(choice: Choice, kind: Kind, buckets: Iterable[MemberIndices]) -> Choice:
    """A choice with other buckets of a kind."""
    if kind == "gathers":
        return choice._replace(gathers=tuple(buckets))
    return choice._replace(reductions=tuple(buckets))


def in_order(problem: Problem, gathers: Iterable[MemberIndices]) -> tuple[MemberIndices, ...]:
    """Buckets of gathers in order: by key, and by use within a key."""
    buckets = grouped((problem.gathers[members[0]].key, members) for members in sorted(gathers))
    return tuple(chain.from_iterable(buckets.values()))
