"""Which operations commute with a gather: applied to shards, they give the shards of what they give on whole values.

Bit for bit, these are the elementwise operations that IEEE 754 rounds correctly, and views. A maximum commutes up to a
maximum over the shards, which has the same bits in any order. Functions such as `exp` are left out: a CPU computes the
elements of a vector and those behind the last full vector by different code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..ir.graph import Eqn, Var
from ..ir.operations import rearranges

aten = torch.ops.aten
CAST = aten._to_copy.default
_ROUNDED = {
    *(aten.abs, aten.neg, aten.mul, aten.div, aten.reciprocal, aten.sqrt, aten.add, aten.sub),
    *(aten.clamp, aten.clamp_min, aten.clamp_max, aten.minimum, aten.maximum, aten.where, aten.nan_to_num),
    *(aten.round, aten.floor, aten.ceil, aten.trunc, aten.sign, aten.isnan, aten.isinf),
}
_KEEP_ALL = {
    *(aten.t, aten.transpose, aten.permute, aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze),
    *(aten.detach, aten.alias),
}
_EXTREMES: Mapping[object, str] = {
    aten.max.default: "max",
    aten.amax.default: "max",
    aten.min.default: "min",
    aten.amin.default: "min",
}


def is_bijection(eqn: Eqn) -> bool:
    """Whether an equation is a view that shows every element of its argument once, in the same dtype."""
    return getattr(eqn.op, "overloadpacket", None) in _KEEP_ALL and rearranges(eqn)


def is_elementwise(eqn: Eqn) -> bool:
    """Whether each element of the result is a correctly rounded function of one element of each argument.

    An `alpha` of an addition may be contracted with it, so that it rounds once or twice. A cast that changes the
    device or the order of the elements in memory is left out.
    """
    if eqn.op is CAST:
        in_place = eqn.kwargs.get("memory_format") in (None, torch.preserve_format)
        return eqn.kwargs.get("dtype") is not None and in_place and not eqn.kwargs.get("device")
    known = getattr(eqn.op, "overloadpacket", None) in _ROUNDED
    return known and "alpha" not in eqn.kwargs and len(eqn.outs) == 1


def extreme(eqn: Eqn) -> str | None:
    """The operation, max or min, if an equation computes that of all elements of a value, or of their magnitudes."""
    if eqn.op is aten.linalg_vector_norm.default:
        order, dtype = (*eqn.args[1:2], 2)[0], eqn.kwargs.get("dtype")
        known = {math.inf: "max", -math.inf: "min"}.get(order) if dtype is None else None
    else:
        known = _EXTREMES.get(eqn.op)
    return known if known is not None and eqn.out.numel == 1 else None


def of_all(eqn: Eqn, shards: Var, out: Var) -> Eqn:
    """The equation that computes an extreme of all elements of `shards`."""
    order = eqn.args[1:2] if eqn.op is aten.linalg_vector_norm.default else ()
    return Eqn(eqn.op, (shards, *order), (out,), region="forward", source=eqn.source)
