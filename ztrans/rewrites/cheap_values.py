"""Choose values of forward that backward recomputes for nothing: it takes no longer than to read them from memory."""

from __future__ import annotations

from ..ir.graph import Eqn, Graph, Var, producers, variables
from ..ir.liveness import liveness
from ..ir.op_facts import op_facts
from ..ir.varying import varying
from .recompute import reduced_storages

_DEPTH = 5  # the longest chain of equations that is repeated for one value


def cheap_values(graph: Graph, at_least: int) -> set[Var]:
    """The values of `at_least` so many bytes that backward recomputes for nothing, each the owner of its storage."""
    root = liveness(graph).root
    first_reader: dict[Var, int] = {}  # by storage, the index of the first equation of backward
    # A value that is needed after backward stays in memory anyway, so recomputing it would free nothing.
    needed_later = {root[v] for v in variables(graph.outputs)} | reduced_storages(graph)
    for index, e in enumerate(graph.eqns):
        for v in e.ins:
            if e.region == "backward":
                first_reader.setdefault(root[v], index)
            elif e.region == "update":
                needed_later.add(root[v])

    choice = _Choice(graph)
    for v in choice.makers:
        is_large = v.nbytes >= at_least
        is_owner = root[v] is v and v not in needed_later
        if is_large and is_owner and v in first_reader:
            chosen = choice.with_inputs(v, first_reader[v], _DEPTH)
            if chosen is not None:
                choice.values |= chosen
    return choice.values


class _Choice:
    """The values to recompute, chosen one by one; each may be computed from earlier ones."""

    def __init__(self, graph: Graph) -> None:
        self.values: set[Var] = set()
        self.makers = producers(graph.eqns)
        self.lifetimes = liveness(graph)
        self.depends_on_batch = varying(graph, ("batch",))

    def with_inputs(self, v: Var, reader: int, depth: int) -> set[Var] | None:
        """`v` and the values that must be recomputed with it for equation number `reader`, or None if it is not cheap.

        A chain of at most `depth` equations is repeated, and only equations that depend on the batch.
        """
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
        """Whether equation number `reader` can read a storage without recomputing more."""
        return storage in self.values or self.lifetimes.last[storage] >= reader


def _is_cheap(e: Eqn) -> bool:
    """Whether an equation takes no longer than to read its arguments and write its results.

    A view takes no time, but does not count: it has no storage of its own to free.
    """
    facts = op_facts(e.op)
    return (facts.pointwise or facts.cheap) and not (facts.random or facts.view)
