"""pose: the scheduling problem that a program poses on a cluster.

Durations come from the cluster, lifetimes from the program. What is live at an operation, apart
from gathered values and gradients, is what the memory analysis finds there less what the problem
itself accounts for, so that the problem's memory and the program's agree where nothing has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from . import coalesce
from .cluster import Cluster
from .collectives import ALL_REDUCE, ALONE, buffer_bytes, received_bytes, sent_bytes, wire_bytes
from .cost import is_matmul, local_bytes, memory
from .graph import Eqn, Graph, producers
from .liveness import liveness
from .play import play
from .problem import Gather, Problem, Reduction, Wire
from .schedule import Skeleton
from .simulate import lane, messages, seconds


def pose(s: Skeleton, cluster: Cluster, budget: float) -> Problem:
    """The problem of placing a program's planned collectives within `budget` bytes.

    Raises: ValueError when the cluster has no link for one of their axes.
    """
    graph = s.graph
    where = {e: i for i, e in enumerate(graph.eqns)}
    before = [0, *accumulate(e in s.places for e in graph.eqns)]  # operations before each equation
    gathers, reductions = _gathers(s, before), _reductions(s)
    held = [0] * (len(s.ops) + 1)  # what gathers and reductions account for where they stand now
    for p, g in zip(s.gathers, gathers):
        held[before[where[p.start]]] += g.held
        held[g.last + 1] -= g.held
    for p, r in zip(s.reductions, reductions):
        held[r.born] += r.held
        held[before[where[p.start]]] += r.flight
        held[before[where[p.wait]]] -= r.held + r.flight
    live = memory(graph).live
    cost = _seconds(s, cluster)
    order = s.reductions[0].start.order if s.reductions else None
    return Problem(
        seconds=tuple(cost[e] for e in s.ops),
        live=tuple(max(live[where[e]] - h, 0) for e, h in zip(s.ops, accumulate(held))),
        matmul=tuple(map(is_matmul, s.ops)),
        gathers=gathers,
        reductions=reductions,
        wires={
            m.key: _wire(p.start, graph, cluster) for m, p in zip((*gathers, *reductions), (*s.gathers, *s.reductions))
        },
        memory=budget,
        max_between=order.between if order else None,
        gathers_in_flight=_limit([p.start.order.in_flight for p in s.gathers], [g.held for g in gathers]),
        reductions_in_flight=_limit([p.start.order.in_flight for p in s.reductions], [r.held for r in reductions]),
    )


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
        found.append(Gather(coalesce.key(start), wire_bytes(start, graph.axes), size, use, last, release, again))
    return tuple(found)


def _reductions(s: Skeleton) -> tuple[Reduction, ...]:
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
        flight = sum(received_bytes(start, k, graph.axes) for k in range(len(start.outs)))
        flight += sent_bytes(start, graph.axes) or _packed_bytes(start, graph)
        found.append(Reduction(key, wire_bytes(start, graph.axes), held, s.born[i], flight, s.need[i]))
    return tuple(found)


def _packed_bytes(start: Eqn, graph: Graph) -> int:
    """Bytes of the copy from which a reduction is sent once it shares a message with others."""
    if start.op is ALL_REDUCE and graph.axes[start.kwargs["axis"]] > 2:
        return 0
    sizes = (buffer_bytes(start, k, graph.axes) for k in range(len(start.outs)))
    return sum(size for size in sizes if size < ALONE * graph.axes[start.kwargs["axis"]])


def _seconds(s: Skeleton, cluster: Cluster) -> dict[Eqn, float]:
    """The duration of every equation; what is not planned stands still where it is waited for, if it has not come."""
    graph = s.graph
    cost = dict(zip(graph.eqns, seconds(graph, cluster)))
    planned = {p.start for p in (*s.gathers, *s.reductions)} | {p.then[0] for p in s.reductions if p.then}
    others = [message for e, message, _ in messages(graph, cluster) if e not in planned]
    played = play([cost[e] if e in s.places else 0.0 for e in graph.eqns], others)
    for message, stall in zip(others, played.stall):
        cost[graph.eqns[min(message.need, len(graph.eqns) - 1)]] += stall
    return cost


def _wire(start: Eqn, graph: Graph, cluster: Cluster) -> Wire:
    axis = start.kwargs["axis"]
    link = cluster.link(axis)
    latency, pace = link.seconds(start.op.name, 1, graph.axes[axis])
    call, unpack = 2 * cluster.device.launch + link.call, dict(link.unpack).get(start.op.name, 0.0)
    return Wire(lane(start), link.name, latency, pace, call, link.host, unpack)


def _limit(asked: Sequence[int | None], sizes: Sequence[int]) -> int | None:
    """Bytes in flight; one message is always allowed."""
    limits = [a for a in asked if a is not None]
    return max(min(limits), max(sizes)) if limits else None
