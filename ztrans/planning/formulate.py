"""formulate: build the scheduling `Problem` of a program for a given cluster.

Durations come from the cluster, and lifetimes from the program. The bytes that a schedule has live are counted without
the program that it makes: no such program needs more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set

from ..ir.collectives import bucket_key, is_small, lane, rules
from ..ir.graph import Eqn, Graph, producers
from ..ir.op_facts import is_matmul
from ..ir.printer import op_name
from .cluster import Cluster
from .cost import local_bytes
from .eager_updates import Group, deadlines, groups
from .event_simulator import Message
from .program_order import Planned, Skeleton
from .residency import residency
from .simulate import COPIES, NO_COPIES, messages, seconds
from .solver.problem import Gather, Problem, Reduction, Update, Wire


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
    graph, (problem, leaving) = s.graph, _framed(s, update)
    floating = {e for group in leaving for e in group.eqns}
    cost = dict(zip(graph.eqns, seconds(graph, cluster)))
    keys = (*(g.key for g in problem.gathers), *(r.key for r in problem.reductions))
    starts = (p.start for p in (*s.gathers, *s.reductions))
    return dataclasses.replace(
        residency(s, problem, leaving),
        seconds=tuple(0.0 if e in floating else cost[e] for e in s.ops),
        wires={key: _wire(start, graph, cluster) for key, start in zip(keys, starts)},
        memory=budget,
        updates=tuple(Update(sum(cost[e] for e in g.eqns), g.after, g.release) for g in leaving),
        others=_others(s, cluster),
    )


def frame(s: Skeleton, update: str | None = None) -> Problem:
    """The problem without the seconds and bytes of operations, which suffices to validate a schedule."""
    return _framed(s, update)[0]


@functools.lru_cache(maxsize=2)  # as `skeleton`
def _framed(s: Skeleton, update: str | None) -> tuple[Problem, tuple[Group, ...]]:
    """The frame of a problem, and the equations of the update that leave their places."""
    gathers = _gathers(s)
    leaving = groups(s) if (update or s.asked_update) == "eager" else ()
    reductions = _reductions(s, {e for group in leaving for e in group.eqns})
    between = s.reductions[0].order.between if s.reductions else None
    problem = Problem(
        seconds=(0.0,) * len(s.ops),
        live=(0,) * len(s.ops),
        matmul=tuple(map(is_matmul, s.ops)),
        gathers=gathers,
        reductions=reductions,
        wires={},
        max_between=float("inf") if between is None else between,
        gathers_in_flight=_limit(s.gathers, gathers),
        reductions_in_flight=_limit(s.reductions, reductions),
        updates=tuple(Update(0.0, group.after, group.release) for group in leaving),
        names=s.names,
    )
    return problem, leaving


def _gathers(s: Skeleton) -> tuple[Gather, ...]:
    graph, end = s.graph, len(s.ops) - 1
    live, makers = s.live, producers(graph.eqns)
    latest: dict[tuple, int] = {}
    gathers: list[Gather] = []
    for i, p in enumerate(s.gathers):
        start, use = p.start, min(s.use[i], end)
        last = max(
            min(s.before[min(live.last[live.root[p.value]] + 1, len(graph.eqns))] - 1, end), use
        )
        # A gathered value may be the result of an operation, or of another planned collective.
        sources = [makers[v] for v in start.ins if v in makers]
        release = max((s.places[e] + 1 if e in s.places else use for e in sources), default=0)
        identity = (start.ins[0], p.value.dtype, bucket_key(start))
        regather = start.provenance.regather if start.provenance else None
        earlier = latest.get(identity) if regather == "auto" else None
        if earlier is not None:
            release = max(release, gathers[earlier].last + 1)
        if regather == "always":
            release = max(release, _phase(s, start.region, use))
        latest[identity] = i
        size = rules(start).received_bytes(start, 0, graph.axes)
        wire, name = rules(start).wire_bytes(start, graph.axes), start.out.name
        key, small = bucket_key(start), is_small(start, 0, graph.axes)
        gathers.append(Gather(key, wire, size, use, last, min(release, use), earlier, small, name))
    return tuple(gathers)


def _phase(s: Skeleton, region: str, use: int) -> int:
    """The place at which the forward or backward that contains operation `use` begins."""
    while use and s.ops[use - 1].region in (region, "update"):
        use -= 1
    return use


def _reductions(s: Skeleton, floating: Set[Eqn]) -> tuple[Reduction, ...]:
    open_buckets: dict[tuple, tuple[int, int]] = {}
    planned, needs, axes, size = [], deadlines(s, floating), s.graph.axes, local_bytes(s.graph)
    for i, p in enumerate(s.reductions):
        start, held, cap = p.start, size(p.start.ins[0]), p.order.bucket
        key = (*bucket_key(start), p.then is not None)
        if cap is not None:  # the user has set the size of a bucket: fill buckets in order of birth
            group, filled = open_buckets.get(key, (0, 0))
            if filled and filled + held > cap:
                group, filled = group + 1, 0
            open_buckets[key] = group, filled + held
            key = (*key, group)
        reduction = Reduction(
            key,
            rules(start).wire_bytes(start, axes),
            held,
            s.born[i],
            received=rules(start).received_bytes(start, 0, axes),
            need=needs[i],
            freed=0 if rules(start).sends_own(start, 0, axes) else held,
            sent=rules(start).sent_bytes(start, axes),
            small=is_small(start, 0, axes),
            name=start.out.name,
        )
        planned.append(reduction)
    return tuple(planned)


def _others(s: Skeleton, cluster: Cluster) -> tuple[Message, ...]:
    """The collectives that the schedule does not place, with the places at which they are issued and waited for."""
    planned = {p.start for p in (*s.gathers, *s.reductions)} | {
        p.then[0] for p in s.reductions if p.then
    }
    return tuple(
        message._replace(issue=s.before[message.issue], need=s.before[message.need])
        for e, message, _ in messages(s.graph, cluster)
        if e not in planned
    )


def _wire(start: Eqn, graph: Graph, cluster: Cluster) -> Wire:
    axis, device = start.kwargs["axis"], cluster.device
    link, ranks = cluster.link(axis), graph.axes[axis]
    kind = op_name(start.op)
    latency, pace = link.seconds(kind, cluster.weight(start, graph.axes), ranks)
    known = dict(link.unpack).get(kind)
    copies = COPIES.get(start.op, NO_COPIES).times if known is None else 0
    return Wire(
        lane(start),
        link.name,
        latency,
        pace,
        call=2 * device.launch + link.call,
        host=link.host,
        unpack=known or 0.0,
        ranks=ranks,
        pack=2 / device.bandwidth,
        copy=copies / device.bandwidth,
    )


def _limit(planned: Sequence[Planned], messages: Sequence[Gather | Reduction]) -> float:
    """The limit of a transform on the bytes of collectives under way, which always allows the largest one."""
    asked = [p.order.in_flight for p in planned if p.order.in_flight is not None]
    return max(min(asked), *(message.held for message in messages)) if asked else float("inf")
