"""Roles in micro-batches: which equations run in each of them, which once a step, and which values enter the update.

Forward and backward run in each micro-batch, with everything that they need. The update runs once: the equations that
reach the state or depend on a gradient, and that neither forward nor backward needs. What is left, such as an accuracy
that is computed behind backward, runs in each micro-batch too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from ..ir.collectives import SHARD, role
from ..ir.graph import Eqn, Graph, Var, producers
from ..ir.marks import GRADIENT, PMEAN
from ..ir.micro_batches import changing
from ..ir.pairing import pair
from ..ir.relations import depending, grouped, needed
from ..ir.source import where
from ..ir.varying import varying


class Gradient(NamedTuple):
    """A value that is averaged over micro-batches: a gradient, or a mean that the user asked for.

    Attributes:
        term: the value before its reductions.
        end: the last wait, or a mark.
        start: the first reduction, or None if there is none.
        planned: whether a plan places that reduction.
        paths: the leaves of the state that it is the gradient of.
    """

    term: Var
    end: Eqn
    start: Eqn | None = None
    planned: bool = False
    paths: tuple[str, ...] = ()


def gradients(graph: Graph) -> dict[Var, Gradient]:
    """The values of a program that are averaged over micro-batches."""
    over = varying(graph, ("batch",))
    marks = (
        e for e in graph.eqns if e.op in (GRADIENT, PMEAN) and not any(v in over for v in e.ins[1:])
    )
    averaged = {
        e.out: Gradient(e.args[0], e, paths=tuple(leaf.name for leaf in e.ins[1:])) for e in marks
    }
    for e, waited in pair(graph).waits.items():
        start = waited.start
        if role(start) == "grad" or (role(start) == "pmean" and start.kwargs["op"] == "mean"):
            member = start.ins[waited.member]
            first = averaged.pop(
                member, None
            )  # a second reduction follows, over the replicated axis
            planned = start.order is not None and graph.axes[start.kwargs["axis"]] > 1
            paths = start.provenance.paths if start.provenance and role(start) == "grad" else ()
            averaged[e.out] = (
                first._replace(end=e) if first else Gradient(member, e, start, planned, paths)
            )
    return averaged


class Roles:
    """The roles of the equations and values of a program."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.makers, self.gradients = graph, producers(graph.eqns), gradients(graph)

    @functools.cached_property
    def _repeated(self) -> set[Eqn]:
        """The equations that every micro-batch runs: forward and backward, and what they need."""
        independent = self._independent()
        return needed(
            (e for e in self.graph.eqns if e.region != "update" or e in independent), self.makers
        )

    def _independent(self) -> set[Eqn]:
        """The equations of the update that every micro-batch runs, because they depend on no gradient.

        These are the means that the user asked for, and what brings values of forward into the new state or the output.
        """
        from_gradients = depending(
            self.graph.eqns, (v for v, g in self.gradients.items() if g.paths)
        )
        means = {g.end for g in self.gradients.values() if not g.paths}
        forward = {v for e in self.graph.eqns if e.region != "update" for v in e.results}
        brought = {e for e, waited in pair(self.graph).waits.items() if _brings(waited.start)}
        cut = {e for e in self.graph.eqns if e.op is SHARD and e.args[0] in forward}
        return {e for e in means | brought | cut if from_gradients.isdisjoint(e.ins)}

    @functools.cached_property
    def _once(self) -> set[Eqn]:
        """The equations of the update."""
        state = [
            self.makers[v] for v in self.graph.outputs[: self.graph.num_state] if v in self.makers
        ]
        update = needed(state, self.makers) | {e for e in self.graph.eqns if role(e) == "output"}
        results = {v for v, g in self.gradients.items() if g.paths}
        once = set[Eqn]()
        for e in self.graph.eqns:
            late = e.region == "update" and e not in self._repeated
            if late and (e in update or not results.isdisjoint(e.ins)):
                once.add(e)
                results.update(e.results)
        return once

    @functools.cached_property
    def changes(self) -> set[Var]:
        """The values that differ from micro-batch to micro-batch."""
        return changing(
            self.graph.replace(eqns=tuple(e for e in self.graph.eqns if e not in self._once))
        )

    @functools.cached_property
    def entering(self) -> Mapping[Var, list[Eqn]]:
        """The values of micro-batches that the update reads, each with the equations that read it."""
        once = (e for e in self.graph.eqns if e in self._once)
        return grouped((v, e) for e in once for v in dict.fromkeys(e.ins) if v in self.changes)

    def check_state(self) -> None:
        """Check that no parameter is updated in the middle of a micro-batch.

        Raises: ValueError that names the leaf.
        """
        trained = {path for g in self.gradients.values() for path in g.paths}
        from_gradients = depending(self.graph.eqns, self.gradients)
        for old, new in zip(self.graph.inputs, self.graph.outputs[: self.graph.num_state]):
            if old.name in trained and new in self.changes and new in from_gradients:
                maker = self.makers.get(new)
                raise ValueError(
                    f"accumulate: state {old} is updated before the last backward of the step, so every micro-batch "
                    f"would update it.\n  at {where(maker.source if maker else None)}\n"
                    f"Compute all gradients first, or make each update a step of its own, with its own zt.accumulate."
                )


def _brings(start: Eqn) -> bool:
    """Whether a reduction is of state, or of outputs that are no scalars."""
    return role(start) == "state" or (role(start) == "output" and any(v.shape for v in start.ins))
