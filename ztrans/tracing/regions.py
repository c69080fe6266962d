"""Which part of the step an equation belongs to: forward, backward or update.

`backward` is what autograd ran. `forward` is what it recorded, what depends on the batch before
the last backward, and what only prepares either. The rest is the `update`: it works on values that
are the same on all ranks, after a gradient, or between two of them. In a step without a backward,
`forward` is what depends on the batch and enters the state through `pmean` or `psum` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.collectives import GRADIENT, PMEAN, PSUM
from ..ir.graph import Eqn, Graph, Region, Var, variables
from ..ir.varying import Varying, varying


@dataclass(frozen=True)
class Fact:
    """What the tracer saw of an equation: autograd ran it; autograd recorded it; the number of the selective
    checkpoint that it is in; that checkpoint drops its results, and backward computes them."""

    backward: bool
    recorded: bool
    checkpoint: int | None = None
    dropped: bool = False


def label_regions(graph: Graph, facts: Mapping[Eqn, Fact]) -> Graph:
    """Give every equation its region."""
    unknown = graph.replace(eqns=tuple(e.replace(region="update") for e in graph.eqns))
    over = varying(unknown, ("batch",))
    differentiated = _differentiated(graph, facts)
    updated = _updated(graph, facts, over, differentiated) | _depending_on_gradients(graph)
    last = max((i for i, e in enumerate(graph.eqns) if facts[e].backward), default=len(graph.eqns))
    unreduced = _unreduced(graph, over) if last == len(graph.eqns) else set[Var]()
    feeds: set[Var] = {v for e in graph.eqns if any(o in over for o in e.outs) for v in e.ins}

    def region(i: int, e: Eqn) -> Region:
        outs = [o for o in e.outs if o is not None]
        if facts[e].backward or e.op is GRADIENT:
            return "backward"
        if any(o in over for o in outs):
            return "forward" if i < last and not any(o in unreduced for o in outs) else "update"
        if e in differentiated:
            return "forward"
        if any(o in updated for o in outs):
            return "update"
        return "forward" if any(o in feeds for o in outs) and i < last else "update"

    eqns = []
    for i, e in reversed(list(enumerate(graph.eqns))):
        eqns.append(e.replace(region=region(i, e)))
        if eqns[-1].region != "update":
            feeds.update(e.ins)
    return graph.replace(eqns=tuple(reversed(eqns)))


def _depending_on_gradients(graph: Graph) -> set[Var]:
    """Values that are made of gradients."""
    depends: set[Var] = set()
    for e in graph.eqns:
        if e.op is GRADIENT or any(v in depends for v in e.ins):
            depends.update(o for o in e.outs if o is not None)
    return depends


def _differentiated(graph: Graph, facts: Mapping[Eqn, Fact]) -> set[Eqn]:
    """What autograd recorded on the way to a backward: it belongs to the function that is differentiated."""
    differentiated: set[Eqn] = set()
    reaches: set[Var] = set()
    for e in reversed(graph.eqns):
        if facts[e].backward or any(o in reaches for o in e.outs):
            if e.op is not GRADIENT:
                reaches.update(e.ins)
            if facts[e].recorded and not facts[e].backward:
                differentiated.add(e)
    return differentiated


def _updated(graph: Graph, facts: Mapping[Eqn, Fact], over: Varying, differentiated: set[Eqn]) -> set[Var]:
    """Other invariant values that are differentiated for, or become state: the update makes them."""
    wanted = {v for v in variables(graph.outputs[: graph.num_state]) if v not in over}
    for e in reversed(graph.eqns):
        if e.op is GRADIENT:
            wanted.update(v for v in e.args[1:] if v not in over)
        elif any(o in wanted for o in e.outs) and e not in differentiated and not facts[e].backward:
            wanted.update(v for v in e.ins if v not in over)
    return wanted


def _unreduced(graph: Graph, over: Varying) -> set[Var]:
    """Values that depend on the batch and enter the state without a reduction that the user asked for."""
    unreduced = {v for v in variables(graph.outputs[: graph.num_state]) if v in over}
    for e in reversed(graph.eqns):
        if any(o in unreduced for o in e.outs) and e.op not in (PMEAN, PSUM):
            unreduced.update(v for v in e.ins if v in over)
    return unreduced
