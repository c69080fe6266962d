"""plan: the decisions that give a program its order, as a value that can be printed, saved and compared.

A plan names the buckets of gathers and where each starts, the buckets of reductions and where each is waited for, the
gathers that are dropped because an earlier value is kept, and when updates run. It depends on shapes and costs only, so
every rank makes the same plan; if ranks measured different costs, they use the plan of rank 0. A plan that was loaded
from a file, received from another rank or passed as an argument is validated, and the program in its order is verified.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ir.differences import Traffic
from ..ir.graph import Graph
from ..ir.printer import WIDTH, fold, format_bytes, wrap
from ..ir.verifier import ProgramError, check
from .cluster import Device
from .cost import memory
from .fingerprint import fingerprint
from .formulate import frame
from .plan_names import Members, Named, resolve
from .program_order import skeleton
from .realise import realise
from .solver.validate import ScheduleError

WRITTEN = "as written"  # the program keeps its order, updates included
_UPDATES = ("eager", "last", WRITTEN)
_MANY = 12  # the most buckets of one kind that print; more of them fold


class OtherProgramError(ValueError):
    """The plan is for another program."""


@dataclass(frozen=True, repr=False)
class Plan:
    """The buckets of a program and their places, by name.

    The name of a member is that of its future. The name of a place is that of the first result of the equation behind
    it; "" is the end of the program.

    Raises:
        ValueError: a field has a wrong type.
    """

    program: str  # a hash of the program that the plan is for
    gathers: Named = ()  # (members, the place at which they start)
    reductions: Named = ()  # (members, the place at which they are waited for)
    dropped: Members = ()  # gathers that do not run, because the value of an earlier gather is kept
    update: str = "eager"  # or "last", or "as written" if the program keeps its order
    notes: tuple[str, ...] = dataclasses.field(
        default=(), compare=False
    )  # which wishes the plan does not fulfil, why
    file: str = dataclasses.field(
        default="", compare=False, repr=False
    )  # the file that the plan was read from
    # What the program sends by axis and role, once the plan has been applied to a program.
    traffic: tuple[tuple[tuple[str, str], Traffic], ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )

    def __post_init__(self) -> None:
        wrong = _wrong_field(self)
        if wrong:
            raise ValueError(f"{self.title}: {wrong}.")

    @property
    def title(self) -> str:
        """The name of the plan in errors."""
        return f"plan {self.file}" if self.file else "plan"

    @property
    def digest(self) -> str:
        """A hash of the decisions of the plan."""
        return hashlib.sha256(json.dumps(self._decisions()).encode()).hexdigest()[:16]

    def _decisions(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        A new file in the same folder is written first, and then replaces the old one. If the disk is full or the
        process is killed, the old file stays unchanged.
        """
        target = Path(os.path.realpath(path))
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        try:
            with part.open("x") as file:
                file.write(json.dumps({**self._decisions(), "notes": self.notes}, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file does not hold a plan.
        """
        try:
            return dataclasses.replace(Plan.of(json.loads(Path(path).read_text())), file=str(path))
        except ValueError as error:
            why = str(error).removeprefix("plan: ").removesuffix(".")
            text = f"plan: {path} does not hold a plan ({why}).\nMake one: lowered.plan.save(path)."
            raise ValueError(text) from None

    @staticmethod
    def of(decoded: Any) -> Plan:
        """Make a plan from its decoded JSON.

        Raises:
            ValueError: the JSON does not hold a plan.
        """
        fields = [f.name for f in dataclasses.fields(Plan) if f.name not in ("file", "traffic")]
        if not isinstance(decoded, dict):
            raise ValueError(
                f"plan: it is a {type(decoded).__name__}, and no object with {', '.join(fields)}."
            )
        missing = next((name for name in fields if name not in decoded), None)
        if missing is not None:
            raise ValueError(f"plan: it has no {missing!r}.")
        unknown = next((name for name in decoded if name not in fields), None)
        if unknown is not None:
            raise ValueError(f"plan: it has {unknown!r}, which is no field of a plan.")
        return Plan(**{name: _frozen(value) for name, value in decoded.items()})

    def as_text(self, *, full: bool = False) -> str:
        """The plan as text: a summary, then its buckets by the names of their members.

        A long bucket folds, and so does a long list of buckets. With `full` each member has a line of its own.
        """
        lines = [
            f"plan {self.digest} for program {self.program}, update {self.update}",
            *_summary(self),
        ]
        lines += _buckets("gather", "starts before", self.gathers, full)
        lines += _buckets("reduce", "waited for before", self.reductions, full)
        if self.dropped:
            lines += _members("  kept from forward, not gathered again: ", self.dropped, "", full)
        return "\n".join(
            [*lines, *(line for note in self.notes for line in wrap(f"  note: {note}"))]
        )

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        kept = f", {len(self.dropped)} kept" if self.dropped else ""
        buckets = f"{len(self.gathers)} gather buckets, {len(self.reductions)} reduction buckets"
        return f"Plan({self.digest}, {buckets}{kept}, update={self.update!r})"


def _summary(plan: Plan) -> list[str]:
    """The numbers of buckets and of their members, and what the program sends by mesh axis and role."""
    counts = [
        f"{sum(len(members) for members, _ in buckets)} {kind} in {len(buckets)} buckets"
        for kind, buckets in (("gathers", plan.gathers), ("reductions", plan.reductions))
        if buckets
    ]
    if plan.dropped:
        counts.append(f"{len(plan.dropped)} gathers dropped")
    sent = [f"  {axis} {role}: {total}" for (axis, role), total in plan.traffic]
    return [f"  {', '.join(counts)}"] * bool(counts) + sent


def _buckets(kind: str, verb: str, buckets: Named, full: bool) -> list[str]:
    """The buckets of one kind, each with its place; of many, the first ones."""
    few = buckets if full or len(buckets) <= _MANY else buckets[: _MANY // 2]
    lines = [
        line
        for members, place in few
        for line in _members(f"  {kind} [", members, f"]  {verb} {place or 'the end'}", full)
    ]
    return (
        lines
        if few is buckets
        else [*lines, f"  ... {len(buckets) - len(few)} more, by as_text(full=True)"]
    )


def _members(before: str, members: Members, after: str, full: bool) -> list[str]:
    """The names of members between two texts, on one line, in which long lists fold, or with `full` on a line each."""
    names = [name.removesuffix("'") for name in members]
    line = f"{before}{', '.join(names)}{after}"
    if len(line) <= WIDTH:
        return [line]
    if full:
        return [
            before.rstrip(),
            *(f"      {name}," for name in names),
            *([f"  {after}"] if after else []),
        ]
    return wrap(f"{before}{fold(names)}{after}")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _wrong_field(plan: Plan) -> str:
    """Say which field of a plan has a wrong type; "" if none has."""
    for name, buckets in (("gathers", plan.gathers), ("reductions", plan.reductions)):
        if not isinstance(buckets, tuple):
            return f"{name} is {buckets!r}; it is a list of pairs, of the names of members and of a place"
        wrong = [bucket for bucket in buckets if not _is_bucket(bucket)]
        if wrong:
            return f"{name} holds {wrong[0]!r}, which is no pair of the names of members and of a place"
    for name, value in (("dropped", plan.dropped), ("notes", plan.notes)):
        if not _strings(value):
            return f"{name} is {value!r}; it is a list of strings"
    if not isinstance(plan.program, str):
        return f"program is {plan.program!r}; it is the hash of a program"
    if plan.update not in _UPDATES:
        return f"update is {plan.update!r}; it is one of {', '.join(map(repr, _UPDATES))}"
    if plan.update == WRITTEN and (plan.gathers or plan.reductions or plan.dropped):
        return f"update is {WRITTEN!r}, and a program as written has no buckets"
    return ""


def _strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


def _is_bucket(value: object) -> bool:
    """Whether a value is a pair of the names of members and the name of a place."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    members, place = value
    return _strings(members) and bool(members) and isinstance(place, str)


def apply(graph: Graph, plan: Plan) -> Graph:
    """Write a program in the order of its plan, and verify it.

    Raises:
        OtherProgramError: the plan is for another program.
        ValueError: something else is wrong with the plan, or the order needs more than the memory of `prefetch`.
    """
    program = ordered(graph, plan)
    if graph.budget is not None and (peak := memory(program).peak) > graph.budget:
        raise ValueError(
            f"{plan.title}: the program that it makes has {peak} bytes live ({format_bytes(peak)}), and prefetch was "
            f"given memory={graph.budget} ({format_bytes(graph.budget)}).\nLower without the plan, and save it again."
        )
    return program


def ordered(graph: Graph, plan: Plan) -> Graph:
    """As `apply`, without the limit of memory: all ranks must use this order, also one that has a larger batch."""
    if plan.program != fingerprint(graph):
        raise OtherProgramError(
            f"{plan.title}: it was made for program {plan.program}, and this one is {fingerprint(graph)}: another "
            f"model, mesh, or other transforms.\nLower without it, and save lowered.plan again."
        )
    try:
        if graph.writes_last and plan.update == "eager":
            raise ScheduleError('update is "eager", and the step has overlap_grads(update="last")')
        planned = (
            plan.gathers
            or plan.reductions
            or plan.dropped
            or any(e.order is not None for e in graph.eqns)
        )
        program = (
            _scheduled(graph, plan) if planned and plan.update != WRITTEN else as_written(graph)
        )
        return check(program)
    except (ScheduleError, ProgramError) as error:
        raise ValueError(
            f"{plan.title}: {error}.\nLower without the plan, and save it again."
        ) from None


def _scheduled(graph: Graph, plan: Plan) -> Graph:
    """The program in the order of a plan."""
    s = skeleton(graph)
    problem = frame(s, plan.update)
    schedule = resolve(s, problem, plan.gathers, plan.reductions, plan.dropped)
    return realise(s, schedule, problem)


def as_written(graph: Graph) -> Graph:
    """The program in its own order, without hints."""
    return graph.replace(
        eqns=tuple(e.replace(order=None) if e.order is not None else e for e in graph.eqns)
    )


def weighed(plan: Plan, peak: int, budget: int | None, device: Device) -> Plan:
    """Add notes to a plan if the peak of its program is above the budget or the memory of the device."""
    notes, has = [], f"the peak is {format_bytes(peak)}"
    if budget is not None and peak > budget:
        notes.append(
            f"{has}, and prefetch was given {format_bytes(budget)}: all ranks run in the same order"
        )
    if peak > device.memory:
        notes.append(f"{has}, and the device ({device.name}) has {format_bytes(device.memory)}")
    return dataclasses.replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))
