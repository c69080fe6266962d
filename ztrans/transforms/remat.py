"""remat: recompute cheap activations in backward, instead of keeping them from forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..ir.graph import Eqn, Graph, Var, producers, variables
from ..ir.liveness import liveness
from ..ir.op_facts import op_facts
from ..ir.recompute import recompute
from ..ir.varying import varying
from .base import Transform, check_number, constructor

_DEPTH = 4  # the most equations in a row that are repeated for one value


@constructor
def remat(*, at_least: int = 1 << 16) -> Transform:
    """Recompute a cheap activation in backward if its inputs are alive there anyway: less memory, the same bits.

    It recomputes elementwise results, casts, copies and layer norms of at least `at_least` bytes that backward reads.
    No other value lives longer, so the peak does not rise. Matrix products, attention and random draws are never
    repeated.

    Rewrites:
        a = gelu(h); y = mm(a, w)               a = gelu(h); y = mm(a, w)
        ...                              -->    ...
        dw = mm(dy, a)                          a' = gelu(h); dw = mm(dy, a')
        dh = gelu_backward(da, h)               dh = gelu_backward(da, h)

    Args:
        at_least: the least size of a value that is recomputed, in bytes.

    Raises: ValueError if `at_least` is no number of bytes.

    Source: PyTorch's min-cut partitioner, limited to recomputation that keeps nothing else alive; Chen et al.,
    "Training deep nets with sublinear memory cost", 2016.

    >>> remat()
    remat()
    """
    check_number("remat: at_least", at_least, "a number of bytes", 0)
    return _Remat(at_least)


@dataclass(frozen=True, repr=False)
class _Remat(Transform):
    at_least: int = 1 << 16

    phase: ClassVar[int] = 0

    def rewrite(self, graph: Graph) -> Graph:
        return recompute(graph, _recomputed(graph, self.at_least))


def _recomputed(graph: Graph, at_least: int) -> set[Var]:
    """The values that backward recomputes, each the owner of its storage."""
    makers, live, over = producers(graph.eqns), liveness(graph), varying(graph, ("batch",))
    wanted: dict[
        Var, int
    ] = {}  # for each storage, the index of the first equation of backward that reads it
    kept = {live.root[v] for v in variables(graph.outputs)}
    for i, e in enumerate(graph.eqns):
        for v in e.ins:
            if e.region == "backward":
                wanted.setdefault(live.root[v], i)
            elif e.region == "update":
                kept.add(live.root[v])
    recomputed: set[Var] = set()

    def needed(v: Var, at: int, depth: int) -> set[Var] | None:
        """The values to recompute so that equation `at` can read `v`, or None if that is not cheap."""
        v = live.root[v]
        if v in recomputed or v not in makers or live.last[v] >= at:
            return set()
        return with_inputs(v, at, depth - 1)

    def with_inputs(v: Var, at: int, depth: int) -> set[Var] | None:
        """`v` and the inputs that must be recomputed with it, or None if that is not cheap."""
        e = makers[v]
        if depth < 0 or v not in over or e.region != "forward" or not _is_cheap(e):
            return None
        inputs = [needed(x, at, depth) for x in e.ins]
        return None if None in inputs else {v}.union(*filter(None, inputs))

    for e in graph.eqns:
        for v in e.results:
            large = v.numel * v.dtype.itemsize >= at_least
            if large and v in wanted and v not in kept and live.root[v] is v:
                recomputed |= with_inputs(v, wanted[v], _DEPTH) or set()
    return recomputed


def _is_cheap(e: Eqn) -> bool:
    facts = op_facts(e.op)
    return (facts.pointwise or facts.cheap) and not (facts.random or facts.view)
