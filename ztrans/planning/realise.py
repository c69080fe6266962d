"""Write a program in the order of a plan or a schedule.

The planned collectives return to the program as buckets. With eager updates, a parameter may be updated right after the
reduction of its gradient. The order depends on the program and the plan only, so it is the same on every rank. A plan
from a file, another rank or an argument is validated, and the program in its order is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..ir.collectives import coalesce
from ..ir.dependencies import grouped
from ..ir.graph import Eqn, Graph, rename
from ..ir.printer import format_bytes
from ..ir.verifier import ProgramError, check
from ..rewrites.neighbours import with_neighbours_as_axes
from .cost import memory
from .eager_updates import EagerGroup, eager_groups
from .early_updates import with_early_updates
from .formulate import frame
from .levers import all_gathers, pulled_levers
from .plan import WRITTEN, Plan
from .plan_names import schedule_of
from .skeleton import Skeleton, skeleton
from .solver.problem import Problem, Schedule
from .solver.tape import Event, Kind, tape
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
    """As `apply_plan`, without the limit: all ranks must use this order, even a rank with a larger batch."""
    s = skeleton(graph, plan.lever_options)
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
        # The same object if nothing changes, because analyses of the program know equations by identity.
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
    events_at = tape(problem, schedule)
    groups = eager_groups(s) if problem.updates else ()
    levers = pulled_levers(s, schedule.levers)
    lever_eqns_at = grouped(chain.from_iterable(lever.eqns for lever in levers))
    # A dict, so that an operation of an update that has run early is not written again at its own place.
    eqns: dict[Eqn, None] = {}
    for k in range(len(s.ops) + 1):
        for event in events_at.get(k, ()):
            eqns.update(dict.fromkeys(_eqns_of(event, s, groups)))
        # They may read a value that was waited for here.
        eqns.update(dict.fromkeys(lever_eqns_at.get(k, ())))
        eqns.update(dict.fromkeys(s.ops[k : k + 1]))

    program = with_neighbours_as_axes(s.graph.replace(eqns=tuple(eqns)))
    # `rename` follows chains: the value that is read in place of another one may be replaced itself.
    return rename(program, dict(chain.from_iterable(lever.reads.items() for lever in levers)))


def _eqns_of(event: Event, s: Skeleton, groups: Sequence[EagerGroup]) -> list[Eqn]:
    """The equations of a program for an event of its schedule."""
    if event.kind is Kind.UPDATE:
        # One update after the other, so that few of their temporaries are live.
        return list(chain.from_iterable(groups[u].eqns for u in event.updates))

    is_gather = event.kind in (Kind.START_GATHER, Kind.WAIT_GATHER)
    collectives = all_gathers(s) if is_gather else s.reductions
    members = [collectives[i] for i in event.members]
    if event.kind in (Kind.START_SECOND, Kind.WAIT_SECOND):
        pairs = [member.second for member in members if member.second is not None]
    else:
        pairs = [(member.start, member.wait) for member in members]
    if event.kind in (Kind.WAIT_GATHER, Kind.WAIT_REDUCTION, Kind.WAIT_SECOND):
        return [wait for _, wait in pairs]
    arrivals = [member.arrival for member in members if member.arrival is not None]
    return [*chain.from_iterable(arrivals), coalesce([start for start, _ in pairs])]
