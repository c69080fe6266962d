"""pose: the scheduling problem that a program poses on a cluster.

Durations come from the cluster, lifetimes from the program: the problem counts the same bytes as the memory
analysis, so that a schedule which fits makes a program which fits.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate

from . import coalesce
from .cluster import Cluster
from .collectives import (
    ALL_GATHER,
    ALONE,
    REDUCE_SCATTER,
    buffer_bytes,
    received_bytes,
    sends_as_it_lies,
    sent_bytes,
    wire_bytes,
)
from .cost import is_matmul, local_bytes
from .eager import deadline, groups
from .graph import Eqn, Graph, producers
from .liveness import liveness
from .play import Message
from .problem import Gather, Problem, Reduction, Wire
from .residency import Residency, residency
from .schedule import Skeleton
from .simulate import lane, messages, seconds


def pose(s: Skeleton, cluster: Cluster, budget: float, update: str | None = None) -> Problem:
    """The problem of placing a program's planned collectives within `budget` bytes.

    `update` says when updates run, "eager" or "last"; by default as `overlap_grads` was asked.

    Raises: ValueError when the cluster has no link for one of their axes.
    """
    graph, before = s.graph, _before(s)
    gathers = _gathers(s, before)
    leaving = groups(s, gathers) if (update or _update(s)) == "eager" else ()
    floating = {e for group in leaving for e in group.eqns}
    resident = residency(s, [g.last for g in gathers], leaving)
    reductions = _reductions(s, resident, floating)
    cost = dict(zip(graph.eqns, seconds(graph, cluster)))
    wires = ((g.key, p.start) for g, p in zip((*gathers, *reductions), (*s.gathers, *s.reductions)))
    return Problem(
        seconds=tuple(0.0 if e in floating else cost[e] for e in s.ops),
        live=resident.live,
        matmul=tuple(map(is_matmul, s.ops)),
        gathers=gathers,
        reductions=reductions,
        wires={key: _wire(start, graph, cluster) for key, start in wires},
        memory=budget,
        max_between=s.reductions[0].start.order.between if s.reductions else None,
        gathers_in_flight=_limit([p.start.order.in_flight for p in s.gathers], [g.held for g in gathers]),
        reductions_in_flight=_limit([p.start.order.in_flight for p in s.reductions], [r.held for r in reductions]),
        across=resident.across,
        updates=tuple(group.update(cost) for group in leaving),
        others=_others(s, cluster, before),
    )


def _update(s: Skeleton) -> str:
    """When updates run, as `overlap_grads` was asked."""
    return s.reductions[0].start.order.update if s.reductions else "last"


def _before(s: Skeleton) -> list[int]:
    """How many operations come before each equation, and before the end."""
    return list(accumulate((e in s.places for e in s.graph.eqns), initial=0))


def _gathers(s: Skeleton, before: Sequence[int]) -> tuple[Gather, ...]:
    graph, end = s.graph, len(s.ops) - 1
    live, made = liveness(graph), producers(graph.eqns)
    seen: dict[tuple, int] = {}
    found: list[Gather] = []
    for i, p in enumerate(s.gathers):
        start, use = p.start, min(s.use[i], end)
        last = max(min(before[min(live.last[live.root[p.value]] + 1, len(graph.eqns))] - 1, end), use)
        # What is gathered may be made by an operation, or be what another planned collective yields.
        sources = [made[v] for v in start.ins if v in made]
        release = max((s.places[e] + 1 if e in s.places else use for e in sources), default=0)
        what = (start.ins[0], p.value.dtype, coalesce.key(start))
        again = seen.get(what) if start.provenance.again else None
        if again is not None:
            release = min(max(release, found[again].last + 1), use)
        seen[what] = i
        size = sum(received_bytes(start, k, graph.axes) for k in range(len(start.outs)))
        wire, name = wire_bytes(start, graph.axes), start.outs[0].name
        key, small = coalesce.key(start), _is_small(start, graph)
        found.append(Gather(key, wire, size, use, last, release, again, small, name))
    return tuple(found)


def _reductions(s: Skeleton, resident: Residency, floating: Set[Eqn]) -> tuple[Reduction, ...]:
    graph, size = s.graph, local_bytes(s.graph)
    open_: dict[tuple, tuple[int, int]] = {}
    found = []
    for i, p in enumerate(s.reductions):
        start, cap = p.start, p.start.order.bucket
        held = sum(map(size, start.ins))
        key = (*coalesce.key(start), p.then is not None)
        if cap is not None:  # the user's own size of a bucket: as many in order of birth as it holds
            group, filled = open_.get(key, (0, 0))
            if filled and filled + held > cap:
                group, filled = group + 1, 0
            open_[key] = group, filled + held
            key = (*key, group)
        value, need = resident.values[i], deadline(s, floating, s.born[i], s.need[i])
        lies = all(sends_as_it_lies(start, k, graph.axes) for k in range(len(start.outs)))
        received = sum(received_bytes(start, k, graph.axes) for k in range(len(start.outs)))
        flight = sent_bytes(start, graph.axes) + (0 if value.received and value.until else received)
        freed, moved = 0 if lies else held, flight + (held if lies else 0)
        # What follows the wait takes the room of what was under way, and no more than that unless it is larger.
        after = value.updating + (0 if value.until else value.bytes)
        flight += max(after - moved, 0 if value.until or value.received else value.bytes)
        result, until = (value.bytes, value.until) if value.until else (0, 0)
        wire, small, name = wire_bytes(start, graph.axes), _is_small(start, graph), start.outs[0].name
        found.append(Reduction(key, wire, held, s.born[i], flight, need, freed, result, until, small, name))
    return tuple(found)


def _is_small(start: Eqn, graph: Graph) -> bool:
    """Whether a collective crosses in one message with others of its bucket that are small too."""
    axes = graph.axes
    return all(
        buffer_bytes(start, k, axes) < ALONE * axes[start.kwargs["axis"]] for k in range(len(start.outs))
    )


def _others(s: Skeleton, cluster: Cluster, before: Sequence[int]) -> tuple[Message, ...]:
    """The collectives that no schedule places, by the places at which they are issued and waited for."""
    planned = {p.start for p in (*s.gathers, *s.reductions)} | {p.then[0] for p in s.reductions if p.then}
    return tuple(
        message._replace(issue=before[message.issue], need=before[message.need])
        for e, message, _ in messages(s.graph, cluster)
        if e not in planned
    )


def _wire(start: Eqn, graph: Graph, cluster: Cluster) -> Wire:
    axis, device = start.kwargs["axis"], cluster.device
    link, ranks = cluster.link(axis), graph.axes[axis]
    latency, pace = link.seconds(start.op.name, 1, ranks)
    known = dict(link.unpack).get(start.op.name)
    copies = {ALL_GATHER: 2, REDUCE_SCATTER: 1}.get(start.op, 0) if known is None else 0  # times that a byte is moved
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


def _limit(asked: Sequence[int | None], sizes: Sequence[int]) -> int | None:
    """Bytes in flight; one message is always allowed."""
    limits = [a for a in asked if a is not None]
    return max(min(limits), max(sizes)) if limits else None
