"""Fusion: which equations of a program run as one, and an order that puts these side by side.

A group is a connected run of elementwise equations and reductions, or the updates of one fused
optimizer, one a tensor, that a single call does for all. What multiplies matrices, attends, draws
random numbers or communicates stands alone, and keeps its order. A group grows from the equations
alone, so equal layers give equal groups wherever the plan of the collectives has cut them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ...ir.collectives import Pairs, pair
from ...ir.graph import Eqn, Graph, Var, is_random, variables
from ...ir.operations import is_view

MOST = 64  # equations of a group: beyond that compiling takes longer than the fusion is worth

# Fused, though tagged neither pointwise nor reduction. Scatters are not: threads would race for their sums.
_ALSO = {
    "_to_copy", "cat", "constant_pad_nd", "copy", "embedding", "full_like", "gather", "index", "linalg_vector_norm",
    "_fused_rms_norm", "_fused_rms_norm_backward", "native_layer_norm", "native_layer_norm_backward",
    "nll_loss_backward", "nll_loss_forward", "ones_like",
    "select_backward", "slice_backward", "stack", "zeros_like",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
}  # fmt: skip
_MAKES = {"arange", "full", "ones", "scalar_tensor", "zeros"}


@dataclass(frozen=True, eq=False)
class Group:
    """Equations that run as one, what they read, and what of theirs is read elsewhere."""

    eqns: tuple[Eqn, ...]
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]

    @property
    def updates(self) -> bool:
        """Whether they are those of a fused optimizer."""
        return is_update(self.eqns[0])


def fuse(graph: Graph) -> tuple[Graph, tuple[Group, ...]]:
    """The program with the equations of each group side by side, and its groups, in order.

    An equation moves up to the group that makes what it reads, where all else that it reads is there by
    then, or is read by that group alone and may wait for it; views and scalars move up to what they read;
    the members of a bucket are unpacked where the first is waited for.
    """
    parts = [part for item in _items(graph) for part in _parts(item)]
    readers: dict[Var, set[int]] = {v: {-1} for v in variables(graph.outputs)}
    for k, part in enumerate(parts):
        for v in (v for e in part for v in e.ins):
            readers.setdefault(v, set()).add(k)
    groups = []
    for k, part in enumerate(parts):
        if len(part) > 1:
            made = dict.fromkeys(out for e in part for out in e.outs if out is not None)
            ins = dict.fromkeys(v for e in part for v in e.ins if v not in made)
            groups.append(Group(tuple(part), tuple(ins), tuple(v for v in made if readers.get(v, set()) - {k})))
    return graph.replace(eqns=tuple(e for part in parts for e in part)), tuple(groups)


def is_update(e: Eqn) -> bool:
    """Whether it is an update of a fused optimizer."""
    return _name(e).startswith("_fused_ada") or _name(e).startswith("_fused_sgd")


def _name(e: Eqn) -> str:
    return e.op._schema.name.removeprefix("aten::") if isinstance(e.op, torch._ops.OpOverload) else ""


def _is_fusible(e: Eqn) -> bool:
    tags = getattr(e.op, "tags", ())
    known = torch.Tag.pointwise in tags or torch.Tag.reduction in tags or _name(e) in _ALSO
    literal = any(isinstance(x, torch.Tensor) for a in e.args for x in (a if isinstance(a, (list, tuple)) else [a]))
    return known and not is_random(e.op) and not literal and not _is_complex(e)


def _shows(e: Eqn) -> bool:
    return (is_view(e) or _name(e) == "_unsafe_view") and not _is_complex(e)


def _is_complex(e: Eqn) -> bool:
    """Whether it reads or makes complex numbers, of which Inductor makes no kernels."""
    return any(v.dtype.is_complex for v in (*e.ins, *e.outs) if v is not None)


@dataclass(eq=False)
class _Item:
    """What stands at one place of the new order."""

    place: tuple[int, int]
    fusible: bool = False
    eqns: list[Eqn] = field(default_factory=list)
    readers: set[_Item] = field(default_factory=set)


def _items(graph: Graph) -> list[_Item]:
    """The equations, one by one: each joins an item that it may join, or comes at the end."""
    items = [_Item((0, 0))]
    home: dict[Var, _Item] = {}
    free: dict[Var, Eqn] = {}  # made of nothing, or a view of that; they stand with who first reads them
    updates: list[_Item] = []  # since the last collective, one for each call

    def place(e: Eqn, target: _Item | None, after: _Item | None = None) -> None:
        held = dict.fromkeys(free[v] for v in e.ins if v in free)
        for v in (out for other in (e, *held) for out in other.outs):
            free.pop(v, None)
        if target is None:
            for other in held if not _is_fusible(e) else ():
                place(other, None)
            target = _Item((after.place[0] if after else len(items), len(items)), _is_fusible(e))
            items.append(target)
        for other in held if target.fusible else ():
            place(other, target)
        for other in dict.fromkeys(home[v] for v in e.ins if v in home and home[v] is not target):
            other.readers.add(target)
            if target.eqns and _may_absorb(target, other, e, home):
                target.eqns[:0] = other.eqns
                for made in other.eqns:
                    home.update((out, target) for out in made.outs if out is not None)
                    for read in (home[v] for v in made.ins if v in home):
                        read.readers = (read.readers - {other}) | {target}
                other.eqns = []
        target.eqns.append(e)
        home.update((out, target) for out in e.outs if out is not None)

    pairs = pair(graph)
    for e in _waits_together(graph, pairs):
        if all(v in free for v in e.ins) and (_shows(e) or _name(e) in _MAKES) and (e.ins or _name(e) in _MAKES):
            free.update((out, e) for out in e.outs if out is not None)
            continue
        latest = max((home[v] for v in e.ins if v in home), key=lambda item: item.place, default=items[0])
        if _shows(e):
            place(e, latest)
        elif _is_fusible(e):
            # A scalar costs nothing wherever it stands; early, it stands between no updates.
            place(e, latest if _may_join(e, latest, home) else None, latest if _is_small(e) else None)
        elif is_update(e):
            calls = (item for item in updates if latest.place < item.place and _same_call(item.eqns[0], e))
            call = None if any(v in free for v in e.ins) else next(calls, None)
            place(e, call)
            updates += [items[-1]] if call is None else []
        else:
            place(e, None)
            updates = [] if e in pairs.starts or e in pairs.waits else updates
    while free:
        place(next(iter(free.values())), None)
    return sorted(items, key=lambda item: item.place)


def _waits_together(graph: Graph, pairs: Pairs) -> Iterator[Eqn]:
    """The equations, all waits for a bucket where the first of them was."""
    for i, e in enumerate(graph.eqns):
        waited = pairs.waits.get(e)
        if waited is None:
            yield e
        elif waited.started.first_wait == i:
            yield from (graph.eqns[k] for k in sorted(waited.started.waits))


def _may_join(e: Eqn, item: _Item, home: dict[Var, _Item]) -> bool:
    """Whether it reads the item's values elementwise: through a scalar, updates that share one would all be one."""
    joined = [v for v in e.ins if home.get(v) is item]
    return item.fusible and len(item.eqns) < MOST and (_is_small(e) or any(v.numel > 1 for v in joined))


