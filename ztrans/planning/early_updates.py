"""Update parameters while backward continues, in a program that reduces no gradient.

    g = mm(x, dy)                      g = mm(x, dy)
    ...rest of backward...      -->    w1 = update(w, g)
    w1 = update(w, g)                  ...rest of backward...

On one rank nothing is sent, so no wait decides when an update runs. As written, all updates stand at the end, and all
gradients are live until then. Here an equation of the update runs once its arguments exist and all readers of what it
overwrites have run. An update that needs all gradients, as after clipping by their norm, stays at the end.

A fused optimizer updates many parameters in one launch. So updates wait for each other until their gradients have
enough bytes together.

`eager_updates` and `realise` do the same for a program that reduces gradients, where waits decide when updates run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..ir.collectives import rules
from ..ir.copies import returns_to_device
from ..ir.dependencies import grouped
from ..ir.donation import donation
from ..ir.graph import Eqn, Graph, Primitive, Var, producers
from ..ir.op_facts import is_random
from ..ir.rewriter import prerequisites, reordered
from .buffers import local_bytes

# Bytes of gradients that are updated together: with fewer, a launch costs more than their memory is worth.
_TOGETHER = 32 << 20


def with_early_updates(graph: Graph) -> Graph:
    """Run updates as soon as they can, once their gradients have `hints.bucket` bytes together."""
    movable = {e for e in graph.eqns if _may_move(e)}
    needs = _needs(graph, movable)
    places = _places(graph, movable, needs)
    for i, e in reversed(list(enumerate(graph.eqns))):
        places.setdefault(e, i)
        # An equation that depends on the state alone, or waits for others, runs no later than the first that needs it.
        for prerequisite in movable.intersection(needs[e]):
            places[prerequisite] = min(places[prerequisite], places[e])
    return reordered(graph, places.__getitem__, needs)


def _may_move(e: Eqn) -> bool:
    if e.region != "update":
        return False
    if rules(e).copies:
        # It moves with its update, and `place_copies` places it later; but a gradient returns for the update alone.
        return not returns_to_device(e)
    # Messages and random draws keep their order.
    return not (isinstance(e.op, Primitive) or rules(e).remote or is_random(e))


def _needs(graph: Graph, movable: Set[Eqn]) -> dict[Eqn, list[Eqn]]:
    """For each equation, its prerequisites, and if it may move, the earlier readers of what it overwrites."""
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
    # By equation, the index of the last equation that stays and that it must follow: its own if it stays, -1 if it
    # depends on inputs of the program alone.
    ready_at: dict[Eqn, int] = {}
    for i, e in enumerate(graph.eqns):
        if e in movable:
            ready_at[e] = max((ready_at[prerequisite] for prerequisite in needs[e]), default=-1)
        else:
            ready_at[e] = i

    owner = donation(graph).owner
    makers = producers(graph.eqns)
    size = local_bytes(graph)
    bucket_bytes = _TOGETHER if graph.hints.bucket is None else graph.hints.bucket
    places: dict[Eqn, float] = dict.fromkeys(movable, len(graph.eqns))
    waiting: list[Eqn] = []
    gradients: set[Var] = set()  # the storages that the waiting updates read
    updates_at = grouped((ready_at[e], e) for e in graph.eqns if e in movable and ready_at[e] >= 0)
    for i, updates in sorted(updates_at.items()):
        waiting += updates
        for e in updates:
            for v in e.ins:
                # A value that forward or backward computes and an update reads is a gradient.
                if v in makers and makers[v] not in movable:
                    gradients.add(owner[v])
        if sum(map(size, gradients)) >= bucket_bytes:
            places.update(dict.fromkeys(waiting, i + 0.5))
            waiting = []
            gradients = set()
    return places
