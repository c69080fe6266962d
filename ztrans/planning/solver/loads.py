"""The loads of buckets: their messages, and the bytes that are live with them.

A search places thousands of choices, and few of their buckets are new. So results that depend on one bucket alone, or
on the levers alone, are computed once. `first_waits` finds the first place at which each reduction can be waited for:
in a small memory, not always where it starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
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
from .problem import Choice, Gather, Levers, MemberIndices, Problem

# A limit in bytes that nothing reaches, and that is exact as a float.
UNLIMITED = 2**52


class Rejected(Exception):
    """A bucket is not possible, or a choice does not fit the memory or takes longer than its limit."""


class GatherLoad(NamedTuple):
    """The message of a bucket of gathers, and the bytes that are live for it.

    Attributes:
        members: the gathers, by index.
        use: the place at which it is waited for, before the first use of a member.
        release: the first place at which it may start.
        bytes: the bytes of its values.
        size: the bytes that are live between its start and its use.
        extra_at_start: further bytes that are live at its start, if that is before its use.
        freed_at_use: the bytes of its start that are not live at its use, if it starts before.
        message: its message, if it starts at its use.
        seconds_alone: the seconds of the message if no other one is under way.
        rises: the additional live bytes compared with a bucket for each member, as in `buffers.rises`.
    """

    members: MemberIndices
    use: int
    release: int
    bytes: int
    size: int
    extra_at_start: int
    freed_at_use: int
    message: Message
    seconds_alone: float
    rises: np.ndarray


class ReductionLoad(NamedTuple):
    """The message of a bucket of reductions, and the bytes that are live for it.

    Attributes:
        members: the reductions, by index.
        start: the place after the birth of the last gradient.
        first_wait, deadline: the first and the last place at which it may be waited for.
        gradients: the bytes of its gradients.
        size: the bytes that are live between its start and its wait.
        extra_at_wait: further bytes that are live at its wait.
        size_at_wait: the most bytes of its wait, without the results of other reductions that are live until then.
        freed_at_first_wait: the bytes that become free at its first wait if it is waited for later.
        last_release: the first place where all its updates with temporaries may run; 0 without temporaries.
        storage: its bytes, by kind.
        room: the additional bytes if it is waited for after its first wait.
        message: its message, if it is waited for at its first wait.
        second: the message of the reductions of its results.
        second_bytes: the bytes that are live for `second`.
        rises: the additional live bytes compared with a bucket for each member, as in `buffers.rises`.
    """

    members: MemberIndices
    start: int
    first_wait: int
    deadline: int
    gradients: int
    size: int
    extra_at_wait: int
    size_at_wait: int
    freed_at_first_wait: int
    last_release: int
    storage: ReductionBytes
    room: RoomNeeded
    message: Message
    second: Message | None
    second_bytes: int
    rises: np.ndarray


class RoomNeeded:
    """The additional bytes of a bucket of reductions, by slot, if it is waited for after its first wait.

    A bucket under way has `size` bytes live at every slot, and `extra_at_wait` more at a place, because its wait may be
    there. `ChoiceLoad.room` has counted the bytes that the first wait leaves live. So they are subtracted: the
    `staying_bytes` up to the slot `staying_until`, where the first of these buffers ends, and the temporaries of
    updates at their releases.

    `slots` begins with the operation after the first wait, and grows on demand.
    """

    def __init__(
        self,
        first_wait: int,
        size: int,
        extra_at_wait: int,
        staying: Sequence[Buffer],
        storage: ReductionBytes,
    ) -> None:
        self.first_wait = first_wait
        self.size = size
        self.extra_at_wait = extra_at_wait
        self.staying_bytes = sum(buffer.bytes for buffer in staying)
        self.staying_until = min((buffer.last for buffer in staying), default=0)
        self.temporaries = storage.temporaries
        self.slots = self._slots(0)

    def between(self, place: int, end: int) -> np.ndarray:
        """By slot, after `place` and up to `end`, the additional bytes if the bucket is waited for later."""
        stop = 2 * (end - self.first_wait)
        if stop > len(self.slots):
            self.slots = self._slots(2 * stop)
        return self.slots[2 * (place - self.first_wait) : stop]

    def _slots(self, count: int) -> np.ndarray:
        # The first slot is the operation after the first wait, so every second one is a place.
        slots = np.full(count, self.size)
        slots[1::2] += self.extra_at_wait
        slots[: max(self.staying_until - 2 * self.first_wait, 0)] -= self.staying_bytes
        for release, size in self.temporaries:
            slot = 2 * (release - self.first_wait) - 1
            if 0 < slot < count:
                slots[slot] -= size
        return slots


def gather_load(problem: Problem, members: MemberIndices) -> GatherLoad:
    """The load of a bucket of gathers.

    Raises: Rejected if a member may start only after another one is used.
    """
    gathers = [problem.gathers[i] for i in members]
    use = min(g.use for g in gathers)
    release = max(g.release for g in gathers)
    if release > use:
        raise Rejected
    packed = packed_values(gathers)
    arriving = sum(g.arriving for g in gathers)
    part = packed // problem.wires[gathers[0].key].ranks
    message = message_of(problem, gathers, use, use)
    # All values are live from the first use on, also those of members with a later use, and what is sent for them.
    together = gather_buffers(problem, gathers, use, use)
    alone = [buffer._replace(bytes=-buffer.bytes) for buffer in _only_at_use(gathers)]
    return GatherLoad(
        members=members,
        use=use,
        release=release,
        bytes=sum(g.bytes for g in gathers),
        size=sum(g.under_way for g in gathers) + part,
        extra_at_start=packed + arriving,
        freed_at_use=arriving,
        message=message,
        seconds_alone=message.alone,
        rises=rises([*together, *alone]),
    )


def _only_at_use(gathers: Iterable[Gather]) -> list[Buffer]:
    """The bytes of gathers in buckets of their own that are live only where these start: codes, and copied shards."""
    return [
        Buffer(g.codes + g.arriving, 2 * g.use, 2 * g.use) for g in gathers if g.codes or g.arriving
    ]


def reduction_load(
    problem: Problem,
    first_waits: Sequence[int],
    minus_unbucketed: Callable[[int], np.ndarray],
    members: MemberIndices,
) -> ReductionLoad:
    """The load of a bucket of reductions.

    Args:
        problem: the reductions.
        first_waits: the first place at which each reduction can be waited for.
        minus_unbucketed: for a reduction, the negative of its live bytes in a bucket of its own, as `buffers.rises`.
        members: the reductions in the bucket, by index.

    Raises: Rejected if a result is needed before the first wait of the bucket.
    """
    reductions = [problem.reductions[i] for i in members]
    start = max(r.born for r in reductions) + 1
    first_wait = max(start, *(first_waits[i] for i in members))
    end = len(problem.seconds)
    deadline = min(end, *(r.deadline for r in reductions))
    if first_wait > deadline:
        raise Rejected
    storage = ReductionBytes(reductions)
    bytes_before = storage.starting if first_wait == start else storage.under_way
    staying = [buffer for buffer in storage.staying if buffer.last > 2 * first_wait]
    # At the end all updates have been released, so no wait has more bytes live.
    size_at_wait = storage.at_wait(end)
    size = storage.under_way + storage.awaiting_bytes
    extra_at_wait = size_at_wait - storage.under_way
    load_rises = [rises(storage.buffers(start, first_wait)), *map(minus_unbucketed, members)]
    return ReductionLoad(
        members=members,
        start=start,
        first_wait=first_wait,
        deadline=deadline,
        gradients=storage.gradients,
        size=size,
        extra_at_wait=extra_at_wait,
        size_at_wait=size_at_wait,
        freed_at_first_wait=max(storage.at_wait(first_wait) - bytes_before, 0),
        last_release=max((release for release, _ in storage.temporaries), default=0),
        storage=storage,
        room=RoomNeeded(first_wait, size, extra_at_wait, staying, storage),
        message=message_of(problem, reductions, start, first_wait),
        second=second_message(problem, reductions, first_wait),
        second_bytes=reserved_for_second([reductions]),
        rises=np.concatenate(load_rises, axis=1),
    )


def _minus_unbucketed(problem: Problem, first_waits: Sequence[int], i: int) -> np.ndarray:
    """The negative of the live bytes of a reduction in a bucket of its own, as `buffers.rises`."""
    r = problem.reductions[i]
    buffers = ReductionBytes([r]).buffers(r.born + 1, first_waits[i])
    return rises(b._replace(bytes=-b.bytes) for b in buffers)


class LeverLoad(NamedTuple):
    """The load of some levers, which is the same for all buckets.

    Attributes:
        live: by slot, the live bytes if every message is a bucket of its own.
        seconds_before: the seconds of compute before each place.
    """

    live: np.ndarray
    seconds_before: Sequence[float]


def lever_load(problem: Problem, without_levers: np.ndarray, levers: Levers) -> LeverLoad:
    """The load of some levers. `without_levers` are the bytes that are live without them, and without what is sent."""
    buffers = problem.lever_buffers(levers)
    if _only_at_use(problem.gathers):
        dropped = problem.dropped(levers)
        buffers += _only_at_use(g for i, g in enumerate(problem.gathers) if i not in dropped)
    live = without_levers + live_by_slot(buffers, len(without_levers))
    compute = problem.compute(levers)
    if compute is problem.seconds:
        return LeverLoad(live, problem.seconds_before)
    return LeverLoad(live, tuple(accumulate(compute, initial=0.0)))


class Loads:
    """The loads of one problem's buckets and levers, each computed once.

    Attributes:
        first_waits: for each reduction, the first place at which it can be waited for.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.memory = int(min(problem.memory, UNLIMITED))
        self.second_bytes = reserved_for_second([r] for r in problem.reductions)
        starts = [r.born + 1 for r in problem.reductions]
        self.first_waits = first_waits(problem, self._without_levers(starts))
        without_levers = self._without_levers(self.first_waits)
        self._levers = functools.cache(functools.partial(lever_load, problem, without_levers))
        self._gather = functools.cache(functools.partial(gather_load, problem))
        minus_unbucketed = functools.cache(
            functools.partial(_minus_unbucketed, problem, self.first_waits)
        )
        self._reduction = functools.cache(
            functools.partial(reduction_load, problem, self.first_waits, minus_unbucketed)
        )

    def _without_levers(self, waits: Sequence[int]) -> np.ndarray:
        """By slot, the live bytes if every message is a bucket of its own and no lever is pulled.

        Gathers start at their use, and reductions are waited for at `waits`.
        """
        problem = self.problem
        buffers = [Buffer(g.bytes, 2 * g.use, 2 * g.last + 1) for g in problem.values]
        for r, wait in zip(problem.reductions, waits):
            buffers += ReductionBytes([r]).buffers(r.born + 1, wait)
        if self.second_bytes:
            buffers.append(second_buffer(problem, self.second_bytes))
        return problem.fixed_bytes + live_by_slot(buffers, len(problem.fixed_bytes))

    def bytes_unbucketed(self, levers: Levers) -> np.ndarray:
        """By slot, the live bytes with these levers if every message is a bucket of its own."""
        return self._levers(levers).live

    def of(self, choice: Choice) -> ChoiceLoad:
        """The load of a choice.

        Raises: Rejected if a bucket is not possible, or if there is not enough room.
        """
        problem = self.problem
        gathers = [self._gather(members) for members in choice.gathers]
        reductions = [self._reduction(members) for members in choice.reductions]
        if problem.gap_between_starts(load.start for load in reductions):
            raise Rejected

        # A bucket of one member adds nothing to the bytes of `levers`.
        shared_rises = [load.rises for load in gathers if len(load.members) > 1]
        shared_rises += [load.rises for load in reductions if len(load.members) > 1]
        levers = self._levers(choice.levers)
        room = self.memory - levers.live - sum_rises(shared_rises, len(levers.live))
        second_bytes = max((load.second_bytes for load in reductions), default=0)
        if second_bytes > self.second_bytes:
            room[2 * problem.births[0] :] -= second_bytes - self.second_bytes
        if room.min(initial=0) < 0:
            raise Rejected

        gathers.sort(key=lambda load: (load.use, load.release))
        reductions.sort(key=lambda load: (load.start, load.deadline))
        return ChoiceLoad(gathers, reductions, levers.seconds_before, room)


