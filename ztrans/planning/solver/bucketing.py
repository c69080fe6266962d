"""bucketing: the buckets with which a search begins.

Neighbours of one key share a bucket until it is full: its transfer takes some times the latency of a message (`FULL`),
or its bytes take the portion of the memory that such buckets may have.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, pairwise

from ...ir.relations import grouped
from .load import Members
from .problem import Gather, Problem, Reduction

FULL = (16.0, 32.0)  # latencies that the transfer of a full bucket takes; the search tries both
FIRST_GATHERS, REGATHERS, REDUCTIONS = (
    0.3,
    0.12,
    0.2,
)  # portions of the memory that is left where a bucket is needed


def by_key(
    messages: Sequence[Gather | Reduction], among: Iterable[int]
) -> dict[Hashable, list[int]]:
    """Indices of messages of the same key, in order."""
    return grouped((messages[i].key, i) for i in among)


def in_order(problem: Problem, gathers: Iterable[Members]) -> tuple[Members, ...]:
    """Buckets of gathers in order: by key, and by use within a key."""
    buckets = grouped((problem.gathers[members[0]].key, members) for members in sorted(gathers))
    return tuple(chain.from_iterable(buckets.values()))


def gather_buckets(
    problem: Problem, among: Iterable[int], room: Sequence[float], portion: float, full: float
) -> list[Members]:
    """Make buckets of some gathers, in order of use.

    Args:
        problem: the gathers and their limits.
        among: the gathers, by index.
        room: for each operation, the bytes that are left while it runs.
        portion: the part of them that a bucket may take at its first use.
        full: the latencies that the transfer of a full bucket takes.
    """

    def fits(members: Sequence[int]) -> bool:
        gathers = [problem.gathers[i] for i in members]
        use = min(g.use for g in gathers)
        # A small member is live twice where it is unpacked: in the buffer that it shares, and as its value.
        held = sum(g.held * (1 + g.small) for g in gathers)
        return max(g.release for g in gathers) <= use and held <= min(
            portion * room[use], problem.gathers_in_flight
        )

    buckets: list[Members] = []
    for indices in by_key(problem.gathers, among).values():
        # The last uses come first: a bucket is waited for at its first use, so its last member is the one that fits.
        filled = _filled(problem, problem.gathers, indices[::-1], full, fits)
        buckets += [members[::-1] for members in filled][::-1]
    return buckets


def reduction_buckets(
    problem: Problem, room: Sequence[float], portion: float, full: float
) -> list[Members]:
    """Make buckets of all reductions likewise; they start as often as `max_between` asks."""
    keys = by_key(problem.reductions, range(len(problem.reductions)))
    births = sorted({r.born for r in problem.reductions})
    since = dict(zip(births[1:], births))  # for each birth, the one before it
    before = {
        j: problem.reductions[i].born for indices in keys.values() for i, j in pairwise(indices)
    }

    def fits(members: Sequence[int]) -> bool:
        reductions = [problem.reductions[i] for i in members]
        first, last = reductions[0].born, reductions[-1].born
        start = before.get(
            members[0], since.get(first, first)
        )  # the latest at which the bucket before this one starts
        matmuls = problem.matmuls[last + 1] - problem.matmuls[start + 1]
        return (
            (matmuls <= problem.max_between or first == last)
            and all(last + 1 <= r.need for r in reductions)
            and sum(r.held for r in reductions)
            <= min(portion * room[last], problem.reductions_in_flight)
        )

    return [
        b
        for indices in keys.values()
        for b in _filled(problem, problem.reductions, indices, full, fits)
    ]


def _filled(
    problem: Problem,
    messages: Sequence[Gather | Reduction],
    indices: Sequence[int],
    full: float,
    fits: Callable[[Sequence[int]], bool],
) -> Iterator[Members]:
    """Buckets of neighbours: each is full once its transfer takes more than `full` latencies, or nothing more fits."""
    wire = problem.wires[messages[indices[0]].key]
    seconds, bucket = {i: wire.pace * messages[i].wire for i in indices}, list[int]()
    for i in indices:
        if bucket and (
            sum(seconds[j] for j in bucket) > full * wire.latency or not fits([*bucket, i])
        ):
            yield tuple(bucket)
            bucket = []
        bucket.append(i)
    if bucket:
        yield tuple(bucket)
