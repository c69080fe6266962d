"""Random changes of a choice: of its buckets, its levers, and when gathers start.

A change takes a source of random numbers, the problem and a choice. It returns another choice, or the same one if it
does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from random import Random
from typing import Literal

from ...ir.dependencies import grouped
from .problem import Choice, Levers, MemberIndices, Problem

Change = Callable[[Random, Problem, Choice], Choice]
# The values of `Choice.lead`. With the last one, gathers start as early as there is room.
_LEADS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 1e6)
# The number of levers that one change pulls, and the values of `Choice.waited_together`.
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
    """Move members between a bucket and the next one: often a few members, sometimes any number."""
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
    """Change the number of reductions that are waited for at one place."""
    # Without updates there are no launches to share.
    if not problem.updates:
        return choice
    return choice._replace(waited_together=chance.choice(_COUNTS))


def pull_more(chance: Random, problem: Problem, choice: Choice) -> Choice:
    """Pull a few more levers of one kind: the best ones, or some that send gathers which may share a bucket."""
    count = chance.choice(_COUNTS)
    if not problem.levers:
        return choice
    kinds = list(problem.lever_kinds.values())
    kind_levers = kinds[-1]
    if len(kinds) > 1:
        kind_levers = kinds[int(chance.random() * len(kinds)) - 1]
    more = [i for i in kind_levers if i not in choice.levers]
    first = 0
    if problem.levers[kind_levers[0]].sends:
        first = chance.randrange(max(len(more), 1))
    more = more[first : first + count]
    levers = choice.levers.union(more)
    for i in more:
        levers -= problem.rivals[i]
    return with_levers(problem, choice, levers)


def with_levers(problem: Problem, choice: Choice, levers: Levers) -> Choice:
    """A choice with other levers. Gathers that these drop leave their buckets, and gathers that these send join.

    New gathers share a bucket if the gathers in whose place they are sent share one, or if those are in no bucket.
    """
    dropped = problem.dropped(levers)
    buckets = []
    for members in choice.gathers:
        remaining = tuple(i for i in members if i not in dropped)
        if remaining:
            buckets.append(remaining)

    missing: set[int] = set()
    for i in levers:
        missing.update(problem.levers[i].sends)
    missing.difference_update(*buckets)
    if missing:
        bucket_of: dict[int, int] = {}
        for k, members in enumerate(choice.gathers):
            for i in members:
                bucket_of[i] = k
        new_buckets: dict[Hashable, list[int]] = {}
        for i in sorted(missing):
            replaced = problem.levers[problem.sent_by[i]].drops
            key = problem.gathers[i].key, bucket_of.get(replaced)
            new_buckets.setdefault(key, []).append(i)
        buckets = list(in_order(problem, [*buckets, *map(tuple, new_buckets.values())]))
    return choice._replace(gathers=tuple(buckets), levers=levers)


# Each change with its weight. `benchmarks/plans/ablations.py` leaves out one at a time, to measure its gain.
CHANGES: tuple[tuple[Change, int], ...] = (
    (split, 20),
    (join, 30),
    (move_border, 50),
    (change_start, 6),
    (change_waits, 4),
    (pull_more, 8),
)

# A field of a problem and of a choice.
Kind = Literal["gathers", "reductions"]


def _pick(chance: Random, choice: Choice) -> tuple[Kind, list[MemberIndices], int]:
    """A random bucket: its kind, the buckets of that kind, and its number among them."""
    count = len(choice.gathers)
    number = chance.randrange(count + len(choice.reductions))
    if number < count:
        return "gathers", list(choice.gathers), number
    return "reductions", list(choice.reductions), number - count


def _cuts(problem: Problem, members: MemberIndices, kind: Kind) -> list[int]:
    """The positions at which a bucket may be split: members of the same operation stay together."""
    if kind == "gathers":
        origins = [(problem.gathers[i].use, problem.gathers[i].release) for i in members]
    else:
        origins = [(problem.reductions[i].born, 0) for i in members]
    return [k for k in range(1, len(members)) if origins[k] != origins[k - 1]]


def can_join(problem: Problem, buckets: Sequence[MemberIndices], k: int, kind: Kind) -> bool:
    """Whether there is a next bucket with the same key."""
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
    """Buckets of gathers, ordered by their members, and with the buckets of each key together."""
    buckets = grouped((problem.gathers[members[0]].key, members) for members in sorted(gathers))
    return tuple(chain.from_iterable(buckets.values()))
