"""Donation: which equations may write their result over an argument that nothing reads any more.

The caller of a step gives the storage of the state away, so an elementwise update of the state runs in place. An
operation on a temporary also runs in place if the argument fills its storage, the equation is the last to read it, and
no collective that is under way reads it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .collectives import rules
from .graph import Eqn, Graph, Var
from .liveness import liveness
from .op_facts import is_random, is_written, op_facts, overloads
from .pairing import pair
from .relations import cached_on_graph
from .write_order import first_write

Written = list[
    tuple[Var, Var | None]
]  # arguments that are overwritten, each with the result that replaces it


@dataclass(frozen=True)
class Donation:
    """Which equations write over their arguments, and how long each storage is then needed.

    Attributes:
        twins: for each equation that writes in place, the operation that does so.
        last: as in `Liveness`; a storage lives on in a result that took it over.
        owner: for each value, the first value that had its storage.
        read: for each storage, the index of the last equation during which a collective still reads it.
    """

    twins: dict[Eqn, Any]
    last: dict[Var, int]
    owner: dict[Var, Var]
    read: dict[Var, int]


@cached_on_graph
def donation(graph: Graph, apart: frozenset[Eqn] = frozenset()) -> Donation:
    """Decide for every equation whether it writes over its arguments; those in `apart` never do."""
    storages, released = _Storages(graph), _let_go(graph)
    twins: dict[Eqn, Any] = {}
    for i, e in enumerate(graph.eqns):
        choices = _choices(e) if e not in apart else ()
        twin, written = next(
            ((t, w) for t, w in choices if _fits(e, w) and storages.may_write(i, e, w)), (None, [])
        )
        if twin is not None:
            twins[e] = twin
            storages.write(written)
        storages.pass_by(e, released.get(e))
    return Donation(
        twins, storages.last, {v: storages.owner(v) for v in storages.root}, storages.read
    )


class _Storages:
    """The owner of each storage and the last equation that needs it, while results take over storages of arguments."""

    def __init__(self, graph: Graph) -> None:
        live = liveness(graph)
        self.root, self.last = live.root, dict(live.last)
        self.state, self.writes_from = set(graph.inputs[: graph.num_state]), first_write(graph)
        self.filling = self.state | {
            v for v, _ in graph.donated
        }  # they fill a storage which the program may write
        self.taken: dict[Var, Var] = {}  # results, each with the owner of the storage that it took
        self.read: dict[Var, int] = {}

    def owner(self, v: Var) -> Var:
        """The first value that had the storage of `v`."""
        v = self.root[v]
        while v in self.taken:
            v = self.taken[v]
        return v

    def may_write(self, place: int, e: Eqn, written: Written) -> bool:
        """Whether each written argument fills a storage of its own, which nothing else needs any more."""
        owners = [self.owner(v) for v, _ in written]
        fill = len(set(owners)) == len(owners) and all(v in self.filling for v, _ in written)
        shared = any(self.owner(v) in owners for v in _others(e, written))
        return fill and not shared and all(self._is_free(place, v) for v in owners)

    def _is_free(self, place: int, storage: Var) -> bool:
        """Whether the equation at `place` is the last that needs a storage, and no collective still reads it."""
        dies = self.last[storage] == place and self.read.get(storage, -1) < place
        return dies and (place >= self.writes_from or storage not in self.state)

    def write(self, written: Written) -> None:
        """From here on the storage of each written argument holds the result."""
        for target, result in written:
            if result is not None:
                self.last[self.owner(target)] = self.last[result]
                self.taken[result] = self.owner(target)

    def pass_by(self, e: Eqn, released: int | None) -> None:
        """Note that an equation has run. If it is a collective, it reads its arguments until equation `released`."""
        if released is not None:
            for owner in map(self.owner, e.ins):
                self.read[owner] = max(released, self.read.get(owner, -1))
        if not rules(e).shares(e) and not is_constant(e):
            self.filling.update(out for out in e.results if not out.future)


_SMALL = 16 << 10  # bytes of a constant that is kept from step to step


def is_constant(e: Eqn) -> bool:
    """Whether an equation makes a small constant. It is made once and used by every step, so nothing writes over it."""
    if (
        e.ins
        or not isinstance(e.op, torch._ops.OpOverload)
        or is_random(e.op)
        or len(e.results) != 1
    ):
        return False
    return e.out.numel * e.out.dtype.itemsize <= _SMALL and not e.out.layout


def _let_go(graph: Graph) -> dict[Eqn, int]:
    """For the start of each collective, the index of the equation until which it reads its members.

    A GPU packs them while the following equations run, until the next start or the next first wait. The user's own
    collectives read theirs until they are waited for. Members that are sent from their own storage live until the wait
    in any case.
    """
    started = pair(graph, include_user=True).starts.values()
    packed = [s for s in started if rules(s.start).packs]
    events = sorted({s.index for s in packed} | {s.first_wait for s in packed})
    released = {s.start: s.first_wait for s in started}
    return released | {s.start: events[bisect_right(events, s.index)] for s in packed}


def _fits(e: Eqn, written: Written) -> bool:
    """Whether every written argument has the type and the device of its result.

    The devices are unknown if a scalar is computed from several: one of them may be on the CPU, another on the GPU.
    """
    scalars = (
        len(written) == 1 and _others(e, written) and e.outs[0] is not None and not e.outs[0].shape
    )
    return (
        bool(written)
        and not scalars
        and all(out is not None and v.is_like(out) for v, out in written)
    )


def _others(e: Eqn, written: Written) -> list[Var]:
    """The arguments of an equation that are not written."""
    return [v for v in e.ins if all(v is not target for target, _ in written)]


def _choices(e: Eqn) -> Iterator[tuple[Any, Written]]:
    """The ways in which an equation can write over its arguments: an operation, and the arguments that it writes."""
    twin = in_place(e.op)
    if e.op is _BATCH_NORM:
        yield batch_norm_over, list(zip(e.args[3:5], e.outs[3:5]))
    elif twin is not None:
        yield twin, _written(e, twin)
    into = _into(e.op)
    if into is not None and (twin is None or op_facts(e.op).arithmetic):
        for k, v in enumerate(e.args):
            if isinstance(v, Var) and (k or twin is None):
                yield onto(e.op, k), [(v, e.outs[0])]


@functools.cache
def in_place(op: Any) -> Any:
    """The in-place twin of an elementwise operation or of a fused optimizer's update, or None."""
    facts = op_facts(op)
    if not (facts.pointwise or facts.fused_update):
        return None
    name = facts.name.split("::")[-1]
    packet = getattr(getattr(torch.ops, op.namespace), f"{name}_", None)
    return getattr(packet, op._schema.overload_name or "default", None)


