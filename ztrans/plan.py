"""plan: the decisions that make an order of a program, as a value that can be printed, saved and compared.

A plan names the buckets of gathers and where each starts, the buckets of reductions and where each
is waited for, the gathers that are dropped because an earlier value is kept, and when updates run.
It is made from shapes and costs alone, so every rank makes the same one; where ranks measured
different costs, rank 0's counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .cluster import Cluster
from .cost import Memory, memory
from .graph import Graph
from .outcome import validate
from .planner import EFFORT, Infeasible, solve
from .pose import pose
from .pretty import size_text
from .problem import Bucket, Problem, Schedule
from .schedule import Skeleton, realise, skeleton

Members = tuple[str, ...]
SLACK = 0.05  # what "auto" lets the peak rise above that of the unscheduled program
WRITTEN = "as written"  # of updates: where they were, and so is everything else


@dataclass(frozen=True)
class Plan:
    """`gathers`: (members, the equation they start before); `reductions`: (members, the equation they are
    waited for before); `dropped`: gathers whose value is kept from earlier. Members are named by their
    futures, equations by their first result; "" is the end of the program. `update` is "eager", "last", or
    "as written" for a program whose order is kept. `notes` say what was not reached."""

    program: str  # a hash of the program that it is for
    gathers: tuple[tuple[Members, str], ...] = ()
    reductions: tuple[tuple[Members, str], ...] = ()
    dropped: Members = ()
    update: str = "eager"
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def digest(self) -> str:
        """A hash of the decisions."""
        return hashlib.sha256(json.dumps(self._decisions()).encode()).hexdigest()[:16]

    def _decisions(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps({**self._decisions(), "notes": self.notes}, indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises: ValueError when the file holds none.
        """
        try:
            return Plan.of(json.loads(Path(path).read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"plan: {path} does not hold a plan ({error}).\nMake one: lowered.plan.save(path)."
            ) from None

    @staticmethod
    def of(found: dict[str, Any]) -> Plan:
        """A plan from its JSON."""
        buckets = {name: tuple((tuple(m), str(at)) for m, at in found[name]) for name in ("gathers", "reductions")}
        return Plan(
            found["program"],
            **buckets,
            dropped=tuple(found["dropped"]),
            update=found["update"],
            notes=tuple(found["notes"]),
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [f"plan {self.digest} for program {self.program}, update {self.update}"]
        for what, buckets, verb in (
            ("gather", self.gathers, "starts before"),
            ("reduce", self.reductions, "waited for before"),
        ):
            for members, at in buckets:
                shown = ", ".join(m.removesuffix("'") for m in members)
                lines.append(f"  {what} [{shown}]  {verb} {at or 'the end'}")
        if self.dropped:
            lines.append(
                f"  kept from forward, not gathered again: {', '.join(m.removesuffix(chr(39)) for m in self.dropped)}"
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def fingerprint(graph: Graph) -> str:
    """A hash of a program, by which a plan knows what it is for: its text but for the user's lines, which a comment
    moves, and its literals."""
    found = hashlib.sha256(str(graph.replace(eqns=tuple(e.replace(source=None) for e in graph.eqns))).encode())
    for e in graph.eqns:
        for x in (*e.args, *e.kwargs.values()):
            for literal in x if isinstance(x, (list, tuple)) else (x,):
                if isinstance(literal, torch.Tensor):
                    found.update(literal.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def make(graph: Graph, cluster: Cluster) -> tuple[Plan, Graph]:
    """A plan for a program with hints, and the program that it makes.

    Every program made is checked. Where one fails, the last that did not is kept, at last the one as
    written, and so it is where nothing else fits a budget that was asked for; the notes say so.

    Raises: ValueError when the memory budget is below what any order needs, or the cluster lacks a link.
    """
    s, program = skeleton(graph), fingerprint(graph)
    if not s.gathers and not s.reductions:
        return Plan(program), s.graph
    asked = [p.start.order.memory for p in s.gathers if p.start.order.memory is not None]
    unscheduled = memory(graph).peak
    budget = min(asked) if asked else int(unscheduled * (1 + SLACK))
    update = s.reductions[0].start.order.update if s.reductions else "last"
    posed = functools.cache(lambda how: pose(s, cluster, budget, how))
    notes, room = [], budget
    # What packing needs for a moment is in the analysis and not in the problem: where that does not fit, the
    # problem gets less; then updates come last; then nothing is packed.
    attempts = [(update, True), (update, True), ("last", True), (update, False), ("last", False), ("last", False)]
    best: tuple[int, Plan, Graph] | None = None
    for number, (how, packed) in enumerate(attempts, 1):
        if not packed and how == update:
            room = budget
        problem = dataclasses.replace(posed(how) if packed else _alone(posed(how)), memory=room)
        order = functools.cache(functools.partial(_order, s, problem, how))
        fits = lambda schedule, order=order: order(schedule)[0] <= budget
        try:
            try:
                schedule = solve(problem, EFFORT // number, fits)
            except Infeasible as error:
                problem = dataclasses.replace(problem, memory=error.needs)
                schedule = solve(problem, EFFORT // number, fits)
            peak, found = order(schedule)
        except (AssertionError, ValueError) as error:
            notes.append(f"an order was given up for the last valid one: {error}")
            break
        if best is None or peak < best[0]:
            best = (peak, _named(s, program, schedule, how), found)
        if peak <= budget:
            break
        room = problem.memory - (peak - budget)
    written = Plan(program, update=WRITTEN), _as_written(graph)
    if best is None:
        return _noted(*written, notes)
    peak, plan, found = best
    if asked and peak > budget >= unscheduled:
        return _noted(*written, [*notes, f"the order is as written: any other needs {size_text(peak)}"])
    if asked and peak > budget:
        raise _too_little(budget, memory(found if peak < unscheduled else graph))
    if peak > budget:
        notes.append(f"the peak is {size_text(peak)}, {size_text(peak - budget)} above the budget")
    if plan.update != update:
        notes.append("updates run at the end: in between they would not have fitted the memory budget")
    return _noted(plan, found, notes)


def _order(s: Skeleton, problem: Problem, update: str, schedule: Schedule) -> tuple[int, Graph]:
    """The program that a schedule makes, and its peak.

    Raises: AssertionError or ValueError when it is none.
    """
    validate(problem, schedule)
    found = realise(s, schedule, update, _kept(problem, schedule)).check()
    return memory(found).peak, found


def _noted(plan: Plan, found: Graph, notes: list[str]) -> tuple[Plan, Graph]:
    return dataclasses.replace(plan, notes=tuple(notes)), found


def _as_written(graph: Graph) -> Graph:
    """The program in its own order, without hints."""
    return graph.replace(eqns=tuple(e.replace(order=None) if e.order is not None else e for e in graph.eqns))


def apply(graph: Graph, plan: Plan) -> Graph:
    """The program that a plan makes of the program it is for.

    Raises: ValueError when it is for another program.
    """
    if plan.program != fingerprint(graph):
        raise ValueError(
            f"plan: it was made for program {plan.program}, and this one is {fingerprint(graph)}: another model, batch "
            f"shape, mesh, or other transforms.\nLower without it, and save lowered.plan again."
        )
    if plan.update == WRITTEN:
        return _as_written(graph)
    s = skeleton(graph)
    place = {_name(s, k): k for k in range(len(s.ops) + 1)}
    gathers = {p.start.outs[0].name: i for i, p in enumerate(s.gathers)}
    reductions = {p.start.outs[0].name: i for i, p in enumerate(s.reductions)}
    by_member = lambda members, index: tuple(index[m] for m in members)
    try:
        schedule = Schedule(
            tuple(
                Bucket(m := by_member(members, gathers), place[at], min(s.use[i] for i in m))
                for members, at in plan.gathers
            ),
            tuple(
                Bucket(m := by_member(members, reductions), max(s.born[i] for i in m) + 1, place[at])
                for members, at in plan.reductions
            ),
            frozenset(gathers[m] for m in plan.dropped),
        )
    except KeyError as error:
        raise ValueError(f"plan: the program has no {error}.\nLower without the plan, and save it again.") from None
    latest: dict = {}
    kept: dict[int, int] = {}
    for i, p in enumerate(s.gathers):
        value = p.start.ins[0], p.value.dtype
        if i in schedule.dropped:
            kept[i] = latest[value]
        else:
            latest[value] = i
    return realise(s, schedule, plan.update, kept)


def _kept(problem: Problem, schedule: Schedule) -> dict[int, int]:
    """Which gather's value is read instead of each dropped one's."""
    kept: dict[int, int] = {}
    for j in sorted(schedule.dropped):
        earlier = problem.gathers[j].again
        kept[j] = kept.get(earlier, earlier)
    return kept


def _name(s: Skeleton, k: int) -> str:
    return next((o.name for e in s.ops[k : k + 1] for o in e.outs if o is not None), "")


def _named(s: Skeleton, program: str, schedule: Schedule, update: str) -> Plan:
    name = lambda planned, members: tuple(planned[i].start.outs[0].name for i in members)
    return Plan(
        program,
        tuple((name(s.gathers, b.members), _name(s, b.start)) for b in schedule.gathers),
        tuple((name(s.reductions, b.members), _name(s, b.wait)) for b in schedule.reductions),
        name(s.gathers, sorted(schedule.dropped)),
        update,
    )


def _alone(problem: Problem) -> Problem:
    """The same, with nothing that could share a bucket."""
    gathers = tuple(g._replace(key=(g.key, i)) for i, g in enumerate(problem.gathers))
    reductions = tuple(r._replace(key=(r.key, i)) for i, r in enumerate(problem.reductions))
    wires = {new.key: problem.wires[new.key[0]] for new in (*gathers, *reductions)}
    return dataclasses.replace(problem, gathers=gathers, reductions=reductions, wires=wires)


def _too_little(budget: int, least: Memory) -> ValueError:
    lines = "".join(f"  {size_text(n):>10}  {v!r}{f'  # {line}' if line else ''}\n" for v, n, line in least.holders[:5])
    where = f" at {least.at.source.where}" if least.at is not None and least.at.source else ""
    return ValueError(
        f"prefetch: memory={budget} ({size_text(budget)}) is less than the step needs in any order: "
        f"{least.peak} bytes ({size_text(least.peak)}){where}.\n{lines}"
        f"Give it that much, a smaller batch, or more ranks."
    )
