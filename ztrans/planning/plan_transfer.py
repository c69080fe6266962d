"""plan_transfer: use a plan for another program of the same step whose equations differ a little.

A batch of another size, such as a single sample, may need another copy or view, so equations have other names. The
collectives and matrix products are the same, in the same order. So a place is identified by how many of them come
before it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, ge

from ..ir.collectives import is_start
from ..ir.graph import Graph
from ..ir.operations import is_matmul
from ..ir.user_collectives import is_users
from .fingerprint import fingerprint
from .formulate import frame
from .plan import WRITTEN, Plan
from .plan_names import Members
from .program_order import Skeleton, place_name, skeleton
from .solver.problem import Problem

# The numbers of matrix products, of births of gradients, and of collectives that no plan places, before a place.
Landmark = tuple[int, int, int]


def landmarks(graph: Graph, plan: Plan) -> dict[str, Landmark]:
    """The landmark of every place that a plan names, in the program that the plan is for."""
    s = skeleton(graph)
    passed, places = _passed(s), {place_name(s, k): k for k in range(len(s.ops) + 1)}
    named = {at for _, at in (*plan.gathers, *plan.reductions)}
    return {at: passed[places[at]] for at in named if at in places}


def _passed(s: Skeleton) -> list[Landmark]:
    """The landmark of every place of a program."""
    births = Counter(s.born)
    steps = [(is_matmul(e), births[k], is_start(e) or is_users(e)) for k, e in enumerate(s.ops)]
    return [*accumulate(steps, lambda sums, more: tuple(map(add, sums, more)), initial=(0, births[-1], 0))]


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
    target = _Target.of(graph, plan.update)
    target.check_collectives(plan)
    landmark = lambda at: marks[at] if at else None  # "" is the end of the program
    return dataclasses.replace(
        plan,
        program=fingerprint(graph),
        gathers=tuple((members, target.started(members, landmark(at))) for members, at in plan.gathers),
        reductions=tuple((members, target.waited(members, landmark(at))) for members, at in plan.reductions),
    )


@dataclass(frozen=True)
class _Target:
    """The program to which a plan is transferred.

    Attributes:
        skeleton: the program without its planned collectives.
        problem: the places between which its collectives may start and be waited for.
        passed: the landmark of every place.
        gathers: the indices of the gathers by name.
        reductions: the indices of the reductions by name.
    """

    skeleton: Skeleton
    problem: Problem
    passed: Sequence[Landmark]
    gathers: Mapping[str, int]
    reductions: Mapping[str, int]

    @staticmethod
    def of(graph: Graph, update: str) -> _Target:
        s = skeleton(graph)
        gathers = {p.start.out.name: i for i, p in enumerate(s.gathers)}
        reductions = {p.start.out.name: i for i, p in enumerate(s.reductions)}
        return _Target(s, frame(s, update), _passed(s), gathers, reductions)

    def check_collectives(self, plan: Plan) -> None:
        """Raises: ValueError if the plan is for other collectives."""
        gathers = {m for members, _ in plan.gathers for m in members} | set(plan.dropped)
        reductions = {m for members, _ in plan.reductions for m in members}
        names = sorted((gathers ^ set(self.gathers)) | (reductions ^ set(self.reductions)))
        if names:
            raise ValueError(f"plan: this program does not have the same collectives: {', '.join(names[:3])}.")

    def started(self, members: Members, mark: Landmark | None) -> str:
        """The place at which a bucket of gathers starts, given the landmark of its start in the first program."""
        bucket = [self.problem.gathers[self.gathers[m]] for m in members]
        return self._place(mark, max(g.release for g in bucket), min(g.use for g in bucket))

    def waited(self, members: Members, mark: Landmark | None) -> str:
        """The place at which a bucket of reductions is waited for, given the landmark of that in the first program."""
        bucket = [self.problem.reductions[self.reductions[m]] for m in members]
        needs = (len(self.skeleton.ops) if r.need is None else r.need for r in bucket)
        return self._place(mark, max(r.born + 1 for r in bucket), min(needs))

    def _place(self, mark: Landmark | None, earliest: int, latest: int) -> str:
        """The first place, within limits, whose landmark is at least `mark`; without a mark, the end of the program."""
        end = len(self.skeleton.ops)
        reached = (k for k, passed in enumerate(self.passed) if mark is not None and all(map(ge, passed, mark)))
        return place_name(self.skeleton, min(max(next(reached, end), earliest), latest))
