"""make_plan: make the plan of a program for a cluster, within a memory budget."""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph
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

    The program is verified. If no order fits the budget of `prefetch`, or no valid order is found, the program keeps
    the order in which it was written, and the notes of the plan say why.

    Raises:
        ValueError: the memory budget is below what any order needs, or the cluster lacks a link.
    """
    s, unscheduled = skeleton(graph), memory(graph)
    budget = int(unscheduled.peak * (1 + SLACK)) if graph.budget is None else graph.budget
    if not s.gathers and not s.reductions:
        if graph.budget is not None and unscheduled.peak > budget:
            raise _too_little(budget, unscheduled)
        plan = Plan(fingerprint(graph))
        return weighed(plan, unscheduled.peak, graph.budget, cluster.device), check(s.graph)

    problem, update = _problem(s, cluster, budget)
    notes, best = [], None
    try:
        schedule = solve(problem)
        validate(problem, schedule)
        best = check(realise(s, schedule, problem))
    except (ProgramError, ScheduleError) as error:
        notes.append(f"an order was not valid, so the last valid one is used: {error}")
    peak = unscheduled.peak if best is None else memory(best).peak
    if best is not None and graph.budget is not None and peak > budget:
        if budget < unscheduled.peak:
            raise _too_little(budget, memory(best) if peak < unscheduled.peak else unscheduled)
        notes.append(f"the order is as written: any other needs {format_bytes(peak)}")
        best, peak = None, unscheduled.peak
    if best is None:
        plan = Plan(fingerprint(graph), update=WRITTEN, notes=tuple(notes))
        return weighed(plan, peak, graph.budget, cluster.device), check(as_written(graph))

    if peak > budget:
        notes.append(f"the peak is {format_bytes(peak)}, {format_bytes(peak - budget)} above the budget")
    if update != s.asked_update:
        notes.append("updates run at the end: in between they would not have fitted the memory budget")
    plan = Plan(fingerprint(graph), *named(s, schedule), update, tuple(notes))
    return weighed(plan, peak, graph.budget, cluster.device), best


def _problem(s: Skeleton, cluster: Cluster, budget: int) -> tuple[Problem, str]:
    """The problem to solve, and when updates run in it: as asked, or at the end if only that fits the budget.

    Where neither fits, it is the one that needs less, with the memory that it needs.
    """
    problems = [(formulate(s, cluster, budget, update), update) for update in dict.fromkeys((s.asked_update, "last"))]
    least = [needs(problem)[0] for problem, _ in problems]
    chosen = min(range(len(problems)), key=lambda k: max(least[k], budget))
    problem, update = problems[chosen]
    return replace(problem, memory=max(budget, least[chosen])), update


def _too_little(budget: int, least: Memory) -> ValueError:
    lines = "".join(
        f"  {format_bytes(n):>10}  {v!r}{f'  # {line}' if line else ''}\n" for v, n, line in least.holders[:5]
    )
    where = f" at {least.at.source.where}" if least.at is not None and least.at.source else ""
    return ValueError(
        f"prefetch: memory={budget} ({format_bytes(budget)}) is less than the step needs in any order: "
        f"{least.peak} bytes ({format_bytes(least.peak)}){where}.\n{lines}"
        f"Give it that much, a smaller batch, or more ranks."
    )
