"""Fusion: choose the equations of a program that run as one, and put these next to each other.

A group is a connected set of elementwise equations and reductions, which become a kernel. Equal updates of a fused
optimizer, one equation for each tensor, are a group that a single call of PyTorch computes, and so are equal counters
of steps. Matrix products, attention, random draws and communication are in no group, and keep their order. Groups
depend on the equations only, not on where the plan placed the collectives, so equal layers have equal groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from ...ir.graph import Eqn, Graph, Var, variables
from ...ir.op_facts import is_view, op_facts
from ...ir.pairing import Pairs, pair
from ...ir.update_groups import has_list_form, is_fused_update

MOST = (
    64  # the most equations of a group: to compile a larger one takes longer than its fusion saves
)

_CONSTANTS = {"arange", "full", "ones", "scalar_tensor", "zeros"}


@dataclass(frozen=True, eq=False)
class Group:
    """Equations that run as one: `ins` are the values that they read, `outs` the results that other equations read."""

    eqns: tuple[Eqn, ...]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]

    @property
    def updates(self) -> bool:
        """Whether these are the updates of a fused optimizer."""
        return is_fused_update(self.eqns[0])

    @property
    def counters(self) -> bool:
        """Whether these are counters of steps, none of which reads another."""
        return all(_is_counter(e) and e.ins[0] in self.ins for e in self.eqns)


def fuse(graph: Graph) -> tuple[Graph, tuple[Group, ...]]:
    """Group the equations of a program.

    Returns the program with the equations of each group next to each other, and the groups in their order.
    """
    parts = [part for item in _Items.of(graph) for part in _parts(item)]
    parts = [*_counters_together(parts, graph.inputs)]
    readers: dict[Var, set[int]] = {v: {-1} for v in variables(graph.outputs)}
    for k, part in enumerate(parts):
        for v in (v for e in part for v in e.ins):
            readers.setdefault(v, set()).add(k)
    groups = (_group(part, k, readers) for k, part in enumerate(parts) if len(part) > 1)
    return graph.replace(eqns=tuple(e for part in parts for e in part)), tuple(groups)


def _group(eqns: Sequence[Eqn], k: int, readers: Mapping[Var, set[int]]) -> Group:
    """The group of part k of the program; `readers` has the parts that read each value."""
    results = dict.fromkeys(out for e in eqns for out in e.results)
    ins = dict.fromkeys(v for e in eqns for v in e.ins if v not in results)
    return Group(tuple(eqns), tuple(ins), tuple(v for v in results if readers.get(v, set()) - {k}))


def _is_fusible(e: Eqn) -> bool:
    facts = op_facts(e.op)
    known = facts.pointwise or facts.reduction or facts.fuses
    literal = any(
        isinstance(x, torch.Tensor)
        for a in e.args
        for x in (a if isinstance(a, (list, tuple)) else [a])
    )
    return known and not facts.random and not literal and not _is_complex(e)


def _is_real_view(e: Eqn) -> bool:
    return (is_view(e) or op_facts(e.op).name == "_unsafe_view") and not _is_complex(e)


def _is_complex(e: Eqn) -> bool:
    """Whether an equation reads or returns complex numbers, for which Inductor generates no kernels."""
    return any(v.dtype.is_complex for v in (*e.ins, *e.outs) if v is not None)


def _is_small(e: Eqn) -> bool:
    return all(out is None or out.numel <= 1 for out in e.outs)


@dataclass(eq=False)
class _Item:
    """Equations at one position of the new order: a group with the views of its values, or a single other equation.

    Items form a union-find forest: when one item absorbs another, the absorbed item is empty and points to it.
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
    """The items of a program, built equation by equation. Their positions are an order of the program.

    An equation joins the item that computes the last of its inputs, if it can run in the kernel of that item. An
    earlier item which only that item reads can run later, so it is absorbed. Views and scalars take the position of the
    item that they read. Constants, and views of them, are deferred until an equation reads them.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.items = [_Item((0, 0))]  # the first item holds the views of inputs
        self.item_of: dict[Var, _Item] = {}
        self.deferred: dict[Var, Eqn] = {}
        self.updates: list[
            _Item
        ] = []  # one for each call of a fused optimizer, since the last collective

    @staticmethod
    def of(graph: Graph) -> list[_Item]:
        """The items of a program, in the new order."""
        build = _Items(pair(graph))
        for e in _waits_together(graph, build.pairs):
            build.add(e)
        for e in dict.fromkeys(build.deferred.values()):  # constants that no equation has read
            build.append(e, build.new_item(e))
        return sorted(build.items, key=lambda item: item.position)

    def add(self, e: Eqn) -> None:
        """Put an equation into an item, or defer it."""
        latest = max(self.read_items(e), key=lambda item: item.position, default=self.items[0])
        if self.is_constant(e):
            self.deferred.update((out, e) for out in e.results)
        elif _is_real_view(e):
            self.append(e, latest)
        elif _is_fusible(e):
            # A scalar is cheap at any position. It is computed early, so that it does not separate updates.
            after = latest if _is_small(e) else None
            item = latest if self.may_join(e, latest) else self.new_item(e, after)
            for each in (*self.take_deferred(e), e):
                self.append(each, item)
        else:
            self.add_alone(e, latest)

    def add_alone(self, e: Eqn, latest: _Item) -> None:
        """Put an equation that is not fused into an item of its own, or an update into the item of its call."""
        constants = self.take_deferred(e)
        for each in constants:
            self.append(each, self.new_item(each))
        call = self.call_for(e, latest) if is_fused_update(e) and not constants else None
        self.append(e, call or self.new_item(e))
        if is_fused_update(e) and call is None:
            self.updates.append(self.items[-1])
        elif e in self.pairs.starts or e in self.pairs.waits:
            self.updates = []

    def append(self, e: Eqn, item: _Item) -> None:
        """Put an equation at the end of an item, and let the item absorb those that it can."""
        for earlier in self.read_items(e):
            if earlier is not item:
                earlier.read_by.add(item)
                if item.eqns and self.may_absorb(item, earlier, e):
                    item.eqns[:0] = earlier.eqns
                    earlier.eqns, earlier.absorbed_by = [], item
        item.eqns.append(e)
        self.item_of.update((out, item) for out in e.results)

    def new_item(self, e: Eqn, after: _Item | None = None) -> _Item:
        """A new item for an equation, at the end, or next to `after`."""
        count = len(self.items)
        self.items.append(_Item((after.position[0] if after else count, count), _is_fusible(e)))
        return self.items[-1]

    def read_items(self, e: Eqn) -> list[_Item]:
        """The items that compute the inputs of an equation, each once."""
        return list(dict.fromkeys(self.item_of[v].root for v in e.ins if v in self.item_of))

    def is_constant(self, e: Eqn) -> bool:
        """Whether the equation creates a constant, or is a view of a deferred constant."""
        return (
            op_facts(e.op).name in _CONSTANTS
            if not e.ins
            else _is_real_view(e) and all(v in self.deferred for v in e.ins)
        )

    def take_deferred(self, e: Eqn) -> list[Eqn]:
        """Remove and return the deferred equations that `e` needs, in an order in which they can run."""
        needed = dict.fromkeys(self.deferred[v] for v in e.ins if v in self.deferred)
        for each in needed:
            for out in each.results:
                self.deferred.pop(out, None)
        return [constant for each in needed for constant in (*self.take_deferred(each), each)]

    def call_for(self, e: Eqn, latest: _Item) -> _Item | None:
        """The item whose call can include an update of a fused optimizer: it runs after the inputs exist."""
        calls = (item for item in self.updates if latest.position < item.position)
        return next((item for item in calls if _is_same_call(item.eqns[0], e)), None)

    def may_join(self, e: Eqn, item: _Item) -> bool:
        """Whether `e` reads a value of the item that is more than a scalar.

        If a scalar sufficed, all updates that share one, such as a clip coefficient, would become one group.
        """
        shared = [v for v in e.ins if v in self.item_of and self.item_of[v].root is item]
        return (
            item.fusible
            and len(item.eqns) < MOST
            and (_is_small(e) or any(v.numel > 1 for v in shared))
        )

    def may_absorb(self, item: _Item, earlier: _Item, e: Eqn) -> bool:
        """Whether an earlier item can run as late as `item`, which will end with `e`: nothing else reads it."""
        fits = item.fusible and len(item.eqns) + len(earlier.eqns) < MOST
        return (
            fits
            and self.may_join(e, earlier)
            and {reader.root for reader in earlier.read_by} == {item}
        )


def _waits_together(graph: Graph, pairs: Pairs) -> Iterator[Eqn]:
    """The equations of a program, with all waits for a bucket at the place of its first wait."""
    for i, e in enumerate(graph.eqns):
        waited = pairs.waits.get(e)
        if waited is None:
            yield e
        elif waited.started.first_wait == i:
            yield from (graph.eqns[k] for k in sorted(waited.started.waits))


def _counters_together(parts: Sequence[list[Eqn]], inputs: Sequence[Var]) -> Iterator[list[Eqn]]:
    """The parts of a program, in which equal counters of the state that follow each other are one part."""
    given = set(inputs)

    def kind(part: list[Eqn]) -> Hashable:
        """What equal counters have in common; None for another part."""
        e = part[0]
        alone = len(part) == 1 and _is_counter(e) and e.ins[0] in given
        return (e.ins[0].dtype, e.args[1:], tuple(e.kwargs.items())) if alone else None

    for counted, alike in groupby(parts, kind):
        if counted is None:
            yield from alike
        else:
            eqns = [e for part in alike for e in part]
            yield from (eqns[k : k + MOST] for k in range(0, len(eqns), MOST))


def _is_counter(e: Eqn) -> bool:
    """Whether an equation of the update adds a number to a scalar, as optimizers do to count their steps."""
    return (
        e.region == "update"
        and e.op is torch.ops.aten.add.Scalar
        and _is_small(e)
        and has_list_form(e)
    )


def _is_same_call(a: Eqn, b: Eqn) -> bool:
    """Whether one call can compute both updates, of one tensor each: they have equal settings and dtypes."""
    lists = all(isinstance(x, list) and len(x) <= 1 for e in (a, b) for x in e.args)
    dtypes = lambda e: [[v.dtype for v in x] for x in e.args]
    return lists and a.op is b.op and a.kwargs == b.kwargs and dtypes(a) == dtypes(b)


def _parts(item: _Item) -> Iterator[list[Eqn]]:
    """The group of an item, if it has one; then, one by one, its other equations, which are views."""
    grouped = {e for e in item.eqns if not _is_real_view(e)}
    if item.fusible and sum(map(_is_fusible, grouped)) < 2:
        grouped = set()
    read = {v for e in grouped for v in e.ins}
    for e in filter(
        _is_real_view, reversed(item.eqns)
    ):  # the views that a group reads run in its kernel
        if not read.isdisjoint(e.outs):
            read.update(e.ins)
            grouped.add(e)
    if grouped:
        yield [e for e in item.eqns if e in grouped]
    yield from ([e] for e in item.eqns if e not in grouped)
