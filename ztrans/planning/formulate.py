"""Build the scheduling `Problem` of a program on a cluster.

The skeleton has the places between which a collective may start and be waited for. Durations follow from the cluster.
`problem_memory` counts the bytes that are live in addition to the planned collectives.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from itertools import chain

from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import bucket_key, is_small, rules
from ..ir.copies import is_copy, other_memory
from ..ir.dependencies import grouped
from ..ir.graph import Eqn, Graph, Region, Var, producers
from ..ir.layout import bytes_on_first_rank
from ..ir.op_facts import is_matmul
from ..ir.rules import Sizes
from ..ir.structure import structure
from ..rewrites.update_groups import group_updates, may_change_places, may_share_call
from .buffers import local_bytes
from .cluster import Cluster
from .cost import launches, memory_traffic
from .devices import Device
from .durations import (
    equation_seconds,
    messages,
    product_share,
    shared_launch_seconds,
    signature,
    transfers,
)
from .eager_updates import EagerGroup, eager_groups
from .levers import ProgramLever, all_gathers, program_levers, with_all_axes
from .network import Message
from .problem_memory import with_memory
from .skeleton import Collective, Skeleton
from .solver.problem import Coding, Gather, Inside, Lever, Problem, Reduction, Update, Wire


def formulate(
    s: Skeleton,
    cluster: Cluster,
    budget: float,
    update: str | None = None,
    least: bool = False,
) -> Problem:
    """Build the problem of placing a program's planned collectives.

    Args:
        s: the program without its planned collectives.
        cluster: the speeds of devices and links.
        budget: the greatest number of bytes that may be live on a rank.
        update: when updates run, "eager" or "last"; by default as `overlap_grads` says.
        least: for a bound: with the least bytes and seconds that the program has in any order.

    Raises:
        ValueError: the cluster has no link for one of the axes.
    """
    problem, groups = _frame_and_groups(s, update)
    duration = dict(zip(s.graph.eqns, equation_seconds(s.graph, cluster)))
    # Floating equations have no place of their own: their updates take the seconds.
    floating = _floating(groups)
    problem = dataclasses.replace(
        with_memory(s, groups, problem, least),
        seconds=tuple(0.0 if e in floating else duration[e] for e in s.ops),
        wires=_wires(s, problem, cluster),
        memory=budget,
        updates=_updates(s, cluster, groups, duration),
        fixed_messages=_fixed_messages(s, cluster),
        levers=_levers(s, cluster),
    )
    return _with_least_seconds(problem, s, cluster) if least else problem


def frame(s: Skeleton, update: str | None = None) -> Problem:
    """The problem without the seconds and bytes of operations, which is enough to validate a schedule."""
    return _frame_and_groups(s, update)[0]


@cached_on_graph
def _frame_and_groups(s: Skeleton, update: str | None) -> tuple[Problem, tuple[EagerGroup, ...]]:
    """The frame of a problem, and the equations of the update that leave their places."""
    groups = eager_groups(s) if (update or s.asked_update) == "eager" else ()
    gathers = _gathers(s)
    reductions = _reductions(s, _floating(groups))
    hints = s.graph.hints
    problem = Problem(
        seconds=(0.0,) * len(s.ops),
        live=(0,) * len(s.ops),
        matmul=tuple(map(is_matmul, s.ops)),
        gathers=gathers,
        reductions=reductions,
        wires={},
        max_between=float("inf") if hints.matmuls_between is None else hints.matmuls_between,
        gathers_in_flight=_most_in_flight(hints.gathers_in_flight, gathers),
        reductions_in_flight=_most_in_flight(hints.reductions_in_flight, reductions),
        updates=tuple(Update(0.0, group.after, group.release) for group in groups),
        names=s.place_names,
        levers=_levers(s),
    )
    return problem, groups


def _updates(
    s: Skeleton, cluster: Cluster, groups: Sequence[EagerGroup], duration: Mapping[Eqn, float]
) -> tuple[Update, ...]:
    """The updates of a problem, one for each group of floating equations.

    Equal updates that run at one place share a launch, which the first of them makes. If one of them stays at its
    place, all have the durations that they have in the skeleton.
    """
    if not groups:
        return ()
    # Measured durations contain their launches.
    launch_of = {} if cluster.measured else _shared_launches(s, groups)
    skeleton_launches = launches(s.graph)
    updates = []
    for group in groups:
        seconds = 0.0
        launch_seconds: dict[int, float] = {}
        for e in group.eqns:
            seconds += duration[e]
            if e in launch_of:
                shared_seconds = shared_launch_seconds(e, s.graph, cluster)
                launch_seconds.setdefault(launch_of[e], shared_seconds)
                if skeleton_launches[e].kernels:
                    seconds -= shared_seconds  # the duration in the skeleton contains it
        updates.append(Update(seconds, group.after, group.release, tuple(launch_seconds.items())))
    return tuple(updates)


def _shared_launches(s: Skeleton, groups: Sequence[EagerGroup]) -> dict[Eqn, int]:
    """For each floating equation, the number of the launch that it shares with equal ones at the same place."""
    floating = _floating(groups)
    # Collectives separate equal updates in the skeleton, but a schedule may run them together.
    updates_only = s.graph.replace(eqns=tuple(filter(may_change_places, s.graph.eqns)))
    launch_of: dict[Eqn, int] = {}
    for number, equal_eqns in enumerate(group_updates(updates_only)[1]):
        if floating.issuperset(equal_eqns):
            launch_of.update(dict.fromkeys(equal_eqns, number))
    return launch_of


def _floating(groups: Sequence[EagerGroup]) -> set[Eqn]:
    """The equations that leave their places (see `eager_updates`)."""
    return set(chain.from_iterable(group.eqns for group in groups))


def _most_in_flight(hint: int | None, members: Sequence[Gather | Reduction]) -> float:
    """The most bytes of collectives under way, from the hint of a transform. The largest collective always fits."""
    if hint is None:
        return float("inf")
    return max([hint, *(member.bytes for member in members)])


# Gathers, and the levers that drop them.


def _gathers(s: Skeleton) -> tuple[Gather, ...]:
    makers = producers(s.graph.eqns)
    phase_begins = _phase_begins(s)
    gathers: list[Gather] = []
    for i, collective in enumerate(s.gathers):
        start = collective.start
        use, last = s.spans[i]
        first = collective.arrival[0] if collective.arrival else start
        sources = [makers[v] for v in first.ins if v in makers]
        release = _release(s, sources, use)
        repeats = s.repeats[i]
        if repeats is not None:
            # Until then the earlier value is live.
            release = max(release, gathers[repeats].last + 1)
        if start.provenance is not None and start.provenance.regather == "always":
            # The user wants the memory back between forward and backward.
            release = max(release, phase_begins[start.region][use])
        gather = _gather(collective, s.graph.axes, use, last)
        gathers.append(gather._replace(release=min(release, use), repeats=repeats))

    # Gathers that only levers send come after all others.
    sizes = with_all_axes(s).axes
    lever_of = {gather: lever for lever in program_levers(s) for gather in lever.sends}
    for collective in all_gathers(s)[len(gathers) :]:
        lever = lever_of[collective]
        dropped = gathers[lever.drops]
        gather = _gather(collective, sizes, dropped.use, dropped.last)
        # The equations of the lever may make what the gather sends.
        made_at = {v: operation for operation, e in lever.eqns for v in e.results}
        places = [made_at[v] + 1 for v in collective.start.ins if v in made_at]
        release = min(max(places, default=dropped.release), dropped.use)
        gathers.append(gather._replace(release=release))
    return tuple(gathers)


def _gather(collective: Collective, sizes: Sizes, use: int, last: int) -> Gather:
    start = collective.start
    coding = _coding(start, sizes)
    codes = rules(start).received_bytes(start, 0, sizes) + rules(start).sent_bytes(start, sizes)
    return Gather(
        key=collective.key,
        wire=rules(start).wire_bytes(start, sizes),
        bytes=rules(start).value_bytes(start, 0, sizes),
        codes=codes if coding.decoded else 0,
        coding=coding,
        use=use,
        last=last,
        arriving=bytes_on_first_rank(start.ins[0], sizes) if collective.arrival else 0,
        small=is_small(start, 0, sizes),
        name=collective.name,
    )


def with_arrivals(problem: Problem, s: Skeleton, cluster: Cluster) -> Problem:
    """The problem whose gathers start where their shards can have arrived from the host, one copy after the other.

    A bound must not know these places: compute may reach them later, with more shards on the device.
    """
    arrived_at = 0.0
    gathers = list(problem.gathers)
    for i, collective in enumerate(s.gathers):
        if collective.arrival is None:
            continue
        copy = collective.arrival[0]
        arrived_at += sum(cluster.tiers[other_memory(copy)].copy_seconds(gathers[i].arriving))
        place = bisect_left(problem.clock, arrived_at)
        release = min(max(gathers[i].release, place), gathers[i].use)
        gathers[i] = gathers[i]._replace(release=release)
    return dataclasses.replace(problem, gathers=tuple(gathers))


def _with_least_seconds(problem: Problem, s: Skeleton, cluster: Cluster) -> Problem:
    """The problem whose operations take the least seconds of all placements of copies.

    Copies that stand between equal updates in the skeleton can be placed around them (see `place_copies`).
    """
    if not any(map(is_copy, s.graph.eqns)):
        return problem
    duration = _least_seconds(s, cluster)
    groups = eager_groups(s) if problem.updates else ()
    floating = _floating(groups)
    updates = []
    for update, group in zip(problem.updates, groups):
        seconds = sum(duration[e] for e in group.eqns)
        updates.append(update._replace(seconds=seconds, launches=()))
    return dataclasses.replace(
        problem,
        seconds=tuple(0.0 if e in floating else duration[e] for e in s.ops),
        updates=tuple(updates),
    )


def _least_seconds(s: Skeleton, cluster: Cluster) -> dict[Eqn, float]:
    """The least seconds of each equation: updates that some order computes in one call have one launch.

    Which updates are equal depends on the updates next to them. So all updates with the same operation and literals, on
    arguments of the same types, count as equal. A leaf that is copied to the device again may have stayed there.
    """
    duration = dict(zip(s.graph.eqns, equation_seconds(s.graph, cluster)))
    skeleton_launches = launches(s.graph)
    measured_seconds = dict(cluster.measured)
    arrivals = [e for e in s.graph.eqns if is_copy(e) and e.out.memory == "device"]
    times_copied = Counter(e.ins[0] for e in arrivals)
    for e in arrivals:
        if times_copied[e.ins[0]] > 1:
            duration[e] = 0.0

    first: dict[Hashable, Eqn] = {}
    least_launch: dict[Hashable, float] = {}
    for e in s.ops:
        if not may_share_call(e) or not skeleton_launches[e].kernels:
            continue
        if measured_seconds and signature(e, s.graph) in measured_seconds:
            continue
        call = structure(e, lambda v: (v.dtype, not v.shape))
        launch_seconds = shared_launch_seconds(e, s.graph, cluster)
        duration[e] -= launch_seconds
        first.setdefault(call, e)
        least_launch[call] = min(launch_seconds, least_launch.get(call, launch_seconds))
    for call, e in first.items():
        duration[e] += least_launch[call]
    return duration


def _release(s: Skeleton, sources: Sequence[Eqn], use: int) -> int:
    """The first place at which a gather can send the results of `sources`, which are operations or collectives."""
    release = 0
    for e in sources:
        release = max(release, s.places[e] + 1 if e in s.places else use)
    return release


def _phase_begins(s: Skeleton) -> dict[Region, list[int]]:
    """For each region, the beginning of the phase of that region around each place."""
    begins: dict[Region, list[int]] = {"forward": [0], "backward": [0], "update": [0]}
    for k, e in enumerate(s.ops):
        for region, places in begins.items():
            # An equation of the update does not end the phase around it.
            continues = e.region in (region, "update")
            places.append(places[-1] if continues else k + 1)
    return begins


def _levers(s: Skeleton, cluster: Cluster | None = None) -> tuple[Lever, ...]:
    """The levers of a problem. Without a cluster, their equations take no time."""
    numbers = {gather: i for i, gather in enumerate(all_gathers(s))}
    levers = []
    for lever in program_levers(s):
        compute: tuple[tuple[int, float], ...] = ()
        if cluster is not None:
            compute = _lever_seconds(lever, with_all_axes(s), cluster.device)
        sends = tuple(numbers[gather] for gather in lever.sends)
        levers.append(Lever(lever.kind, lever.name, lever.drops, sends, lever.buffers, compute))
    return tuple(levers)


def _lever_seconds(
    lever: ProgramLever, graph: Graph, device: Device
) -> tuple[tuple[int, float], ...]:
    """The seconds of the equations of a lever, by the operation before which they run. They count as copies."""
    by_operation = []
    for operation, eqns in grouped(lever.eqns).items():
        overhead = 0.0
        traffic = 0
        for e in eqns:
            if rules(e).shares_storage(e):
                overhead += device.call_overhead
            else:
                overhead += device.kernel_gap
                traffic += memory_traffic(e, graph)
        by_operation.append((operation, overhead + traffic / device.bandwidth))
    return tuple(by_operation)


# Reductions.


def _reductions(s: Skeleton, floating: Set[Eqn]) -> tuple[Reduction, ...]:
    axes = s.graph.axes
    size = local_bytes(s.graph)
    last_waits = _last_waits(s, floating)
    bucket_bytes = s.graph.hints.bucket
    # If the user has set the size of a bucket, buckets fill in order of birth.
    last_bucket: dict[tuple, tuple[int, int]] = {}  # by key, its number and bytes
    reductions = []
    for i, collective in enumerate(s.reductions):
        start = collective.start
        gradient = size(start.ins[0])
        # Members of a bucket share both of its messages.
        second_bucket = collective.second and bucket_key(collective.second[0])
        key: tuple = (collective.key, second_bucket)
        if bucket_bytes is not None:
            number, filled = last_bucket.get(key, (0, 0))
            if filled and filled + gradient > bucket_bytes:
                number += 1
                filled = 0
            last_bucket[key] = number, filled + gradient
            key = (*key, number)

        second = None
        if collective.second is not None:
            second_start = collective.second[0]
            second_key = (*bucket_key(second_start), key)
            second = _reduction(second_start, second_key, size, axes, s.born[i])
        reduction = _reduction(start, key, size, axes, s.born[i])
        reductions.append(
            reduction._replace(deadline=last_waits[i], name=collective.name, second=second)
        )
    return tuple(reductions)


def _last_waits(s: Skeleton, floating: Set[Eqn]) -> list[int]:
    """The last place to wait for each reduction.

    It is the place of the first operation that needs the result, moved back over floating equations right before it,
    because they run after the wait; but never before the start of the reduction.
    """
    # For each place, where the floating equations right before it begin.
    moved_back = [0]
    for k, e in enumerate(s.ops):
        moved_back.append(moved_back[k] if e in floating else k + 1)
    places = []
    for born, need in zip(s.born, s.need):
        start = min(born + 1, need)
        places.append(max(moved_back[need], start))
    return places


def _reduction(
    start: Eqn, key: tuple, size: Callable[[Var], int], axes: Sizes, born: int
) -> Reduction:
    coding = _coding(start, axes)
    return Reduction(
        key,
        wire=rules(start).wire_bytes(start, axes),
        bytes=size(start.ins[0]),
        born=born,
        copied=not rules(start).sends_without_copy(start, 0, axes),
        decoded=rules(start).value_bytes(start, 0, axes) if coding.decoded else 0,
        coding=coding,
        small=is_small(start, 0, axes),
    )


def _coding(start: Eqn, sizes: Sizes) -> Coding:
    """The traffic of encoding and decoding the one member of a collective; none if it is sent in a dtype."""
    return Coding(rules(start).encoding(start, sizes), rules(start).decoding(start, sizes))


# How messages travel.


def _fixed_messages(s: Skeleton, cluster: Cluster) -> tuple[Message, ...]:
    """The messages that no schedule moves, with the places at which they are issued and waited for.

    Copies between two memories are not among them: they are placed after the schedule (see `place_copies`).
    """
    fixed = []
    for e, message, _ in messages(s.graph, cluster):
        if e in s.places and not is_copy(e):
            issue = s.ops_before[message.issue]
            need = s.ops_before[message.need]
            fixed.append(message._replace(issue=issue, need=need))
    return tuple(fixed)


def _wires(s: Skeleton, problem: Problem, cluster: Cluster) -> dict[Hashable, Wire]:
    """How the messages of each key travel."""
    wires: dict[Hashable, Wire] = {}
    share_of_products = product_share(s.graph, equation_seconds(s.graph, cluster))

    def wire(start: Eqn) -> Wire:
        return _wire(start, with_all_axes(s), cluster, share_of_products)

    for gather, planned_gather in zip(problem.gathers, all_gathers(s)):
        wires[gather.key] = wire(planned_gather.start)
    for reduction, planned_reduction in zip(problem.reductions, s.reductions):
        wires[reduction.key] = wire(planned_reduction.start)
        if reduction.second is not None and planned_reduction.second is not None:
            wires[reduction.second.key] = wire(planned_reduction.second[0])
    return wires


def _wire(start: Eqn, graph: Graph, cluster: Cluster, share_of_products: float) -> Wire:
    """How the messages of a key travel. They slow down products, which are a share of compute."""
    axis = start.kwargs["axis"]
    device = cluster.device
    link = cluster.link(axis)
    kind = rules(start).kind.name
    received = rules(start).wire_bytes(start, graph.axes) or 1
    *first_level, last = transfers(start, graph, cluster)
    inside = None
    tree = None
    if first_level:
        level = first_level[0]
        inside = Inside(level.lane, level.link, level.latency, level.seconds / received)
        latency = last.latency
        pace = last.seconds / received
    else:
        # The bytes of a bucket decide whether a ring or a tree is faster, so the wire has both. For the bytes that one
        # received byte charges its link with, `ways` returns the seconds of that byte.
        charged = cluster.charge_factor(start, graph.axes)
        (latency, pace), *tree_ways = link.ways(kind, charged, graph.axes[axis])
        tree = tree_ways[0] if tree_ways else None

    measured_unpack = dict(link.unpack).get(kind)
    coded = bool(
        rules(start).decoding(start, graph.axes)
    )  # then its members have the traffic of their codes
    unpacked = 0
    if measured_unpack is None and not coded:
        unpacked = rules(start).unpacking_per_byte
    if link.includes_packing and not device.gloo:
        unpacked = 0
    kernels = 1 if link.includes_packing else 2  # the message, and what packs it
    return Wire(
        last.lane,
        last.link,
        latency,
        pace,
        overhead=kernels * device.kernel_gap + link.overhead,
        byte_overhead=link.byte_overhead,
        unpack=0.0 if coded else measured_unpack or 0.0,
        coding=device.coding / device.bandwidth if coded else 0.0,
        ranks=graph.axes[axis],
        pack=0.0 if link.includes_packing or coded else 2 / device.bandwidth,
        copy_out=unpacked / device.bandwidth,
        beside=not device.gloo,
        inside=inside,
        taken=share_of_products * cluster.lost_beside(axis, kind),
        tree=tree,
    )
