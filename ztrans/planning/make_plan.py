"""make_plan: make the plan of a program for a cluster, within a memory budget."""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph
from ..ir.pairing import pair
from ..ir.printer import format_bytes
from ..ir.verifier import ProgramError, check
from .cluster import Cluster
from .cost import Memory, memory
from .fingerprint import fingerprint
from .formulate import formulate
from .plan import WRITTEN, Plan, as_written, weighed
from .plan_names import named
from .program_order import Skeleton, skeleton
from .realise import realise
from .solver.problem import Problem
from .solver.solve import needs, solve
from .solver.validate import ScheduleError, validate

SLACK = 0.05  # the share by which "auto" lets the peak rise above that of the unscheduled program


def make(graph: Graph, cluster: Cluster) -> tuple[Plan, Graph]:
    """Make the plan of a program with hints, and the program in the order of that plan.

    The program is verified. If no other order fits the budget of `prefetch`, or if the planned order is not valid, the
    program keeps the order in which it was written, and the notes of the plan say why.

    Raises:
        ValueError: the memory budget is below what any order needs, or the cluster lacks a link.
    """
    s, unscheduled = skeleton(graph), memory(graph)
    budget = int(unscheduled.peak * (1 + SLACK)) if graph.budget is None else graph.budget
    if not s.gathers and not s.reductions:
        if graph.budget is not None and unscheduled.peak > budget:
            raise _too_little(budget, unscheduled)
        plan = Plan(fingerprint(graph))
        return _noted(plan, graph, unscheduled.peak, cluster), check(s.graph)

    problem, update = problem_within(s, cluster, budget)
    try:
        schedule = solve(problem)
        validate(problem, schedule)
        ordered = check(realise(s, schedule, problem))
    except (ProgramError, ScheduleError) as error:
        return _as_written(graph, unscheduled, cluster, f"the planned one is not valid: {error}")
    peak = memory(ordered).peak
    if graph.budget is not None and peak > budget:
        if budget < unscheduled.peak:
            raise _too_little(budget, memory(ordered) if peak < unscheduled.peak else unscheduled)
        return _as_written(graph, unscheduled, cluster, f"any other needs {format_bytes(peak)}")

    notes = []
    if peak > budget:
        notes.append(
            f"the peak is {format_bytes(peak)}, {format_bytes(peak - budget)} above the budget"
        )
    if update != s.asked_update:
        notes.append(
            "updates run at the end: in between they would not have fitted the memory budget"
        )
    plan = Plan(fingerprint(graph), *named(s, schedule), update, tuple(notes))
    return _noted(plan, graph, peak, cluster), ordered


def problem_within(s: Skeleton, cluster: Cluster, budget: int) -> tuple[Problem, str]:
    """The problem to solve, and when updates run in it.

    Updates run as the user asked. If they were to run early and that cannot fit the budget, they run last, provided
    that this takes less memory. If that does not fit either, the problem may take as much memory as it needs.
    """
    update, problem = s.asked_update, formulate(s, cluster, budget)
    least = needs(problem).bytes
    if update == "eager" and least > budget:
        last = formulate(s, cluster, budget, "last")
        if (at_end := needs(last).bytes) < least:
            update, problem, least = "last", last, at_end
    return replace(problem, memory=max(budget, least)), update


def _as_written(
    graph: Graph, unscheduled: Memory, cluster: Cluster, reason: str
) -> tuple[Plan, Graph]:
    """The program in the order in which it was written, and a plan that says why."""
    plan = Plan(fingerprint(graph), update=WRITTEN, notes=(f"the order is as written: {reason}",))
    return _noted(plan, graph, unscheduled.peak, cluster), check(as_written(graph))


def _noted(plan: Plan, graph: Graph, peak: int, cluster: Cluster) -> Plan:
    """Add notes to a plan: which way its collectives go between hosts, and about memory."""
    routes = ((e, cluster.route(e, graph.axes)) for e in pair(graph).starts)
    lines = (f"{e.op} over {e.kwargs['axis']}: {route}" for e, route in routes if route is not None)
    plan = replace(plan, notes=(*plan.notes, *dict.fromkeys(lines)))
    return weighed(plan, peak, graph.budget, cluster.device)


def _too_little(budget: int, least: Memory) -> ValueError:
    lines = "".join(
        f"  {format_bytes(n):>10}  {v!r}{f'  # {line}' if line else ''}\n"
        for v, n, line in least.holders[:5]
    )
    where = f" at {least.at.source.where}" if least.at is not None and least.at.source else ""
    return ValueError(
        f"prefetch: memory={budget} ({format_bytes(budget)}) is less than the step needs in any order: "
        f"{least.peak} bytes ({format_bytes(least.peak)}){where}.\n{lines}"
        f"Give it that much, a smaller batch, or more ranks."
    )
