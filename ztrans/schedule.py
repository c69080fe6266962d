"""schedule: order hints to one order.

Transforms that schedule only write hints on equations; this solves them all at once, so the order
in which they were applied cannot matter. An equation without a hint keeps its place:

    birth   right after the last of its inputs is made        (a gradient's views and casts, its reduction)
    use     right before its result is read, or when `bytes` of reductions are under way, and at
            least one other                                   (the wait of a reduction)
    early   ahead of its wait, with at most `bytes` of gathers between start and wait, and at
            least one                                         (a gather)

One sort by (place, side, position) that respects data flow then gives the program; it is the same
on every rank, and with it the order of the collectives.
"""

from __future__ import annotations

import heapq

from .collectives import WAIT, is_start
from .graph import Eqn, Graph, Var, producers, users

Key = tuple[int, int, int]  # position of the equation it is placed at; before (-1), at (0), after (1, 2); own position


def schedule(graph: Graph) -> Graph:
    """Realise every order hint; the result has none."""
    position = {e: i for i, e in enumerate(graph.eqns)}
    made, used = producers(graph.eqns), users(graph)
    keys: dict[Eqn, Key] = {e: (i, 0, i) for e, i in position.items()}
    for e, i in position.items():
        if e.order is not None and e.order.place == "birth":
            keys[e] = (max((keys[made[v]][0] for v in e.ins if v in made), default=-1), 1, i)
    keys.update(_early(graph, keys, used))
    bounded = _late(graph, keys, made)
    for e, i in reversed(position.items()):
        if e.order is not None and e.order.place == "use":
            readers = [keys[u][0] for out in e.outs for u in used.get(out, ())]
            keys[e] = min((min(readers, default=len(position)), -1, i), bounded.get(e, (len(position), 0, i)))
    eqns = _sorted(graph, keys, made, used)
    return graph.replace(eqns=tuple(e.replace(order=None) for e in eqns))


def _early(graph: Graph, keys: dict[Eqn, Key], used: dict[Var, list[Eqn]]) -> dict[Eqn, Key]:
    """Starts of gathers, moved ahead of earlier gathers' waits as far as the bytes in flight allow."""
    gathers = [e for e in graph.eqns if e.order is not None and e.order.place == "early" and is_start(e)]
    waits = {e: min(keys[u] for out in e.outs for u in used[out] if u.op is WAIT) for e in gathers}
    gathers.sort(key=waits.__getitem__)
    sizes = [sum(out.numel * out.dtype.itemsize for out in e.outs) for e in gathers]
    placed: dict[Eqn, Key] = {}
    first, in_flight = 0, 0
    for k, e in enumerate(gathers):
        cap = e.order.bytes if e.order.bytes is not None else 2 * max(sizes)
        in_flight += sizes[k]
        while in_flight > cap and first < k - 1:
            in_flight -= sizes[first]
            first += 1
        # While gather `first` has not been waited for, this one may already be under way.
        at = (-1, 0) if first == 0 else (waits[gathers[first - 1]][0], 1)
        placed[e] = min((*at, keys[e][2]), keys[e])
    return placed


def _late(graph: Graph, keys: dict[Eqn, Key], made: dict[Var, Eqn]) -> dict[Eqn, Key]:
    """Where the wait of a reduction must be at the latest for the bytes under way: a gradient in whole dies there."""
    waits = [e for e in graph.eqns if e.op is WAIT and e.order is not None and e.order.place == "use"]
    waits.sort(key=lambda w: keys[made[w.args[0]]])
    sizes = [sum(v.numel * v.dtype.itemsize for v in made[w.args[0]].ins) for w in waits]
    placed: dict[Eqn, Key] = {}
    first, in_flight = 0, 0
    for k, w in enumerate(waits):
        cap = w.order.bytes if w.order.bytes is not None else 2 * max(sizes)
        in_flight += sizes[k]
        while in_flight > cap and first < k - 1:
            at = keys[made[w.args[0]]][0]
            placed[waits[first]] = (at, 2, keys[waits[first]][2])
            in_flight -= sizes[first]
            first += 1
    return placed


def _sorted(graph: Graph, keys: dict[Eqn, Key], made: dict[Var, Eqn], used: dict[Var, list[Eqn]]) -> list[Eqn]:
    """The least order by key that respects data flow."""
    missing = {e: len({made[v] for v in e.ins if v in made}) for e in graph.eqns}
    ready = [(keys[e], i, e) for i, e in enumerate(graph.eqns) if not missing[e]]
    heapq.heapify(ready)
    rank = {e: i for i, e in enumerate(graph.eqns)}
    order: list[Eqn] = []
    while ready:
        _, _, e = heapq.heappop(ready)
        order.append(e)
        for reader in dict.fromkeys(u for out in e.outs if out is not None for u in used.get(out, ())):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (keys[reader], rank[reader], reader))
    return order
