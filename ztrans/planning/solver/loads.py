"""The messages of given buckets, and the bytes that are live with them.

A search places thousands of choices, and few of their buckets are new. So what follows from a bucket alone, or from the
levers alone, is computed once. `first_waits` is the first place at which each reduction can be waited for: in a small
memory not always where it starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..buffers import Buffer, live_by_slot, rises, sum_rises
from ..network import NEVER, Message
from .messages import (
    ReductionBytes,
    gather_buffers,
    message_of,
    packed_values,
    reserved_for_second,
    second_buffer,
    second_message,
)
from .problem import Choice, Levers, MemberIndices, Problem

# Bytes: more than there are, and exact as a float.
ENDLESS = 2**52


class Rejected(Exception):
    """A bucket is not possible, or a choice does not fit the memory or takes longer than its limit."""


class GatherLoad(NamedTuple):
    """A bucket of gathers as a message, and the bytes that it takes.

    Attributes:
        members: the gathers, by index.
        use: the place at which it is waited for, before the first use of a member.
        release: the first place at which it may start.
        bytes: of its values.
        size: the bytes that are live between its start and its use.
        burst: the bytes that are live in addition where it starts, if that is before its use.
        message: as if it started at its use.
        alone: the seconds that the message takes if no other one is under way.
        rises: how many more bytes are live than with a bucket for each member, as in `buffers.rises`.
    """

    members: MemberIndices
    use: int
    release: int
    bytes: int
    size: int
    burst: int
    message: Message
    alone: float
    rises: np.ndarray


class ReductionLoad(NamedTuple):
    """A bucket of reductions as a message, and the bytes that it takes.

    Attributes:
        members: the reductions, by index.
        start: the place after the birth of the last gradient.
        first_wait, deadline: the first and the last place at which it may be waited for.
        gradients: the bytes of its gradients.
        size: the bytes that are live between its start and its wait.
        burst: the bytes that are live in addition at its wait.
        size_at_wait: the most bytes that its wait takes, without the results of other reductions that await it.
        spare: the bytes that become free at its first wait if it is waited for later.
        last_release: the first place at which all updates after it that have temporaries may run, or 0.
        storage: its bytes, by kind.
        room: the bytes that it takes in addition if it is waited for later.
        message: as if it was waited for at its first wait.
        second: the reductions of its results, as a message.
        second_bytes: the bytes that are live for it.
        rises: how many more bytes are live than with a bucket for each member, as in `buffers.rises`.
    """

    members: MemberIndices
    start: int
    first_wait: int
    deadline: int
    gradients: int
    size: int
    burst: int
    size_at_wait: int
    spare: int
    last_release: int
    storage: ReductionBytes
    room: RoomNeeded
    message: Message
    second: Message | None
    second_bytes: int
    rises: np.ndarray


class RoomNeeded:
    """The bytes that a bucket of reductions takes in addition, by slot, if it is waited for after its first wait.

    A bucket under way takes `size` at every slot, and `burst` more at a place, because the wait may be there.
    `Loaded.room` has counted the first wait. So what that wait leaves live is taken off: the `staying` bytes up to the
    slot `until`, where the first of them ends, and the temporaries of updates at their releases.

    `slots` begins with the operation after the first wait. It grows when a later slot is asked for.
    """

    def __init__(
        self,
        first_wait: int,
        size: int,
        burst: int,
        staying: Sequence[Buffer],
        total: ReductionBytes,
    ) -> None:
        self.first_wait = first_wait
        self.size = size
        self.burst = burst
        self.staying = sum(buffer.bytes for buffer in staying)
        self.until = min((buffer.last for buffer in staying), default=0)
        self.temporaries = total.temporaries
        self.slots = self._slots(0)

    def between(self, place: int, end: int) -> np.ndarray:
        """By slot, from after a place to an end, the bytes that it takes in addition if it is waited for later."""
        stop = 2 * (end - self.first_wait)
        if stop > len(self.slots):
            self.slots = self._slots(2 * stop)
        return self.slots[2 * (place - self.first_wait) : stop]

    def _slots(self, count: int) -> np.ndarray:
        # The first slot is the operation after the first wait, so every second one is a place.
        slots = np.full(count, self.size)
        slots[1::2] += self.burst
        slots[: max(self.until - 2 * self.first_wait, 0)] -= self.staying
        for release, size in self.temporaries:
            slot = 2 * (release - self.first_wait) - 1
            if 0 < slot < count:
                slots[slot] -= size
        return slots


def gather_load(problem: Problem, members: MemberIndices) -> GatherLoad:
    """The load of a bucket of gathers, of which each may start before any is used."""
    gathers = [problem.gathers[i] for i in members]
    use = min(g.use for g in gathers)
    release = max(g.release for g in gathers)
    if release > use:
        raise Rejected
    size = sum(g.bytes for g in gathers)
    packed = packed_values(gathers)
    part = packed // problem.wires[gathers[0].key].ranks
    # Members that are used later are live from the first use on.
    early = [Buffer(g.bytes, 2 * use, 2 * g.use - 1) for g in gathers]
    message = message_of(problem, gathers, use, use)
    return GatherLoad(
        members=members,
        use=use,
        release=release,
        bytes=size,
        size=size + part,
        burst=packed,
        message=message,
        alone=message.alone,
        rises=rises([*early, *gather_buffers(problem, gathers, use, use)]),
    )


def reduction_load(
    problem: Problem,
    first_waits: Sequence[int],
    minus_alone: Callable[[int], np.ndarray],
    members: MemberIndices,
) -> ReductionLoad:
    """The load of a bucket of reductions.

    Args:
        problem: the reductions.
        first_waits: the first wait of each, before which no result is needed.
        minus_alone: from a reduction, the negative of what it has live in a bucket of its own, as `buffers.rises`.
        members: the reductions in the bucket.
    """
    reductions = [problem.reductions[i] for i in members]
    start = max(r.born for r in reductions) + 1
    first_wait = max(start, *(first_waits[i] for i in members))
    end = len(problem.seconds)
    deadline = min(end, *(r.deadline for r in reductions))
    if first_wait > deadline:
        raise Rejected
    total = ReductionBytes(reductions)
    bytes_before = total.starting if first_wait == start else total.under_way
    staying = [buffer for buffer in total.staying if buffer.last > 2 * first_wait]
    # At the end all updates have been released, so this is the most that any wait has live.
    size_at_wait = total.at_wait(end)
    size = total.under_way + total.awaiting_bytes
    burst = size_at_wait - total.under_way
    load_rises = [rises(total.buffers(start, first_wait)), *map(minus_alone, members)]
    return ReductionLoad(
        members=members,
        start=start,
        first_wait=first_wait,
        deadline=deadline,
        gradients=total.gradients,
        size=size,
        burst=burst,
        size_at_wait=size_at_wait,
        spare=max(total.at_wait(first_wait) - bytes_before, 0),
        last_release=max((release for release, _ in total.temporaries), default=0),
        storage=total,
        room=RoomNeeded(first_wait, size, burst, staying, total),
        message=message_of(problem, reductions, start, first_wait),
        second=second_message(problem, reductions, first_wait),
        second_bytes=reserved_for_second([reductions]),
        rises=np.concatenate(load_rises, axis=1),
    )


def _minus_alone(problem: Problem, first_waits: Sequence[int], i: int) -> np.ndarray:
    """The negative of what a reduction has live in a bucket of its own, as `buffers.rises`."""
    r = problem.reductions[i]
    buffers = ReductionBytes([r]).buffers(r.born + 1, first_waits[i])
    return rises(b._replace(bytes=-b.bytes) for b in buffers)


class Fixed(NamedTuple):
    """What is the same for all buckets, if some levers are pulled.

    Attributes:
        live: the live bytes by slot, if every message is a bucket of its own.
        seconds_before: the seconds of compute before each place.
    """

    live: np.ndarray
    seconds_before: Sequence[float]


def fixed(problem: Problem, without_levers: np.ndarray, levers: Levers) -> Fixed:
    """What is the same for all buckets if some levers are pulled, where some bytes are live without them."""
    live = without_levers + live_by_slot(problem.lever_buffers(levers), len(without_levers))
    compute = problem.compute(levers)
    if compute is problem.seconds:
        return Fixed(live, problem.seconds_before)
    return Fixed(live, tuple(accumulate(compute, initial=0.0)))


class Loads:
    """The loads of one problem's buckets, and the bytes that are live with them, by slot.

    Attributes:
        first_waits: for each reduction, the first place at which it can be waited for.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.memory = int(min(problem.memory, ENDLESS))
        self.second_bytes = reserved_for_second([r] for r in problem.reductions)
        starts = [r.born + 1 for r in problem.reductions]
        self.first_waits = first_waits(problem, self._without_levers(starts))
        without_levers = self._without_levers(self.first_waits)
        self.fixed = functools.cache(functools.partial(fixed, problem, without_levers))
        self._gather = functools.cache(functools.partial(gather_load, problem))
        minus_alone = functools.cache(functools.partial(_minus_alone, problem, self.first_waits))
        self._reduction = functools.cache(
            functools.partial(reduction_load, problem, self.first_waits, minus_alone)
        )

    def _without_levers(self, waits: Sequence[int]) -> np.ndarray:
        """By slot, what is live if every message is a bucket of its own and no lever is pulled.

        Gathers start at their use, and reductions are waited for at these places.
        """
        problem = self.problem
        buffers = [Buffer(g.bytes, 2 * g.use, 2 * g.last + 1) for g in problem.values]
        for r, wait in zip(problem.reductions, waits):
            buffers += ReductionBytes([r]).buffers(r.born + 1, wait)
        if self.second_bytes:
            buffers.append(second_buffer(problem, self.second_bytes))
        return problem.fixed_bytes + live_by_slot(buffers, len(problem.fixed_bytes))

    def bytes_unbucketed(self, levers: Levers) -> np.ndarray:
        """By slot, what is live if every message is a bucket of its own, and these levers are pulled."""
        return self.fixed(levers).live

    def of(self, choice: Choice) -> Loaded:
        """The loads of a choice, in which every bucket is possible, and for which there is room."""
        problem = self.problem
        gathers = [self._gather(members) for members in choice.gathers]
        reductions = [self._reduction(members) for members in choice.reductions]
        if problem.gap_between_starts(load.start for load in reductions):
            raise Rejected

        # A bucket of one member changes nothing.
        shared = [load.rises for load in gathers if len(load.members) > 1]
        shared += [load.rises for load in reductions if len(load.members) > 1]
        unchanged = self.fixed(choice.levers)
        room = self.memory - unchanged.live - sum_rises(shared, len(unchanged.live))
        second_bytes = max((load.second_bytes for load in reductions), default=0)
        if second_bytes > self.second_bytes:
            room[2 * problem.births[0] :] -= second_bytes - self.second_bytes
        if room.min(initial=0) < 0:
            raise Rejected

        gathers.sort(key=lambda load: (load.use, load.release))
        reductions.sort(key=lambda load: (load.start, load.deadline))
        return Loaded(gathers, reductions, unchanged.seconds_before, room)


