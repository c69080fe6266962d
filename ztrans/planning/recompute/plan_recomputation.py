"""Plan a step together with the values that backward recomputes, or finds on the host.

Messages and activations share one limit of memory, and no formula divides it: a bucket that is live for longer may be
worth more than the compute that makes room for it, or nothing. So several candidates are tried. The first one leaves
to messages only the bytes that they need in every order. Each further one recomputes more, and so leaves them more.
The last one recomputes the values that `remat()` recomputes without a limit. The seconds of each are estimated by a
schedule (see `baseline`). The three that seem fastest are planned in full:

    program --> choose --> recompute --> shard, hint --> move to the host --> plan --> place copies --> simulate

If no order of its program fits the limit, the choice is corrected. A candidate whose compute alone takes longer than
the best step so far is skipped, and so are all lower targets. The choice depends on the program and the cluster alone,
so ranks with batches of the same size make the same choice. `with_recomputation` and `values_on_host` apply the choice
of a stored plan to a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...ir.graph import Graph, Hints, Var
from ...ir.printer import counted, format_bytes, format_seconds, nearest
from ...ir.verifier import ProgramError
from ...rewrites.keep_on_host import values_for_backward
from ...rewrites.recompute import recompute, repeatable
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

# The number of targets between the state and the peak of the step that keeps everything.
_TARGETS = 12
# The most candidates that are planned in full, and by what share one of them may seem slower than the fastest.
_PLANS = 3
_CLOSE = 0.1
# The number of candidates in a row without a faster one, after which the search ends.
_PATIENCE = 2
# The most corrections of a target because no plan fits, and the least correction, as a share of the limit.
_CORRECTIONS = 4
_LEAST_CORRECTION = 0.005

# Makes the program of one rank, with hints and no order, from the names of the values that backward recomputes and that
# wait on the host.
Lower = Callable[[tuple[str, ...], tuple[str, ...]], Graph]
Ordering = Callable[[Graph, Cluster], tuple[Plan, Graph]]  # as `make_plan`


class Candidate(NamedTuple):
    """A choice for the values of forward, and the estimated seconds of the step with it."""

    residency: Residency
    seconds: float


@dataclass(frozen=True)
class Recomputation:
    """The plan of a step, which also names the recomputed values and those on the host.

    Attributes:
        plan: its decisions.
        ordered: the program of one rank in the order of the plan.
        seconds: the simulated seconds of the step.
    """

    plan: Plan
    ordered: Graph
    seconds: float


def has_choice(hints: Hints) -> bool:
    """Whether the plan of a step also chooses the values to recompute, or to move to the host."""
    may_move = hints.offload and hints.memory_limit is not None
    return may_move or hints.recompute_at_least is not None


def plan_recomputation(graph: Graph, lower: Lower, cluster: Cluster) -> Recomputation:
    """Choose the values that a step recomputes and that wait on the host, and make its plan.

    Args:
        graph: the program before it is sharded, without recomputation in backward.
        lower: applies a choice and the other transforms to that program.
        cluster: the speeds, and the memory of the device.

    Raises: DoesNotFit if none of the choices that were tried fits the limit.
    """
    hinted = lower((), ())
    limit = hinted.hints.memory_limit
    if limit is None:
        raise ValueError(f"{graph.name}: without a limit of memory there is nothing to choose.")
    return _Planner(lower, cluster, baseline_of(graph, hinted, cluster)).best_within(limit)


def candidates_within(baseline: Baseline, limit: int) -> list[Candidate]:
    """The choices within a limit that may be the fastest: the least recomputation first, the one of `remat()` last."""
    candidates: list[Candidate] = []
    choices: set[Hashable] = set()
    least_seconds = float("inf")
    since_faster = 0
    for target in _targets(baseline, limit):
        residency = baseline.choice(target)
        choice = residency.chosen_values
        if choice in choices:
            continue
        choices.add(choice)

        # Lower targets only recompute more: none of them takes less compute.
        too_slow = baseline.compute(residency) >= least_seconds
        if residency.peak > limit or too_slow or since_faster == _PATIENCE:
            break

        seconds = baseline.seconds(residency, limit)
        candidates.append(Candidate(residency, seconds))
        if seconds < least_seconds:
            least_seconds = seconds
            since_faster = 0
        else:
            since_faster += 1
        # A peak above its target is the lowest peak. It may still fit the limit.
        if residency.peak > target:
            break

    cheap = baseline.cheap_recomputed
    if cheap.peak <= limit and cheap.chosen_values not in choices:
        candidates.append(Candidate(cheap, baseline.seconds(cheap, limit)))
    return candidates


def _targets(baseline: Baseline, limit: int) -> Iterator[float]:
    """A limit, and the targets below it. All limits share them, so a larger limit has all targets of a smaller one."""
    yield float(limit)
    live = baseline.model.live
    state = float(live[0])
    step = (float(live.max()) - state) / _TARGETS
    for k in range(_TARGETS, 0, -1):
        target = state + k * step
        if target < limit:
            yield target


class _Planner:
    """Plans the choices of one step in full."""

    def __init__(self, lower: Lower, cluster: Cluster, baseline: Baseline) -> None:
        self.lower = lower
        self.cluster = cluster
        self.baseline = baseline
        self.errors: list[DoesNotFit] = []

    def best_within(self, limit: int) -> Recomputation:
        """The fastest plan within a limit, of the candidates that seem fastest.

        Raises: DoesNotFit if no plan fits.
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
            # `make_plan` also tries the program as it was written.
            best = self._plan(self.baseline.lowest, make_plan)
        if best is None:
            raise self._does_not_fit()
        return best

    def _plan_or_corrected(self, residency: Residency, limit: int) -> Recomputation | None:
        """The plan of a choice. If no order of its program fits the limit, the choice recomputes a little more."""
        for _ in range(1 + _CORRECTIONS):
            planned = self._plan(residency)
            if planned is not None:
                return planned
            excess = self.errors[-1].least.peak - limit
            target = residency.peak - max(excess, _LEAST_CORRECTION * limit)
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
        return Recomputation(plan, ordered, seconds)

    def _ordered(self, hinted: Graph, ordering: Ordering) -> tuple[Plan, Graph]:
        """The plan and the program of one rank in its order. If the planned order is not valid, the notes say why.

        Raises: DoesNotFit
        """
        try:
            return ordering(hinted, self.cluster)
        except (ProgramError, ScheduleError):
            return make_plan(hinted, self.cluster)

    def _notes(self, residency: Residency) -> Iterator[str]:
        """The notes of a plan about its choice for the values of forward."""
        recomputed = residency.recomputed()
        waiting = residency.waiting()
        if recomputed:
            seconds = format_seconds(self.baseline.micro * residency.seconds)
            size = self._size(recomputed)
            yield f"backward recomputes {counted(len(recomputed), 'value')} of {size}, in {seconds}"
        if waiting:
            size = self._size(waiting)
            verb = "waits" if len(waiting) == 1 else "wait"
            count = counted(len(waiting), "value")
            yield f"{count} of forward, {size}, {verb} for backward on the host"

    def _rewritten(self, residency: Residency) -> Graph:
        """The program of one rank, without an order, with the recomputation and the moves of a choice."""
        return self.lower(self._names(residency.recomputed()), self._names(residency.waiting()))

    def _names(self, values: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.baseline.model.values[v].var.name for v in values)

    def _size(self, values: Sequence[int]) -> str:
        return format_bytes(sum(self.baseline.model.values[v].use.bytes for v in values))

    def _does_not_fit(self) -> DoesNotFit:
        """The error that no plan fits the limit. It names a limit within which a plan was found.

        The search finds other orders within other limits, so the order with the lowest peak so far may not be found
        again. The written order is always found within its own peak.
        """
        hinted = self._rewritten(self.baseline.lowest)
        least = min((error.least for error in self.errors), key=lambda needed: needed.peak)
        for _ in range(_CORRECTIONS):
            try:
                make_plan(hinted.with_hints(memory_limit=least.peak), self.cluster)
                break
            except DoesNotFit as error:
                least = error.least
        else:
            least = memory(hinted)
        return does_not_fit(hinted, self.cluster.device, least)


def fastest(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates that seem fastest, in order."""
    ranked = sorted(candidates, key=lambda candidate: candidate.seconds)[:_PLANS]
    if not ranked:
        return []
    most_seconds = (1 + _CLOSE) * ranked[0].seconds
    return [candidate for candidate in ranked if candidate.seconds <= most_seconds]


def with_recomputation(graph: Graph, plan: Plan) -> Graph:
    """The program before it is sharded, with the recomputation of a plan.

    Raises: OtherProgramError if the program lacks a value that the plan names, or must keep it.
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
                f"may recompute{nearest(name, values)}.\nLower without the plan, and save it again."
            )
    return recompute(graph, {values[name] for name in plan.recomputed})


def values_on_host(plan: Plan, hinted: Graph) -> set[Var]:
    """The values of a program that its plan moves to the host.

    Raises: OtherProgramError if the program lacks a value that the plan names, or must keep it on the device.
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
                f"backward reads later{nearest(name, values)}.\nLower without the plan, and save it again."
            )
    return {values[name] for name in plan.on_host}
