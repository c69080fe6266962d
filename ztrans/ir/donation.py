"""Donation: which equations may write their result over an argument that nothing reads any more.

The state of a step is donated: its storage is the caller's to lose. Elementwise updates of it are
done in place, and so are those of temporaries, where an argument fills its storage, dies with the
equation, and is not read by a collective under way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .collectives import SHARD, WAIT, is_start
from .graph import Eqn, Graph, Var, producers
from .liveness import liveness
from .operations import is_view
from .user_collectives import is_wait
from .write_order import first_write


@dataclass(frozen=True)
class Donation:
    """`twins`: the in-place operation of each equation that has one; `last`: as in `Liveness`, with results
    in the storage of arguments taken into account; `owner`: who first had the storage of each value; `read`:
    where each storage is let go by the collectives that read it."""

    twins: dict[Eqn, Any]
    last: dict[Var, int]
    owner: dict[Var, Var]
    read: dict[Var, int]


def donation(graph: Graph, apart: Collection[Eqn] = ()) -> Donation:
    """Decide for every equation whether it writes over its arguments, but for those `apart`, which do not."""
    live = liveness(graph)
    last = dict(live.last)
    state, writes_from = set(graph.inputs[: graph.num_state]), first_write(graph)
    exact = set(state)  # values that fill a storage which the program may write
    moved: dict[Var, Var] = {}  # results that live in the storage of an argument
    until = _let_go(graph)
    read: dict[Var, int] = {}  # by storage, where the last collective that reads it lets it go

    def owner(v: Var) -> Var:
        v = live.root[v]
        while v in moved:
            v = moved[v]
        return v

    def may(i: int, e: Eqn, pairs: list[tuple[Var, Var | None]]) -> bool:
        owners = [owner(v) for v, _ in pairs]
        others = [v for v in e.ins if all(v is not target for target, _ in pairs)]
        if others and not e.outs[0].shape and len(pairs) == 1:
            return False  # of scalars one may lie on a CPU and the other, and with it the result, on a GPU
        return (
            all(v in exact and last[owner(v)] == i and _alike(v, out) for v, out in pairs)
            and len(set(owners)) == len(owners)
            and not any(owner(v) in owners for v in others)
            and all(read.get(v, -1) < i for v in owners)
            and (i >= writes_from or state.isdisjoint(owners))
        )

    found: dict[Eqn, Any] = {}
    for i, e in enumerate(graph.eqns):
        choices = _choices(e) if e not in apart else ()
        twin, pairs = next(((t, p) for t, p in choices if p and may(i, e, p)), (None, []))
        if twin is not None:
            found[e] = twin
            for target, out in pairs:  # from here on the storage holds the result
                last[owner(target)] = last[out]
                moved[out] = owner(target)
        for v in e.ins if e in until else ():
            read[owner(v)] = max(until[e], read.get(owner(v), -1))
        if not is_view(e) and e.op is not SHARD:
            exact.update(out for out in e.outs if out is not None and not out.future)
    return Donation(found, last, {v: owner(v) for v in live.root}, read)


def _let_go(graph: Graph) -> dict[Eqn, int]:
    """Of every equation that starts a collective, the index of the one up to which its members are read.

    A GPU packs them beside what follows, until the next start or the first wait for one; the user's own
    collectives read theirs until they are waited for. What is sent as it lies is alive until then anyway.
    """
    made, waited = producers(graph.eqns), set[Eqn]()
    found: dict[Eqn, int] = {}
    packing: Eqn | None = None
    for i, e in enumerate(graph.eqns):
        start = made[e.args[0]] if e.op is WAIT or is_wait(e) else None
        first = start is not None and start not in waited
        if first:
            waited.add(start)
        if first and is_wait(e):
            found[start] = i
        elif packing is not None and (first or is_start(e)):
            found[packing], packing = i, None
        if is_start(e):
            packing = e
    return found


def _alike(v: Var, out: Var | None) -> bool:
    return out is not None and (v.shape, v.dtype, v.layout) == (out.shape, out.dtype, out.layout)


def _choices(e: Eqn) -> Iterator[tuple[Any, list[tuple[Var, Var | None]]]]:
    """The ways to write over arguments: what does so, and what it writes, each with the result that this makes."""
    twin = in_place(e.op)
    if twin is not None:
        yield twin, _written(e, twin)
    elif _into(e.op) is not None:
        for k, v in enumerate(e.args):
            if isinstance(v, Var):
                yield onto(e.op, k), [(v, e.outs[0])]


@functools.cache
def in_place(op: Any) -> Any:
    """The in-place twin of an elementwise operation or of a fused optimizer's."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    namespace, name = op._schema.name.split("::")
    if torch.Tag.pointwise not in op.tags and not name.startswith("_fused_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    return getattr(packet, op._schema.overload_name or "default", None) if packet is not None else None


# Every row of what these make needs that row of their arguments alone, and is written when it has been read.
_BY_ROW = {"aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data"}


@functools.cache
def _into(op: Any) -> tuple[Any, str] | None:
    """The form with `out=` of an operation that may write where it reads, and that argument's name."""
    if not isinstance(op, torch._ops.OpOverload) or not (torch.Tag.pointwise in op.tags or op._schema.name in _BY_ROW):
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = getattr(getattr(torch.ops, op._schema.name.split("::")[0]), op._schema.name.split("::")[1])
    forms = [getattr(packet, name) for name in packet.overloads()]
    for form in (f for f in forms if torch.Tag.generated not in f.tags):  # those make a result and copy it
        *given, last = form._schema.arguments or [None]
        if last is not None and last.kwarg_only and last.is_out and [(a.name, str(a.type)) for a in given] == wanted:
            return form, last.name
    return None


@functools.cache
def onto(op: Any, place: int) -> Callable:
    """`op` that writes its result over its argument `place`, where all that it reads is contiguous.

    >>> x = torch.ones(2, 2)
    >>> onto(torch.ops.aten._softmax.default, 0)(x, -1, False) is x, x[0, 0].item()
    (True, 0.5)
    """
    form, out = _into(op)

    def over(*args: Any, **kwargs: Any) -> torch.Tensor:
        if all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor)):
            return form(*args, **kwargs, **{out: args[place]})
        return op(*args, **kwargs)

    over.__name__ = f"{op._schema.name.split('::')[1]}_over"
    return over


def _written(e: Eqn, twin: Any) -> list[tuple[Var, Var | None]]:
    """The arguments that the in-place twin writes, each with the result that this makes."""
    pairs = updated(e, twin)
    # A fused optimizer writes its gradients only to unscale them, which is not asked of it here.
    return pairs[:1] + pairs[2:] if _declared(twin)[0] and e.kwargs.get("grad_scale") is None else pairs


def updated(e: Eqn, twin: Any) -> list[tuple[Var, Var | None]]:
    """The arguments that the in-place twin declares to write, each with the result that this makes, or would."""
    _, declared = _declared(twin)
    flat = [x for a, write in zip(e.args, declared) if write for x in (a if isinstance(a, (list, tuple)) else (a,))]
    return list(zip(flat, e.outs)) if len(flat) == len(e.outs) and all(isinstance(v, Var) for v in flat) else []


@functools.cache
def _declared(twin: Any) -> tuple[bool, list[bool]]:
    """Whether it is a fused optimizer's, and which arguments it writes."""
    writes = [s.alias_info is not None and s.alias_info.is_write for s in twin._schema.arguments]
    return twin._schema.name.startswith("aten::_fused_"), writes
