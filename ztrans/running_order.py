"""The order in which a backend runs a planned program, and what it computes with one call.

A backend puts some equations next to each other: equal updates, which one call computes, and elementwise equations,
which become one kernel. An equation that runs earlier or later than the plan says may keep a value live for longer. A
value that backward recomputes would even be live throughout, if it joined a kernel of forward. So equations are left in
their places where the peak of memory would rise above that of the plan.

A kernel frees its arguments only when it ends. Until then, a concatenation that it makes is in memory too. Equations
that run one by one free their arguments earlier. So where a kernel would need more than the limit of the step, its
equations run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from .ir.donation import donation
from .ir.graph import Eqn, Graph, Var
from .ir.op_facts import op_facts
from .ir.update_groups import EqnGroup, group_updates
from .planning.buffers import Storage, by_memory, live_bytes, storages
from .planning.cost import memory
from .runtime.inductor.fusion import FusedGroup, computed_alike, fuse, runs_in_one_call

# The numbers of parts of an update's parameters that are tried in turn, until the peak of memory does not rise.
_PARTS = (1, 16, 256, 4096)
# The most rounds that leave more equations in their places.
_ROUNDS = 10
# The share of the limit by which a kernel may exceed it. It allocates its results, also small ones such as the gradient
# of a bias, before it frees its arguments. The scalars of grouped updates may exceed the peak by the same share.
_EXCESS = 0.001
# Operations whose results a kernel writes to memory, even if nothing else reads them.
_CONCATENATIONS = {"cat", "stack"}


def with_grouped_updates(
    graph: Graph, may_group: Callable[[Eqn], bool] = lambda eqn: True
) -> tuple[Graph, tuple[EqnGroup, ...]]:
    """The program with equal updates next to each other, among those that may be grouped, and their groups.

    Where the peak of memory would rise otherwise, fewer parameters are updated together, so that fewer temporary values
    live at one time.
    """
    peak = memory(graph).peak
    for parts in _PARTS:
        grouped, groups = group_updates(graph, may_group, parts)
        if memory(grouped).peak <= (1 + _EXCESS) * peak:
            return grouped, groups
    return graph, ()


def fused_within_peak(graph: Graph) -> tuple[Graph, tuple[FusedGroup, ...]]:
    """The program with the equations of each kernel next to each other, and the groups of equations that are kernels.

    An equation that would raise the peak of memory stays in its place. The equations of a kernel that would need more
    than the limit of the step run one by one. Scalars, buckets that are unpacked at once, and
    values that all ranks must compute alike join kernels in any case: the peak depends on the size of the batch, and
    their kernels may not.
    """
    peak = memory(graph).peak
    alike = computed_alike(graph)
    if alike:
        # Which updates are grouped has an effect on the kernels of the others, so it may not depend on the peak either.
        grouped, updates = group_updates(graph, runs_in_one_call)
    else:
        grouped, updates = with_grouped_updates(graph, runs_in_one_call)
    limit = graph.hints.memory_limit
    unmoved: frozenset[Eqn] = frozenset()
    alone: frozenset[Eqn] = frozenset()
    fused, groups = fuse(grouped, updates)
    for _ in range(_ROUNDS):
        moved = _Moves(graph, fused, alike | unmoved).that_raise(peak)
        too_large: frozenset[Eqn] = frozenset()
        if not moved and limit is not None:
            kernels = [group for group in groups if alike.isdisjoint(group.eqns)]
            too_large = _too_large(fused, kernels, limit)
        if not moved and not too_large:
            break
        unmoved |= moved
        alone |= too_large
        fused, groups = fuse(grouped, updates, unmoved, alone)
    return fused, groups


def _too_large(fused: Graph, kernels: Sequence[FusedGroup], limit: int) -> frozenset[Eqn]:
    """The equations of the kernels during which more bytes are live than a limit allows."""
    number = {eqn: i for i, eqn in enumerate(fused.eqns)}
    every, _ = by_memory(storages(fused, donation(fused)))
    eqns: set[Eqn] = set()
    for kernel in kernels:
        first = number[kernel.eqns[0]]
        last = number[kernel.eqns[-1]]
        if kernel.is_update:
            continue
        if _bytes_of_kernel(fused, every, first, last) > (1 + _EXCESS) * limit:
            eqns.update(kernel.eqns)
    return frozenset(eqns)


def _bytes_of_kernel(fused: Graph, every: Sequence[Storage], first: int, last: int) -> int:
    """The bytes that are live while the equations from `first` to `last` run as one kernel."""
    live = 0
    for storage in every:
        is_inside = first <= storage.first and storage.last <= last
        maker = fused.eqns[max(storage.first, 0)]
        # A kernel has other values that only it reads in registers.
        if is_inside and op_facts(maker.op).name not in _CONCATENATIONS:
            continue
        if storage.first <= last and storage.last >= first:
            live += storage.bytes
    return live


class _Moves:
    """How the equations of a program were moved to fuse it, and which bytes are live because of that.

    Attributes:
        fused: the program with its equations moved.
        fixed: the equations that are not to blame: they are in their places already, or must stay where they are.
        number: of each equation in the program before it was fused.
        owner: by value, the first value that had its storage, before the program was fused.
        last_use: by such a value, the number of the last equation that needed it.
        storages: of the fused program, on the device, the largest first.
    """

    def __init__(self, graph: Graph, fused: Graph, fixed: Set[Eqn]) -> None:
        self.fused = fused
        self.fixed = fixed
        self.number = {eqn: i for i, eqn in enumerate(graph.eqns)}
        lifetimes = donation(graph)
        self.owner = lifetimes.owner
        self.last_use: dict[Var, int] = {}
        for storage in storages(graph, lifetimes):
            # Some buffers of equations are listed under the name of a value, too.
            last = self.last_use.get(storage.value, -1)
            self.last_use[storage.value] = max(last, storage.last)
        self.storages, _ = by_memory(storages(fused, donation(fused)))
        self.storages.sort(key=lambda storage: -storage.bytes)

    def that_raise(self, peak: int) -> frozenset[Eqn]:
        """The moved equations because of which the fused program needs more bytes than `peak`.

        Those of the largest values come first, until they cover what is above the peak.
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

        None if the storage was live there before, or if the equation is fixed.
        """
        maker = self.fused.eqns[storage.first]
        if storage.value not in maker.outs:
            return None  # the caller's, or a buffer of the equation
        here = self.number[self.fused.eqns[i]]
        owner = self.owner[storage.value]
        eqn: Eqn | None = None
        if owner is not storage.value or self.number[maker] > here:
            # It wrote over an argument that others now read after it, or it ran later than this equation.
            eqn = maker
        elif self.last_use[owner] < here:
            # The last equation that reads it ran earlier than this one. If that one has not moved, this one has.
            eqn = self.fused.eqns[storage.last]
            if eqn in self.fixed:
                eqn = self.fused.eqns[i]
        return None if eqn in self.fixed else eqn


def _is_live(storage: Storage, i: int) -> bool:
    return storage.first <= i <= storage.last
