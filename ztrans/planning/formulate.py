"""formulate: build the scheduling `Problem` of a program for a given cluster.

Durations come from the cluster, and lifetimes from the program. The bytes that a schedule has live are an upper bound,
counted before its program is written. A value that an operation at a fixed place computes is live up to the last
operation at a fixed place that needs it, in every order. How long reduced values live, and what eager updates allocate,
depends on where reductions are waited for. These bytes are counted from the wait on, until the last place or wait at
which they may be needed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from itertools import chain

from ..ir.collectives import bucket_key, is_small, rules
from ..ir.copies import is_copy
from ..ir.donation import donation
from ..ir.graph import Eqn, Graph, Region, Var, producers, variables
from ..ir.layout import local_shape
from ..ir.op_facts import is_matmul
from ..ir.printer import op_name
from ..ir.rules import Sizes
from .buffers import (
    AT_START,
    AT_WAIT,
    Buffer,
    Storage,
    device_bytes,
    live_by_slot,
    local_bytes,
    storages,
)
from .cluster import Cluster
from .network import Message
from .simulate import NO_UNPACKING, UNPACKING, equation_seconds, messages, transfers
from .skeleton import Collective, Skeleton, UpdateGroup, deadlines, update_groups
from .solver.problem import Gather, Inside, Lever, Problem, Reduction, Update, Wire, gather_levers


def formulate(s: Skeleton, cluster: Cluster, budget: float, update: str | None = None) -> Problem:
    """Build the problem of placing a program's planned collectives.

    Args:
        s: the program without its planned collectives.
        cluster: the speeds, from which the durations of operations and messages follow.
        budget: the greatest number of bytes that may be live on a rank.
        update: when updates run, "eager" or "last"; by default as `overlap_grads` says.

    Raises:
        ValueError: the cluster has no link for one of the axes.
    """
    problem, groups = _framed(s, update)
    all_storages = _Storages(s, groups)
    cost = dict(zip(s.graph.eqns, equation_seconds(s.graph, cluster)))
    wires: dict[Hashable, Wire] = {}
    for gather, planned_gather in zip(problem.gathers, s.all_gathers):
        wires[gather.key] = _wire(planned_gather.start, s.sized_graph, cluster)
    for reduction, planned_reduction in zip(problem.reductions, s.reductions):
        wires[reduction.key] = _wire(planned_reduction.start, s.sized_graph, cluster)
        if reduction.again is not None and planned_reduction.second is not None:
            second = planned_reduction.second[0]
            wires[reduction.again.key] = _wire(second, s.sized_graph, cluster)
    return dataclasses.replace(
        _with_buffers(all_storages, problem),
        seconds=tuple(0.0 if e in all_storages.floating else cost[e] for e in s.ops),
        wires=wires,
        memory=budget,
        updates=tuple(Update(sum(cost[e] for e in g.eqns), g.after, g.release) for g in groups),
        fixed_messages=_fixed_messages(s, cluster),
        levers=(*gather_levers(problem.gathers), *_levers_of_parts(s, problem.gathers, cluster)),
    )


def frame(s: Skeleton, update: str | None = None) -> Problem:
    """The problem without the seconds and bytes of operations, which suffices to validate a schedule."""
    return _framed(s, update)[0]


@functools.lru_cache(maxsize=2)  # as `skeleton`
def _framed(s: Skeleton, update: str | None) -> tuple[Problem, tuple[UpdateGroup, ...]]:
    """The frame of a problem, and the equations of the update that leave their places."""
    groups = update_groups(s) if (update or s.asked_update) == "eager" else ()
    gathers = _gathers(s)
    floating = set(chain.from_iterable(group.eqns for group in groups))
    reductions = _reductions(s, floating)
    hints = s.graph.hints
    problem = Problem(
        seconds=(0.0,) * len(s.ops),
        live=(0,) * len(s.ops),
        matmul=tuple(map(is_matmul, s.ops)),
        gathers=gathers,
        reductions=reductions,
        wires={},
        max_between=float("inf") if hints.matmuls_between is None else hints.matmuls_between,
        gathers_in_flight=_limit(hints.gathers_in_flight, gathers),
        reductions_in_flight=_limit(hints.reductions_in_flight, reductions),
        updates=tuple(Update(0.0, group.after, group.release) for group in groups),
        names=s.place_names,
        levers=(*gather_levers(gathers), *_levers_of_parts(s, gathers)),
    )
    return problem, groups


def _gathers(s: Skeleton) -> tuple[Gather, ...]:
    end = len(s.ops) - 1
    makers = producers(s.graph.eqns)
    phases = _phases(s)
    gathers: list[Gather] = []
    for i, collective in enumerate(s.gathers):
        start = collective.start
        use = min(s.use[i], end)
        sources = [makers[v] for v in start.ins if v in makers]
        release = _release(s, sources, use)
        repeats = s.repeats[i]
        if repeats is not None:
            release = max(release, gathers[repeats].last + 1)
        if start.provenance is not None and start.provenance.regather == "always":
            release = max(release, phases[start.region][use])
        last = max(_last_reader(s, collective.value, end), use)
        gather = _gather(collective, s.sizes, use, last)
        gathers.append(gather._replace(release=min(release, use), repeats=repeats))
    for each in s.of_parts:
        replaced = gathers[each.instead]
        use = replaced.use
        gather = _gather(each.collective, s.sizes, use, replaced.last)
        # The part exists once the first value has been waited for.
        release = min(gathers[each.first].use + 1, use)
        gathers.append(gather._replace(release=release, instead=each.instead))
    return tuple(gathers)


def _gather(collective: Collective, sizes: Sizes, use: int, last: int) -> Gather:
    start = collective.start
    return Gather(
        bucket_key(start),
        rules(start).wire_bytes(start, sizes),
        rules(start).received_bytes(start, 0, sizes),
        use,
        last,
        small=is_small(start, 0, sizes),
        name=collective.name,
    )


def _levers_of_parts(
    s: Skeleton, gathers: Sequence[Gather], cluster: Cluster | None = None
) -> tuple[Lever, ...]:
    """For each gather of parts, the lever that sends it. Those whose parts are kept for the shortest time come first.

    The part is copied where the first value is waited for. Without a cluster, that takes no time.
    """
    first_rank = dict.fromkeys(s.sizes, 0)
    levers = []
    for i, each in enumerate(s.of_parts, len(s.gathers)):
        part = each.part[-1].out
        size = math.prod(local_shape(part, s.sizes, first_rank)) * part.dtype.itemsize
        made = gathers[each.first].use
        use = gathers[i].use
        seconds: tuple[tuple[int, float], ...] = ()
        if cluster is not None:
            device = cluster.device
            seconds = (
                (made, device.kernel_gap + device.call_overhead + 2 * size / device.bandwidth),
            )
        kept = Buffer(size, 2 * made, 2 * use)
        lever = Lever(gathers[i].name, (each.instead,), (kept,), seconds, sent=(i,))
        levers.append((use - made, lever))
    return tuple(lever for _, lever in sorted(levers, key=lambda item: item[0]))


def _release(s: Skeleton, sources: Sequence[Eqn], use: int) -> int:
    """The place from which on the results of `sources` exist, which a gather sends: operations or collectives."""
    return max((s.places[e] + 1 if e in s.places else use for e in sources), default=0)


def _last_reader(s: Skeleton, value: Var, end: int) -> int:
    """The last operation that needs the storage of a value."""
    equation_after = min(s.lifetimes.last[s.lifetimes.root[value]] + 1, len(s.graph.eqns))
    return min(s.ops_before[equation_after] - 1, end)


def _phases(s: Skeleton) -> dict[Region, list[int]]:
    """For each region and place, where the forward or backward that contains the place begins."""
    begins: dict[Region, list[int]] = {"forward": [0], "backward": [0], "update": [0]}
    for k, e in enumerate(s.ops):
        for region, places in begins.items():
            places.append(places[-1] if e.region in (region, "update") else k + 1)
    return begins


def _reductions(s: Skeleton, floating: Set[Eqn]) -> tuple[Reduction, ...]:
    axes = s.graph.axes
    size = local_bytes(s.graph)
    needs = deadlines(s, floating)
    most = s.graph.hints.bucket
    # If the user has set the size of a bucket, buckets fill in order of birth: by key, the last one and its bytes.
    filling: dict[tuple, tuple[int, int]] = {}
    reductions = []
    for i, collective in enumerate(s.reductions):
        start = collective.start
        gradient = size(start.ins[0])
        key: tuple = (*bucket_key(start), collective.second is not None)
        if most is not None:
            number, filled = filling.get(key, (0, 0))
            if filled and filled + gradient > most:
                number += 1
                filled = 0
            filling[key] = number, filled + gradient
            key = (*key, number)
        again = None
        if collective.second is not None:
            second = collective.second[0]
            again = _reduction(second, (*bucket_key(second), key), size, axes, s.born[i])
        reduction = _reduction(start, key, size, axes, s.born[i])
        reductions.append(reduction._replace(need=needs[i], name=collective.name, again=again))
    return tuple(reductions)


def _reduction(
    start: Eqn, key: tuple, size: Callable[[Var], int], axes: Sizes, born: int
) -> Reduction:
    return Reduction(
        key,
        rules(start).wire_bytes(start, axes),
        size(start.ins[0]),
        born,
        copied=not rules(start).sends_own(start, 0, axes),
        small=is_small(start, 0, axes),
    )


def _fixed_messages(s: Skeleton, cluster: Cluster) -> tuple[Message, ...]:
    """The collectives that the schedule does not place, with the places at which they are issued and waited for.

    Copies between two memories find their places after the schedule (see `place_copies`).
    """
    fixed = []
    for e, message, _ in messages(s.graph, cluster):
        if e in s.places and not is_copy(e):
            issue = s.ops_before[message.issue]
            need = s.ops_before[message.need]
            fixed.append(message._replace(issue=issue, need=need))
    return tuple(fixed)


def _wire(start: Eqn, graph: Graph, cluster: Cluster) -> Wire:
    axis = start.kwargs["axis"]
    device = cluster.device
    link = cluster.link(axis)
    kind = op_name(start.op)
    received = rules(start).wire_bytes(start, graph.axes) or 1
    *inside, last = transfers(start, axis, graph, cluster)
    paces = [level.seconds / received for level in (*inside, last)]
    latency, pace = last.latency, paces[-1]
    tree = None
    if not inside:
        (latency, pace), *others = link.ways(
            kind, cluster.weight(start, graph.axes), graph.axes[axis]
        )
        tree = others[0] if others else None
    measured_unpack = dict(link.unpack).get(kind)
    unpacked = UNPACKING.get(start.op, NO_UNPACKING).times if measured_unpack is None else 0
    if link.includes_packing and not device.gloo:
        unpacked = 0
    return Wire(
        last.lane,
        last.link,
        latency,
        pace,
        overhead=(1 if link.includes_packing else 2) * device.kernel_gap + link.overhead,
        byte_overhead=link.byte_overhead,
        unpack=measured_unpack or 0.0,
        ranks=graph.axes[axis],
        pack=0.0 if link.includes_packing else 2 / device.bandwidth,
        copy=unpacked / device.bandwidth,
        beside=not device.gloo,
        inside=Inside(*inside[0][:3], paces[0]) if inside else None,
        taken=device.taken,
        tree=tree,
    )


def _limit(hint: int | None, members: Sequence[Gather | Reduction]) -> float:
    """The limit of a transform on the bytes of collectives under way, which always allows the largest one."""
    return float("inf") if hint is None else max([hint, *(member.bytes for member in members)])


# The bytes that are live besides the planned collectives.


class _Storages:
    """The storages of a program, each by the first value that has it, and the parts of the program that need them.

    Attributes:
        floating: the equations of eager updates.
        readers: for each storage that eager updates read or write, their groups.
        group_of: for each storage that an eager update allocates after a reduction, its group.
        of_state: the storages of values that eager updates need and that depend on the state only.
        gather_of: for each result of a planned gather, the gather.
        reduction_of: for each storage of gradients, the last reduction of one of them.
        reduced: the results of planned reductions.
        fixed_until: for each storage that an operation at a fixed place needs, the place after the last one.
        sent_until: for each storage that a planned gather sends, the place of the last wait for such a gather.
        outputs: the storages of the results of the program.
    """

    def __init__(self, s: Skeleton, groups: Sequence[UpdateGroup]) -> None:
        self.s = s
        self.groups = groups
        self.donated = donation(s.graph)
        self.size = device_bytes(s.graph)
        self.outputs = {self.donated.owner[v] for v in variables(s.graph.outputs)}
        self.floating: set[Eqn] = set()
        self.readers: dict[Var, set[int]] = {}
        self.group_of: dict[Var, int] = {}
        self.of_state: set[Var] = set()
        self.gather_of: dict[Var, int] = {}
        self.reduction_of: dict[Var, int] = {}
        self.reduced: set[Var] = set()
        self.fixed_until: dict[Var, int] = {}
        self.sent_until: dict[Var, int] = {}
        self._add_updates()
        self._add_operations()
        self._add_collectives()

    def _add_updates(self) -> None:
        of_state = set(self.s.movable[1].values())
        for u, group in enumerate(self.groups):
            self.floating.update(group.eqns)
            for e in group.eqns:
                for storage in self.touched(e):
                    self.readers.setdefault(storage, set()).add(u)
                if group.after:
                    self.group_of.update((storage, u) for storage in self.allocated(e))
                if e in of_state:
                    self.of_state.update(self.allocated(e))

    def _add_operations(self) -> None:
        for k, e in enumerate(self.s.ops):
            if e not in self.floating:
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
        """Whether only the group that allocates a storage needs it."""
        if storage in self.outputs or storage in self.fixed_until or storage in self.sent_until:
            return False
        return len(self.readers[storage]) == 1

    def last_slot(self, storage: Var) -> int:
        """The last slot at which a place, a gather or a release needs a storage."""
        if storage in self.outputs:
            return 2 * len(self.s.ops) + 1
        last = max(2 * self.sent_until.get(storage, -1), 2 * self.fixed_until.get(storage, 0) - 1)
        for u in self.readers.get(storage, ()):
            last = max(last, 2 * self.groups[u].release)
        return last


def _with_buffers(all_storages: _Storages, problem: Problem) -> Problem:
    """Add to a problem what is live in every schedule, and the buffers of its reductions."""
    s = all_storages.s
    buffers: list[Buffer] = []
    of_reductions = _ReductionBuffers(all_storages)
    inputs = set(s.graph.inputs)
    for storage in storages(s.graph, all_storages.donated):
        if storage.on_host:
            continue
        if storage.value in inputs:
            buffers.append(Buffer(storage.bytes, 0, 2 * len(s.ops)))
        else:
            buffers += _fixed_buffers(all_storages, problem, storage)
        if storage.value in all_storages.reduction_of:
            latest = all_storages.reduction_of[storage.value]
            of_reductions.add_waiting(latest, _shared_bytes(problem, latest, storage))
    slots = live_by_slot(buffers, 2 * len(s.ops) + 1)
    return dataclasses.replace(
        problem,
        live=tuple(slots[1::2].tolist()),
        live_at_places=tuple(slots[::2].tolist()),
        reductions=of_reductions.added_to(problem.reductions),
    )


def _fixed_buffers(all_storages: _Storages, problem: Problem, storage: Storage) -> Iterator[Buffer]:
    """The slots during which a storage that the program allocates is live in every order."""
    s = all_storages.s
    v = storage.value
    count = len(s.ops)

    def between(first: int, end: int, through_place: bool = False) -> Iterator[Buffer]:
        """From operation `first` to the one before place `end`, or through that place."""
        if first < end:
            last = 2 * end if through_place or end == count else 2 * end - 1
            yield Buffer(storage.bytes, 2 * first + 1, last)

    first = s.ops_before[storage.first]
    end = s.ops_before[storage.last + 1]
    if v in all_storages.of_state:
        # It is computed at its place, or before that by the first group that needs it.
        early = first if v in all_storages.group_of else min(first, s.born[0] + 1)
        yield from between(early, count)
    elif v in all_storages.gather_of:
        # Up to its last planned use the value counts with its gather. Views and results in place may live longer.
        i = all_storages.gather_of[v]
        freed = max(problem.gathers[i].last + 1, first)
        # A result that overwrites the value needs memory of its own if the value is kept for a later gather.
        apart = end > freed and any(g.repeats == i for g in problem.gathers)
        yield from between(freed - apart, max(freed, end))
    elif v in all_storages.reduction_of:
        # From its birth to its wait a gradient counts with its reduction.
        latest = all_storages.reduction_of[v]
        born = s.born[latest]
        if _shared_bytes(problem, latest, storage):
            yield from between(first, born + 1, through_place=True)
        else:
            yield from between(first, born, through_place=True)
        yield from between(born + 1, all_storages.fixed_until.get(v, 0))
    elif v not in all_storages.group_of and v not in all_storages.reduced:
        # The others count with the reduction after which they are allocated.
        last_send = all_storages.sent_until.get(v, -1)
        last = count if v in all_storages.readers else max(end, last_send)
        yield from between(first, last, through_place=last_send >= end)


def _shared_bytes(problem: Problem, latest: int, storage: Storage) -> int:
    """The bytes of other gradients in the storage of a gradient, which its reduction does not count."""
    return max(storage.bytes - problem.reductions[latest].bytes, 0)


class _ReductionBuffers:
    """What reductions send and receive, their results, and what the updates after them allocate, by reduction."""

    def __init__(self, all_storages: _Storages) -> None:
        self.all_storages = all_storages
        self.born = all_storages.s.born
        self.collectives = all_storages.s.reductions
        self.buffers: list[list[Buffer]] = [[] for _ in self.collectives]
        self.temporaries: list[list[tuple[int, int]]] = [[] for _ in self.collectives]
        self.second = [0 for _ in self.collectives]

    def added_to(self, reductions: Sequence[Reduction]) -> tuple[Reduction, ...]:
        """The reductions with all these bytes."""
        all_storages = self.all_storages
        for i in range(len(reductions)):
            self._add_transfer(i)
        for storage, u in all_storages.group_of.items():
            if not all_storages.is_temporary(storage):
                latest = max(all_storages.groups[u].after)
                self._add_result(latest, storage, all_storages.size(storage))
        for group in all_storages.groups:
            if group.after:
                self._add_temporaries(group)
        with_bytes = []
        for i, reduction in enumerate(reductions):
            buffers = tuple(self.buffers[i])
            temporaries = tuple(self.temporaries[i])
            with_bytes.append(
                reduction._replace(buffers=buffers, temporaries=temporaries, second=self.second[i])
            )
        return tuple(with_bytes)

    def add_waiting(self, i: int, size: int) -> None:
        """Add bytes that are live from the first place where reduction `i` can be waited for until its wait."""
        if size:
            self.buffers[i].append(Buffer(size, 2 * self.born[i] + 2, AT_WAIT))

    def _add_transfer(self, i: int) -> None:
        """Add what reduction `i` sends and receives, and its result, which may stay in the receive buffer."""
        s = self.all_storages.s
        axes = s.graph.axes
        collective = self.collectives[i]
        storage = self.all_storages.donated.owner[collective.value]
        sent_bytes = rules(collective.start).sent_bytes(collective.start, axes)
        received, result, in_buffer = self._received(collective.start, collective.wait)
        if sent_bytes:
            self.buffers[i].append(Buffer(sent_bytes, AT_START, AT_WAIT))
        if collective.second is None and in_buffer:
            self._add_result(i, storage, received, AT_START)
            return
        self.buffers[i].append(Buffer(received, AT_START, AT_WAIT))
        if collective.second is not None:
            start, wait = collective.second
            received_again, final, _ = self._received(start, wait)
            self.second[i] += result + rules(start).sent_bytes(start, axes) + received_again
            result = final
        self._add_result(i, storage, result)

    def _received(self, start: Eqn, wait: Eqn) -> tuple[int, int, bool]:
        """The bytes that a reduction receives, those of its result, and whether the result is where it was received."""
        received = rules(start).received_bytes(start, 0, self.all_storages.s.graph.axes)
        in_buffer = self.all_storages.s.lifetimes.root[wait.out] is not wait.out
        return received, received if in_buffer else self.all_storages.size(wait.out), in_buffer

    def _add_result(self, i: int, storage: Var, size: int, first: int = AT_WAIT) -> None:
        """Add a storage that exists after the wait for reduction `i`.

        An update that needs it may need later reductions too. Then the storage counts as a result up to the first place
        where such a reduction can be waited for, and from there on with that reduction.
        """
        all_storages = self.all_storages
        groups = [all_storages.groups[u] for u in all_storages.readers.get(storage, ())]
        later_reductions = {max(group.after, default=i) for group in groups} - {i}
        last = all_storages.last_slot(storage)
        for later in later_reductions:
            last = max(last, 2 * self.born[later] + 1)
            self.add_waiting(later, size)
            if self.collectives[later].second:
                self.second[later] += size
        self.buffers[i].append(Buffer(size, first, last))

    def _add_temporaries(self, group: UpdateGroup) -> None:
        """Add the most bytes of temporaries that the equations of a group have live at once."""
        all_storages = self.all_storages
        latest = max(group.after)
        last: dict[Var, int] = {}  # for each storage, the last equation of the group that needs it
        for i, e in enumerate(group.eqns):
            last.update(dict.fromkeys(all_storages.touched(e), i))
        total = 0
        most = 0
        for i, e in enumerate(group.eqns):
            allocated = [v for v in all_storages.allocated(e) if all_storages.is_temporary(v)]
            total += sum(map(all_storages.size, allocated))
            most = max(most, total)
            for v in all_storages.touched(e):
                if v in all_storages.group_of and last[v] == i and all_storages.is_temporary(v):
                    total -= all_storages.size(v)
        self.temporaries[latest].append((group.release, most))
        if self.collectives[latest].second:
            self.second[latest] += most
