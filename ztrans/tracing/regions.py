"""The regions of a step: forward, backward and update.

The region of an equation follows from the first of these rules that holds:

1. Autograd ran it, or it marks a gradient: backward.
2. It depends on the batch: forward before the last backward, and update after it. In a step without a backward it is
   forward, unless its results enter the state other than through `pmean` or `psum`: update.
3. Autograd recorded it, and a backward uses its results: forward.
4. The update computes it (see `_updated`), or it depends on a gradient: update.
5. It precedes the last backward, if there is one, and forward or backward reads its result: forward.
6. Otherwise: update.

The update works on values that are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from ..ir.dependencies import depending
from ..ir.graph import Demand, Eqn, Graph, Region, Var, variables
from ..ir.marks import GRADIENT, PMEAN, PSUM
from ..ir.op_facts import is_random
from ..ir.varying import varying


@dataclass(frozen=True)
class Fact:
    """What a trace has noted about an equation.

    Attributes:
        backward: autograd ran it.
        recorded: autograd recorded it, to run its derivative later.
        checkpoint: the number of the checkpoint that it is in.
        dropped: that checkpoint does not store its results: backward recomputes them.
        demand: what a selective checkpoint demands of its results.
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
    # The equations that read a value are labelled before the one that computes it.
    for e in reversed(graph.eqns):
        region = evidence.region(e)
        if region != "update":
            evidence.read_early.update(e.ins)
        eqns.append(e if region == e.region else e.replace(region=region))
    return graph.replace(eqns=tuple(reversed(eqns)))


class _Evidence:
    """The facts about a program from which the region of an equation follows."""

    def __init__(self, graph: Graph, facts: Mapping[Eqn, Fact]) -> None:
        backward = [i for i, e in enumerate(graph.eqns) if facts[e].backward]
        # A step without a backward has all its equations before one.
        self.before_last_backward = set(graph.eqns[: backward[-1]] if backward else graph.eqns)
        self.facts = facts
        self.on_batch = _on_batch(graph)
        self.differentiated = _differentiated(graph, facts)

        # What forward and backward read. At first this is what equations that depend on the batch read;
        # `label_regions` adds what the equations read that it labels forward or backward.
        self.read_early: set[Var] = set()
        gradients: set[Var] = set()
        for e in graph.eqns:
            if e.op is GRADIENT:
                gradients.update(e.results)
            if _binds(e, self.on_batch):
                self.read_early.update(e.ins)

        after_gradients = depending(graph.eqns, gradients)
        self.updated = _updated(graph, facts, self.on_batch, self.differentiated) | after_gradients
        self.unreduced: set[Var] = set()
        if not backward:
            self.unreduced = _unreduced(graph, self.on_batch)

    def region(self, e: Eqn) -> Region:
        """The region of the first rule that holds for an equation."""
        early = e in self.before_last_backward
        if self.facts[e].backward or e.op is GRADIENT:
            return "backward"
        if _binds(e, self.on_batch):
            return "forward" if early and not _binds(e, self.unreduced) else "update"
        if e in self.differentiated:
            return "forward"
        if _binds(e, self.updated):
            return "update"
        return "forward" if early and _binds(e, self.read_early) else "update"


def _on_batch(graph: Graph) -> Set[Var]:
    """The values that depend on the batch."""
    eqns = []
    for e in graph.eqns:
        # No equation has a region yet. As one of the update, a draw in the shape of an invariant value is invariant,
        # because it does not depend on the batch.
        eqns.append(e.replace(region="update") if is_random(e) else e)
    return varying(graph.replace(eqns=tuple(eqns)), ("batch",)).keys()


def _binds(e: Eqn, values: Set[Var]) -> bool:
    """Whether a result of an equation is one of these values."""
    return not values.isdisjoint(e.results)


def _differentiated(graph: Graph, facts: Mapping[Eqn, Fact]) -> set[Eqn]:
    """The equations of the differentiated function: autograd recorded them, and a backward uses their results."""
    differentiated: set[Eqn] = set()
    reaches: set[Var] = set()
    for e in reversed(graph.eqns):
        if facts[e].backward or _binds(e, reaches):
            if e.op is not GRADIENT:
                reaches.update(e.ins)
            if facts[e].recorded and not facts[e].backward:
                differentiated.add(e)
    return differentiated


def _updated(
    graph: Graph, facts: Mapping[Eqn, Fact], on_batch: Set[Var], differentiated: set[Eqn]
) -> set[Var]:
    """The values that the update computes, as far as they follow from its results.

    They become state, or a gradient is for them, or such a value is computed from them.
    Values that depend on the batch, or that the differentiated function computes, are left out.
    """
    update_values = {v for v in variables(graph.outputs[: graph.num_state]) if v not in on_batch}
    for e in reversed(graph.eqns):
        if e.op is GRADIENT:
            update_values.update(v for v in e.args[1:] if v not in on_batch)
        elif _binds(e, update_values) and e not in differentiated and not facts[e].backward:
            update_values.update(v for v in e.ins if v not in on_batch)
    return update_values


def _unreduced(graph: Graph, on_batch: Set[Var]) -> set[Var]:
    """Values that depend on the batch and enter the state without a `pmean` or `psum` that the user wrote."""
    unreduced = {v for v in variables(graph.outputs[: graph.num_state]) if v in on_batch}
    for e in reversed(graph.eqns):
        if _binds(e, unreduced) and e.op not in (PMEAN, PSUM):
            unreduced.update(v for v in e.ins if v in on_batch)
    return unreduced