class ChoiceLoad(NamedTuple):
    """The load of a choice.

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
    """For each reduction, the first place at which it can be waited for. No reduction waits before an earlier one.

    It is the place at which the reduction starts, unless the bytes of the wait and of the updates after it do not fit
    there. An update at the beginning of backward, when most activations are live, may fit a few operations later. A
    reduction that fits nowhere is waited for where it starts.

    Args:
        problem: the reductions, and the memory.
        live_bytes: by slot, the live bytes if every message is a bucket of its own, and every reduction is waited for
            where it starts.
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
        storage = ReductionBytes([r])
        at_once = live_by_slot(storage.buffers(start, start), len(room))
        # The wait moves only if an earlier reduction is waited for later, or if it does not fit.
        if earliest > start or room[at_once > 0].min(initial=0) < 0:
            room += at_once
            waits[i] = _first_wait(storage, room, start, max(earliest, start), deadline)
            room -= live_by_slot(storage.buffers(start, waits[i]), len(room))
        earliest = waits[i]
    return waits


def _first_wait(
    storage: ReductionBytes, room: np.ndarray, start: int, earliest: int, deadline: int
) -> int:
    """The first place, from `earliest` on, where a reduction can be waited for; `earliest` if there is none."""
    # The bucket must fit at every slot before its wait.
    full = room[2 * start + 1 : 2 * deadline] < storage.under_way + storage.awaiting_bytes
    latest = deadline
    if full.any():
        latest = start + (int(full.argmax()) + 1) // 2
    places = np.arange(earliest, max(latest, earliest) + 1)
    waits_fit = room[2 * places] >= storage.at_wait(deadline) + storage.awaiting_bytes

    # The buffers that stay after its wait must fit as long as they are live.
    staying_until = max((buffer.last + 1 for buffer in storage.staying), default=0)
    staying_bytes = sum(buffer.bytes for buffer in storage.staying)
    too_full = np.flatnonzero(room[:staying_until] < staying_bytes)
    stays_fit = 2 * places + 1 > too_full.max(initial=-1)

    fits = waits_fit & stays_fit
    return int(places[fits.argmax()]) if fits.any() else earliest
