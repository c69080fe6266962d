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

_DEPTH = 5  # the most equations in a row that are repeated for one value


@constructor
def remat(*, at_least: int = 1 << 16) -> Transform:
    """Recompute a cheap activation in backward if its inputs are alive there anyway: less memory, the same bits.

    It recomputes elementwise results, casts, copies and layer norms of at least `at_least` bytes that backward reads.
    No value of forward lives longer. A recomputed value may live until another one is recomputed from it, which very
    seldom raises the peak. Matrix products, attention and random draws are never repeated.

    Rewrites:
        a = gelu(h); y = mm(a, w)               a = gelu(h); y = mm(a, w)
        ...                              -->    ...
        dw = mm(dy, a)                          a' = gelu(h); dw = mm(dy, a')
        dh = gelu_backward(da, h)               dh = gelu_backward(da, h)

    Args:
        at_least: the least size of a value that is recomputed, in bytes.

    Raises: ValueError if `at_least` is not a number of bytes.

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
    lifetimes = liveness(graph)
    first_reader: dict[Var, int] = {}  # by storage, the number of the first equation of backward
    needed_later = {lifetimes.root[v] for v in variables(graph.outputs)}
    for number, e in enumerate(graph.eqns):
        for v in e.ins:
            if e.region == "backward":
                first_reader.setdefault(lifetimes.root[v], number)
            elif e.region == "update":
                needed_later.add(lifetimes.root[v])
    choice = _Choice(graph)
    for v in choice.makers:
        is_large = v.numel * v.dtype.itemsize >= at_least
        is_owner = lifetimes.root[v] is v and v not in needed_later
        if is_large and is_owner and v in first_reader:
            choice.values |= choice.with_inputs(v, first_reader[v], _DEPTH) or set()
    return choice.values


class _Choice:
    """The values to recompute, chosen one after the other; each relies on those before it."""

    def __init__(self, graph: Graph) -> None:
        self.values: set[Var] = set()
        self.makers = producers(graph.eqns)
        self.lifetimes = liveness(graph)
        self.depends_on_batch = varying(graph, ("batch",))

    def with_inputs(self, v: Var, reader: int, depth: int) -> set[Var] | None:
        """`v`, and what must be recomputed with it for equation number `reader`; None if that is not cheap."""
        maker = self.makers[v]
        is_cheap = maker.region == "forward" and _is_cheap(maker)
        if depth == 0 or v not in self.depends_on_batch or not is_cheap:
            return None
        values = {v}
        for x in maker.ins:
            storage = self.lifetimes.root[x]
            if storage in self.makers and not self._is_there(storage, reader):
                inputs = self.with_inputs(storage, reader, depth - 1)
                if inputs is None:
                    return None
                values |= inputs
        return values

    def _is_there(self, storage: Var, reader: int) -> bool:
        """Whether equation number `reader` can read a storage anyway."""
        return storage in self.values or self.lifetimes.last[storage] >= reader


def _is_cheap(e: Eqn) -> bool:
    facts = op_facts(e.op)
    return (facts.pointwise or facts.cheap) and not (facts.random or facts.view)
