"""Choose the order of a program with hints, and record in a plan what was chosen and why.

The budget of the solver is the limit of the step, which a transform or the device sets, less some room for copies of
leaves. Without a limit, it is a little
more than the program needs as written. If no schedule fits the budget, updates run last. If none fits then either, a
program with a limit keeps its order or is refused; without a limit, the plan exceeds the budget by as little as it can,
and its notes say so.

    make_plan --> plan_order --> for the budget, and again with less room for micro-batches:
                                 problem_within (when updates run) --> solve --> validate --> realise --> check
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ..ir.graph import Graph, Hints
from ..ir.pairing import pair
from ..ir.printer import format_bytes
from ..ir.verifier import ProgramError, check
from .cluster import Cluster, Device
from .cost import memory
from .durations import notes_on_unknown_costs
from .early_updates import with_early_updates
from .formulate import formulate, with_arrivals
from .levers import lever_notes, pulled_levers
from .limit import DoesNotFit, does_not_fit
from .place_copies import room_for_copies
from .plan import WRITTEN, Plan
from .plan_names import buckets_by_name
from .realise import realise, without_hints
from .skeleton import Skeleton, skeleton
from .solver.problem import Problem, Schedule
from .solver.search import EFFORT, WITHOUT_SEARCH, least_memory, solve
from .solver.validate import ScheduleError, validate

# Without a limit, the share by which the peak may rise above the peak of the program as written.
SLACK = 0.05
# A step that exceeds its limit by more than this share is refused without a search. The bytes that a schedule counts
# are an upper bound, so a step that needs a little more may still fit.
FAR = 0.05
# The most searches for an order of micro-batches, each within fewer bytes.
_ROUNDS = 4


def make_plan(graph: Graph, cluster: Cluster) -> tuple[Plan, Graph]:
    """Make the plan of a program with hints, and the verified program in the order of that plan.

    If no other order fits the limit, or if the planned order is not valid, the program keeps the order in which it was
    written, and the notes of the plan say why.

    Raises:
        DoesNotFit: every order that was tried needs more than the limit.
        ValueError: the cluster lacks a link.
    """
    try:
        return plan_order(graph, cluster)
    except (ProgramError, ScheduleError) as error:
        # The verifier has the last word. An order that it refuses must not fail a step that runs as written.
        return _as_written(graph, cluster, f"the planned one is not valid: {error}")
    except DoesNotFit as error:
        as_written = memory(graph)
        if error.limit < as_written.peak:
            least = min(error.least, as_written, key=lambda m: m.peak)
            raise does_not_fit(graph, cluster.device, least) from None
        least_peak = format_bytes(error.least.peak)
        return _as_written(graph, cluster, f"any other needs {least_peak}")


def plan_order(graph: Graph, cluster: Cluster) -> tuple[Plan, Graph]:
    """As `make_plan`, but a planned order that fails is an error.

    Raises:
        DoesNotFit: the planned order needs more than the limit.
        ProgramError, ScheduleError: the planned order is not valid.
        ValueError: the cluster lacks a link.
    """
    s = skeleton(graph, cluster.neighbours(graph.axes))
    if not s.gathers and not s.reductions:
        return _without_collectives(s, cluster)

    limit = graph.hints.memory_limit
    budget = int(memory(graph).peak * (1 + SLACK))
    if limit is not None:
        budget = max(limit - room_for_copies(graph), 0)
    problem, update, schedule, ordered = _fastest_order(s, cluster, budget)
    planned_memory = memory(ordered)
    if limit is not None and planned_memory.peak > limit:
        raise does_not_fit(graph, cluster.device, planned_memory)

    notes = []
    if planned_memory.peak > budget:
        excess = format_bytes(planned_memory.peak - budget)
        notes.append(f"the peak is {format_bytes(planned_memory.peak)}, {excess} above the budget")
    if update != s.asked_update:
        notes.append(
            "updates run at the end: in between they would not have fitted the memory budget"
        )
    notes += lever_notes(pulled_levers(s, schedule.levers))
    plan = Plan(s.fingerprint, *buckets_by_name(s, problem, schedule), update, tuple(notes))
    return _with_notes(plan, graph, planned_memory.peak, cluster), ordered


def _check_near_limit(s: Skeleton, problem: Problem, device: Device) -> None:
    """Refuse a step that needs far more than its limit, without a search for a fast order.

    Raises: DoesNotFit
    """
    limit = s.graph.hints.memory_limit
    if limit is None or problem.memory <= limit * (1 + FAR):
        return
    least = memory(realise(s, solve(problem, WITHOUT_SEARCH), problem))
    if least.peak > limit * (1 + FAR):
        raise does_not_fit(s.graph, device, least)


class _Order(NamedTuple):
    """A schedule of a problem, and the program in its order."""

    problem: Problem
    update: str
    schedule: Schedule
    graph: Graph


def _fastest_order(s: Skeleton, cluster: Cluster, budget: int) -> _Order:
    """The fastest order found; if it exceeds the limit of the step, the order with every message sent alone.

    A problem of micro-batches counts too few bytes: sums of gradients are live through all of them but the first, and
    so are the batches of the others. So each search gets less room, by the bytes that the last order needed above the
    budget.

    Raises: DoesNotFit, ProgramError, ScheduleError
    """
    limit = s.graph.hints.memory_limit
    room = budget
    cut = 0
    for _ in range(_ROUNDS if s.graph.micro > 1 else 1):
        problem, update = problem_within(s, cluster, room)
        _check_near_limit(s, problem, cluster.device)
        order = _order_of(s, problem, update, EFFORT)
        excess = memory(order.graph).peak - budget
        if excess <= 0 or problem.memory > room:  # less room gives the same problem
            break
        # The peak falls by whole messages, so a smaller cut than the last one may change nothing.
        cut = max(cut, excess)
        room -= cut
    if limit is None or memory(order.graph).peak <= limit:
        return order
    return _order_of(s, problem, update, WITHOUT_SEARCH)


def _order_of(s: Skeleton, problem: Problem, update: str, effort: int) -> _Order:
    """The order of a problem.

    Raises: ProgramError, ScheduleError
    """
    schedule = solve(problem, effort)
    validate(problem, schedule)
    return _Order(problem, update, schedule, check(realise(s, schedule, problem)))


def _without_collectives(s: Skeleton, cluster: Cluster) -> tuple[Plan, Graph]:
    """The plan of a program without planned collectives: its updates may run early, if that takes no more memory."""
    graph = s.graph
    update = "last"
    if graph.hints.update == "eager" and graph.micro == 1:
        early = with_early_updates(graph)
        if early.eqns != graph.eqns and memory(early).peak <= memory(graph).peak:
            graph = early
            update = "eager"
    graph_memory = memory(graph)
    if graph.hints.memory_limit is not None and graph_memory.peak > graph.hints.memory_limit:
        raise does_not_fit(graph, cluster.device, graph_memory)
    plan = Plan(s.fingerprint, update=update)
    return _with_notes(plan, graph, graph_memory.peak, cluster), check(graph)


def problem_within(s: Skeleton, cluster: Cluster, budget: int) -> tuple[Problem, str]:
    """The problem to solve, and when updates run in it.

    Updates run as the user asked. If early updates cannot fit the budget, updates run last, provided that this takes
    less memory. If neither fits, the problem may take as much memory as it needs: its bytes are an upper bound, so the
    program of its schedule may still fit.
    """
    update = s.asked_update
    problem = with_arrivals(formulate(s, cluster, budget), s, cluster)
    least = least_memory(problem)
    if update == "eager" and least > budget:
        at_end = with_arrivals(formulate(s, cluster, budget, "last"), s, cluster)
        least_at_end = least_memory(at_end)
        if least_at_end < least:
            return dataclasses.replace(at_end, memory=max(budget, least_at_end)), "last"
    return dataclasses.replace(problem, memory=max(budget, least)), update


def _as_written(graph: Graph, cluster: Cluster, reason: str) -> tuple[Plan, Graph]:
    """The program in the order in which it was written, and a plan that says why.

    Raises: DoesNotFit
    """
    graph_memory = memory(graph)
    if graph.hints.memory_limit is not None and graph_memory.peak > graph.hints.memory_limit:
        raise does_not_fit(graph, cluster.device, graph_memory)
    fingerprint = skeleton(graph).fingerprint
    plan = Plan(fingerprint, update=WRITTEN, notes=(f"the order is as written: {reason}",))
    return _with_notes(plan, graph, graph_memory.peak, cluster), check(without_hints(graph))


def _with_notes(plan: Plan, graph: Graph, peak: int, cluster: Cluster) -> Plan:
    """Add notes to a plan: unknown costs, the routes of collectives between hosts, and memory."""
    lines = notes_on_unknown_costs(graph, cluster)
    for e in pair(graph).starts:
        route = cluster.route(e, graph.axes)
        if route is not None:
            lines.append(f"{e.op} over {e.kwargs['axis']}: {route}")
    plan = dataclasses.replace(plan, notes=(*plan.notes, *dict.fromkeys(lines)))
    return with_memory_notes(plan, peak, graph.hints, cluster.device)


def with_memory_notes(plan: Plan, peak: int, hints: Hints, device: Device) -> Plan:
    """Add notes to a plan if the peak of its program is above the limit or the memory of the device."""
    notes = list(plan.notes)
    text = f"the peak is {format_bytes(peak)}"
    if hints.memory_limit is not None and peak > hints.memory_limit:
        limit = f"the limit {format_bytes(hints.memory_limit)}"
        notes.append(f"{text}, and {limit}: all ranks run in the same order")
    if peak > device.memory:
        notes.append(f"{text}, and the device ({device.name}) has {format_bytes(device.memory)}")
    return dataclasses.replace(plan, notes=tuple(dict.fromkeys(notes)))
