"""Marks of micro-batches: how the values of one micro-batch become values of the whole step.

s = accumulate(g)      the sum of g over all micro-batches
y = join(x)            the values x of all micro-batches, one behind the other along dim 0
w = keep(w0)           w0 of the first micro-batch, which all others read too

A program with these marks runs once for each micro-batch (see `micro_batches`). With a single one they are the
identity.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..graph import Eqn, Primitive
from .interface import Memberwise
from .marks import Mark


class Accumulate(Memberwise):
    """Rules of accumulate: the sum has a storage of its own."""

    over_all = True

    def problem(self, eqn: Eqn, axes: Mapping[str, int]) -> str | None:
        return (
            None
            if eqn.out.is_like(*eqn.ins)
            else "a sum over micro-batches has another type than its terms"
        )


class Join(Memberwise):
    """Rules of join: the result has a storage of its own, with the rows of all micro-batches."""

    over_all = True

    def problem(self, eqn: Eqn, axes: Mapping[str, int]) -> str | None:
        (part,), out = eqn.ins, eqn.out
        fits = part.shape[1:] == out.shape[1:] and part.shape and part.dtype == out.dtype
        return None if fits else "the parts of micro-batches do not make up the joined value"


ACCUMULATE = Primitive("accumulate", Accumulate())
JOIN = Primitive("join", Join())
KEEP = Primitive("keep", Mark())  # a view of the value of the first micro-batch
MICRO_MARKS = (ACCUMULATE, JOIN, KEEP)
