"""remat: make cheap values again in backward, rather than keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..ir.graph import Eqn, Graph, Var, is_random, producers, variables
from ..ir.liveness import liveness
from ..ir.operations import is_view
from ..ir.recompute import recompute
from ..ir.varying import varying
from .base import Transform

aten = torch.ops.aten
_CHEAP = {aten._to_copy.default, aten.clone.default, aten.native_layer_norm.default}
_DEEP = 4  # equations that may have to be repeated for one value


def remat(*, at_least: int = 1 << 16) -> Transform:
    """Make activations again in backward where what they are made of is kept anyway: less memory, the same bits.

    Made again are elementwise results, casts, copies and layer norms of at least `at_least` bytes that
    backward reads. Nothing else lives longer for it, so no peak rises; matrix products, attention and
    random draws are never repeated.

    Rewrites:
        a = gelu(h); y = mm(a, w)               a = gelu(h); y = mm(a, w)
        ...                              -->    ...
        dw = mm(dy, a)                          a' = gelu(h); dw = mm(dy, a')
        dh = gelu_backward(da, h)               dh = gelu_backward(da, h)

    Args:
        at_least: bytes of the smallest value that is worth it.

    Raises: ValueError for a size that is none.

    Source: the recomputation of PyTorch's min-cut partitioner, where it costs no other memory; Chen et
    al., "Training deep nets with sublinear memory cost", 2016.

    >>> remat()
    remat()
    """
    if not isinstance(at_least, int) or isinstance(at_least, bool) or at_least < 0:
        raise ValueError(f"remat: at_least={at_least!r}; it is a number of bytes.")
    return _Remat(at_least)


@dataclass(frozen=True, repr=False)
class _Remat(Transform):
    at_least: int = 1 << 16

    turn: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return "remat"

    def rewrite(self, graph: Graph) -> Graph:
        return recompute(graph, _again(graph, self.at_least))


def _again(graph: Graph, at_least: int) -> set[Var]:
    """The values, each the first in its storage, that backward makes for itself."""
    made, live, over = producers(graph.eqns), liveness(graph), varying(graph, ("batch",))
    wanted: dict[Var, int] = {}  # where backward first reads a storage
    kept = {live.root[v] for v in variables(graph.outputs)}
    for i, e in enumerate(graph.eqns):
        for v in e.ins:
            if e.region == "backward":
                wanted.setdefault(live.root[v], i)
            elif e.region == "update":
                kept.add(live.root[v])
    found: set[Var] = set()

    def needed(v: Var, at: int, deep: int = _DEEP) -> set[Var] | None:
        """What else must be made again to have `v` at `at`: nothing if it is there; None if it cannot be had."""
        v = live.root[v]
        if v in found or v not in made or live.last[v] >= at:
            return set()
        return again(v, at, deep - 1)

    def again(v: Var, at: int, deep: int) -> set[Var] | None:
        e = made[v]
        if deep < 0 or v not in over or e.region != "forward" or not _is_cheap(e):
            return None
        parts = [needed(x, at, deep) for x in e.ins]
        return None if None in parts else {v}.union(*parts)

    for e in graph.eqns:
        for v in e.outs:
            large = v is not None and v.numel * v.dtype.itemsize >= at_least
            if large and v in wanted and v not in kept and live.root[v] is v:
                found |= again(v, wanted[v], _DEEP) or set()
    return found


def _is_cheap(e: Eqn) -> bool:
    tags: Any = getattr(e.op, "tags", ())
    return not is_random(e.op) and not is_view(e) and (torch.Tag.pointwise in tags or e.op in _CHEAP)
