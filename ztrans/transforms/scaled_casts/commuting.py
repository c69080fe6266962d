"""Which operations commute with a gather: of shards, they compute the shards of what they compute of whole values.

Bit for bit, these are views, and the elementwise operations that IEEE 754 rounds correctly. A maximum commutes up to a
maximum over the shards, which is the same in any order. Functions such as `exp` are left out: a CPU computes the
elements of a vector and those behind the last full vector by different code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...ir.graph import Eqn
from ...ir.op_facts import CAST, op_facts, rearranges

aten = torch.ops.aten
_NORM = aten.linalg_vector_norm.default
_EXTREMES: Mapping[object, str] = {
    **dict.fromkeys((aten.max.default, aten.amax.default, (_NORM, math.inf)), "max"),
    **dict.fromkeys((aten.min.default, aten.amin.default, (_NORM, -math.inf)), "min"),
}


def is_bijection(eqn: Eqn) -> bool:
    """Whether an equation is a view that shows every element of its argument once, in the same dtype."""
    return op_facts(eqn.op).permutes and rearranges(eqn)


def is_elementwise(eqn: Eqn) -> bool:
    """Whether each element of the result is a correctly rounded function of one element of each argument.

    Left out are complex numbers and an addition with an `alpha`, which may round once or twice, and a cast that changes
    the device or the order of the elements in memory.
    """
    if len(eqn.outs) != 1 or any(v.dtype.is_complex for v in (*eqn.ins, eqn.out)):
        return False
    if eqn.op is CAST:
        in_place = eqn.kwargs.get("memory_format") in (None, torch.preserve_format)
        return eqn.kwargs.get("dtype") is not None and in_place and not eqn.kwargs.get("device")
    facts = op_facts(eqn.op)
    scaled = "alpha" in eqn.kwargs or (facts.name in ("add", "sub", "rsub") and len(eqn.args) > 2)
    return facts.exact and not scaled


def extreme(eqn: Eqn) -> tuple[str, tuple]:
    """The operation max or min, if an equation computes that of all elements of a value, or of all magnitudes.

    Returns: The operation or an empty text, and the arguments of the equation behind the value, without dims.
    """
    more = eqn.args[1:2] if eqn.op is _NORM else ()
    known = _EXTREMES.get((eqn.op, *more) if more else eqn.op, "")
    return (known if eqn.out.numel == 1 and not eqn.kwargs.get("dtype") else ""), more
