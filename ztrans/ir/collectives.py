"""Collectives as equations over lists, and the marks that a trace carries for them.

    f, g   = all_gather([a, b], dtype, axis=dp)          shards -> whole values, cast before the wire
    f, g   = reduce_scatter([a, b], mean, axis=dp)       one term a rank -> shards of the sum
    f, g   = all_reduce([a, b], mean, axis=dp)           one term a rank -> the sum, everywhere
    x      = wait(f)                                     a future -> its value
    s      = shard(x, dim, axis=dp)                      whole -> this rank's part; nothing moves
    g      = gradient(g0, w)                             marks g0 as the gradient of w (from the trace)
    y      = pmean(x, axis) | psum(x, axis)              what the user asked for (from the trace)

A list is a bucket: packing, casting and unpacking belong to the operation, not to the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from .graph import Eqn, Graph, Layout, Partial, Primitive, Split, Var, dce, rename

ALL_GATHER = Primitive("all_gather")
REDUCE_SCATTER = Primitive("reduce_scatter")
ALL_REDUCE = Primitive("all_reduce")
WAIT = Primitive("wait")
SHARD = Primitive("shard")
GRADIENT = Primitive("gradient")
PMEAN = Primitive("pmean")
PSUM = Primitive("psum")

STARTS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


def is_start(eqn: Eqn) -> bool:
    """Whether the equation starts a collective."""
    return eqn.op in STARTS


def without(layout: Layout, axis: str) -> Layout:
    """`layout` with nothing on `axis`."""
    return tuple(part for part in layout if part.axis != axis)


def all_gather(shards: Sequence[Var], names: Sequence[str], axis: str, **eqn) -> Eqn:
    """Start a gather of `shards`, each cut over `axis`."""
    futures = (Var(f"{name}'", s.dtype, s.shape, without(s.layout, axis), True) for s, name in zip(shards, names))
    return Eqn(ALL_GATHER, (list(shards),), tuple(futures), {"dtype": None, "axis": axis}, **eqn)


def reduce(
    terms: Sequence[Var], names: Sequence[str], axis: str, op: str, to: Split | None, dtype=None, result=None, **eqn
) -> Eqn:
    """Start the reduction of `terms` over `axis`: a reduce_scatter when `to` cuts the result, else an all_reduce.

    Terms cross the wire as `dtype` and become a sum of dtype `result`; both default to the terms' own.
    """
    futures = (
        Var(f"{name}'", result or t.dtype, t.shape, (*without(t.layout, axis), *((to,) if to else ())), True)
        for t, name in zip(terms, names)
    )
    start = REDUCE_SCATTER if to else ALL_REDUCE
    return Eqn(start, (list(terms),), tuple(futures), {"op": op, "dtype": dtype, "axis": axis}, **eqn)


def wait(future: Var, **eqn) -> Eqn:
    """Wait for `future`; its value has the future's name without the quote."""
    out = dataclasses.replace(future, name=future.name.removesuffix("'"), future=False)
    return Eqn(WAIT, (future,), (out,), **eqn)


def wire_dtype(eqn: Eqn, member: Var) -> torch.dtype:
    """The dtype in which a member of a started collective crosses the wire."""
    return eqn.kwargs.get("dtype") or member.dtype


def wire_bytes(eqn: Eqn, sizes: Mapping[str, int]) -> int:
    """Bytes that one rank must receive for a started collective, padding included.

    A gather or a scatter over n ranks moves (n-1)/n of the whole value, an all_reduce twice that.
    """
    if not is_start(eqn):
        return 0
    axis = eqn.kwargs["axis"]
    total = sum(buffer_bytes(eqn, member, sizes) for member in range(len(eqn.outs)))
    return total * (sizes[axis] - 1) * (2 if eqn.op is ALL_REDUCE else 1) // sizes[axis]


