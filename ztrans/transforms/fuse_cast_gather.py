"""fuse_cast_gather: cast a parameter before it is gathered, not after."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..ir.collectives import rules
from ..ir.graph import Eqn, Graph, Var, rename, users, variables
from ..ir.op_facts import CAST, rearranges
from ..ir.operations import compute
from .base import Transform, constructor
from .scaled_casts import cast_on_shards


@constructor
def fuse_cast_gather() -> Transform:
    """Gather parameters in the dtype in which they are used: half the bytes for bf16, and the same bits.

    A gather moves elements and a cast is elementwise, so the two commute. Casts also commute with views that rearrange
    elements, but not with a view of the same bytes as another dtype. A gather is fused with the casts that follow it if
    everything that reads the gathered value casts it to the same narrower dtype, directly or through such views.

    Rewrites:
        f = all_gather(w)                       f = all_gather(w, bf16)
        a = wait(f)                      -->    a = wait(f)
        b = t(a); c = cast(b, bf16)             b = t(a)               # c is b

    A cast of a scaled parameter moves too, if the scale is one number for the whole tensor, as in fp8 training. The
    scale may follow from a maximum of the parameter: the maxima of all parameters take one small all_reduce, at the
    start of the step. At stage 3 backward gathers the fp8 value again. A note of the program names each parameter that
    is cast to fp8 after its gather, and says why.

    Rewrites:
        a = wait(all_gather(w))                 m = wait(all_reduce(max(abs(w)), max))
        s = div(448, max(abs(a)))        -->    s = div(448, m); v = cast(mul(w, s), f8e4m3)
        c = cast(mul(a, s), f8e4m3)             c = wait(all_gather(v))

    Source: DeepSpeed DeepCompile, "fuse allgather and downcast" (#7588), 2025; torchao's fp8 gathers for FSDP2, 2024.

    >>> fuse_cast_gather()
    fuse_cast_gather()
    """
    return _FuseCastGather()


@dataclass(frozen=True, repr=False)
class _FuseCastGather(Transform):
    def rewrite(self, graph: Graph) -> Graph:
        graph = cast_on_shards(graph)
        readers = users(graph)
        outputs = set(variables(graph.outputs))
        narrow: dict[Var, Var] = {}  # the values that become narrower
        alias: dict[Var, Var] = {}  # the results of casts that disappear
        for e in graph.eqns:
            if rules(e).moves and e.kwargs["dtype"] is None and len(e.outs) == 1:
                values, casts = _narrowed(e, readers, outputs)
                for v in values:
                    narrow[v] = dataclasses.replace(v, dtype=casts[0].kwargs["dtype"])
                for cast in casts:
                    alias[cast.out] = cast.args[0]
        eqns = []
        for e in graph.eqns:
            if not (e.op is CAST and e.out in alias):
                eqns.append(_retyped(e, narrow))
        return rename(graph.replace(eqns=tuple(eqns)), {**alias, **narrow})


def _narrowed(
    gather: Eqn, readers: dict[Var, list[Eqn]], outputs: set[Var]
) -> tuple[list[Var], list[Eqn]]:
    """The values that become narrower with a gather, its future first, and the casts that are then superfluous."""
    future = gather.out
    (end,) = readers[future]
    meta_value = torch.empty(end.out.shape, dtype=end.out.dtype, device="meta")
    uses = list(_uses(end.out, meta_value, readers, outputs))
    casts = [x for x in uses if isinstance(x, Eqn)]
    dtypes = {cast.kwargs["dtype"] for cast in casts}
    if None in uses or len(dtypes) != 1 or dtypes.pop().itemsize >= future.dtype.itemsize:
        return [], []
    return [future, *(x for x in uses if isinstance(x, Var))], casts


def _retyped(e: Eqn, narrow: dict[Var, Var]) -> Eqn:
    """The equation with its results in their narrower dtype; the same equation if none of them is narrower."""
    if not any(out in narrow for out in e.results):
        return e
    e = e.replace(outs=tuple(out and narrow.get(out, out) for out in e.outs))
    return e.replace(kwargs={**e.kwargs, "dtype": e.out.dtype}) if rules(e).moves else e


def _uses(
    v: Var, x: torch.Tensor, readers: dict[Var, list[Eqn]], outputs: set[Var]
) -> Iterator[Var | Eqn | None]:
    """`v`, which has the strides of `x`, its views, and the casts that read them.

    None stands for a reader of another kind, and for a cast that also moves elements, as a cast of rows with gaps does.
    """
    yield None if v in outputs else v
    for e in readers.get(v, ()):
        if e.op is CAST and e.kwargs.get("dtype") is not None and not e.kwargs.get("device"):
            memory_format = e.kwargs.get("memory_format") or torch.preserve_format
            strides = torch.empty_like(x, memory_format=memory_format).stride()
            yield e if strides == x.stride() else None
        elif rearranges(e):
            for out, y in zip(e.outs, compute(e, {v: x})):
                if out is not None:
                    yield from _uses(out, y, readers, outputs)
        else:
            yield None
