"""Marks: equations that say what a value is, such as a gradient, a mean over ranks, or a sum over micro-batches.

A transform that shards a program replaces these marks by reductions; otherwise they are the identity:

    g = gradient(g0, w)                   g0 is the gradient of w
    y = pmean(x, axis)                    zt.pmean, psum, pmax or pmin in the user's step; "*" stands for all axes
    v = pvary(w, x)                       zt.pvary: w as a value of the samples of x, so its gradient is not reduced

A program that runs once for each micro-batch has these marks (see `micro_batches`):

    s = accumulate(g)                     the sum of g over all micro-batches
    y = join(x)                           the values x of all micro-batches, concatenated along dim 0
    w = keep(w0)                          w0 of the first micro-batch, which all others read too
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from ..ops import EVERY_AXIS
from .axes import members
from .graph import Eqn, Graph, Primitive, Var
from .rules import INVARIANT, Axes, Memberwise, Sizes


class Mark(Memberwise):
    """Rules of a mark whose result is a view of its first argument."""

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        if not eqn.ins:
            return "a mark is of a value, not of a literal"
        value = eqn.ins[0]
        if len(eqn.outs) == 1 and value.is_like(eqn.out):
            return None
        return f"a mark has the type of {value!r}"

    def shares_storage(self, eqn: Eqn) -> bool:
        return True


class Gradient(Mark):
    """Rules of gradient: it varies only over the axes of its value, because it is reduced over all others."""

    named_argument = 1

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        gradient, value = eqn.args
        return axes_of.get(gradient, INVARIANT) & axes_of.get(value, INVARIANT)


class Reduced(Mark):
    """Rules of pmean, psum, pmax and pmin: a reduction over an axis is equal on all ranks of that axis."""

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        value, axis = eqn.args
        if axis == EVERY_AXIS:
            return INVARIANT
        return axes_of.get(value, INVARIANT) - {*members(axis)}


class Varied(Mark):
    """Rules of pvary: the value varies where the second one does."""

    def varies(self, eqn: Eqn, axes_of: Mapping[Var, Axes]) -> Axes:
        value, like = eqn.args
        return axes_of.get(value, INVARIANT) | axes_of.get(like, INVARIANT)


class Accumulate(Memberwise):
    """Rules of accumulate: the sum has a storage of its own."""

    over_all_micro_batches = True

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        if len(eqn.ins) == 1 and eqn.out.is_like(eqn.ins[0]):
            return None
        return "a sum over micro-batches has another type than its terms"


class Join(Memberwise):
    """Rules of join: the result has a storage of its own, with the rows of all micro-batches."""

    over_all_micro_batches = True

    def problem(self, eqn: Eqn, axes: Sizes) -> str | None:
        (part,) = eqn.ins
        if part.shape and part.shape[1:] == eqn.out.shape[1:] and part.dtype == eqn.out.dtype:
            return None
        return "the parts of micro-batches do not make up the joined value"


GRADIENT = Primitive("gradient", Gradient())
PMEAN = Primitive("pmean", Reduced())
PSUM = Primitive("psum", Reduced())
PMAX = Primitive("pmax", Reduced())
PMIN = Primitive("pmin", Reduced())
PVARY = Primitive("pvary", Varied())
ACCUMULATE = Primitive("accumulate", Accumulate())
JOIN = Primitive("join", Join())
KEEP = Primitive("keep", Mark())
# The reductions that the user's step asks for, and the operation that combines the values of all ranks.
REDUCTIONS: Mapping[Any, str] = {PMEAN: "mean", PSUM: "sum", PMAX: "max", PMIN: "min"}
# The marks by the names of the operations that a trace records for them.
MARKS: Mapping[str, Primitive] = {
    f"ztrans::{op!r}": op for op in (GRADIENT, PMEAN, PSUM, PMAX, PMIN, PVARY)
}


def gradient_marks(graph: Graph) -> set[Eqn]:
    """The equations that mark gradients."""
    return {e for e in graph.eqns if e.op is GRADIENT}


def differentiated_gradients(graph: Graph) -> list[Eqn]:
    """The marks of gradients that the step differentiates through, the first one of each value.

    A later gradient of the same value depends on such a gradient, and on its derivative. The derivative of the mark is
    a mark of the same value that depends on the first. Several gradients of a value that only are added up, as those
    of micro-batches, do not depend on each other.
    """
    needed: set[Var] = set()
    marks: dict[Var, list[Eqn]] = {}
    for e in reversed(graph.eqns):
        if e.op is GRADIENT:
            if e.out in needed:
                marks.setdefault(e.args[1], []).append(e)
            needed.add(e.args[0])
        elif not needed.isdisjoint(e.results):
            needed.update(e.ins)
    several = {value: of_value for value, of_value in marks.items() if len(of_value) > 1}
    if not several:
        return []

    candidates = set(chain.from_iterable(several.values()))
    # For each result so far, the values whose marks it depends on.
    depends_on: dict[Var, frozenset[Var]] = {}
    differentiated: dict[Var, Eqn] = {}
    for e in graph.eqns:
        values = frozenset[Var]().union(*(depends_on[v] for v in e.ins if v in depends_on))
        if e in candidates:
            value = e.args[1]
            if value in values:
                differentiated[value] = several[value][-1]
            values |= {value}
        if values:
            depends_on.update(dict.fromkeys(e.results, values))
    return list(differentiated.values())


def reduced_values(graph: Graph) -> list[Var]:
    """The values that `zt.pmean`, `psum`, `pmax` and `pmin` reduce."""
    return [e.args[0] for e in graph.eqns if e.op in REDUCTIONS]
