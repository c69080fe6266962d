"""Change the layout of a value over one mesh axis, by equations.

split  -> whole     all_gather          terms -> split     reduce_scatter
terms  -> whole     all_reduce          whole -> split     shard (nothing moves)
split  -> split     all_to_all          norm terms         pow, all_reduce, pow, in fp32 at least
split, no elements -> whole             new_empty
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ..ir.collectives import all_gather, all_to_all, reduce, shard, wait
from ..ir.graph import Eqn, Partial, Placement, Provenance, Region, Split, Var
from ..ir.layout import on_axis, without
from ..ir.op_facts import CAST
from ..ir.source import Source
from ..ops import HALF

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Site:
    """The common properties of the new equations. The layout changes over the axis of the provenance.

    Attributes:
        region, source: the region and the user's line of all of them.
        fresh: makes a new name from a name.
        provenance: the provenance of the collectives among them.
    """

    region: Region
    source: Source | None
    fresh: Callable[[str], str]
    provenance: Provenance

    @property
    def axis(self) -> str:
        return self.provenance.axis

    def equation(self, op: Any, args: tuple, out: Var, **kwargs: Any) -> Eqn:
        return Eqn(op, args, (out,), kwargs, self.region, self.source)

    def start_and_wait(self, start: Eqn) -> list[Eqn]:
        """The start of a collective at this site, and the wait for it."""
        start = start.replace(region=self.region, source=self.source, provenance=self.provenance)
        return [start, wait(start.out).like(start)]


def redistribute(v: Var, to: Placement, site: Site, name: str) -> tuple[list[Eqn], Var]:
    """The equations that change the placement of `v` to `to`, and their result, with the name `name`."""
    placement = on_axis(v.layout, site.axis)
    if placement == to:
        return [], v

    if isinstance(placement, Partial):
        split = to if isinstance(to, Split) else None
        if placement.op.startswith("norm"):
            p = float(placement.op.removeprefix("norm"))
            return _norm(v, p, split, site, name)
        return reduced(v, placement.op, split, site, name)

    if isinstance(placement, Split):
        if isinstance(to, Split) and v.numel:
            exchange = all_to_all([v], [site.fresh(name)], site.axis, to.dim)
            eqns = site.start_and_wait(exchange)
            return eqns, eqns[-1].out
        gather = _gathered(v, site, name)
        eqns, out = redistribute(gather[-1].out, to, site, name)
        return [*gather, *eqns], out

    if not isinstance(to, Split):
        raise ValueError(f"redistribute: {v!r} to {to}: a whole value is not spread into terms.")
    cut = shard(v, site.fresh(name), site.axis, to.dim, region=site.region, source=site.source)
    return [cut], cut.out


def _gathered(v: Var, site: Site, name: str) -> list[Eqn]:
    """The equations that gather `v`. If it has no elements, nothing is sent."""
    if v.numel:
        return site.start_and_wait(all_gather([v], [site.fresh(name)], site.axis))
    out = Var(site.fresh(name), v.dtype, v.shape, without(v.layout, site.axis))
    return [site.equation(aten.new_empty.default, (v, list(v.shape)), out)]


def reduced(
    v: Var,
    op: str,
    to: Split | None,
    site: Site,
    name: str,
    dtype: torch.dtype | None = None,
    result: torch.dtype | None = None,
) -> tuple[list[Eqn], Var]:
    """The equations that reduce the terms of `v` on the ranks of the axis, to a whole value or to shards."""
    if to is not None and to.dim >= len(v.shape):
        to = None  # a scalar has no dim to split
    start = reduce([v], [site.fresh(name)], site.axis, op, to, dtype, result)
    eqns = site.start_and_wait(start)
    return eqns, eqns[-1].out


def _norm(v: Var, p: float, to: Split | None, site: Site, name: str) -> tuple[list[Eqn], Var]:
    """Combine the p-norms of parts: the p-th root of the sum of p-th powers, or the max or min for an infinite p."""
    if math.isinf(p):
        return reduced(v, "max" if p > 0 else "min", to, site, name)

    # The square of a norm above 256 is infinite in fp16.
    if v.dtype in HALF:
        wide = dataclasses.replace(v, name=site.fresh(f"{v.name}.float32"), dtype=torch.float32)
        eqns, root = _norm(wide, p, to, site, f"{name}.float32")
        out = dataclasses.replace(root, name=site.fresh(name), dtype=v.dtype)
        widen = site.equation(CAST, (v,), wide, dtype=wide.dtype)
        narrow = site.equation(CAST, (root,), out, dtype=out.dtype)
        return [widen, *eqns, narrow], out

    layout = (*without(v.layout, site.axis), Partial(site.axis, "sum"))
    power = dataclasses.replace(v, name=site.fresh(f"{v.name}.pow"), layout=layout)
    take_power = site.equation(aten.pow.Tensor_Scalar, (v, p), power)
    eqns, total = reduced(power, "sum", to, site, f"{name}.pow")
    root = dataclasses.replace(total, name=site.fresh(name))
    take_root = site.equation(aten.pow.Tensor_Scalar, (total, 1 / p), root)
    return [take_power, *eqns, take_root], root
