"""ladder: plan a step whose plan also chooses what backward recomputes, or finds on the host, within one limit.

Messages and activations share the limit, and no price says how: a bucket that is held longer may be worth more than
the compute that makes room for it, or nothing. So several splits are planned. The first leaves to activations what
messages do not need in any order. Each further one leaves a tenth of the limit more to messages, by recomputing more.
The schedule is the judge: the fastest plan that is within the limit wins.

    program --> choose --> recompute --> shard, hint --> move to the host --> plan --> place copies --> simulate

A split whose compute alone takes longer than the best step so far is skipped, and so are all after it. The choice
depends on the program and the cluster alone, so ranks with batches of one size make the same choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...ir.graph import Graph, Hints, Var
from ...ir.keep_on_host import values_for_backward
from ...ir.micro_batches import is_cut, parts
from ...ir.printer import format_bytes, format_seconds
from ...ir.recompute import recompute, repeatable
from ..buffers import by_operation, local_bytes
from ..cluster import Cluster
from ..formulate import formulate
from ..limit import DoesNotFit, does_not_fit
from ..make_plan import make_plan
from ..place_copies import place_copies
from ..plan import Plan
from ..realise import PlanError
from ..simulate import seconds, simulate
from ..skeleton import skeleton
from ..solver.loads import Loads
from ..solver.problem import NO_LEVERS
from .absences import HostLink
from .choose import choose, choose_least
from .model import Model, Residency, model_of, places_of

STEP = 0.1  # the share of the limit by which messages get more from one split to the next
_PATIENCE = 2  # splits in a row that are no faster, after which the search ends
_CORRECTIONS = 4  # times that a target is made smaller because no plan fits
_LEAST_CORRECTION = 0.005  # by this share of the limit at least

_LEAST_MOVED = 1 << 16  # bytes of a value that is moved to the host: less is not worth a copy

# From a program before it is sharded, and the names of values that wait on the host, to the program of one rank, with
# hints and no order.
Lower = Callable[[Graph, tuple[str, ...]], Graph]


@dataclass(frozen=True)
class Split:
    """A plan with what it recomputes.

    Attributes:
        plan: its decisions.
        hinted, ordered: the program of one rank without an order, and in the order of the plan.
        seconds: of the step, simulated.
        compute: of the step without what is recomputed.
        recomputed: seconds of compute in addition.
        needs: the live bytes if every message is sent alone.
    """

    plan: Plan
    hinted: Graph
    ordered: Graph
    seconds: float
    compute: float
    recomputed: float
    needs: int


def has_choice(hints: Hints) -> bool:
    """Whether the plan of a step also chooses what becomes of the values of forward."""
    may_move = hints.offload and hints.memory is not None
    return may_move or hints.recompute_at_least is not None


def plan_recomputation(graph: Graph, hinted: Graph, lower: Lower, cluster: Cluster) -> Split:
    """Choose what a step recomputes and what waits on the host, and make its plan.

    Args:
        graph: the program before it is sharded, in which backward recomputes nothing.
        hinted: the program of one rank, with hints and no order.
        lower: applies the other transforms to a program, which makes it one of one rank, and moves values to the host.
        cluster: the speeds, and the memory of the device.

    Raises: DoesNotFit if no choice that was tried fits the limit.
    """
    model = model_of_step(graph, hinted, cluster)
    search = _Search(graph, lower, cluster, model, hinted.micro)
    limit = hinted.hints.memory
    if limit is None:
        raise ValueError(f"{graph.name}: without a limit of memory there is nothing to choose.")
    return search.best_within(limit)


def model_of_step(graph: Graph, hinted: Graph, cluster: Cluster) -> Model:
    """The model of a step: its program before it is sharded, and the program of one rank.

    Of a step in micro-batches it is that of the last one, which has all regions.
    """
    s = skeleton(parts(hinted).last if hinted.micro > 1 else hinted)
    problem = formulate(s, cluster, float("inf"))
    live = by_operation(Loads(problem).bytes_unbucketed(NO_LEVERS))
    live += (hinted.micro - 1) * sum(
        local_bytes(hinted)(v) for v in hinted.batch if is_cut(hinted, v)
    )
    duration = dict(zip(graph.eqns, seconds(graph, cluster)))
    link = None
    movable: set[str] = set()
    if hinted.hints.offload:
        latency, pace = cluster.copy_seconds(1)
        link = HostLink(problem.seconds_before, latency, pace, cluster.device.launch)
        size = local_bytes(hinted)
        movable = {v.name for v in values_for_backward(hinted) if size(v) >= _LEAST_MOVED}
    at_least = graph.hints.recompute_at_least
    places = places_of(s.graph, s.ops)
    return model_of(graph, duration.__getitem__, places, live, at_least, link, movable)


class _Search:
    """The splits of one step that were planned."""

    def __init__(
        self, graph: Graph, lower: Lower, cluster: Cluster, model: Model, micro: int
    ) -> None:
        self.graph = graph
        self.lower = lower
        self.cluster = cluster
        self.model = model
        self.micro = micro
        self.errors: list[DoesNotFit] = []
        # By the values that are recomputed, and those that wait on the host. None means that no plan fits.
        self.splits: dict[tuple[frozenset[int], frozenset[int]], Split | None] = {}

    def best_within(self, limit: int) -> Split:
        """The fastest plan within a limit, of the splits that were tried.

        Raises: DoesNotFit if none fits. It is the error of the one that needs least.
        """
        best: Split | None = None
        slower = 0
        target = float(limit)
        while slower < _PATIENCE and len(self.errors) <= _CORRECTIONS:
            residency = choose(self.model, target)
            if residency.peak > target:
                break
            if best is not None and best.compute + self._seconds(residency) >= best.seconds:
                break
            split = self._planned(residency)
            if split is None:
                too_much = self.errors[-1].least.peak - limit
                target = residency.peak - max(too_much, _LEAST_CORRECTION * limit)
                continue
            slower += 1
            if best is None or split.seconds < best.seconds:
                slower = 0
                best = split
            target = min(target, residency.peak) - STEP * limit
        best = best or self._planned(choose_least(self.model))
        if best is None:
            raise self._too_little()
        return self._with_notes(best)

    def _planned(self, residency: Residency) -> Split | None:
        """The plan of a choice, or None if no order of its program fits the limit."""
        key = frozenset(residency.recomputed()), frozenset(residency.waiting())
        if key not in self.splits:
            try:
                self.splits[key] = self.planned(residency)
            except DoesNotFit as error:
                self.errors.append(error)
                self.splits[key] = None

        return self.splits[key]

    def _rewritten(self, residency: Residency) -> Graph:
        """The program of one rank, without an order, that recomputes and moves what was chosen."""
        values = {self.model.values[v].var for v in residency.recomputed()}
        return self.lower(recompute(self.graph, values), self._names(residency.waiting()))

    def _names(self, values: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.model.values[v].var.name for v in values)

    def _size(self, values: Sequence[int]) -> str:
        return format_bytes(sum(self.model.values[v].bytes for v in values))

    def planned(self, residency: Residency) -> Split:
        """The plan of a choice.

        Raises: DoesNotFit if no order of its program fits the limit.
        """
        recomputed = residency.recomputed()
        waiting = residency.waiting()
        hinted = self._rewritten(residency)
        plan, ordered = make_plan(hinted, self.cluster)
        timeline = simulate(place_copies(ordered, self.cluster), self.cluster)
        seconds = self._seconds(residency)
        notes = list(plan.notes)
        if recomputed:
            more = f"{len(recomputed)} values of {self._size(recomputed)}"
            notes.append(f"backward recomputes {more}, in {format_seconds(seconds)}")
        if waiting:
            more = f"{len(waiting)} values of forward, {self._size(waiting)}"
            notes.append(f"{more}, wait for backward on the host")
        plan = dataclasses.replace(
            plan,
            recomputed=self._names(recomputed),
            on_host=self._names(waiting),
            notes=tuple(notes),
        )
        compute = timeline.compute - seconds
        return Split(plan, hinted, ordered, timeline.seconds, compute, seconds, residency.peak)

    def _seconds(self, residency: Residency) -> float:
        """The seconds of compute that a choice adds to a step of any number of micro-batches."""
        return residency.seconds * self.micro

    def _too_little(self) -> DoesNotFit:
        """The error if no plan was found within the limit. It names a limit within which one was found.

        The search finds other orders within other limits, so the order that needs least so far may not be found again.
        """
        hinted = self._rewritten(choose_least(self.model))
        error = min(self.errors, key=lambda error: error.least.peak)
        for _ in range(_CORRECTIONS):
            try:
                make_plan(hinted.with_hints(memory=error.least.peak), self.cluster)
                break
            except DoesNotFit as larger:
                error = larger
        return does_not_fit(hinted, self.cluster.device, error.least)

    def _with_notes(self, best: Split) -> Split:
        """The best split, with a note on the others."""
        planned = [split for split in self.splits.values() if split is not None]
        if len(planned) < 2:
            return best
        rooms = []
        for split in planned:
            room = format_bytes(max(planned[0].needs - split.needs, 0))
            rooms.append(f"{room} takes {format_seconds(split.seconds)}")
        note = f"memory that recomputation leaves to messages: {', '.join(rooms)}"
        plan = dataclasses.replace(best.plan, notes=(*best.plan.notes, note))
        return dataclasses.replace(best, plan=plan)


def recomputing(graph: Graph, plan: Plan) -> Graph:
    """The program before it is sharded, with the recomputation of a plan.

    Raises: PlanError if the program has no value of such a name, or must keep it.
    """
    if plan.recomputed and graph.hints.recompute_at_least is None:
        raise PlanError(
            f"{plan.title}: it recomputes {plan.recomputed[0]!r}, and the step has no remat(memory=...).\n"
            f"Lower without the plan, and save it again."
        )
    values = {v.name: v for v in repeatable(graph)}
    for name in plan.recomputed:
        if name not in values:
            raise PlanError(
                f"{plan.title}: it recomputes {name!r}, and the program has no such value of forward that backward "
                f"may recompute.\nLower without the plan, and save it again."
            )
    return recompute(graph, {values[name] for name in plan.recomputed})


def moved_by(plan: Plan, hinted: Graph) -> set[Var]:
    """The values of a program that wait on the host because its plan says so.

    Raises: PlanError if the program has no value of such a name, or must keep it on the device.
    """
    if plan.on_host and not hinted.hints.offload:
        raise PlanError(
            f"{plan.title}: it moves {plan.on_host[0]!r} to the host, and the step has no offload(memory=...).\n"
            f"Lower without the plan, and save it again."
        )
    values = {v.name: v for v in values_for_backward(hinted)} if plan.on_host else {}
    for name in plan.on_host:
        if name not in values:
            raise PlanError(
                f"{plan.title}: it moves {name!r} to the host, and the program has no such value of forward that only "
                f"backward reads later.\nLower without the plan, and save it again."
            )
    return {values[name] for name in plan.on_host}
