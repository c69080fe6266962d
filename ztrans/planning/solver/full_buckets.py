"""Full buckets, with which a search begins: neighbours share a bucket until its latency is a small share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from ...ir.dependencies import grouped
from .problem import Gather, MemberIndices, Problem, Reduction

# A bucket is full once its transfer takes this many latencies of a message.
FULL = 16.0


def gather_buckets(
    problem: Problem,
    among: Iterable[int],
    room: Sequence[float],
    portion: float,
    full: float = FULL,
) -> list[MemberIndices]:
    """Full buckets of some gathers, in order of use.

    Neighbours of one key share a bucket until it is full: its transfer takes `full` latencies of a message, or its
    bytes take a portion of the room at its first use.

    Args:
        problem: the gathers and their limits.
        among: the gathers, by index.
        room: for each operation, the bytes that are left while it runs.
        portion: the share of the room that a bucket may take.
        full: the number of latencies that the transfer of a full bucket takes.
    """

    def fits(members: Sequence[int]) -> bool:
        gathers = [problem.gathers[i] for i in members]
        use = min(g.use for g in gathers)
        # A small member is live twice where it is unpacked: in the shared buffer, and as its value. Codes are live
        # beside the value that they become.
        size = sum(g.bytes + (g.codes or g.bytes * g.small) for g in gathers)
        most = min(portion * room[use], problem.gathers_in_flight)
        released = max(g.release for g in gathers) <= use
        return released and size <= most

    buckets: list[MemberIndices] = []
    for indices in grouped((problem.gathers[i].key, i) for i in among).values():
        # Fill from the last use to the first: the room of a bucket is counted at its first use, which is then the use
        # of the member that was added last.
        last_first = list(_filled(problem, problem.gathers, indices[::-1], full, fits))
        for members in reversed(last_first):
            buckets.append(members[::-1])
    return buckets


def reduction_buckets(
    problem: Problem, room: Sequence[float], portion: float, full: float = FULL
) -> list[MemberIndices]:
    """Full buckets of all reductions, as `gather_buckets` fills them. They start as often as `max_between` asks."""
    by_key = grouped((r.key, i) for i, r in enumerate(problem.reductions))
    births = sorted({r.born for r in problem.reductions})
    previous_birth = dict(zip(births[1:], births))
    # For each reduction, the birth of the previous one with its key.
    born_before: dict[int, int] = {}
    for indices in by_key.values():
        for i, j in pairwise(indices):
            born_before[j] = problem.reductions[i].born

    def fits(members: Sequence[int]) -> bool:
        reductions = [problem.reductions[i] for i in members]
        first = reductions[0].born
        last = reductions[-1].born
        # The latest start of the previous bucket.
        start = born_before.get(members[0], previous_birth.get(first, first))
        matmuls = problem.matmuls[last + 1] - problem.matmuls[start + 1]
        if matmuls > problem.max_between and first != last:
            return False
        if any(r.deadline <= last for r in reductions):
            return False
        most = min(portion * room[last], problem.reductions_in_flight)
        return sum(r.bytes for r in reductions) <= most

    buckets: list[MemberIndices] = []
    for indices in by_key.values():
        buckets += _filled(problem, problem.reductions, indices, full, fits)
    return buckets


def _filled(
    problem: Problem,
    messages: Sequence[Gather | Reduction],
    indices: Sequence[int],
    full: float,
    fits: Callable[[Sequence[int]], bool],
) -> Iterator[MemberIndices]:
    """Buckets of neighbours: one ends once its transfer takes `full` latencies, or the next member does not fit."""
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
