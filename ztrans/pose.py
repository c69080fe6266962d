"""pose: the scheduling problem that a program poses on a cluster.

Durations come from the cluster, lifetimes from the program. What is live at an operation, apart
from gathered values and gradients, is what the memory analysis finds there less what the problem
itself accounts for, so that the problem's memory and the program's agree where nothing has moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import accumulate

from . import coalesce
from .cluster import Cluster
from .collectives import ALL_REDUCE, ALONE, buffer_bytes, received_bytes, sent_bytes, wire_bytes
from .cost import is_matmul, local_bytes, memory
from .graph import Eqn, Graph, Var, is_view, producers
from .liveness import liveness
from .play import Message
from .problem import Gather, Problem, Reduction, Update, Wire
from .schedule import Skeleton
from .simulate import lane, messages, seconds


def pose(s: Skeleton, cluster: Cluster, budget: float, update: str | None = None) -> Problem:
    """The problem of placing a program's planned collectives within `budget` bytes.

    `update` says when updates run, "eager" or "last"; by default as `overlap_grads` was asked.

    Raises: ValueError when the cluster has no link for one of their axes.
    """
    graph = s.graph
    where = {e: i for i, e in enumerate(graph.eqns)}
    before = [0, *accumulate(e in s.places for e in graph.eqns)]  # operations before each equation
    order = s.reductions[0].start.order if s.reductions else None
    eager = (update or (order.update if order else "last")) == "eager"
    cost = dict(zip(graph.eqns, seconds(graph, cluster)))
    gathers, reductions = _gathers(s, before), _reductions(s)
    updates, floating = _updates(s, gathers, cost) if eager else ((), set())
    if eager:
        reductions = tuple(r._replace(need=_ends(s, floating, r)) for r in reductions)
    held = [0] * (len(s.ops) + 1)  # what gathers and reductions account for where they stand now
    for p, g in zip(s.gathers, gathers):
        held[before[where[p.start]]] += g.held
        held[g.last + 1] -= g.held
    for p, r in zip(s.reductions, reductions):
        held[r.born] += r.held
        held[before[where[p.start]]] += r.flight
        held[before[where[p.wait]]] -= r.held + r.flight
    live = memory(graph).live
    return Problem(
        seconds=tuple(0.0 if e in floating else cost[e] for e in s.ops),
        live=tuple(0 if e in floating else max(live[where[e]] - h, 0) for e, h in zip(s.ops, accumulate(held))),
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
        updates=updates,
        others=_others(s, cluster, before),
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


def _updates(s: Skeleton, gathers: Sequence[Gather], cost: Mapping[Eqn, float]) -> tuple[tuple[Update, ...], set[Eqn]]:
    """The updates that run where their reductions are waited for, and their equations.

    What something at a fixed place yields after the last reduction that could be waited for, as the scale of a
    global norm, is no longer waited for with a reduction: what needs it stays at its place.
    """
    movable, free = s.floating
    state, index = set(s.graph.inputs[: s.graph.num_state]), {p.value: i for i, p in enumerate(s.reductions)}
    floating = {*movable, *free.values()}
    release: dict[Var, int] = {}  # the place from which a value is there, and a leaf of the state read by no other
    for k, e in enumerate(s.ops):
        if e not in floating:
            release.update((v, k + 1) for v in e.ins if v in state)
            release.update((o, k + 1) for o in e.outs if o is not None)
    for p, g in zip(s.gathers, gathers):
        release[p.value] = g.use + 1
        if g.again is None:
            release.update((v, max(release.get(v, 0), g.use + 1)) for v in p.start.ins)
    after: dict[Var, frozenset[int]] = {p.value: frozenset([i]) for p, i in zip(s.reductions, index.values())}
    groups: dict[tuple[frozenset[int], int], float] = {}
    latest = max(s.need, default=0)
    for e in movable:
        reductions = frozenset().union(*(after.get(v, ()) for v in e.ins))
        place = max(release.get(v, 0) for v in e.ins)
        if place > latest:
            floating.discard(e)
            place = s.places[e] + 1
        else:
            groups[reductions, place] = groups.get((reductions, place), 0.0) + cost[e]
        for out in filter(None, e.outs):
            after[out], release[out] = reductions, place
    updates = [Update(took, tuple(sorted(reductions)), place) for (reductions, place), took in groups.items()]
    alone = sum(cost[e] for e in dict.fromkeys(free.values()))
    return (*updates, *([Update(alone, ())] if alone else [])), floating


def _ends(s: Skeleton, floating: Set[Eqn], reduction: Reduction) -> int:
    """The place up to which a reduction must have come: before the equations that leave their places."""
    need = reduction.need
    while need > reduction.born + 1 and (s.ops[need - 1] in floating or is_view(s.ops[need - 1])):
        need -= 1
    return need


def _others(s: Skeleton, cluster: Cluster, before: Sequence[int]) -> tuple[Message, ...]:
    """The collectives that no schedule places, by the places at which they are issued and waited for."""
    planned = {p.start for p in (*s.gathers, *s.reductions)} | {p.then[0] for p in s.reductions if p.then}
    return tuple(
        message._replace(issue=before[message.issue], need=before[message.need])
        for e, message, _ in messages(s.graph, cluster)
        if e not in planned
    )


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
