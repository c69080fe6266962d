"""load: a bucket as a message, and the bytes that it takes wherever it starts and is waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..event_simulator import Message
from .problem import Problem, Reduction
from .sending import sending
from .slots import Span, buffers, changes, gathering, reducing, sending_bytes, under_way, waited

Members = tuple[int, ...]


class Load(NamedTuple):
    """A bucket as a message. A gather's `place` is that of its use, and `bound` its release; a reduction's
    `place` is that of its start, and `bound` its need."""

    members: Members
    place: int
    wait: int  # the first place at which it can be waited for
    bound: int
    held: int
    size: int  # bytes live between its start and its wait
    burst: int  # further bytes at one place: where a gather starts early, or a reduction is waited for late
    message: Message  # as if it started at `place`
    changes: np.ndarray  # where it changes what is live, compared with its members alone
    released: tuple[
        tuple[int, int], ...
    ] = ()  # of a reduction: bytes that its updates have at later places
    stays: int = 0  # of a reduction: bytes that are counted after its first wait as its result, up to slot `until`
    until: int = 0
    spared: int = 0  # of a reduction: bytes at its first wait that are not live there if it is waited for later
    second: int = 0  # of a reduction: bytes of the second one that follows it

    def needs(self, place: int, end: int) -> np.ndarray:
        """By slot, from after a place to an end: the room that a reduction needs to be waited for there or later."""
        needs = np.full(2 * (end - place), self.size)
        needs[1::2] += self.burst
        needs[: max(self.until - 2 * place - 1, 0)] -= self.stays
        for size, released in self.released:
            if place < released <= end:
                needs[2 * (released - place) - 1] -= size
        return needs

    def unreleased(self, problem: Problem, place: int) -> int:
        """The bytes of a reduction's `burst` that are not live at a place, because updates may not run there yet."""
        if all(released <= place for _, released in self.released):
            return 0
        reductions = [problem.reductions[i] for i in self.members]
        return waited(reductions, len(problem.seconds)) - waited(reductions, place)


def gather_load(problem: Problem, members: Members) -> Load | None:
    """The load of a bucket of gathers; None if one of them may not start before another is used."""
    gathers = [problem.gathers[i] for i in members]
    use, release = min(g.use for g in gathers), max(g.release for g in gathers)
    if release > use:
        return None
    held, (burst, part) = sum(g.held for g in gathers), buffers(problem, gathers)
    message = sending(problem, gathers, use, use)
    spans = (
        *((2 * use, 2 * g.use, g.held) for g in gathers),
        *gathering(problem, gathers, use, use),
    )
    return Load(members, use, use, release, held, held + part, burst, message, changes(spans))


def reduction_load(problem: Problem, waits: Sequence[int], members: Members) -> Load | None:
    """The load of a bucket of reductions, given the first wait of each; None if a result is needed before that."""
    reductions, first_waits = [problem.reductions[i] for i in members], [waits[i] for i in members]
    end, start = len(problem.seconds), max(r.born for r in reductions) + 1
    wait, need = max(start, *first_waits), min(end, *(r.need for r in reductions))
    if wait > need:
        return None
    total = lambda field: sum(getattr(r, field) for r in reductions)
    size, results = under_way(reductions), list(chain.from_iterable(r.results for r in reductions))
    before = sending_bytes(reductions) if wait == start else size
    return Load(
        members,
        place=start,
        wait=wait,
        bound=need,
        held=total("held"),
        size=size + total("waiting"),
        burst=waited(reductions, end) - size,
        message=sending(problem, reductions, start, wait),
        changes=changes([*reducing(reductions, start, wait), *_without(reductions, first_waits)]),
        released=tuple(
            (size, place) for r in reductions for size, place in r.released if place > wait
        ),
        stays=sum(size for size, _ in results),
        until=min((until for _, until in results), default=0),
        spared=max(waited(reductions, wait) - before, 0),
        second=total("second"),
    )


def _without(reductions: Sequence[Reduction], waits: Sequence[int]) -> Iterator[Span]:
    """The bytes of reductions that are buckets of their own, to take away."""
    for r, wait in zip(reductions, waits):
        yield from ((first, until, -size) for first, until, size in reducing([r], r.born + 1, wait))
