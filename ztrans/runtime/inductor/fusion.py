"""Group the equations of a program that run as one kernel or call, and put each group's equations next to each other.

A group is a connected set of elementwise equations and reductions, which becomes one kernel. Equal updates of a fused
optimizer, one equation for each tensor, form a group that a single call of PyTorch computes; so do equal counters of
steps. Matrix products, attention, random draws and communication join no group, and keep their order. Groups depend on
the equations, not on where the plan placed the collectives, so equal layers have equal groups. Equations that would
keep values live at the peak of memory are the exception (see `running_order`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...ir.graph import Eqn, Graph, Var, variables
from ...ir.nested import instances
from ...ir.op_facts import is_view, op_facts
from ...ir.pairing import Pairs, pair
from ...ir.varying import varying
from ...rewrites.update_groups import EqnGroup, has_list_form, is_fused_update

# The most equations of a kernel: compiling a larger one takes longer than its fusion saves.
MOST = 64
_CONSTANTS = {"arange", "full", "ones", "scalar_tensor", "zeros"}


@dataclass(frozen=True, eq=False)
class FusedGroup:
    """Equations that run as one kernel or one call.

    Attributes:
        eqns: the equations, which are next to each other in the program.
        ins: the values that they read from outside.
        outs: the results that other equations or the outputs read.
        is_update: whether they are equal updates, which one call of PyTorch computes. Other groups become a kernel.
    """

    eqns: tuple[Eqn, ...]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    is_update: bool


def fuse(
    graph: Graph,
    updates: Sequence[EqnGroup],
    unmoved: Collection[Eqn] = frozenset(),
    alone: Collection[Eqn] = frozenset(),
) -> tuple[Graph, tuple[FusedGroup, ...]]:
    """Group the equations of a program.

    Args:
        graph: the program, with equal updates next to each other.
        updates: groups of equal updates, one call of PyTorch for each (see `runs_in_one_call`).
        unmoved: equations that keep their places: they join a group only if they need not move.
        alone: equations that join no group.

    Returns: The program with the equations of each group next to each other, and the groups in program order.
    """
    items = _Items(pair(graph), updates, unmoved, alone)
    for eqn in _waits_together(graph, items.pairs):
        items.add(eqn)

    parts: list[list[Eqn]] = []
    for item in items.in_order():
        parts += _parts(item)
    first_updates = {update[0] for update in updates}
    readers = _readers(parts, graph)
    eqns: list[Eqn] = []
    groups = []
    for k, part in enumerate(parts):
        eqns += part
        if len(part) > 1:
            groups.append(_group(k, part, readers, part[0] in first_updates))
    return graph.replace(eqns=tuple(eqns)), tuple(groups)


def _group(
    k: int, eqns: Sequence[Eqn], readers: Mapping[Var, set[int]], is_update: bool
) -> FusedGroup:
    """The group of part k of the program. `readers` are the numbers of the parts that read each value."""
    reads: dict[Var, None] = {}
    results: dict[Var, None] = {}
    for eqn in eqns:
        reads.update(dict.fromkeys(eqn.ins))
        results.update(dict.fromkeys(eqn.results))
    ins = [v for v in reads if v not in results]
    outs = [v for v in results if readers.get(v, set()) - {k}]
    return FusedGroup(tuple(eqns), tuple(ins), tuple(outs), is_update)


def _readers(parts: Sequence[list[Eqn]], graph: Graph) -> dict[Var, set[int]]:
    """The numbers of the parts that read each value. The outputs of the program count as one more part."""
    readers: dict[Var, set[int]] = {}
    for k, part in enumerate(parts):
        for eqn in part:
            for v in eqn.ins:
                readers.setdefault(v, set()).add(k)
    for v in variables(graph.outputs):
        readers.setdefault(v, set()).add(len(parts))
    return readers


def computed_alike(graph: Graph) -> frozenset[Eqn]:
    """The equations whose results must have the same bits on all ranks; none if there is one rank.

    These are the update, and all equations that do not depend on the batch. Their kernels must not depend on anything
    that may differ between ranks, such as the size of a batch, because a kernel rounds differently from its equations
    run one by one.
    """
    if all(size == 1 for size in graph.axes.values()):
        return frozenset()
    may_differ = varying(graph, ("batch",))
    replicated = []
    for eqn in graph.eqns:
        if eqn.region == "update" or any(v not in may_differ for v in eqn.results):
            replicated.append(eqn)
    return frozenset(replicated)


def runs_in_one_call(eqn: Eqn) -> bool:
    """Whether one call of PyTorch can compute this equation with equal ones: a fused update, or a counter of steps."""
    return is_fused_update(eqn) or _is_counter(eqn)


def _is_counter(eqn: Eqn) -> bool:
    """Whether an equation of the update adds a number to a scalar, as optimizers do to count their steps."""
    adds = eqn.region == "update" and eqn.op is torch.ops.aten.add.Scalar
    return adds and _is_small(eqn) and has_list_form(eqn)


def _is_fusible(eqn: Eqn) -> bool:
    """Whether an equation can run in a kernel with others."""
    facts = op_facts(eqn.op)
    fuses = facts.pointwise or facts.reduction or facts.fuses
    if not fuses or facts.random or _is_complex(eqn):
        return False
    # A tensor among the arguments is a constant of the user, and kernels take none.
    constants = instances((eqn.args, eqn.kwargs), torch.Tensor)
    return not constants


def _is_real_view(eqn: Eqn) -> bool:
    return is_view(eqn) and not _is_complex(eqn)


def _is_complex(eqn: Eqn) -> bool:
    """Whether an equation reads or returns complex numbers. Inductor generates no kernels for them."""
    return any(v.dtype.is_complex for v in (*eqn.ins, *eqn.results))


def _is_small(eqn: Eqn) -> bool:
    return all(out.numel <= 1 for out in eqn.results)


@dataclass(eq=False)
class _Item:
    """The equations at one position of the new order: a group with views of its values, or a single other equation.

    Items form a union-find forest: an item that another one absorbs becomes empty, and points to it.
    """

    position: tuple[int, int]
    fusible: bool = False
    eqns: list[Eqn] = field(default_factory=list)
    read_by: set[_Item] = field(default_factory=set)
    absorbed_by: _Item | None = None

    @property
    def root(self) -> _Item:
        """The item that now holds the equations of this one."""
        item = self
        while item.absorbed_by is not None:
            item = item.absorbed_by
        return item


class _Items:
    """The items of a program, built equation by equation. Their positions give the new order of the program.

    An equation joins the item that computes the last of its inputs, if it can run in the kernel of that item. The item
    absorbs an earlier item that nothing else reads, because that can run later. Views and scalars take the position of
    the item that they read. Constants, and views of them, are deferred until an equation reads them.
    """

    def __init__(
        self,
        pairs: Pairs,
        updates: Sequence[EqnGroup],
        unmoved: Collection[Eqn],
        alone: Collection[Eqn],
    ) -> None:
        self.pairs = pairs
        self.unmoved = unmoved
        self.alone = alone
        self.update_of: dict[Eqn, EqnGroup] = {}
        for update in updates:
            self.update_of.update(dict.fromkeys(update, update))
        self.items = [_Item((0, 0))]  # holds views of inputs
        self.item_of: dict[Var, _Item] = {}
        self.deferred: dict[Var, Eqn] = {}

    def in_order(self) -> list[_Item]:
        """The items in the new order; constants that no equation has read are last."""
        for eqn in dict.fromkeys(self.deferred.values()):
            self.append(eqn, self.new_item(_is_fusible(eqn)))
        return sorted(self.items, key=lambda item: item.position)

    def add(self, eqn: Eqn) -> None:
        """Put an equation into an item, or defer it."""
        update = self.update_of.get(eqn, (eqn,))
        latest = max(self.read_items(eqn), key=lambda item: item.position, default=self.items[0])
        if self.is_constant(eqn):
            self.deferred.update((out, eqn) for out in eqn.results)
        elif _is_real_view(eqn):
            self.append(eqn, latest)
        elif _is_fusible(eqn) and len(update) == 1 and eqn not in self.alone:
            self.add_fusible(eqn, latest)
        elif eqn is update[0]:  # the others come with it
            self.add_alone(update)

    def add_fusible(self, eqn: Eqn, latest: _Item) -> None:
        """Put an equation, with the constants that it reads, into the last item that it reads or into a new one."""
        if self.may_join(eqn, latest):
            item = latest
        else:
            # A scalar is cheap at any position. It is computed early, so that it does not separate updates.
            item = self.new_item(True, neighbour=latest if _is_small(eqn) else None)
        for constant in self.take_deferred(eqn):
            self.append(constant, item)
        self.append(eqn, item)

    def add_alone(self, eqns: Sequence[Eqn]) -> None:
        """Put an equation that is not fused, or equal updates, into a new item."""
        for eqn in eqns:
            for constant in self.take_deferred(eqn):
                self.append(constant, self.new_item(_is_fusible(constant)))
        item = self.new_item(False)
        for eqn in eqns:
            self.append(eqn, item)

    def append(self, eqn: Eqn, item: _Item) -> None:
        """Put an equation at the end of an item, and let the item absorb the earlier items that it can."""
        for earlier in self.read_items(eqn):
            if earlier is item:
                continue
            earlier.read_by.add(item)
            if item.eqns and self.may_absorb(item, earlier, eqn):
                item.eqns[:0] = earlier.eqns
                earlier.eqns = []
                earlier.absorbed_by = item
        item.eqns.append(eqn)
        self.item_of.update((out, item) for out in eqn.results)

    def new_item(self, fusible: bool, neighbour: _Item | None = None) -> _Item:
        """A new item at the end, or next to `neighbour`."""
        count = len(self.items)
        position = count if neighbour is None else neighbour.position[0]
        item = _Item((position, count), fusible)
        self.items.append(item)
        return item

    def read_items(self, eqn: Eqn) -> list[_Item]:
        """The items that compute the inputs of an equation, each once."""
        return list(dict.fromkeys(self.item_of[v].root for v in eqn.ins if v in self.item_of))

    def is_constant(self, eqn: Eqn) -> bool:
        """Whether the equation creates a constant, or is a view of a deferred constant."""
        if not eqn.ins:
            return op_facts(eqn.op).name in _CONSTANTS
        return _is_real_view(eqn) and all(v in self.deferred for v in eqn.ins)

    def take_deferred(self, eqn: Eqn) -> list[Eqn]:
        """Remove and return the deferred equations that `eqn` needs, in an order that can run."""
        constants = dict.fromkeys(self.deferred[v] for v in eqn.ins if v in self.deferred)
        for constant in constants:
            for out in constant.results:
                self.deferred.pop(out, None)
        eqns: list[Eqn] = []
        for constant in constants:
            eqns += self.take_deferred(constant)
            eqns.append(constant)
        return eqns

    def may_join(self, eqn: Eqn, item: _Item) -> bool:
        """Whether `eqn` reads a value of the item that is more than a scalar.

        If a scalar were enough, all updates that share one, such as a clip coefficient, would become one group.
        """
        if not item.fusible or len(item.eqns) >= MOST:
            return False
        if eqn in self.unmoved and item is not self.items[-1]:
            return False
        shared = [v for v in eqn.ins if v in self.item_of and self.item_of[v].root is item]
        return _is_small(eqn) or any(v.numel > 1 for v in shared)

    def may_absorb(self, item: _Item, earlier: _Item, eqn: Eqn) -> bool:
        """Whether an earlier item can run as late as `item`, which will end with `eqn`: nothing else reads it."""
        fits = item.fusible and len(item.eqns) + len(earlier.eqns) < MOST
        if not fits or not self.may_join(eqn, earlier):
            return False
        if not all(reader.root is item for reader in earlier.read_by):
            return False
        return not any(x in self.unmoved for x in earlier.eqns)


def _waits_together(graph: Graph, pairs: Pairs) -> Iterator[Eqn]:
    """The equations of a program, with all waits for a bucket moved to its first wait."""
    for i, eqn in enumerate(graph.eqns):
        paired_wait = pairs.waits.get(eqn)
        if paired_wait is None:
            yield eqn
        elif paired_wait.started.first_wait == i:
            yield from (graph.eqns[k] for k in sorted(paired_wait.started.waits))


def _parts(item: _Item) -> Iterator[list[Eqn]]:
    """The group of an item, if it has one; then its other equations, which are views, one by one."""
    group_eqns = _group_eqns(item)
    if group_eqns:
        yield [eqn for eqn in item.eqns if eqn in group_eqns]
    for eqn in item.eqns:
        if eqn not in group_eqns:
            yield [eqn]


def _group_eqns(item: _Item) -> set[Eqn]:
    """The equations of an item that form a group, with the views that they read, which run in their kernel."""
    group_eqns = {eqn for eqn in item.eqns if not _is_real_view(eqn)}
    # A kernel of one equation saves nothing.
    if item.fusible and sum(map(_is_fusible, group_eqns)) < 2:
        return set()
    group_reads: set[Var] = set()
    for eqn in group_eqns:
        group_reads.update(eqn.ins)
    # Backwards, to include views of views.
    for eqn in reversed(item.eqns):
        if eqn not in group_eqns and any(v in group_reads for v in eqn.outs):
            group_reads.update(eqn.ins)
            group_eqns.add(eqn)
    return group_eqns
