"""The order in which a backend runs a planned program, and what it computes with one call.

A backend puts some equations next to each other: equal updates, which one call computes, and elementwise equations,
which become one kernel. An equation that runs earlier or later than the plan says may keep a value live for longer. A
value that backward recomputes would even be live throughout, if it joined a kernel of forward. So equations are left in
their places where the peak of memory would rise above that of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir.donation import donation
from .ir.graph import Eqn, Graph
from .ir.update_groups import EqnGroup, group_updates
from .planning.buffers import Storage, by_memory, live_bytes, storages
from .planning.cost import memory
from .runtime.inductor.fusion import FusedGroup, fuse

# How often more equations are left in their places, before all of them are.
_ROUNDS = 10


def with_grouped_updates(graph: Graph) -> tuple[Graph, Sequence[EqnGroup]]:
    """The program with equal updates next to each other, and their groups.

    Updates that compute temporary values are left in their places where the peak of memory would rise otherwise.
    """
    in_place = donation(graph).in_place_ops
    peak = memory(graph).peak

    def may_move_any(eqn: Eqn) -> bool:
        return True

    def may_move_without_temporary(eqn: Eqn) -> bool:
        return eqn in in_place or not any(v.shape for v in eqn.results)

    for may_move in (may_move_any, may_move_without_temporary):
        grouped, groups = group_updates(graph, may_move)
        if memory(grouped).peak <= peak:
            return grouped, groups
    return graph, ()


def fused_within_peak(graph: Graph) -> tuple[Graph, tuple[FusedGroup, ...]]:
    """The program with the equations of each kernel next to each other, and the groups of equations that are kernels.

    The peak of memory is that of the program, except for scalars, and for buckets that are unpacked at once.
    """
    peak = memory(graph).peak
    in_place: frozenset[Eqn] = frozenset()
    for _ in range(_ROUNDS):
        fused, groups = fuse(graph, in_place)
        more = _Moves(graph, fused).that_raise(peak) - in_place
        if not more:
            return fused, groups
        in_place |= more
    return fuse(graph, frozenset(graph.eqns))


class _Moves:
    """How the equations of a program were moved to fuse it, and which bytes are live because of that."""

    def __init__(self, graph: Graph, fused: Graph) -> None:
        self.fused = fused
        self.number = {eqn: i for i, eqn in enumerate(graph.eqns)}
        lifetimes = donation(graph)
        self.owner = lifetimes.owner
        self.last_use = {each.value: each.last for each in storages(graph, lifetimes)}
        self.storages, _ = by_memory(storages(fused, donation(fused)))
        self.storages.sort(key=lambda storage: -storage.bytes)

    def that_raise(self, peak: int) -> frozenset[Eqn]:
        """The moved equations because of which the fused program needs more bytes than `peak`.

        The largest values come first, and no more of them than what is above the peak.
        """
        live = live_bytes(self.fused, self.storages)
        moved: dict[Eqn, Storage] = {}
        for i in sorted(range(len(live)), key=lambda i: -live[i]):
            above = live[i] - peak
            if above <= 0:
                break
            above -= sum(storage.bytes for storage in moved.values() if _is_live(storage, i))
            for storage in self.storages:
                if above <= 0:
                    break
                cause = self.cause(storage, i) if _is_live(storage, i) else None
                if cause is not None and cause not in moved:
                    moved[cause] = storage
                    above -= storage.bytes
        return frozenset(moved)

    def cause(self, storage: Storage, i: int) -> Eqn | None:
        """The equation that was moved so that a storage is live at equation `i` of the fused program.

        It is the one that makes the storage, if that ran later than equation `i`; or the last one that reads it, if
        that ran earlier. None if the storage was live there before.
        """
        maker = self.fused.eqns[storage.first]
        if storage.value not in maker.outs:
            return None  # the caller's, or a buffer of the equation
        here = self.number[self.fused.eqns[i]]
        if self.number[maker] > here:
            return maker
        if self.last_use[self.owner[storage.value]] < here:
            return self.fused.eqns[storage.last]
        return None


def _is_live(storage: Storage, i: int) -> bool:
    return storage.first <= i <= storage.last
