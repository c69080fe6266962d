"""Plan a step whose plan also chooses what backward recomputes, or finds on the host.

Messages and activations share one limit of memory, and no formula divides it: a bucket that is live for longer may be
worth more than the compute that makes room for it, or nothing. So several candidates are tried. The first leaves to
activations what messages do not need in any order. Each further one leaves more to messages, by recomputing more. The
last one recomputes what `remat()` does without a limit. A schedule is the judge of each (see `baseline`). The three
that seem fastest are planned in full:

    program --> choose --> recompute --> shard, hint --> move to the host --> plan --> place copies --> simulate

If no order of its program fits the limit, the choice is corrected. A candidate whose compute alone takes longer than
the best step so far is skipped, and so are all after it. The choice depends on the program and the cluster alone, so
ranks with batches of one size make the same choice. `with_recomputation` and `values_on_host` find the choices of a
stored plan in a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...ir.graph import Graph, Hints, Var
from ...ir.keep_on_host import values_for_backward
from ...ir.printer import format_bytes, format_seconds
from ...ir.recompute import recompute, repeatable
from ...ir.verifier import ProgramError
from ..cluster import Cluster
from ..cost import memory
from ..limit import DoesNotFit, does_not_fit
from ..make_plan import make_plan, plan_order
from ..place_copies import place_copies
from ..plan import Plan
from ..realise import OtherProgramError
from ..simulate import simulate
from ..solver.validate import ScheduleError
from .baseline import Baseline, baseline_of
from .residency import Residency

# Targets between the state and the peak of the step in which everything is kept.
_TARGETS = 12
# Candidates that are planned in full. One that is estimated to be slower than the fastest by the share `_CLOSE` is not.
_PLANS = 3
_CLOSE = 0.1
# Candidates in a row that are no faster, after which the search ends.
_PATIENCE = 2
# Times that a target is made smaller because no plan fits, each by this share of the limit at least.
_CORRECTIONS = 4
_LEAST_CORRECTION = 0.005

# From a program before it is sharded, and the names of values that wait on the host, to the program of one rank, with
# hints and no order.
Lower = Callable[[Graph, tuple[str, ...]], Graph]
Ordering = Callable[[Graph, Cluster], tuple[Plan, Graph]]  # as `make_plan`


class Candidate(NamedTuple):
    """What may become of the values of forward, and the seconds that the step then takes, as they were estimated."""

    residency: Residency
    seconds: float


@dataclass(frozen=True)
class Recomputation:
    """A plan with what it recomputes.

    Attributes:
        plan: its decisions.
        unordered, ordered: the program of one rank without an order, and in the order of the plan.
        seconds: of the step, simulated.
    """

    plan: Plan
    unordered: Graph
    ordered: Graph
    seconds: float


def has_choice(hints: Hints) -> bool:
    """Whether the plan of a step also chooses what becomes of the values of forward."""
    may_move = hints.offload and hints.memory_limit is not None
    return may_move or hints.recompute_at_least is not None


def plan_recomputation(
    graph: Graph, hinted: Graph, lower: Lower, cluster: Cluster
) -> Recomputation:
    """Choose what a step recomputes and what waits on the host, and make its plan.

    Args:
        graph: the program before it is sharded, in which backward recomputes nothing.
        hinted: the program of one rank, with hints and no order.
        lower: applies the other transforms to a program, which makes it one of one rank, and moves values to the host.
        cluster: the speeds, and the memory of the device.

    Raises: DoesNotFit if no choice that was tried fits the limit.
    """
    limit = hinted.hints.memory_limit
    if limit is None:
        raise ValueError(f"{graph.name}: without a limit of memory there is nothing to choose.")
    baseline = baseline_of(graph, hinted, cluster)
    return _Planner(graph, lower, cluster, baseline).best_within(limit)


def candidates_within(baseline: Baseline, limit: int) -> list[Candidate]:
    """The choices within a limit that may be the fastest: those that recompute least first, and that of `remat()`."""
    candidates: list[Candidate] = []
    choices: set[Hashable] = set()
    best = float("inf")
    slower = 0
    for target in _targets(baseline, limit):
        residency = baseline.choice(target)
        choice = residency.chosen_values
        if choice in choices:
            continue
        choices.add(choice)

        # Lower targets only recompute more: none of them takes less compute.
        if residency.peak > limit or baseline.compute(residency) >= best or slower == _PATIENCE:
            break

        seconds = baseline.seconds(residency, limit)
        candidates.append(Candidate(residency, seconds))
        if seconds < best:
            best = seconds
            slower = 0
        else:
            slower += 1
        # This is the lowest peak, which still may fit the limit.
        if residency.peak > target:
            break

    cheap = baseline.cheap_recomputed
    if cheap.peak <= limit and cheap.chosen_values not in choices:
        candidates.append(Candidate(cheap, baseline.seconds(cheap, limit)))
    return candidates


def _targets(baseline: Baseline, limit: int) -> Iterator[float]:
    """A limit, and the targets below it. These are the same for every limit, so a larger one has all of a smaller."""
    yield float(limit)
    live = baseline.model.live
    state = float(live[0])
    step = (float(live.max()) - state) / _TARGETS
    for k in range(_TARGETS, 0, -1):
        target = state + k * step
        if target < limit:
            yield target


class _Planner:
    """Plans choices of one step in full."""

    def __init__(self, graph: Graph, lower: Lower, cluster: Cluster, baseline: Baseline) -> None:
        self.graph = graph
        self.lower = lower
        self.cluster = cluster
        self.baseline = baseline
        self.errors: list[DoesNotFit] = []

    def best_within(self, limit: int) -> Recomputation:
        """The fastest plan within a limit, of those that were made.

        Raises: DoesNotFit if none fits. It is the error of the one that needs least.
        """
        best: Recomputation | None = None
        for candidate in fastest(candidates_within(self.baseline, limit)):
            if best is not None and self.baseline.compute(candidate.residency) >= best.seconds:
                continue
            planned = self._plan_or_corrected(candidate.residency, limit)
            if planned is None:
                continue
            if best is None or planned.seconds < best.seconds:
                best = planned

        if best is None:
            # `make_plan` may also leave the program in the order in which it was written.
            best = self._plan(self.baseline.lowest, make_plan)
        if best is None:
            raise self._does_not_fit()
        return best

    def _plan_or_corrected(self, residency: Residency, limit: int) -> Recomputation | None:
        """The plan of a choice. While no order of its program fits the limit, it recomputes a little more."""
        for _ in range(1 + _CORRECTIONS):
            planned = self._plan(residency)
            if planned is not None:
                return planned
            too_much = self.errors[-1].least.peak - limit
            target = residency.peak - max(too_much, _LEAST_CORRECTION * limit)
            residency = self.baseline.choice(target)
            if residency.peak > target:
                break
        return None

    def _plan(self, residency: Residency, ordering: Ordering = plan_order) -> Recomputation | None:
        """The plan of a choice, or None if no order of its program fits the limit."""
        hinted = self._rewritten(residency)
        try:
            plan, ordered = self._ordered(hinted, ordering)
        except DoesNotFit as error:
            self.errors.append(error)
            return None
        plan = dataclasses.replace(
            plan,
            recomputed=self._names(residency.recomputed()),
            on_host=self._names(residency.waiting()),
            notes=(*plan.notes, *self._notes(residency)),
        )
        seconds = simulate(place_copies(ordered, self.cluster), self.cluster).seconds
        return Recomputation(plan, hinted, ordered, seconds)

    def _ordered(self, hinted: Graph, ordering: Ordering) -> tuple[Plan, Graph]:
        """The program of one rank in an order. If the planned one is not valid, the notes say what was wrong.

        Raises: DoesNotFit
        """
        try:
            return ordering(hinted, self.cluster)
        except (ProgramError, ScheduleError):
            return make_plan(hinted, self.cluster)

    def _notes(self, residency: Residency) -> Iterator[str]:
        """What becomes of the values of forward."""
        recomputed = residency.recomputed()
        waiting = residency.waiting()
        if recomputed:
            seconds = format_seconds(self.baseline.micro * residency.seconds)
            size = self._size(recomputed)
            yield f"backward recomputes {len(recomputed)} values of {size}, in {seconds}"
        if waiting:
            size = self._size(waiting)
            yield f"{len(waiting)} values of forward, {size}, wait for backward on the host"

    def _rewritten(self, residency: Residency) -> Graph:
        """The program of one rank, without an order, that recomputes and moves what was chosen."""
        values = {self.baseline.model.values[v].var for v in residency.recomputed()}
        return self.lower(recompute(self.graph, values), self._names(residency.waiting()))

    def _names(self, values: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.baseline.model.values[v].var.name for v in values)

    def _size(self, values: Sequence[int]) -> str:
        return format_bytes(sum(self.baseline.model.values[v].use.bytes for v in values))

    def _does_not_fit(self) -> DoesNotFit:
        """The error if no plan was found within the limit. It names a limit within which one was found.

        The search finds other orders within other limits, so the order that needs least so far may not be found again.
        Within the peak of the program as it was written, that order is always found.
        """
        hinted = self._rewritten(self.baseline.lowest)
        least = min((error.least for error in self.errors), key=lambda each: each.peak)
        for _ in range(_CORRECTIONS):
            try:
                make_plan(hinted.with_hints(memory_limit=least.peak), self.cluster)
                break
            except DoesNotFit as larger:
                least = larger.least
        else:
            least = memory(hinted)
        return does_not_fit(hinted, self.cluster.device, least)


def fastest(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates that seem fastest, in order."""
    ranked = sorted(candidates, key=lambda candidate: candidate.seconds)[:_PLANS]
    return [each for each in ranked if each.seconds <= (1 + _CLOSE) * ranked[0].seconds]


