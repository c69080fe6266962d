"""first_waits: the first place at which each reduction can be waited for.

It is the place at which the reduction starts, unless the bytes that the wait and the updates behind it make do not fit
there. An update at the beginning of backward, when most activations are live, may fit a few operations later.
"""

from __future__ import annotations

import numpy as np

from .problem import Problem, Reduction
from .slots import reducing, summed, under_way, waited


def first_waits(problem: Problem, live: np.ndarray) -> tuple[int, ...]:
    """Choose the first waits, in order of birth, so that no reduction is waited for before an earlier one.

    A reduction that fits nowhere is waited for where it starts.

    Args:
        problem: the reductions, and the memory.
        live: bytes by slot, if every message is alone and every reduction is waited for where it starts.
    """
    starts = tuple(r.born + 1 for r in problem.reductions)
    if problem.reductions_in_flight < float("inf") or live.max(initial=0) <= problem.memory:
        return starts
    room, waits, before = problem.memory - live, list(starts), 0
    for i, (r, start) in enumerate(zip(problem.reductions, starts)):
        need = min(r.need, len(problem.seconds))
        if before > need:
            return starts
        at_once = summed(reducing([r], start, start), len(room))
        if before > start or room[at_once > 0].min(initial=0) < 0:
            room += at_once
            waits[i] = _first_wait(r, room, max(before, start), need)
            room -= summed(reducing([r], start, waits[i]), len(room))
        before = waits[i]
    return tuple(waits)


def _first_wait(r: Reduction, room: np.ndarray, earliest: int, need: int) -> int:
    """The first place, from `earliest` on, where a reduction can be waited for; `earliest` if there is none."""
    start = r.born + 1
    full = room[2 * start + 1 : 2 * need] < under_way([r]) + r.waiting
    latest = start + (int(full.argmax()) + 1) // 2 if full.any() else need
    places = np.arange(earliest, max(latest, earliest) + 1)
    until = max((until for _, until in r.results), default=0)
    too_full = np.flatnonzero(
        room[:until] < sum(size for size, _ in r.results)
    )  # for the results, after the wait
    fits = (room[2 * places] >= waited([r], need) + r.waiting) & (
        2 * places + 1 > too_full.max(initial=-1)
    )
    return int(places[fits.argmax()]) if fits.any() else earliest
