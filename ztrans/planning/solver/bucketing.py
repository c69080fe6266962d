"""bucketing: which consecutive messages of a key to send as one.

The best buckets of a lane that has its link to itself are computed exactly. For reductions, message j may be sent
once its gradient is born. Let f(j) be the earliest time at which the first j have been sent:

    f(j) = min over i < j of  max(f(i), born(j)) + latency + seconds(i..j)

Gathers are the same with time reversed: `ready` is then the time from the first use of a bucket to the end. The best
i is either the last with f(i) <= born(j), for which the lane is free, or the first after it, since f(i) ascends, and
f(i) - seconds(..i) does too. Both only move forward, so this takes O(n).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, pairwise

from .loads import Members
from .problem import Gather, Problem, Reduction

# Sizes of buckets in order, of messages that are ready at these times and take these seconds; then the latency, and by
# message the first that it may share a bucket with.
Cut = Callable[[Sequence[float], Sequence[float], float, Sequence[int]], list[int]]


def consecutive(ready: Sequence[float], seconds: Sequence[float], latency: float, first: Sequence[int]) -> list[int]:
    """Sizes of the buckets that end soonest, in order.

    `ready` ascends. A bucket whose last member is j begins at member `first[j]` at the earliest; `first`
    ascends too. Of equally good buckets it takes the larger one.

    >>> consecutive([0.0, 1.0, 9.0], [2.0, 2.0, 1.0], latency=1.0, first=[0, 0, 0])
    [2, 1]
    """
    n, sent = len(ready), [0.0, *accumulate(seconds)]
    end, cut = [0.0] * (n + 1), [0] * (n + 1)
    free = 0  # how many have been sent by the time of ready[j]
    for j in range(n):
        while free < j and end[free + 1] <= ready[j]:
            free += 1
        candidates, busy = [], max(free + 1, first[j])
        if free >= first[j]:
            candidates.append((ready[j] - sent[free], free))
        if busy <= j:
            candidates.append((end[busy] - sent[busy], busy))
        best, cut[j + 1] = min(candidates)
        end[j + 1] = best + latency + sent[j + 1]
    sizes, j = [], n
    while j:
        sizes.append(j - cut[j])
        j = cut[j]
    return sizes[::-1]


def by_key(things: Sequence[Gather | Reduction], among: Iterable[int]) -> dict[Hashable, list[int]]:
    """Indices of the same key, in order."""
    keys: dict[Hashable, list[int]] = {}
    for i in among:
        keys.setdefault(things[i].key, []).append(i)
    return keys


def gather_buckets(
    problem: Problem,
    among: Iterable[int],
    room: Sequence[float],
    portion: float,
    share: float = 1.0,
    cut: Cut = consecutive,
) -> list[Members]:
    """Make buckets of gathers that take at most a `portion` of the room at their use, with 1 / `share` of the link."""
    most = float("inf") if problem.gathers_in_flight is None else problem.gathers_in_flight
    buckets: list[Members] = []
    for key, indices in by_key(problem.gathers, among).items():
        indices.reverse()
        gathers, wire = [problem.gathers[i] for i in indices], problem.wires[key]
        earlier = [-g.use for g in gathers]
        reach = [bisect_right(earlier, -g.release) for g in gathers]
        # Where a small member is unpacked, it is live twice: in the buffer that it shares, and as its value.
        held, caps = [g.held * (1 + g.small) for g in gathers], [min(portion * room[g.use], most) for g in gathers]
        first = _first(held, caps, reach)
        seconds = [share * wire.pace * g.wire for g in gathers]
        left = [problem.clock[-1] - problem.clock[g.use] for g in gathers]
        sizes = cut(left, seconds, wire.latency, first)
        buckets += [members[::-1] for members in _split(indices, sizes)][::-1]
    return buckets


def reduction_buckets(
    problem: Problem, room: Sequence[float], portion: float, share: float = 1.0, cut: Cut = consecutive
) -> list[Members]:
    """Make buckets of reductions likewise, with the room at their birth; they start as often as `max_between` asks."""
    most = float("inf") if problem.reductions_in_flight is None else problem.reductions_in_flight
    often = float("inf") if problem.max_between is None else problem.max_between
    starts = sorted({r.born + 1 for r in problem.reductions})
    previous = dict(zip(starts[1:], starts))
    buckets: list[Members] = []
    for key, indices in by_key(problem.reductions, range(len(problem.reductions))).items():
        reductions, wire = [problem.reductions[i] for i in indices], problem.wires[key]
        start = [r.born + 1 for r in reductions]
        since = [previous.get(start[0], start[0]), *start]  # at the latest, the start before the bucket of each
        passed = [problem.matmuls[k] for k in start]
        reach = [
            min(
                len(start) if r.need is None else bisect_right(start, r.need),
                max(bisect_right(passed, problem.matmuls[k] + often), bisect_right(start, r.born + 1)),
            )
            for r, k in zip(reductions, since)
        ]
        first = _first([r.held for r in reductions], [min(portion * room[r.born], most) for r in reductions], reach)
        seconds = [share * wire.pace * r.wire for r in reductions]
        buckets += _split(indices, cut([problem.clock[k] for k in start], seconds, wire.latency, first))
    return buckets


def _first(held: Sequence[int], caps: Sequence[float], reach: Sequence[int]) -> list[int]:
    """For each member, the first that it may share a bucket with: all between fit below its cap, and none of
    them, m, comes before `reach[m]` ends."""
    until = [0] * (len(held) + 1)
    for m, end in enumerate(reach):
        until[end] = m + 1
    first, i, total = [], 0, 0
    for j, more in enumerate(held):
        total += more
        while i < j and (total > caps[j] or i < until[j]):
            total -= held[i]
            i += 1
        first.append(i)
    return first


def _split(indices: Sequence[int], sizes: Sequence[int]) -> list[Members]:
    return [tuple(indices[a:b]) for a, b in pairwise([0, *accumulate(sizes)])]
