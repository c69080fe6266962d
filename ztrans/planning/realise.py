"""Write a program in the order of a plan or of a schedule.

The planned collectives return to the program as buckets. With eager updates, the update of a parameter may follow the
reduction of its gradient at once. The order depends on the program and the plan only, so it is the same on every rank.
A plan that was loaded from a file, received from another rank or passed as an argument is validated, and the program in
its order is verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from ..ir.collectives import coalesce
from ..ir.dependencies import grouped
from ..ir.graph import Eqn, Graph, Var, rename
from ..ir.neighbours import with_neighbours_as_axes
from ..ir.printer import format_bytes
from ..ir.verifier import ProgramError, check
from .cost import memory
from .eager_updates import eager_groups
from .early_updates import with_early_updates
from .formulate import frame
from .plan import WRITTEN, Plan, schedule_of
from .skeleton import Collective, GatherOfParts, Skeleton, skeleton
from .solver.after_waits import PendingUpdates, SecondReductions
from .solver.problem import Bucket, Problem, Schedule
from .solver.validate import ScheduleError


class PlanError(ValueError):
    """A program cannot be written in the order of a plan."""


class OtherProgramError(PlanError):
    """The plan is for another program."""


class OverLimitError(PlanError):
    """The order of the plan needs more memory than the limit of the step, for instance for a larger batch."""


def apply_plan(graph: Graph, plan: Plan) -> Graph:
    """Write a program in the order of its plan, and verify it.

    Raises:
        OtherProgramError: the plan is for another program.
        OverLimitError: the order needs more than the limit of the step.
        PlanError: something else is wrong with the plan.
    """
    program = follow_plan(graph, plan)
    limit = graph.hints.memory_limit
    if limit is None:
        return program
    peak = memory(program).peak
    if peak > limit:
        raise OverLimitError(
            f"{plan.title}: the program that it makes has {peak} bytes live ({format_bytes(peak)}), and the limit of "
            f"the step is {limit} ({format_bytes(limit)}).\nLower without the plan, and save it again."
        )
    return program


def follow_plan(graph: Graph, plan: Plan) -> Graph:
    """As `apply_plan`, without the limit of memory: all ranks must use this order, also one with a larger batch."""
    s = skeleton(graph, plan.neighbours)
    if plan.program != s.fingerprint:
        raise OtherProgramError(
            f"{plan.title}: it was made for program {plan.program}, and this one is {s.fingerprint}: another "
            f"model, mesh, or other transforms.\nLower without it, and save lowered.plan again."
        )
    try:
        return check(_in_order(s, graph, plan))
    except (ScheduleError, ProgramError) as error:
        raise PlanError(
            f"{plan.title}: {error}.\nLower without the plan, and save it again."
        ) from None


def _in_order(s: Skeleton, graph: Graph, plan: Plan) -> Graph:
    """The program with skeleton `s` in the order of its plan.

    Raises: ScheduleError if it cannot run in that order.
    """
    if graph.hints.update == "last" and plan.update == "eager":
        raise ScheduleError('update is "eager", and the step has overlap_grads(update="last")')
    if plan.update == "eager" and not s.gathers and not s.reductions:
        return with_early_updates(s.graph)
    if plan.update == WRITTEN:
        return without_hints(graph)
    if plan.is_empty and not any(e.hint for e in graph.eqns):
        return without_hints(graph)
    problem = frame(s, plan.update)
    return realise(s, schedule_of(plan, s, problem), problem)


def without_hints(graph: Graph) -> Graph:
    """The program in its own order, without hints."""
    eqns = []
    for e in graph.eqns:
        # The same object where nothing changes: analyses of the program know equations by identity.
        eqns.append(e if e.hint is None else e.replace(hint=None))
    return graph.replace(eqns=tuple(eqns))


def realise(s: Skeleton, schedule: Schedule, problem: Problem) -> Graph:
    """Write a program with its planned collectives where `schedule` puts them.

    Args:
        s: the program without its planned collectives.
        schedule: the buckets, their places, and the levers that are pulled.
        problem: the problem of the program. Its updates run where the last of the reductions that they need is waited
            for; if it has none, all equations of the update stay at their places.

    Returns:
        The program in that order. It is not verified.
    """
    emit = _Emission(s, problem)
    gather_starts, gather_waits = _gather_eqns(s, schedule)
    reduction_starts = grouped((bucket.start, bucket) for bucket in schedule.reductions)
    reduction_waits = grouped((bucket.wait, bucket) for bucket in schedule.reductions)
    # At a place, gathers start before eager updates run, so they overlap. If gathers under way are limited, they start
    # after the updates.
    starts_first = problem.gathers_in_flight == float("inf")
    for k in range(len(s.ops) + 1):
        waits = emit.start_reductions(reduction_starts.get(k, ()), reduction_waits.get(k, ()), k)
        starts = gather_starts.get(k, ())
        if starts_first:
            emit.write(starts)
        if k in problem.releases:
            emit.update(k)
        for bucket in waits:
            emit.wait(bucket, k)
        # In a plan that was edited, the last bucket may run its updates with the next.
        emit.update(k)
        emit.wait_for_second_reductions(k)
        emit.write(starts)  # those that have not been written yet
        emit.write(gather_waits.get(k, ()))
        emit.write(s.ops[k : k + 1])

    program = with_neighbours_as_axes(s.graph.replace(eqns=tuple(emit.eqns)))
    return rename(program, _kept_values(s, schedule, problem))


def _gather_eqns(
    s: Skeleton, schedule: Schedule
) -> tuple[dict[int, list[Eqn]], dict[int, list[Eqn]]]:
    """By place, the starts of gathers, and the waits for them, after which parts of their values are kept."""
    starts: dict[int, list[Eqn]] = {}
    waits: dict[int, list[Eqn]] = {}
    collectives = s.all_gathers
    uses = (*s.use, *(s.use[each.replaces] for each in s.of_parts))
    # A member is waited for at its own first use, later than its bucket if others are used before it.
    for bucket in schedule.gathers:
        start = coalesce([collectives[i].start for i in bucket.members])
        starts.setdefault(bucket.start, []).append(start)
        for i in bucket.members:
            waits.setdefault(uses[i], []).append(collectives[i].wait)
    for each in sent_of_parts(s, schedule):
        waits.setdefault(s.use[each.first], []).extend(each.part)
    return starts, waits


def sent_of_parts(s: Skeleton, schedule: Schedule) -> list[GatherOfParts]:
    """The gathers of parts that a schedule sends, which are numbered after all others."""
    members = sorted(chain.from_iterable(bucket.members for bucket in schedule.gathers))
    return [s.of_parts[i - len(s.gathers)] for i in members if i >= len(s.gathers)]


def _kept_values(s: Skeleton, schedule: Schedule, problem: Problem) -> dict[Var, Var]:
    """For the value of each dropped gather, the value that is kept for it. `rename` follows them to the first."""
    kept_for = {}
    replaced = {each.replaces for each in sent_of_parts(s, schedule)}
    for i in problem.dropped(schedule.levers) - replaced:
        earlier = problem.gathers[i].repeats
        if earlier is not None:
            kept_for[s.gathers[i].value] = s.gathers[earlier].value
    return kept_for


class _Emission:
    """The equations that have been written so far, and the reductions that are under way after them."""

    def __init__(self, s: Skeleton, problem: Problem) -> None:
        self.s = s
        self.problem = problem
        self.eqns: dict[Eqn, None] = {}
        self.groups = eager_groups(s) if problem.updates else ()
        self.updates = PendingUpdates(problem)
        self.under_way = 0  # the bytes of gradients whose reduction is under way
        self.second_buckets: SecondReductions[Bucket] = SecondReductions()

    def write(self, eqns: Iterable[Eqn]) -> None:
        """Write equations, except those that have been written already."""
        self.eqns.update(dict.fromkeys(eqns))

    def start_reductions(
        self, starts: Iterable[Bucket], waits: Iterable[Bucket], k: int
    ) -> deque[Bucket]:
        """Start reductions at place k. If too many are under way, wait for some of `waits` first; return the others."""
        remaining = deque(waits)
        for bucket in starts:
            # A bucket cannot wait for itself to make room.
            while remaining and remaining[0] is not bucket and not self.fits(bucket):
                self.wait(remaining.popleft(), k)
            self.reduce(bucket)
        return remaining

    def members(self, bucket: Bucket) -> list[Collective]:
        """The members of a bucket of reductions."""
        return [self.s.reductions[i] for i in bucket.members]

    def _gradients(self, bucket: Bucket) -> int:
        return sum(self.problem.reductions[i].bytes for i in bucket.members)

    def fits(self, bucket: Bucket) -> bool:
        """Whether a bucket of gradients may start while those under way still are."""
        return self.under_way + self._gradients(bucket) <= self.problem.reductions_in_flight

    def reduce(self, bucket: Bucket) -> None:
        """Start a bucket of reductions."""
        self.write([coalesce([member.start for member in self.members(bucket)])])
        self.under_way += self._gradients(bucket)

    def wait(self, bucket: Bucket, place: int) -> None:
        """Wait for a bucket of reductions, start its second reduction if it has one, and write updates that can run."""
        members = self.members(bucket)
        self.write([member.wait for member in members])
        self.under_way -= self._gradients(bucket)
        second_starts = [member.second[0] for member in members if member.second]
        if not second_starts:
            self.updates.complete(bucket.members)
        else:
            self.write([coalesce(second_starts)])
            need = min(self.s.need[i] for i in bucket.members)
            for earlier in self.second_buckets.add(bucket, need):
                self._wait_second(earlier)
        if not bucket.with_next:
            self.update(place)

    def wait_for_second_reductions(self, place: int) -> None:
        """Wait for the second reductions that are needed at this place."""
        for bucket in self.second_buckets.needed(place):
            self._wait_second(bucket)
            self.update(place)

    def _wait_second(self, bucket: Bucket) -> None:
        self.write([member.second[1] for member in self.members(bucket) if member.second])
        self.updates.complete(bucket.members)

    def update(self, place: int) -> None:
        """Write the updates that can run at a place, one after the other, so that few of their temporaries live."""
        for u in self.updates.run(place):
            self.write(self.groups[u].eqns)