def _may_absorb(item: _Item, other: _Item, e: Eqn, home: dict[Var, _Item]) -> bool:
    """Whether what stands earlier may wait for the item: nothing but the item reads it."""
    fits = item.fusible and len(item.eqns) + len(other.eqns) < MOST
    return fits and other.readers == {item} and _may_join(e, other, home)


def _is_small(e: Eqn) -> bool:
    return all(out is None or out.numel <= 1 for out in e.outs)


def _same_call(a: Eqn, b: Eqn) -> bool:
    """Whether one call does both updates: of one optimizer, with the same settings, one tensor each, of one dtype."""
    lists = all(isinstance(x, list) and len(x) <= 1 for e in (a, b) for x in e.args)
    dtypes = lambda e: [[v.dtype for v in x] for x in e.args]
    return lists and a.op is b.op and a.kwargs == b.kwargs and dtypes(a) == dtypes(b)


def _parts(item: _Item) -> Iterator[list[Eqn]]:
    """The group of an item, if it has one, and apart from it the views that only others read."""
    grouped = [e for e in item.eqns if not _shows(e)]
    if item.fusible and sum(_is_fusible(e) for e in grouped) < 2:
        grouped = []
    read = {v for e in grouped for v in e.ins}
    for e in reversed(item.eqns if grouped else ()):
        if _shows(e) and any(out in read for out in e.outs):
            read.update(e.ins)
            grouped.append(e)
    together = set(grouped)
    if together:
        yield [e for e in item.eqns if e in together]
    yield from ([e] for e in item.eqns if e not in together)
