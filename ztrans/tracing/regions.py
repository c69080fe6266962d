"""Label the equations of a step with their regions: forward, backward and update.

The first of these rules that holds gives the region of an equation:

1. Autograd ran it, or it marks a gradient: backward.
2. It depends on the batch: forward before the last backward, and update after it. In a step without a backward it is
   forward, unless its results enter the state other than through a reduction such as `pmean`: then
   update.
3. Autograd recorded it, and a backward uses its results: forward.
4. It computes a value of the update (see `_update_values`), or it depends on a gradient: update.
5. It precedes the last backward, if there is one, and forward or backward reads its result: forward.
6. Otherwise: update.

The update works on values that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from ..ir.dependencies import depending
from ..ir.graph import Demand, Eqn, Graph, Region, Var
from ..ir.marks import GRADIENT, REDUCTIONS
from ..ir.op_facts import is_random
from ..ir.varying import varying


@dataclass(frozen=True)
class Fact:
    """The facts of a trace about an equation, for its region.

    Attributes:
        backward: autograd ran it.
        recorded: autograd recorded it, to run its derivative later.
        checkpoint: the number of the checkpoint around it.
        dropped: that checkpoint does not store its results: backward recomputes them.
        demand: the demand of a selective checkpoint for its results.
    """

    backward: bool = False
    recorded: bool = False
    checkpoint: int | None = None
    dropped: bool = False
    demand: Demand | None = None


def label_regions(graph: Graph, facts: Mapping[Eqn, Fact]) -> Graph:
    """Give every equation its region."""
    evidence = _Evidence(graph, facts)
    eqns = []
    # Backwards, because rule 5 needs the regions of the equations that read a value.
    for e in reversed(graph.eqns):
        region = evidence.region(e)
        if region != "update":
            evidence.read_early.update(e.ins)
        eqns.append(e if region == e.region else e.replace(region=region))
    return graph.replace(eqns=tuple(reversed(eqns)))


class _Evidence:
    """The sets of equations and values by which the rules decide."""

    def __init__(self, graph: Graph, facts: Mapping[Eqn, Fact]) -> None:
        backward = [i for i, e in enumerate(graph.eqns) if facts[e].backward]
        # Without a backward, all equations count as before it.
        self.before_last_backward = set(graph.eqns[: backward[-1]] if backward else graph.eqns)
        self.facts = facts
        self.batch_values = _batch_values(graph)
        self.differentiated_eqns = _differentiated_eqns(graph, facts)

        # The values that forward and backward read: at first the values that equations on the batch read. As
        # `label_regions` labels an equation forward or backward, it adds the values that this equation reads.
        self.read_early: set[Var] = set()
        gradients: set[Var] = set()
        for e in graph.eqns:
            if e.op is GRADIENT:
                gradients.update(e.results)
            if _binds(e, self.batch_values):
                self.read_early.update(e.ins)

        update_values = _update_values(graph, facts, self.batch_values, self.differentiated_eqns)
        self.update_values = update_values | depending(graph.eqns, gradients)
        self.unreduced_values: set[Var] = set()
        if not backward:
            self.unreduced_values = _unreduced_values(graph, self.batch_values)

    def region(self, e: Eqn) -> Region:
        """The region of an equation, by the first rule that holds."""
        early = e in self.before_last_backward
        if self.facts[e].backward or e.op is GRADIENT:
            return "backward"
        if _binds(e, self.batch_values):
            return "forward" if early and not _binds(e, self.unreduced_values) else "update"
        if e in self.differentiated_eqns:
            return "forward"
        if _binds(e, self.update_values):
            return "update"
        return "forward" if early and _binds(e, self.read_early) else "update"


def _batch_values(graph: Graph) -> Set[Var]:
    """The values that depend on the batch."""
    eqns = []
    for e in graph.eqns:
        # No equation has a region yet. A draw in the shape of an invariant value does not depend on the batch. It is
        # labelled update here, because `varying` treats such a draw of the update as invariant.
        eqns.append(e.replace(region="update") if is_random(e) else e)
    return varying(graph.replace(eqns=tuple(eqns)), ("batch",)).keys()


def _binds(e: Eqn, values: Set[Var]) -> bool:
    """Whether a result of an equation is one of these values."""
    return not values.isdisjoint(e.results)


def _differentiated_eqns(graph: Graph, facts: Mapping[Eqn, Fact]) -> set[Eqn]:
    """The equations of the differentiated function: autograd recorded them, and a backward uses their results."""
    differentiated_eqns: set[Eqn] = set()
    # The values that a backward uses, directly or through other equations.
    backward_inputs: set[Var] = set()
    for e in reversed(graph.eqns):
        if facts[e].backward or _binds(e, backward_inputs):
            if e.op is not GRADIENT:
                backward_inputs.update(e.ins)
            if facts[e].recorded and not facts[e].backward:
                differentiated_eqns.add(e)
    return differentiated_eqns


def _update_values(
    graph: Graph, facts: Mapping[Eqn, Fact], batch_values: Set[Var], differentiated_eqns: set[Eqn]
) -> set[Var]:
    """The values of the update: new state, values that a gradient is for, and values that these are computed from.

    Values that depend on the batch are left out, and so are values that only the differentiated function or a backward
    uses.
    """
    update_values = {v for v in graph.new_state if v not in batch_values}
    for e in reversed(graph.eqns):
        if e.op is GRADIENT:
            update_values.update(v for v in e.args[1:] if v not in batch_values)
        elif _binds(e, update_values) and e not in differentiated_eqns and not facts[e].backward:
            update_values.update(v for v in e.ins if v not in batch_values)
    return update_values


def _unreduced_values(graph: Graph, batch_values: Set[Var]) -> set[Var]:
    """The values that depend on the batch and enter the state without a reduction that the user wrote."""
    unreduced_values = {v for v in graph.new_state if v in batch_values}
    for e in reversed(graph.eqns):
        if _binds(e, unreduced_values) and e.op not in REDUCTIONS:
            unreduced_values.update(v for v in e.ins if v in batch_values)
    return unreduced_values