class Loaded(NamedTuple):
    """The loads of a choice.

    Attributes:
        gathers, reductions: the buckets, in order of use and of start.
        seconds_before: the seconds of compute before each place.
        room: by slot, the bytes that are left if each gather starts at its use, and each reduction is waited for at its
            first wait.
    """

    gathers: list[GatherLoad]
    reductions: list[ReductionLoad]
    seconds_before: Sequence[float]
    room: np.ndarray


def first_waits(problem: Problem, live_bytes: np.ndarray) -> list[int]:
    """The first place at which each reduction can be waited for, so that none is waited for before an earlier one.

    It is the place at which the reduction starts, unless the bytes of the wait and of the updates after it do not fit
    there. An update at the beginning of backward, when most activations are live, may fit a few operations later. A
    reduction that fits nowhere is waited for where it starts.

    Args:
        problem: the reductions, and the memory.
        live_bytes: by slot, if every message is a bucket of its own and every reduction is waited for where it starts.
    """
    starts = [r.born + 1 for r in problem.reductions]
    if problem.reductions_in_flight < NEVER or live_bytes.max(initial=0) <= problem.memory:
        return starts
    room = problem.memory - live_bytes
    waits = list(starts)
    earliest = 0
    for i, (r, start) in enumerate(zip(problem.reductions, starts)):
        deadline = min(r.deadline, len(problem.seconds))
        if earliest > deadline:
            return starts
        total = ReductionBytes([r])
        at_once = live_by_slot(total.buffers(start, start), len(room))
        # The wait moves only if an earlier reduction is waited for later, or if it does not fit.
        if earliest > start or room[at_once > 0].min(initial=0) < 0:
            room += at_once
            waits[i] = _first_wait(total, room, start, max(earliest, start), deadline)
            room -= live_by_slot(total.buffers(start, waits[i]), len(room))
        earliest = waits[i]
    return waits


def _first_wait(
    total: ReductionBytes, room: np.ndarray, start: int, earliest: int, deadline: int
) -> int:
    """The first place, from `earliest` on, where a reduction can be waited for; `earliest` if there is none."""
    # Until its wait, the bucket must fit at every slot.
    full = room[2 * start + 1 : 2 * deadline] < total.under_way + total.awaiting_bytes
    latest = deadline
    if full.any():
        latest = start + (int(full.argmax()) + 1) // 2
    places = np.arange(earliest, max(latest, earliest) + 1)
    waits_fit = room[2 * places] >= total.at_wait(deadline) + total.awaiting_bytes

    # After its wait, what stays must fit as long as it is live.
    until = max((buffer.last + 1 for buffer in total.staying), default=0)
    too_full = np.flatnonzero(room[:until] < sum(buffer.bytes for buffer in total.staying))
    stays_fit = 2 * places + 1 > too_full.max(initial=-1)

    fits = waits_fit & stays_fit
    return int(places[fits.argmax()]) if fits.any() else earliest
