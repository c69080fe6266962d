"""plan_transfer: use a plan for another program of the same step whose equations differ a little.

A batch of another size, such as a single sample, may need another copy or view, so equations have other names. The
collectives and matrix products are the same, in the same order. So a place is identified by how many of them come
before it.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from operator import add

from ..ir.collectives import is_start
from ..ir.graph import Graph
from ..ir.op_facts import is_matmul
from ..ir.user_collectives import is_users
from .fingerprint import fingerprint
from .formulate import frame
from .plan import WRITTEN, Plan
from .plan_names import Members, check_members, index
from .program_order import Skeleton, skeleton

# The numbers of matrix products, of births of gradients, and of collectives that no plan places, before a place.
Landmark = tuple[int, int, int]


def landmarks(graph: Graph, plan: Plan) -> dict[str, Landmark]:
    """The landmark of every place that a plan names, in the program that the plan is for."""
    s = skeleton(graph)
    passed = dict(zip(s.names, _passed(s)))
    return {at: passed[at] for _, at in (*plan.gathers, *plan.reductions) if at in passed}


def _passed(s: Skeleton) -> list[Landmark]:
    """The landmark of every place of a program."""
    births = Counter(s.born)
    steps = [(is_matmul(e), births[k], is_start(e) or is_users(e)) for k, e in enumerate(s.ops)]
    return [
        *accumulate(
            steps, lambda sums, more: tuple(map(add, sums, more)), initial=(0, births[-1], 0)
        )
    ]


def transfer(plan: Plan, marks: Mapping[str, Landmark], graph: Graph) -> Plan:
    """Make a plan for another program of the same step.

    A gather starts at the first place with at least the same landmark, but not after its first use.

    Args:
        plan: the plan of the first program.
        marks: the `landmarks` of the first program.
        graph: the second program.

    Raises:
        ValueError: the programs do not have the same collectives.
    """
    if plan.update == WRITTEN:
        return dataclasses.replace(plan, program=fingerprint(graph))
    s = skeleton(graph)
    problem, passed = (
        frame(s, plan.update),
        [*zip(*_passed(s))],
    )  # each of the three numbers grows from place to place
    check_members(s, plan.gathers, plan.reductions, plan.dropped)
    gathers, reductions = index(s.gathers), index(s.reductions)

    def place(at: str, earliest: int, latest: int) -> str:
        """The first place with at least as much before it as the place `at` of the plan had, within limits."""
        reached = max(map(bisect_left, passed, marks[at])) if at else len(s.ops)  # "" is the end
        return s.names[min(max(reached, earliest), latest)]

    def started(members: Members, at: str) -> str:
        bucket = [problem.gathers[gathers[m]] for m in members]
        return place(at, max(g.release for g in bucket), min(g.use for g in bucket))

    def waited(members: Members, at: str) -> str:
        bucket = [problem.reductions[reductions[m]] for m in members]
        return place(at, max(r.born + 1 for r in bucket), min(r.need for r in bucket))

    return dataclasses.replace(
        plan,
        program=fingerprint(graph),
        gathers=tuple((members, started(members, at)) for members, at in plan.gathers),
        reductions=tuple((members, waited(members, at)) for members, at in plan.reductions),
    )
