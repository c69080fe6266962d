"""make_plan: make the plan of a program for a cluster, within a memory budget."""

from __future__ import annotations

from typing import NamedTuple

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
from .solver.problem import Schedule
from .solver.solve import solve
from .solver.validate import ScheduleError, validate

SLACK = 0.05  # the share by which "auto" lets the peak rise above that of the unscheduled program


class Order(NamedTuple):
    """A schedule, and the program in its order."""

    schedule: Schedule
    update: str  # when updates run
    graph: Graph
    peak: int  # of the program, in bytes


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

    orders, notes = _orders(s, cluster, budget)
    best = min(orders, key=lambda order: order.peak, default=None)
    if best is not None and graph.budget is not None and best.peak > budget:
        if budget < unscheduled.peak:
            raise _too_little(budget, memory(best.graph) if best.peak < unscheduled.peak else unscheduled)
        notes.append(f"the order is as written: any other needs {format_bytes(best.peak)}")
        best = None
    if best is None:
        plan = Plan(fingerprint(graph), update=WRITTEN, notes=tuple(notes))
        return weighed(plan, unscheduled.peak, graph.budget, cluster.device), check(as_written(graph))

    if best.peak > budget:
        notes.append(f"the peak is {format_bytes(best.peak)}, {format_bytes(best.peak - budget)} above the budget")
    if best.update != s.asked_update:
        notes.append("updates run at the end: in between they would not have fitted the memory budget")
    plan = Plan(fingerprint(graph), *named(s, best.schedule), best.update, tuple(notes))
    return weighed(plan, best.peak, graph.budget, cluster.device), best.graph


def _orders(s: Skeleton, cluster: Cluster, budget: int) -> tuple[list[Order], list[str]]:
    """The order with updates as the user asked; if that does not fit, also the one with updates last; and notes."""
    orders: list[Order] = []
    try:
        for update in dict.fromkeys((s.asked_update, "last")):
            orders.append(_order(s, cluster, budget, update))
            if orders[-1].peak <= budget:
                break
    except (ProgramError, ScheduleError) as error:
        return orders, [f"an order was not valid, so the last valid one is used: {error}"]
    return orders, []


def _order(s: Skeleton, cluster: Cluster, budget: int, update: str) -> Order:
    """Solve the scheduling problem of a program, and write the program in the order of the solution.

    Raises:
        ScheduleError: the schedule breaks a rule of the problem.
        ProgramError: the program is not well formed.
    """
    problem = formulate(s, cluster, budget, update)
    schedule = solve(problem)
    validate(problem, schedule)
    graph = check(realise(s, schedule, update, problem.keepers(schedule.dropped)))
    return Order(schedule, update, graph, memory(graph).peak)


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