_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def batch_norm_over(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """A batch norm that writes the new running mean and variance over the old ones, its arguments 3 and 4."""
    return *torch.ops.aten._native_batch_norm_legit.default(*args, **kwargs), args[3], args[4]


@functools.cache
def _into(op: Any) -> tuple[Any, str] | None:
    """For an operation that may write over an argument while it reads it: its form with `out=`, and that keyword."""
    if not (op_facts(op).pointwise or op_facts(op).by_row):
        return None
    signature = [(a.name, str(a.type)) for a in op._schema.arguments]
    forms = overloads(op.overloadpacket)
    for form in (
        f for f in forms if torch.Tag.generated not in f.tags
    ):  # generated forms allocate a result and copy
        *given, last = form._schema.arguments or [None]
        if (
            last is not None
            and last.kwarg_only
            and last.is_out
            and [(a.name, str(a.type)) for a in given] == signature
        ):
            return form, last.name
    return None


@functools.cache
def onto(op: Any, place: int) -> Callable:
    """`op` as a function that writes its result over argument number `place`.

    It does so only if the result would have the strides of that argument, which code after it may rely on: if all
    arguments are contiguous, or, in plain arithmetic, if both have the same strides or the other one is a scalar.

    >>> x = torch.ones(2, 2)
    >>> onto(torch.ops.aten._softmax.default, 0)(x, -1, False) is x, x[0, 0].item()
    (True, 0.5)
    """
    target = _into(op)
    if target is None:
        raise ValueError(f"{op} has no form that writes where it reads.")
    form, out = target
    tensors = [
        k
        for k, a in enumerate(form._schema.arguments)
        if not a.kwarg_only and str(a.type) == "Tensor"
    ]
    is_arithmetic = op_facts(op).arithmetic

    def over(*args: Any, **kwargs: Any) -> torch.Tensor:
        fits = is_arithmetic and _lie_alike(args[place], args[1 - place])
        if not fits and not all(args[k].is_contiguous() for k in tensors):
            return op(*args, **kwargs)
        return form(*args, **kwargs, **{out: args[place]})

    over.__name__ = f"{op._schema.name.split('::')[1]}_over"
    return over


def _lie_alike(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the sum of two tensors has the strides of `x`."""
    return x.stride() == other.stride() or not other.dim()


def _written(e: Eqn, twin: Any) -> Written:
    """The arguments that the in-place twin writes, each with the result that replaces it."""
    pairs = updated(e, twin)
    # A fused optimizer writes its gradients only to unscale them, which it does only if `grad_scale` is given.
    return (
        pairs[:1] + pairs[2:]
        if _declared(twin)[0] and e.kwargs.get("grad_scale") is None
        else pairs
    )


def updated(e: Eqn, twin: Any) -> Written:
    """The arguments that the in-place twin declares to write, each with its result."""
    _, declared = _declared(twin)
    flat = [
        x
        for a, write in zip(e.args, declared)
        if write
        for x in (a if isinstance(a, (list, tuple)) else (a,))
    ]
    return (
        list(zip(flat, e.outs))
        if len(flat) == len(e.outs) and all(isinstance(v, Var) for v in flat)
        else []
    )


@functools.cache
def _declared(twin: Any) -> tuple[bool, list[bool]]:
    """Whether the twin is that of a fused optimizer, and which arguments it writes."""
    return twin._schema.name.startswith("aten::_fused_"), list(
        map(is_written, twin._schema.arguments)
    )
