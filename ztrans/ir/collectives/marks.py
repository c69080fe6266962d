"""Marks of the trace: which values are gradients, and which reductions the user asked for.

g = gradient(g0, w)                   g0 is the gradient of w
y = pmean(x, axis) | psum(x, axis)    zt.pmean and zt.psum in the user's step; the axis "*" stands for all axes

A transform that shards a program replaces the marks by reductions. A mark that no transform replaces is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ops import EVERY_AXIS
from ..axes import members
from ..graph import Eqn, Graph, Primitive, Var, rename
from .interface import Memberwise

_NOWHERE: frozenset[str] = frozenset()


class Mark(Memberwise):
    """The rules that all marks share: the result is the first argument."""

    def shares(self, eqn: Eqn) -> bool:
        return True


class Gradient(Mark):
    """Rules of gradient: it varies only over axes that its value varies over, because it is reduced over the others."""

    def varies(self, eqn: Eqn, over: Mapping[Var, frozenset[str]]) -> frozenset[str]:
        gradient, value = eqn.args
        return over.get(gradient, _NOWHERE) & over.get(value, _NOWHERE)


class Reduced(Mark):
    """Rules of pmean and psum: the mean, or the sum, over an axis, which is the same on all ranks of that axis."""

    def varies(self, eqn: Eqn, over: Mapping[Var, frozenset[str]]) -> frozenset[str]:
        value, axis = eqn.args
        return _NOWHERE if axis == EVERY_AXIS else over.get(value, _NOWHERE) - {*members(axis)}


GRADIENT = Primitive("gradient", Gradient())
PMEAN = Primitive("pmean", Reduced())
PSUM = Primitive("psum", Reduced())
MARKS = (GRADIENT, PMEAN, PSUM)


def erase_marks(graph: Graph) -> Graph:
    """Drop the marks that no transform has replaced; they are the identity."""
    marked = {e.results[0]: e.args[0] for e in graph.eqns if e.op in MARKS}
    eqns = tuple(e for e in graph.eqns if e.op not in MARKS)
    return rename(graph.replace(eqns=eqns), marked)
