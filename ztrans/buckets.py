"""buckets: which consecutive messages to send as one, exactly, for one lane with nothing else on its link.

Reductions: message j may go once its gradient is born, and the sooner the last has been sent the
better. With f(j) the earliest time at which the first j have been,

    f(j) = min over i < j of  max(f(i), born(j)) + latency + seconds(i..j)

Gathers are the same with time reversed: ready is then the time from the first use of a bucket to
the end. The best i is either the last with f(i) <= born(j), for which the lane is free, or the one
with the least f(i) - seconds(..i) after it; f ascends, so both only move on: O(n).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate


def consecutive(ready: Sequence[float], seconds: Sequence[float], latency: float, first: Sequence[int]) -> list[int]:
    """Sizes of the buckets that end soonest, in order.

    `ready` ascends. A bucket whose last member is j begins at member `first[j]` at the earliest; `first`
    ascends too. Of equally good buckets it takes the larger one.

    >>> consecutive([0.0, 1.0, 9.0], [2.0, 2.0, 1.0], latency=1.0, first=[0, 0, 0])
    [2, 1]
    """
    n, sent = len(ready), [0.0, *accumulate(seconds)]
    end, cut = [0.0] * (n + 1), [0] * (n + 1)
    free = 0  # the most that have been sent by the time of ready[j]
    busy: deque[int] = deque()  # more than those, by ascending end[i] - sent[i]
    for j in range(n):
        while busy and end[busy[-1]] - sent[busy[-1]] > end[j] - sent[j]:
            busy.pop()
        busy.append(j)
        while free < j and end[free + 1] <= ready[j]:
            free += 1
        while busy and busy[0] < max(first[j], free + 1):
            busy.popleft()
        found = []
        if free >= first[j]:
            found.append((max(end[free], ready[j]) - sent[free], free))
        if busy:
            found.append((end[busy[0]] - sent[busy[0]], busy[0]))
        best, cut[j + 1] = min(found)
        end[j + 1] = best + latency + sent[j + 1]
    sizes, j = [], n
    while j:
        sizes.append(j - cut[j])
        j = cut[j]
    return sizes[::-1]