def with_recomputation(graph: Graph, plan: Plan) -> Graph:
    """The program before it is sharded, with the recomputation of a plan.

    Raises: OtherProgramError if the program has no value of such a name, or must keep it.
    """
    if plan.recomputed and graph.hints.recompute_at_least is None:
        raise OtherProgramError(
            f"{plan.title}: it recomputes {plan.recomputed[0]!r}, and the step has no remat(memory=...).\n"
            f"Lower without the plan, and save it again."
        )
    values = {v.name: v for v in repeatable(graph)}
    for name in plan.recomputed:
        if name not in values:
            raise OtherProgramError(
                f"{plan.title}: it recomputes {name!r}, and the program has no such value of forward that backward "
                f"may recompute.\nLower without the plan, and save it again."
            )
    return recompute(graph, {values[name] for name in plan.recomputed})


def values_on_host(plan: Plan, hinted: Graph) -> set[Var]:
    """The values of a program that wait on the host because its plan says so.

    Raises: OtherProgramError if the program has no value of such a name, or must keep it on the device.
    """
    if plan.on_host and not hinted.hints.offload:
        raise OtherProgramError(
            f"{plan.title}: it moves {plan.on_host[0]!r} to the host, and the step has no offload(memory=...).\n"
            f"Lower without the plan, and save it again."
        )
    values = {v.name: v for v in values_for_backward(hinted)} if plan.on_host else {}
    for name in plan.on_host:
        if name not in values:
            raise OtherProgramError(
                f"{plan.title}: it moves {name!r} to the host, and the program has no such value of forward that only "
                f"backward reads later.\nLower without the plan, and save it again."
            )
    return {values[name] for name in plan.on_host}
