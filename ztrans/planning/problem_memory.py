"""Count the bytes that are live in every schedule of a problem, and the buffers of its reductions.

They are an upper bound, counted before the program of a schedule is written. A value that an operation at a fixed place
computes is live, in every order, up to the last operation at a fixed place that needs it. How long reduced values live,
and what eager updates allocate, depends on where reductions are waited for: these bytes count from the wait to the last
place or wait at which they may be needed.

Slots are those of `buffers`: 2k is place k, 2k + 1 is operation k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ..ir.collectives import rules
from ..ir.donation import donation
from ..ir.graph import Eqn, Var, variables
from .buffers import (
    AT_START,
    AT_WAIT,
    Buffer,
    Storage,
    by_memory,
    device_bytes,
    live_by_slot,
    storages,
)
from .eager_updates import EagerGroup, movable_eqns
from .skeleton import Skeleton
from .solver.problem import Problem, Reduction


def with_memory(
    s: Skeleton, groups: Sequence[EagerGroup], problem: Problem, least: bool = False
) -> Problem:
    """The problem with the bytes that are live in every schedule, and the buffers of its reductions.

    Args:
        s: the program without an order.
        groups: its eager updates.
        problem: the problem without bytes.
        least: for a bound. Alone, a gathered value stays in its message, with padding, and results may overwrite it
            there. In a bucket it is copied out, and if it is kept, such results have memory of their own: no padding.
    """
    uses = _StorageUses(s, groups)
    if least:
        sizes = (uses.size(gather.wait.out) for gather in s.gathers)
        gathers = (g._replace(bytes=min(g.bytes, size)) for g, size in zip(problem.gathers, sizes))
        problem = dataclasses.replace(problem, gathers=tuple(gathers))
    reduction_buffers = _ReductionBuffers(uses)
    buffers: list[Buffer] = []
    inputs = set(s.graph.inputs)
    for storage in by_memory(storages(s.graph, uses.donated))["device"]:
        if storage.value in inputs:
            buffers.append(Buffer(storage.bytes, 0, 2 * len(s.ops)))  # the caller's, throughout
        else:
            if least and storage.value in uses.gather_of:
                value_bytes = problem.gathers[uses.gather_of[storage.value]].bytes
                storage = storage._replace(bytes=min(storage.bytes, value_bytes))
            buffers += _fixed_buffers(uses, problem, storage)

        # Gradients that share a storage are freed together, after the last of their reductions.
        if storage.value in uses.reduction_of:
            latest = uses.reduction_of[storage.value]
            reduction_buffers.add_until_wait(latest, _shared_bytes(problem, latest, storage))

    slots = live_by_slot(buffers, 2 * len(s.ops) + 1)
    return dataclasses.replace(
        problem,
        live=tuple(slots[1::2].tolist()),
        live_at_places=tuple(slots[::2].tolist()),
        reductions=reduction_buffers.added_to(problem.reductions),
    )


class _StorageUses:
    """The parts of a program that need each storage; storages are named by the first value that has them.

    Attributes:
        needed_by: for each storage that eager updates read or write, their groups.
        group_of: for each storage that an eager update allocates after a reduction, the group of that update.
        state_only: the storages that eager updates allocate for values that depend on the state only.
        gather_of: for each result of a planned gather, the gather.
        reduction_of: for each storage of gradients, the last reduction of one of them.
        reduced: the results of planned reductions.
        fixed_until: for each storage that an operation at a fixed place needs, the place after the last one.
        sent_until: for each storage that a planned gather sends, the place of the last wait for such a gather.
        outputs: the storages of the results of the program.
    """

    def __init__(self, s: Skeleton, groups: Sequence[EagerGroup]) -> None:
        self.s = s
        self.groups = groups
        self.donated = donation(s.graph)
        self.size = device_bytes(s.graph)
        self.outputs = {self.donated.owner[v] for v in variables(s.graph.outputs)}
        self.needed_by: dict[Var, set[int]] = {}
        self.group_of: dict[Var, int] = {}
        self.state_only: set[Var] = set()
        self.gather_of: dict[Var, int] = {}
        self.reduction_of: dict[Var, int] = {}
        self.reduced: set[Var] = set()
        self.fixed_until: dict[Var, int] = {}
        self.sent_until: dict[Var, int] = {}
        self._add_updates_and_operations()
        self._add_collectives()

    def _add_updates_and_operations(self) -> None:
        floating: set[Eqn] = set()
        state_only_eqns = set(movable_eqns(self.s).state_only.values())
        for u, group in enumerate(self.groups):
            floating.update(group.eqns)
            for e in group.eqns:
                for storage in self.touched(e):
                    self.needed_by.setdefault(storage, set()).add(u)
                if group.after:
                    self.group_of.update((storage, u) for storage in self.allocated(e))
                if e in state_only_eqns:
                    self.state_only.update(self.allocated(e))
        for k, e in enumerate(self.s.ops):
            if e not in floating:
                self.fixed_until.update((storage, k + 1) for storage in self.touched(e))

    def _add_collectives(self) -> None:
        owner = self.donated.owner
        for i, (gather, use) in enumerate(zip(self.s.gathers, self.s.use)):
            self.sent_until[owner[gather.start.ins[0]]] = use
            self.gather_of[gather.start.out] = i
            self.gather_of[gather.wait.out] = i
        for i, reduction in enumerate(self.s.reductions):
            self.reduction_of[owner[reduction.start.ins[0]]] = i
            self.reduced.update(e.out for e in reduction.eqns)

    def touched(self, e: Eqn) -> set[Var]:
        """The storages that an equation reads or writes."""
        return {self.donated.owner[v] for v in (*e.ins, *e.results)}

    def allocated(self, e: Eqn) -> list[Var]:
        """The storages that an equation allocates."""
        return [v for v in e.results if self.donated.owner[v] is v]

    def is_temporary(self, storage: Var) -> bool:
        """Whether only the group that allocates a storage needs it, so that it is live only while that group runs."""
        if storage in self.outputs or storage in self.fixed_until or storage in self.sent_until:
            return False
        return len(self.needed_by[storage]) == 1

    def last_slot(self, storage: Var) -> int:
        """The last slot at which an operation at a fixed place, a gather or a released update needs a storage."""
        if storage in self.outputs:
            return 2 * len(self.s.ops) + 1
        last = max(2 * self.sent_until.get(storage, -1), 2 * self.fixed_until.get(storage, 0) - 1)
        for u in self.needed_by.get(storage, ()):
            last = max(last, 2 * self.groups[u].release)
        return last


# What is live in every schedule.


def _fixed_buffers(uses: _StorageUses, problem: Problem, storage: Storage) -> Iterator[Buffer]:
    """The buffers of a storage that the program allocates, for the slots at which it is live in every order."""
    s = uses.s
    v = storage.value
    count = len(s.ops)

    def between(first: int, end: int, through_place: bool = False) -> Iterator[Buffer]:
        """From operation `first` to the one before place `end`, or through that place."""
        if first < end:
            last = 2 * end if through_place or end == count else 2 * end - 1
            yield Buffer(storage.bytes, 2 * first + 1, last)

    first = s.ops_before[storage.first]
    end = s.ops_before[storage.last + 1]
    if v in uses.state_only and v.future and v in uses.group_of and uses.is_temporary(v):
        pass  # a copy of a leaf to the device: it counts with the temporaries of its update
    elif v in uses.state_only:
        # It is computed at its place, or before that by the first group that needs it.
        early = first if v in uses.group_of else min(first, s.born[0] + 1)
        yield from between(early, count)
    elif v in uses.gather_of:
        # Up to its last planned use, the value counts with its gather. Views and results in place may live longer.
        i = uses.gather_of[v]
        freed = max(problem.gathers[i].last + 1, first)
        begin = freed
        if end > freed and any(g.repeats == i for g in problem.gathers):
            # If the value is kept for a later gather, the result that overwrites it needs memory of its own.
            begin = freed - 1
        yield from between(begin, end)
    elif v in uses.reduction_of:
        # From its birth to its wait, a gradient counts with its reduction.
        latest = uses.reduction_of[v]
        born = s.born[latest]
        # Other gradients in the storage count with that reduction, but only from the place after this birth on.
        counted = born + 1 if _shared_bytes(problem, latest, storage) else born
        yield from between(first, counted, through_place=True)
        yield from between(born + 1, uses.fixed_until.get(v, 0))
    elif v not in uses.group_of and v not in uses.reduced:
        # Storages of updates and reduced values count with the reduction after which they are allocated.
        last_send = uses.sent_until.get(v, -1)
        last = count if v in uses.needed_by else max(end, last_send)
        yield from between(first, last, through_place=last_send >= end)


def _shared_bytes(problem: Problem, latest: int, storage: Storage) -> int:
    """The bytes of the other gradients in the storage of a gradient, which its reduction does not count."""
    return max(storage.bytes - problem.reductions[latest].bytes, 0)


# What depends on where reductions are waited for.


class _ReductionBuffers:
    """The buffers of each reduction: sent and received bytes, the result, and allocations of the updates after it."""

    def __init__(self, uses: _StorageUses) -> None:
        self.uses = uses
        self.born = uses.s.born
        self.collectives = uses.s.reductions
        self.buffers: list[list[Buffer]] = [[] for _ in self.collectives]
        self.temporaries: list[list[tuple[int, int]]] = [[] for _ in self.collectives]
        self.second_bytes = [0 for _ in self.collectives]

    def added_to(self, reductions: Sequence[Reduction]) -> tuple[Reduction, ...]:
        """The reductions with all these bytes."""
        uses = self.uses
        for i in range(len(reductions)):
            self._add_transfer(i)
        for storage, u in uses.group_of.items():
            if not uses.is_temporary(storage):
                latest = max(uses.groups[u].after)
                self._add_result(latest, storage, uses.size(storage))
        for group in uses.groups:
            if group.after:
                self._add_temporaries(group)

        with_bytes = []
        for i, reduction in enumerate(reductions):
            with_bytes.append(
                reduction._replace(
                    buffers=tuple(self.buffers[i]),
                    temporaries=tuple(self.temporaries[i]),
                    second_bytes=self.second_bytes[i],
                )
            )
        return tuple(with_bytes)

    def add_until_wait(self, i: int, size: int) -> None:
        """Add bytes that are live from the first place where reduction `i` can be waited for until its wait."""
        if size:
            self.buffers[i].append(Buffer(size, 2 * self.born[i] + 2, AT_WAIT))

    def _add_transfer(self, i: int) -> None:
        """Add what reduction `i` sends and receives, and its result, which may stay in the receive buffer."""
        axes = self.uses.s.graph.axes
        collective = self.collectives[i]
        storage = self.uses.donated.owner[collective.value]
        sent_bytes = rules(collective.start).sent_bytes(collective.start, axes)
        received, result, in_buffer = self._received_bytes(collective.start, collective.wait)
        if sent_bytes:
            self.buffers[i].append(Buffer(sent_bytes, AT_START, AT_WAIT))
        if collective.second is None and in_buffer:
            self._add_result(i, storage, received, AT_START)
            return

        # The wait copies the result out of the receive buffer. A second reduction sends that result at once, and
        # memory is reserved for one of them, because at most one is under way between two waits.
        self.buffers[i].append(Buffer(received, AT_START, AT_WAIT))
        if collective.second is not None:
            start, wait = collective.second
            second_received, second_result, _ = self._received_bytes(start, wait)
            second_sent = rules(start).sent_bytes(start, axes)
            self.second_bytes[i] += result + second_sent + second_received
            result = second_result
        self._add_result(i, storage, result)

    def _received_bytes(self, start: Eqn, wait: Eqn) -> tuple[int, int, bool]:
        """The bytes that a reduction receives, the bytes of its result, and whether that is in the receive buffer."""
        received = rules(start).received_bytes(start, 0, self.uses.s.graph.axes)
        in_buffer = self.uses.s.lifetimes.root[wait.out] is not wait.out
        result = received if in_buffer else self.uses.size(wait.out)
        return received, result, in_buffer

    def _add_result(self, i: int, storage: Var, size: int, first: int = AT_WAIT) -> None:
        """Add a storage that exists after the wait for reduction `i`.

        An update that needs it may need later reductions too. Then the storage counts with reduction `i` up to the
        first place where such a reduction can be waited for, and from there on with that reduction. A storage that the
        program returns counts with reduction `i` to the end.
        """
        if storage in self.uses.outputs:
            self.buffers[i].append(Buffer(size, first, self.uses.last_slot(storage)))
            return
        groups = [self.uses.groups[u] for u in self.uses.needed_by.get(storage, ())]
        later_reductions = {max(group.after, default=i) for group in groups} - {i}
        last = self.uses.last_slot(storage)
        for later in later_reductions:
            last = max(last, 2 * self.born[later] + 1)
            self.add_until_wait(later, size)
            if self.collectives[later].second:
                self.second_bytes[later] += size
        self.buffers[i].append(Buffer(size, first, last))

    def _add_temporaries(self, group: EagerGroup) -> None:
        """Add the peak bytes of the temporaries of a group."""
        uses = self.uses
        latest = max(group.after)
        # For each storage, the last equation of the group that needs it.
        last_use: dict[Var, int] = {}
        for i, e in enumerate(group.eqns):
            last_use.update(dict.fromkeys(uses.touched(e), i))

        live = 0
        peak = 0
        for i, e in enumerate(group.eqns):
            for v in uses.allocated(e):
                if uses.is_temporary(v):
                    live += uses.size(v)
            peak = max(peak, live)
            for v in uses.touched(e):
                if v in uses.group_of and last_use[v] == i and uses.is_temporary(v):
                    live -= uses.size(v)

        self.temporaries[latest].append((group.release, peak))
        if self.collectives[latest].second:
            self.second_bytes[latest] += peak
