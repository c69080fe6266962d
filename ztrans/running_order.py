"""The order in which a backend runs a planned program, with the equations of one call or kernel next to each other.

One call computes equal updates, and elementwise equations become one kernel. An equation that moves away from its place
in the plan may keep a value live for longer. A value that backward recomputes would even stay live throughout, if its
equation joined a kernel of forward. So an equation stays in its place where the memory peak would rise above that of
the plan.

A kernel frees its arguments only when it ends, and a concatenation that it makes is in memory until then. Equations
that run one by one free their arguments earlier. So where a kernel would exceed the limit of the step, its equations
run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from .ir.donation import donation
from .ir.graph import Eqn, Graph, Var
from .ir.op_facts import op_facts
from .planning.buffers import Storage, by_memory, live_bytes, storages
from .planning.cost import memory
from .rewrites.update_groups import EqnGroup, group_updates
from .runtime.inductor.fusion import FusedGroup, computed_alike, fuse, runs_in_one_call

# The numbers of parts that the parameters of an update are divided into, tried in turn until the peak does not rise.
_PARTS = (1, 16, 256, 4096)
# The most rounds of fusion, each of which leaves more equations in their places.
_ROUNDS = 10
# The share by which a kernel may exceed the limit: it allocates its results, including small ones such as the gradient
# of a bias, before it frees its arguments. The scalars of grouped updates may exceed the peak by the same share.
_EXCESS = 0.001
# Operations whose results a kernel writes to memory, even if nothing else reads them.
_CONCATENATIONS = {"cat", "stack"}


def with_grouped_updates(
    graph: Graph, may_group: Callable[[Eqn], bool] = lambda eqn: True
) -> tuple[Graph, tuple[EqnGroup, ...]]:
    """The program with equal updates next to each other, where `may_group` allows it, and the groups.

    If the memory peak would rise, fewer parameters are updated together, so that fewer temporary values are live at
    once.
    """
    peak = memory(graph).peak
    for parts in _PARTS:
        grouped, groups = group_updates(graph, may_group, parts)
        if memory(grouped).peak <= (1 + _EXCESS) * peak:
            return grouped, groups
    return graph, ()


def fused_within_peak(graph: Graph) -> tuple[Graph, tuple[FusedGroup, ...]]:
    """The program with the equations of each kernel next to each other, and the groups of equations that are kernels.

    An equation that would raise the memory peak stays in its place. The equations of a kernel that would exceed the
    limit of the step run one by one. Scalars, buckets that are unpacked at once, and values that all ranks must compute
    alike always join kernels: the peak depends on the size of the batch, and their kernels must not.
    """
    peak = memory(graph).peak
    replicated = computed_alike(graph)
    if replicated:
        # The grouped updates affect the kernels of the other equations, so they must not depend on the peak either.
        grouped, updates = group_updates(graph, runs_in_one_call)
    else:
        grouped, updates = with_grouped_updates(graph, runs_in_one_call)
    limit = graph.hints.memory_limit
    unmoved: frozenset[Eqn] = frozenset()
    unfused: frozenset[Eqn] = frozenset()
    fused, groups = fuse(grouped, updates)
    for _ in range(_ROUNDS):
        culprits = _Moves(graph, fused, replicated | unmoved).culprits(peak)
        too_large: frozenset[Eqn] = frozenset()
        # Kernels change when their equations stay in place, so their sizes are checked last.
        if not culprits and limit is not None:
            kernels = [group for group in groups if replicated.isdisjoint(group.eqns)]
            too_large = _in_too_large_kernels(fused, kernels, limit)
        if not culprits and not too_large:
            break
        unmoved |= culprits
        unfused |= too_large
        fused, groups = fuse(grouped, updates, unmoved, unfused)
    return fused, groups


def _in_too_large_kernels(
    fused: Graph, kernels: Sequence[FusedGroup], limit: int
) -> frozenset[Eqn]:
    """The equations of the kernels that exceed the limit while they run."""
    number = {eqn: i for i, eqn in enumerate(fused.eqns)}
    on_device = by_memory(storages(fused, donation(fused)))["device"]
    eqns: set[Eqn] = set()
    for kernel in kernels:
        if kernel.is_update:
            continue
        first = number[kernel.eqns[0]]
        last = number[kernel.eqns[-1]]
        if _kernel_bytes(fused, on_device, first, last) > (1 + _EXCESS) * limit:
            eqns.update(kernel.eqns)
    return frozenset(eqns)


def _kernel_bytes(fused: Graph, on_device: Sequence[Storage], first: int, last: int) -> int:
    """The bytes that are live while the equations from `first` to `last` run as one kernel."""
    live = 0
    for storage in on_device:
        is_inside = first <= storage.first and storage.last <= last
        maker = fused.eqns[max(storage.first, 0)]
        # All other values that only the kernel reads are in registers.
        if is_inside and op_facts(maker.op).name not in _CONCATENATIONS:
            continue
        if storage.first <= last and storage.last >= first:
            live += storage.bytes
    return live


class _Moves:
    """How fusion moved the equations of a program, and which bytes are live because of that.

    Attributes:
        fused: the program with its equations moved.
        fixed: the equations that cannot be blamed: they are in their places already, or must stay in their kernels.
        number: the position of each equation in the program before fusion.
        owner: for each value, the first value with the same storage, before fusion.
        last_use: for each such owner, the number of the last equation that needed it, before fusion.
        storages: the storages of the fused program on the device, the largest first.
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
        self.storages = by_memory(storages(fused, donation(fused)))["device"]
        self.storages.sort(key=lambda storage: -storage.bytes)

    def culprits(self, peak: int) -> frozenset[Eqn]:
        """The moved equations that raise the bytes of the fused program above `peak`.

        Equations of the largest values come first, until they cover the bytes above the peak.
        """
        live = live_bytes(self.fused, self.storages)
        culprits: dict[Eqn, Storage] = {}
        for i in sorted(range(len(live)), key=lambda i: -live[i]):
            excess = live[i] - peak
            if excess <= 0:
                break
            excess -= sum(storage.bytes for storage in culprits.values() if _is_live(storage, i))
            for storage in self.storages:
                if excess <= 0:
                    break
                cause = self.cause(storage, i) if _is_live(storage, i) else None
                if cause is not None and cause not in culprits:
                    culprits[cause] = storage
                    excess -= storage.bytes
        return frozenset(culprits)

    def cause(self, storage: Storage, i: int) -> Eqn | None:
        """The moved equation because of which a storage is live at equation `i` of the fused program.

        None if the storage was live there before fusion, or if the equation is fixed.
        """
        maker = self.fused.eqns[storage.first]
        if storage.value not in maker.outs:
            return None  # an argument of the program, or a buffer of the equation
        here = self.number[self.fused.eqns[i]]
        owner = self.owner[storage.value]
        eqn: Eqn | None = None
        if owner is not storage.value or self.number[maker] > here:
            # Before fusion, `maker` wrote over an argument that others now read later, or it ran after equation `i`.
            eqn = maker
        elif self.last_use[owner] < here:
            # Before fusion, the last reader ran before equation `i`. If the reader has not moved, equation `i` has.
            eqn = self.fused.eqns[storage.last]
            if eqn in self.fixed:
                eqn = self.fused.eqns[i]
        return None if eqn in self.fixed else eqn


def _is_live(storage: Storage, i: int) -> bool:
    return storage.first <= i <= storage.last
