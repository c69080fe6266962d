"""reshard: the equations that change the layout of a value over one mesh axis.

split  -> whole     all_gather          terms -> split     reduce_scatter
terms  -> whole     all_reduce          whole -> split     shard (nothing moves)
split  -> split     all_gather, shard   norm terms         pow, all_reduce, pow
split, no elements -> whole             new_empty
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from .collectives import SHARD, all_gather, reduce, wait
from .graph import Eqn, Partial, Provenance, Region, Split, Var
from .layout import on_axis, without
from .source import Source


@dataclasses.dataclass(frozen=True)
class Site:
    """What the new equations have in common: their region, the user's line, a provenance, and a source of names."""

    region: Region
    source: Source | None
    fresh: Callable[[str], str]
    provenance: Provenance

    @property
    def eqn(self) -> dict:
        return {"region": self.region, "source": self.source}


def redistribute(
    v: Var, to: Split | Partial | None, axis: str, site: Site, name: str
) -> tuple[list[Eqn], Var]:
    """The equations that lay `v` out as `to` over `axis`, and their result, which is called `name`."""
    have = on_axis(v.layout, axis)
    if have == to:
        return [], v
    split = to if isinstance(to, Split) else None
    if isinstance(have, Partial) and have.op.startswith("norm"):
        return _norm(v, float(have.op.removeprefix("norm")), split, axis, site, name)
    if isinstance(have, Partial):
        return reduced(v, have.op, split, axis, site, name)
    if isinstance(have, Split):
        eqns = _gathered(v, axis, site, name)
        more, out = redistribute(eqns[-1].out, to, axis, site, name)
        return [*eqns, *more], out
    if not isinstance(to, Split):
        raise ValueError(f"redistribute: {v!r} to {to}: a whole value is not spread into terms.")
    out = dataclasses.replace(v, name=site.fresh(name), layout=(*v.layout, to))
    return [Eqn(SHARD, (v, to.dim), (out,), {"axis": axis}, **site.eqn)], out


def _gathered(v: Var, axis: str, site: Site, name: str) -> list[Eqn]:
    """The equations that gather `v`; if it has no elements, nothing moves."""
    if v.numel == 0:
        whole = Var(site.fresh(name), v.dtype, v.shape, without(v.layout, axis))
        return [Eqn(torch.ops.aten.new_empty.default, (v, list(v.shape)), (whole,), **site.eqn)]
    start = all_gather([v], [site.fresh(name)], axis, provenance=site.provenance, **site.eqn)
    return [start, wait(start.out, **site.eqn)]


def reduced(
    v: Var, op: str, to: Split | None, axis: str, site: Site, name: str, dtype=None, result=None
) -> tuple[list[Eqn], Var]:
    """The equations that reduce `v`, of which each rank of `axis` has a term, to a whole value or to shards."""
    if to is not None and to.dim >= len(v.shape):
        to = None
    start = reduce(
        [v], [site.fresh(name)], axis, op, to, dtype, result, provenance=site.provenance, **site.eqn
    )
    end = wait(start.out, **site.eqn)
    return [start, end], end.out


def _norm(
    v: Var, p: float, to: Split | None, axis: str, site: Site, name: str
) -> tuple[list[Eqn], Var]:
    """Combine the p-norms of parts: the p-th root of the sum of their p-th powers, or their max or min if p = inf."""
    aten = torch.ops.aten
    if p in (float("inf"), float("-inf")):
        return reduced(v, "max" if p > 0 else "min", to, axis, site, name)
    power = dataclasses.replace(
        v, name=site.fresh(f"{v.name}.pow"), layout=(*without(v.layout, axis), Partial(axis, "sum"))
    )
    eqns, total = reduced(power, "sum", to, axis, site, f"{name}.pow")
    root = dataclasses.replace(total, name=site.fresh(name))
    first = Eqn(aten.pow.Tensor_Scalar, (v, p), (power,), **site.eqn)
    return [first, *eqns, Eqn(aten.pow.Tensor_Scalar, (total, 1 / p), (root,), **site.eqn)], root
