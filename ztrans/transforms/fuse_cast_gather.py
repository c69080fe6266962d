"""fuse_cast_gather: cast before the wire, not after it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ..ir.collectives import rules
from ..ir.graph import Eqn, Graph, Var, rename, users, variables
from ..ir.operations import rearranges
from .base import Transform

_CAST = torch.ops.aten._to_copy.default


def fuse_cast_gather() -> Transform:
    """Gather parameters in the dtype in which they are used: half the bytes for bf16, bit for bit the same.

    A gather only moves elements and a cast works on each alone, so they commute. So do views that show the
    elements as they are; a view of the same bytes as another dtype does not. A gather is fused when everything
    that reads it casts it to one narrower dtype, maybe through such views that leave no gaps.

    Rewrites:
        f = all_gather(w)                       f = all_gather(w, bf16)
        a = wait(f)                      -->    a = wait(f)
        b = t(a); c = cast(b, bf16)             b = t(a)               # c is b

    Source: DeepSpeed DeepCompile, "fuse allgather and downcast" (#7588), 2025.

    >>> fuse_cast_gather()
    fuse_cast_gather()
    """
    return _FuseCastGather()


@dataclass(frozen=True, repr=False)
class _FuseCastGather(Transform):
    @property
    def name(self) -> str:
        return "fuse_cast_gather"

    def rewrite(self, graph: Graph) -> Graph:
        used, outputs = users(graph), set(variables(graph.outputs))
        narrow: dict[Var, torch.dtype] = {}  # values that become narrower
        alias: dict[Var, Var] = {}  # results of casts that disappear
        for e in graph.eqns:
            if rules(e).moves and e.kwargs["dtype"] is None and len(e.outs) == 1:
                (end,) = used[e.outs[0]]
                whole = torch.empty(end.outs[0].shape, dtype=end.outs[0].dtype, device="meta")
                found = _readers(end.outs[0], whole, used, outputs)
                dtypes = {c.kwargs["dtype"] for c in found[1]} if found else set()
                if len(dtypes) == 1 and (dtype := dtypes.pop()).itemsize < e.outs[0].dtype.itemsize:
                    narrow.update(dict.fromkeys([e.outs[0], *found[0]], dtype))
                    alias.update((c.outs[0], c.args[0]) for c in found[1])
        new = {v: dataclasses.replace(v, dtype=dtype) for v, dtype in narrow.items()}
        eqns = []
        for e in graph.eqns:
            if e.op is _CAST and e.outs[0] in alias:
                continue
            if any(out in new for out in e.outs):
                e = e.replace(outs=tuple(new.get(out, out) for out in e.outs))
                if rules(e).moves:
                    e = e.replace(kwargs={**e.kwargs, "dtype": e.outs[0].dtype})
            eqns.append(e)
        return rename(graph.replace(eqns=tuple(eqns)), {**alias, **new})


def _readers(
    v: Var, x: torch.Tensor, used: dict[Var, list[Eqn]], outputs: set[Var]
) -> tuple[list[Var], list[Eqn]] | None:
    """The values seen through views from `v`, which lies as `x` does, and the casts that read them.

    None if anything else does, or a cast that moves elements too: of rows with gaps it makes a dense value.
    """
    if v in outputs:
        return None
    seen, casts = [v], []
    for e in used.get(v, ()):
        if e.op is _CAST and e.kwargs.get("dtype") is not None and not e.kwargs.get("device"):
            keep = e.kwargs.get("memory_format") or torch.preserve_format
            if torch.empty_like(x, memory_format=keep).stride() != x.stride():
                return None
            casts.append(e)
        elif rearranges(e):
            made = e.op(*(x if a is v else a for a in e.args), **e.kwargs)
            for out, y in zip(e.outs, made if isinstance(made, (list, tuple)) else (made,)):
                if out is None:
                    continue
                found = _readers(out, y, used, outputs)
                if found is None:
                    return None
                seen += found[0]
                casts += found[1]
        else:
            return None
    return seen, casts
