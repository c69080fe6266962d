"""In a program that reduces no gradient, parameters are updated while backward continues.

    g = mm(x, dy)                      g = mm(x, dy)
    ...rest of backward...      -->    w1 = update(w, g)
    w1 = update(w, g)                  ...rest of backward...

On one rank nothing is sent, so no wait decides when an update runs. Without one, all updates stand at the end, and all
gradients live until then. Here the equations of the update run once their arguments exist, and once everything that
reads what they overwrite has run. An update that needs all gradients, as after clipping by their norm, stays at the
end.

A fused optimizer updates many parameters in one launch. So updates wait for each other until their gradients have some
bytes together.

`eager_updates` and `realise` do the same for a program that reduces gradients, whose waits decide when updates run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..ir.collectives import rules
from ..ir.dependencies import grouped
from ..ir.donation import donation
from ..ir.graph import Eqn, Graph, Primitive, Var, producers
from ..ir.op_facts import is_random
from ..ir.rewriter import prerequisites, reordered
from .buffers import local_bytes

# Bytes of gradients; with fewer, a launch would cost more than their memory is worth.
_TOGETHER = 32 << 20


def with_early_updates(graph: Graph) -> Graph:
    """The program whose updates run as soon as they can, when their gradients have `hints.bucket` bytes together."""
    movable = {e for e in graph.eqns if _may_move(e)}
    needs = _needs(graph, movable)
    places = _places(graph, movable, needs)
    for i, e in reversed(list(enumerate(graph.eqns))):
        places.setdefault(e, i)
        # What depends on the state alone, and what waits for others, runs at the latest with the first that needs it.
        for other in movable.intersection(needs[e]):
            places[other] = min(places[other], places[e])
    return reordered(graph, places.__getitem__, needs)


def _may_move(e: Eqn) -> bool:
    if e.region != "update":
        return False
    if rules(e).copies:
        return True  # it goes with the update that it is for, and finds its place later
    # Messages and random draws keep their order.
    return not (isinstance(e.op, Primitive) or rules(e).remote or is_random(e))


def _needs(graph: Graph, movable: Set[Eqn]) -> dict[Eqn, list[Eqn]]:
    """What each equation reads, and before one that may move, what reads the storage that it overwrites."""
    owner = donation(graph).owner
    needs = prerequisites(graph)
    readers: dict[Var, list[Eqn]] = {}  # of each storage, so far
    for e in graph.eqns:
        read = {owner[v] for v in e.ins}
        if e in movable:
            for storage in read.intersection(owner[out] for out in e.results):
                needs[e] += readers.get(storage, ())
        for storage in read:
            readers.setdefault(storage, []).append(e)
    return needs


def _places(
    graph: Graph, movable: Set[Eqn], needs: Mapping[Eqn, Sequence[Eqn]]
) -> dict[Eqn, float]:
    """Where each equation that may move runs: half a place after an equation that stays, or at the end."""
    # The last of the equations that stay that it must follow; -1 if it depends on inputs of the program alone.
    ready: dict[Eqn, int] = {}
    for i, e in enumerate(graph.eqns):
        ready[e] = max((ready[each] for each in needs[e]), default=-1) if e in movable else i

    owner = donation(graph).owner
    makers = producers(graph.eqns)
    size = local_bytes(graph)
    together = _TOGETHER if graph.hints.bucket is None else graph.hints.bucket
    places: dict[Eqn, float] = dict.fromkeys(movable, len(graph.eqns))
    waiting: list[Eqn] = []
    gradients: set[Var] = set()  # the storages that the waiting updates read
    ready_after = grouped((ready[e], e) for e in graph.eqns if e in movable and ready[e] >= 0)
    for i, updates in sorted(ready_after.items()):
        waiting += updates
        for v in (v for e in updates for v in e.ins):
            # What forward or backward computes and an update reads is a gradient.
            if v in makers and makers[v] not in movable:
                gradients.add(owner[v])
        if sum(map(size, gradients)) >= together:
            places.update(dict.fromkeys(waiting, i + 0.5))
            waiting = []
            gradients = set()
    return places
