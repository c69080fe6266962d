"""The step that keeps everything: its choices of what to recompute or move, and estimates of their seconds.

To write the program of a choice and to plan it in full takes seconds. But a choice changes little of the scheduling
problem: live bytes, and the places where compute takes longer. So the problem of the step that keeps everything is
written once. The changes of a choice are added to it, and a short search finds an order.

The estimate leaves out that recomputation may read a gathered parameter earlier than backward does, and that it gathers
biases which backward does not read. Copies to the host take no part in the search. The chosen program is planned in
full, and its limit is checked there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from ...ir.graph import Graph, Var
from ...ir.micro_batches import is_cut, micro_batch_programs
from ...ir.op_facts import is_matmul
from ...rewrites.cheap_values import cheap_values
from ...rewrites.keep_on_host import values_for_backward
from ..buffers import by_operation, local_bytes
from ..cluster import Cluster
from ..cost import memory
from ..durations import equation_seconds
from ..formulate import formulate
from ..skeleton import skeleton
from ..solver.loads import Loads
from ..solver.problem import NO_LEVERS, Problem
from ..solver.search import best_placed, least_memory
from .absences import HostLink
from .choose import choose, choose_least
from .model import NOWHERE, Model, model_of, uses_of
from .residency import Residency

# The messages that the search of an estimate places.
_EFFORT = 4000
# The least bytes of a value that may wait on the host. A smaller value is not worth a copy.
_LEAST_MOVED = 1 << 16


@dataclass(frozen=True, eq=False)
class Baseline:
    """A step that keeps everything. For a step in micro-batches, the last one, which has all regions.

    Attributes:
        model: its values and computations.
        problem: its scheduling problem, without a limit.
        micro: the number of micro-batches.
        other_bytes: the live bytes of the other micro-batches.
        cheap: the values that `remat()` recomputes without a limit.
    """

    model: Model
    problem: Problem
    micro: int
    other_bytes: int
    cheap: Set[Var]

    def compute(self, residency: Residency) -> float:
        """The seconds of compute with a choice, a lower bound of the seconds of the step."""
        return sum(self.problem.seconds) + self.micro * residency.seconds

    def seconds(self, residency: Residency, limit: int) -> float:
        """The estimated seconds of the step with a choice, within a limit."""
        problem = self._within(residency, limit)
        problem = dataclasses.replace(problem, memory=max(problem.memory, least_memory(problem)))
        seconds = best_placed(problem, _EFFORT).seconds
        # The problem has the seconds of recomputation, but no copies to the host: add theirs.
        recomputed_seconds = sum(problem.seconds) - sum(self.problem.seconds)
        seconds = seconds + residency.price - recomputed_seconds
        # The other micro-batches recompute and copy as much.
        return seconds + (self.micro - 1) * residency.price

    def choice(self, target: float) -> Residency:
        """The choice with which the live bytes stay within a target, if they can.

        The model assumes that reductions are waited for where they start. A wait without room there moves to a later
        place. Then fewer bytes are live at the peak, so it may be enough to recompute less. So this chooses with the
        waits of the model, places the waits for that choice, and chooses again with the live bytes of these waits. The
        result is the cheaper of the two choices that fits.
        """
        first = choose(self.model, target)
        if first.peak > target:
            first = self.lowest
        problem = self._within(first, target)
        live = by_operation(Loads(problem).bytes_unbucketed(NO_LEVERS)) + self.other_bytes
        if (live == first.live).all():
            return first

        # The live bytes with these waits, without the changes of the first choice.
        live_without = live - (first.live - self.model.live)
        second = choose(dataclasses.replace(self.model, live=live_without), target)
        if second.peak > target:
            return first
        if first.peak <= target and first.price <= second.price:
            return first
        return second

    @functools.cached_property
    def lowest(self) -> Residency:
        """The choice with the lowest peak."""
        return choose_least(self.model)

    @functools.cached_property
    def cheap_recomputed(self) -> Residency:
        """The choice of `remat()` without a limit. It frees memory throughout the step, others only at the peak."""
        repeated = set(self.model.forced)
        for i, computation in enumerate(self.model.computations):
            if any(self.model.values[v].var in self.cheap for v in computation.droppable):
                repeated.add(i)
        return Residency(self.model, repeated)

    def _within(self, residency: Residency, limit: float) -> Problem:
        """The problem of the step with a choice, within a limit."""
        return dataclasses.replace(
            problem_of(residency, self.problem), memory=limit - self.other_bytes
        )


def baseline_of(graph: Graph, hinted: Graph, cluster: Cluster) -> Baseline:
    """The baseline of a step.

    Args:
        graph: the program before it is sharded, without recomputation in backward.
        hinted: the program of one rank, with hints and no order.
        cluster: the speeds, and the memory of the device.
    """
    part = micro_batch_programs(hinted).last
    s = skeleton(part, cluster.neighbours(part.axes))
    problem = formulate(s, cluster, float("inf"))
    size = local_bytes(hinted)
    other_bytes = (hinted.micro - 1) * sum(size(v) for v in hinted.batch if is_cut(hinted, v))
    live = by_operation(Loads(problem).bytes_unbucketed(NO_LEVERS)) + other_bytes
    seconds = dict(zip(graph.eqns, equation_seconds(graph, cluster)))

    link = None
    movable: set[str] = set()
    if hinted.hints.offload:
        host = cluster.tiers["host"]
        latency, pace = host.copy_seconds(1)
        # The host may also have leaves of the state.
        room = host.capacity - memory(hinted).host_peak
        link = HostLink(problem.seconds_before, latency, pace, cluster.device.kernel_gap, room)
        movable = {v.name for v in values_for_backward(hinted) if size(v) >= _LEAST_MOVED}

    at_least = graph.hints.recompute_at_least
    uses = uses_of(s.graph, s.ops)
    model = model_of(graph, seconds, uses, live, at_least, link, movable)
    cheap = set() if at_least is None else cheap_values(graph, at_least)
    return Baseline(model, problem, hinted.micro, other_bytes, cheap)


def problem_of(residency: Residency, baseline: Problem) -> Problem:
    """The scheduling problem of the step with a choice. `baseline` is the one of the step that keeps everything."""
    model = residency.model
    additional = residency.live - model.live
    at_places = np.array(baseline.live_at_places)
    at_places[:-1] += additional
    seconds = list(baseline.seconds)
    matmul = list(baseline.matmul)
    for i in residency.repeated:
        place = residency.runs_at[i]
        if place != NOWHERE:
            seconds[place] += model.computations[i].seconds
            matmul[place] += is_matmul(model.computations[i].eqn)
    return dataclasses.replace(
        baseline,
        seconds=tuple(seconds),
        matmul=tuple(matmul),
        live=tuple((np.array(baseline.live) + additional).tolist()),
        live_at_places=tuple(at_places.tolist()),
    )
