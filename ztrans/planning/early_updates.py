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

from collections.abc import Iterable, Mapping, Sequence

from ..ir.collectives import rules
from ..ir.dependencies import grouped, reachable
from ..ir.donation import donation
from ..ir.graph import Eqn, Graph, Primitive, Var, producers
from ..ir.op_facts import is_random
from .buffers import local_bytes

# Bytes of gradients; with fewer, a launch would cost more than their memory is worth.
_TOGETHER = 32 << 20


def with_early_updates(graph: Graph) -> Graph:
    """The program whose updates run as soon as they can, when their gradients have `hints.bucket` bytes together."""
    movable = [e for e in graph.eqns if _may_move(e)]
    needs = _needs(graph, movable)
    ready_after = grouped((place, e) for e, place in _places(graph, needs).items())
    emission = _Emission(graph, needs)
    for k, e in enumerate(graph.eqns):
        if e not in needs:
            emission.write([e])
            emission.add(ready_after.get(k, ()))
    emission.write(movable)  # those that have not been written yet
    return graph.replace(eqns=tuple(emission.eqns))


def _may_move(e: Eqn) -> bool:
    if e.region != "update":
        return False
    if rules(e).copies:
        return True  # it goes with the update that it is for, and finds its place later
    # Messages and random draws keep their order.
    return not (isinstance(e.op, Primitive) or rules(e).remote or is_random(e))


def _needs(graph: Graph, movable: Sequence[Eqn]) -> dict[Eqn, list[Eqn]]:
    """For each equation that may move, those that come before it: what it reads, and what reads what it overwrites."""
    owner = donation(graph).owner
    makers = producers(movable)
    # Of each storage, those among them that have read it so far.
    readers: dict[Var, list[Eqn]] = {}
    needs: dict[Eqn, list[Eqn]] = {}
    for e in movable:
        overwritten = {owner[out] for out in e.results}
        needs[e] = [makers[v] for v in e.ins if v in makers]
        for storage in {owner[v] for v in e.ins} & overwritten:
            needs[e] += readers.get(storage, ())
        for v in e.ins:
            readers.setdefault(owner[v], []).append(e)
    return needs


def _places(graph: Graph, needs: Mapping[Eqn, Sequence[Eqn]]) -> dict[Eqn, int]:
    """For each equation that may move, the index of the fixed equation after which it can run.

    It is -1 if the equation depends on the inputs of the program only. Such an equation runs when another needs it.
    """
    owner = donation(graph).owner
    exists: dict[Var, int] = {}
    last_read: dict[Var, int] = {}
    for k, e in enumerate(graph.eqns):
        if e not in needs:
            exists.update((out, k) for out in e.results)
            last_read.update((owner[v], k) for v in e.ins)

    places: dict[Eqn, int] = {}
    for e, before in needs.items():
        overwritten = {owner[out] for out in e.results}
        place = max((places[other] for other in before), default=-1)
        for v in e.ins:
            place = max(place, exists.get(v, -1))
            if owner[v] in overwritten:
                place = max(place, last_read.get(owner[v], -1))
        places[e] = place
    return places


class _Emission:
    """The equations that have been written, and the updates that wait until their gradients have enough bytes."""

    def __init__(self, graph: Graph, needs: Mapping[Eqn, Sequence[Eqn]]) -> None:
        self.eqns: dict[Eqn, None] = {}
        self.needs = needs
        self.position = {e: k for k, e in enumerate(graph.eqns)}
        self.owner = donation(graph).owner
        self.makers = producers(graph.eqns)
        self.size = local_bytes(graph)
        self.together = _TOGETHER if graph.hints.bucket is None else graph.hints.bucket
        self.waiting: list[Eqn] = []
        self.gradients: set[Var] = set()  # the storages that the waiting updates read

    def write(self, eqns: Iterable[Eqn]) -> None:
        """Write equations, after the movable ones that come before them."""

        def unwritten_before(e: Eqn) -> list[Eqn]:
            before = self.needs[e] if e in self.needs else self._movable_makers(e)
            return [other for other in before if other not in self.eqns]

        missing = reachable((e for e in eqns if e not in self.eqns), unwritten_before)
        self.eqns.update(dict.fromkeys(sorted(missing, key=self.position.__getitem__)))

    def _movable_makers(self, e: Eqn) -> list[Eqn]:
        """The movable equations that compute what an equation reads."""
        makers = [self.makers[v] for v in e.ins if v in self.makers]
        return [maker for maker in makers if maker in self.needs]

    def add(self, updates: Iterable[Eqn]) -> None:
        """Let updates that can run wait for others. If their gradients have enough bytes, write them all."""
        for e in updates:
            self.waiting.append(e)
            for v in e.ins:
                # What forward or backward computes and an update reads is a gradient.
                maker = self.makers.get(v)
                if maker is not None and maker not in self.needs:
                    self.gradients.add(self.owner[v])

        if self.waiting and sum(map(self.size, self.gradients)) >= self.together:
            self.write(self.waiting)
            self.waiting = []
            self.gradients = set()