def buffer_bytes(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
    """Bytes of a member of a started collective as it is on the wire, its parts on all ranks together, padded."""
    member, future, axis = eqn.ins[index], eqn.outs[index], eqn.kwargs["axis"]
    total = wire_dtype(eqn, member).itemsize
    cuts = {s.dim: s.axis for v in (member, future) for s in v.layout if isinstance(s, Split)}
    for dim, rows in enumerate(member.shape):
        part = -(-rows // sizes[cuts[dim]]) if dim in cuts else rows
        total *= part * sizes[axis] if cuts.get(dim) == axis else part
    return total


ALONE = 1 << 16  # bytes of one rank's part from which on a member crosses in a message of its own


def is_alone(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
    """Whether a member of a started collective crosses in a message of its own, and is not packed with others:
    one large enough that a copy would cost more than a message, and one that has none to be packed with."""
    enough = ALONE * sizes[eqn.kwargs["axis"]]
    small = [k for k in range(len(eqn.outs)) if buffer_bytes(eqn, k, sizes) < enough]
    return index not in small or len(small) == 1


def sends_as_it_lies(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> bool:
    """Whether a reduction sends a member's own storage, which must then live until the wait: one that crosses
    alone and needs neither a cast nor padding. A gather's own part is copied to where the whole will be."""
    member, axis = eqn.ins[index], eqn.kwargs["axis"]
    split = eqn.outs[index].split
    even = split is None or (split.dim == 0 and member.shape[0] % sizes[axis] == 0)
    reduces = eqn.op is REDUCE_SCATTER or (eqn.op is ALL_REDUCE and sizes[axis] == 2)
    return reduces and even and wire_dtype(eqn, member) == member.dtype and is_alone(eqn, index, sizes)


def received_bytes(eqn: Eqn, index: int, sizes: Mapping[str, int]) -> int:
    """Bytes of the buffer into which a member of a started collective is received: a gather's is the value."""
    n = sizes[eqn.kwargs["axis"]]
    return buffer_bytes(eqn, index, sizes) * (n - 1 if eqn.op is REDUCE_SCATTER else n) // n


def unpacked_bytes(eqn: Eqn, sizes: Mapping[str, int]) -> int:
    """Bytes of the buffer in which a gather receives the members that cross together, and of which their values
    are made: a GPU does that when they have come, a CPU when the first is waited for."""
    if eqn.op is not ALL_GATHER:
        return 0
    return sum(buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)) if not is_alone(eqn, k, sizes))


def sent_bytes(eqn: Eqn, sizes: Mapping[str, int]) -> int:
    """Bytes of the buffers from which a collective sends what it had to pack, and a reduction what it had to cast
    or pad."""
    if eqn.op is ALL_GATHER:
        return unpacked_bytes(eqn, sizes) // sizes[eqn.kwargs["axis"]]
    if eqn.op is ALL_REDUCE and sizes[eqn.kwargs["axis"]] > 2:
        return 0
    packed = (k for k in range(len(eqn.outs)) if not sends_as_it_lies(eqn, k, sizes))
    return sum(buffer_bytes(eqn, k, sizes) for k in packed)


def erase_marks(graph: Graph) -> Graph:
    """Drop what no transform has made use of: in a plain program marks, pmean and psum are the identity."""
    marks = {e.outs[0]: e.args[0] for e in graph.eqns if e.op in (GRADIENT, PMEAN, PSUM)}
    eqns = tuple(e for e in graph.eqns if e.op not in (GRADIENT, PMEAN, PSUM))
    return rename(graph.replace(eqns=eqns), marks)


def erase_trivial(graph: Graph) -> Graph:
    """Drop the collectives of axes of size 1: a gather becomes its cast, the rest the identity."""
    one = {axis for axis, size in graph.mesh if size == 1}
    if not one:
        return graph
    alias: dict[Var, Var] = {}
    eqns = []
    for e in graph.eqns:
        axis = e.kwargs.get("axis")
        if e.op is SHARD and axis in one:
            alias[e.outs[0]] = e.args[0]
        elif is_start(e) and axis in one:
            for member, future in zip(e.ins, e.outs):
                alias[future] = _through(member, future, e, eqns)
        elif e.op is WAIT and e.args[0] in alias:
            alias[e.outs[0]] = e.args[0]
        else:
            eqns.append(e)
    cut = lambda v: dataclasses.replace(v, layout=tuple(p for p in v.layout if p.axis not in one))
    new = {v: cut(v) for v in {*graph.inputs, *(o for e in eqns for o in e.outs if o is not None)} if v.layout}
    graph = rename(graph.replace(eqns=tuple(eqns)), alias)
    eqns = tuple(e.replace(outs=tuple(new.get(o, o) for o in e.outs)) for e in graph.eqns)
    inputs = tuple(new.get(v, v) for v in graph.inputs)
    batch = frozenset(new.get(v, v) for v in graph.batch)
    return dce(rename(graph.replace(inputs=inputs, eqns=eqns, batch=batch), new))


def _through(member: Var, future: Var, e: Eqn, eqns: list[Eqn]) -> Var:
    """What a value becomes when it crosses a wire that is not there: rounded to the wire's dtype and back."""
    for dtype in (e.kwargs.get("dtype"), future.dtype):
        if dtype is not None and dtype != member.dtype:
            out = Var(
                f"{future.name.removesuffix(chr(39))}.{dtype}".replace("torch.", ""),
                dtype,
                member.shape,
                member.layout,
            )
            eqns.append(Eqn(torch.ops.aten._to_copy.default, (member,), (out,), {"dtype": dtype}, e.region, e.source))
            member = out
    return member


def bucket_key(start: Eqn) -> tuple:
    """What the members of one bucket have in common.

    >>> from ztrans.ir.graph import Provenance
    >>> w = Var("w", torch.float32, (4, 2), (Split("dp"),))
    >>> bucket_key(all_gather([w], ["f"], "dp", provenance=Provenance("param", ("w",), "dp")))[:3]
    (all_gather, 'dp', 'param')
    """
    member, future = start.ins[0], start.outs[0]
    axis = start.kwargs["axis"]
    dims = tuple(p.dim for v in (member, future) for p in v.layout if isinstance(p, Split) and p.axis == axis)
    terms = tuple(p.op for p in member.layout if isinstance(p, Partial) and p.axis == axis)
    wire = wire_dtype(start, member)
    role = start.provenance.role
    return start.op, axis, role, wire, member.dtype, future.dtype, start.kwargs.get("op"), dims, terms


def coalesce(starts: Sequence[Eqn]) -> Eqn:
    """One equation that starts all of `starts`, which have one key; their futures stay what they are."""
    first, *rest = starts
    if not rest:
        return first.replace(order=None)
    other = next((e for e in rest if bucket_key(e) != bucket_key(first)), None)
    if other is not None:
        raise ValueError(f"coalesce: {first.outs[0].name} and {other.outs[0].name} share a bucket, but not one key.")
    members = [v for e in starts for v in e.ins]
    paths = tuple(dict.fromkeys(p for e in starts for p in e.provenance.paths))
    provenance = first.provenance.__class__(first.provenance.role, paths, first.provenance.axis)
    outs: tuple[Var, ...] = tuple(out for e in starts for out in e.outs)
    return first.replace(args=(members,), outs=outs, provenance=provenance, order=None)
