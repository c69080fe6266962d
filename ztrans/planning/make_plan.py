"""make_plan: a plan for a program, made for a cluster within a memory budget."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from ..ir.graph import Graph
from ..ir.printer import format_bytes
from ..ir.verifier import ProgramError, check
from .cluster import Cluster
from .cost import Memory, memory
from .fingerprint import fingerprint
from .formulate import pose
from .plan import WRITTEN, Plan, as_written, weighed
from .plan_names import named
from .program_order import Skeleton, skeleton
from .realise import realise
from .solver.evaluation import keepers
from .solver.problem import Problem, Schedule
from .solver.solve import EFFORT, Infeasible, solve
from .solver.validate import ScheduleError, validate

SLACK = 0.05  # what "auto" lets the peak rise above that of the unscheduled program


class Order(NamedTuple):
    """A schedule, when its updates run, and the program that it makes."""

    schedule: Schedule
    update: str
    graph: Graph
    peak: int


def make(graph: Graph, cluster: Cluster) -> tuple[Plan, Graph]:
    """A plan for a program with hints, and the program that it makes.

    Every program made is verified. Where one fails, the last that did not is kept, at last the one as
    written, and so it is where nothing else fits a budget that was asked for; the notes say so.

    Raises: ValueError when the memory budget is below what any order needs, or the cluster lacks a link.
    """
    s, program, unscheduled = skeleton(graph), fingerprint(graph), memory(graph)
    budget = int(unscheduled.peak * (1 + SLACK)) if graph.budget is None else graph.budget
    if not s.gathers and not s.reductions:
        if graph.budget is not None and unscheduled.peak > budget:
            raise _too_little(budget, unscheduled)
        return weighed(Plan(program), unscheduled.peak, graph.budget, cluster.device), check(s.graph)
    update = s.reductions[0].start.order.update if s.reductions else "last"
    orders, notes = [], list[str]()
    try:
        for order in _orders(s, cluster, budget, update):
            orders.append(order)
    except (ProgramError, ScheduleError) as error:
        notes.append(f"an order was given up for the last valid one: {error}")
    best = min(orders, key=lambda order: order.peak, default=None)
    if best is not None and graph.budget is not None and best.peak > budget:
        if budget < unscheduled.peak:
            raise _too_little(budget, memory(best.graph) if best.peak < unscheduled.peak else unscheduled)
        notes.append(f"the order is as written: any other needs {format_bytes(best.peak)}")
        best = None
    if best is None:
        plan = Plan(program, update=WRITTEN, notes=tuple(notes))
        return weighed(plan, unscheduled.peak, graph.budget, cluster.device), check(as_written(graph))
    if best.peak > budget:
        notes.append(f"the peak is {format_bytes(best.peak)}, {format_bytes(best.peak - budget)} above the budget")
    if best.update != update:
        notes.append("updates run at the end: in between they would not have fitted the memory budget")
    plan = Plan(program, *named(s, best.schedule), best.update, tuple(notes))
    return weighed(plan, best.peak, graph.budget, cluster.device), best.graph


def _orders(s: Skeleton, cluster: Cluster, budget: int, update: str) -> Iterator[Order]:
    """Orders of a program, up to one that fits the budget.

    The problem counts nearly what the program needs. Where the program needs more, the next problem gets as much
    less; where that does not do, updates run at the end.
    """
    room = budget
    posed = functools.cache(functools.partial(pose, s, cluster, budget))
    for number, how in enumerate((update, update, update, "last", "last"), 1):
        problem = dataclasses.replace(posed(how), memory=room)
        order = functools.cache(functools.partial(_order, s, problem, how))
        fits = lambda schedule, order=order: order(schedule).peak <= budget
        try:
            schedule = solve(problem, EFFORT // number, fits)
        except Infeasible as error:
            problem = dataclasses.replace(problem, memory=error.needs)
            schedule = solve(problem, EFFORT // number, fits)
        found = order(schedule)
        yield found
        if found.peak <= budget:
            return
        room = problem.memory - (found.peak - budget)


def _order(s: Skeleton, problem: Problem, update: str, schedule: Schedule) -> Order:
    """The program that a schedule makes.

    Raises: ScheduleError or ProgramError when it is none.
    """
    validate(problem, schedule)
    graph = check(realise(s, schedule, update, keepers(problem, schedule)))
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
