"""The decisions that order a program, as a value that can be printed, saved and compared.

A plan has the buckets of gathers and where each starts, the buckets of reductions and where each is waited for, the
gathers that are dropped because an earlier value is kept, the values that backward recomputes or finds on the host, and
when updates run. It names places by landmarks: "matmul 14 + 2" is two operations after the 14th matrix product. So a
person can read it, and it fits every batch size. It depends on shapes and costs only, so every rank makes the same
plan; if ranks measured different costs, they use the plan of rank 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..ir.printer import WIDTH, counted, fold, nearest, wrap
from ..ir.wire_traffic import WireTraffic

WRITTEN = "as written"  # the program keeps its order, updates included
_UPDATES = ("eager", "last", WRITTEN)
# The fields that name values, and what happens to these.
_VALUES = {
    "dropped": "kept from forward, not gathered again",
    "recomputed": "recomputed in backward",
    "on_host": "on the host until backward",
}
_MOST_LINES = 12  # the most buckets of one kind that print; more of them fold

MemberNames = tuple[str, ...]
NamedBuckets = tuple[tuple[MemberNames, str], ...]  # the names of the members, and of the place


@dataclass(frozen=True, repr=False)
class Plan:
    """The buckets of a program and their places, by name.

    Attributes:
        program: a hash of the collectives and landmarks of the plan's program.
        gathers: the members of each bucket, and the place at which they start. A gather among neighbours, which each
            keep a part of an earlier value, has its axis in its name: `w@dp/8` is sent among each 8 ranks of dp.
        reductions: the members of each bucket, and the place at which they are waited for. "gradient 3, with the next"
            means that the updates after it run together with the updates of the next bucket that is waited for there.
        dropped: gathers that do not run, because the value of an earlier gather is kept.
        recomputed: values of forward that backward computes again, because `remat` has a limit of memory.
        on_host: values of forward that wait for backward on the host, because `offload` has a limit of memory.
        update: when updates run, "eager" or "last", or "as written" if the program keeps its order.
        notes: what a reader should know about the plan, such as a request that it does not follow, and why.
        file: the file that the plan was read from.
        traffic: what the program sends by axis and role; empty until the plan has been applied to a program.

    Raises:
        ValueError: a field has a wrong type.
    """

    program: str
    gathers: NamedBuckets = ()
    reductions: NamedBuckets = ()
    dropped: MemberNames = ()
    recomputed: MemberNames = dataclasses.field(default=(), kw_only=True)
    on_host: MemberNames = dataclasses.field(default=(), kw_only=True)
    update: str = "eager"
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    file: str = dataclasses.field(default="", compare=False, repr=False)
    traffic: tuple[tuple[tuple[str, str], WireTraffic], ...] = dataclasses.field(
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
    def is_empty(self) -> bool:
        """Whether the plan neither places nor drops a collective."""
        return not (self.gathers or self.reductions or self.dropped)

    @property
    def digest(self) -> str:
        """A hash of the decisions of the plan."""
        return hashlib.sha256(json.dumps(self._decisions()).encode()).hexdigest()[:16]

    def _decisions(self) -> dict[str, Any]:
        """The fields that decide the order, by name."""
        compared = [field for field in dataclasses.fields(self) if field.compare]
        return {field.name: getattr(self, field.name) for field in compared}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        A new file in the same folder is written first, and then replaces the old one. If the disk is full or the
        process is killed, the old file stays unchanged.
        """
        text = json.dumps({**self._decisions(), "notes": self.notes}, indent=1)
        target = Path(os.path.realpath(path))
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        try:
            with part.open("x") as file:
                file.write(f"{text}\n")
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
            plan = Plan.of(json.loads(Path(path).read_text()))
            return dataclasses.replace(plan, file=str(path))
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
        names = [field.name for field in dataclasses.fields(Plan)]
        fields = [name for name in names if name not in ("file", "traffic")]
        if not isinstance(decoded, dict):
            raise ValueError(
                f"plan: it is a {type(decoded).__name__}, not an object with {', '.join(fields)}."
            )
        for name in fields:
            if name not in decoded:
                raise ValueError(f"plan: it has no {name!r}.")
        for name in decoded:
            if name not in fields:
                is_near = nearest(name, fields)
                raise ValueError(f"plan: it has {name!r}, which is not a field of a plan{is_near}.")
        return Plan(**{name: _frozen(value) for name, value in decoded.items()})

    @property
    def lever_options(self) -> tuple[str, ...]:
        """What its levers use, from the names of the gathers: they end in "@dp/8" if 8 neighbours keep parts."""
        options: dict[str, None] = {}
        for name in (*member_names(self.gathers), *self.dropped):
            _, at, option = name.rpartition("@")
            if at:
                options[option] = None
        return tuple(options)

    def as_text(self, *, full: bool = False) -> str:
        """The plan as text: a summary, then its buckets by the names of their members.

        A long bucket folds, and so does a long list of buckets. With `full` each member has a line of its own.
        """
        title = f"plan {self.digest} for program {self.program}, update {self.update}"
        lines = [title, *_summary(self)]
        lines += _bucket_lines("gather", "starts at", self.gathers, full)
        lines += _bucket_lines("reduce", "waited for at", self.reductions, full)
        for field, text in _VALUES.items():
            if getattr(self, field):
                lines += _member_lines(f"  {text}: ", getattr(self, field), "", full)
        for note in self.notes:
            lines += wrap(f"  note: {note}")
        return "\n".join(lines)

    def diff(self, new: Plan) -> str:
        """The changes from this plan to another one of the same program: buckets, places, and what else differs.

        >>> before = Plan("p", gathers=((("a", "b"), "the start"), (("c",), "the start")))
        >>> print(before.diff(Plan("p", gathers=((("a", "b"), "matmul 1"),), dropped=("c",))))
          gather [a, ... 1 more]  starts at matmul 1, not at the start
        - gather [c]  starts at the start
        + kept from forward, not gathered again: c
        """
        lines = _changed_buckets("gather", "starts at", self.gathers, new.gathers)
        lines += _changed_buckets("reduce", "waited for at", self.reductions, new.reductions)
        for field, text in _VALUES.items():
            old_names = getattr(self, field)
            new_names = getattr(new, field)
            for sign, names, others in (("-", old_names, new_names), ("+", new_names, old_names)):
                only_here = [name for name in names if name not in others]
                if only_here:
                    lines.append(f"{sign} {text}: {fold(only_here)}")
        if self.update != new.update:
            lines.append(f"  update {new.update}, not {self.update}")
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES - 1 :] = [
                f"  ... {counted(len(lines) - _MOST_LINES + 1, 'more change')}"
            ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        parts = [
            self.digest,
            f"{len(self.gathers)} gather buckets",
            f"{len(self.reductions)} reduction buckets",
        ]
        if self.dropped:
            parts.append(f"{len(self.dropped)} kept")
        if self.recomputed:
            parts.append(f"{len(self.recomputed)} recomputed")
        if self.on_host:
            parts.append(f"{len(self.on_host)} on the host")
        return f"Plan({', '.join(parts)}, update={self.update!r})"


def member_names(buckets: NamedBuckets) -> list[str]:
    """The names of the members of all buckets, in order."""
    return list(chain.from_iterable(members for members, _ in buckets))


def _summary(plan: Plan) -> list[str]:
    """The numbers of buckets and of their members, and what the program sends by mesh axis and role."""
    counts = []
    for kind, buckets in (("gather", plan.gathers), ("reduction", plan.reductions)):
        if buckets:
            members = counted(len(member_names(buckets)), kind)
            counts.append(f"{members} in {counted(len(buckets), 'bucket')}")
    if plan.dropped:
        counts.append(f"{counted(len(plan.dropped), 'gather')} dropped")
    if plan.recomputed:
        counts.append(f"{counted(len(plan.recomputed), 'value')} recomputed")
    if plan.on_host:
        counts.append(f"{counted(len(plan.on_host), 'value')} on the host")
    lines = [f"  {', '.join(counts)}"] if counts else []
    for (axis, role), total in plan.traffic:
        lines.append(f"  {axis} {role}: {total}")
    return lines


def _bucket_lines(kind: str, verb: str, buckets: NamedBuckets, full: bool) -> list[str]:
    """The buckets of one kind, each with its place; of many, the first ones."""
    folds = len(buckets) > _MOST_LINES and not full
    first_buckets = buckets[: _MOST_LINES // 2] if folds else buckets
    lines = []
    for members, place in first_buckets:
        lines += _member_lines(f"  {kind} [", members, f"]  {verb} {place}", full)
    if folds:
        lines.append(f"  ... {len(buckets) - len(first_buckets)} more, by as_text(full=True)")
    return lines


def _changed_buckets(kind: str, verb: str, before: NamedBuckets, after: NamedBuckets) -> list[str]:
    """The buckets of one kind that only one of two plans has, and those that have another place."""
    old_places = dict(before)
    new_places = dict(after)
    lines = []
    for members, place in before:
        new_place = new_places.get(members)
        if new_place is None:
            lines.append(f"- {kind} [{fold(members)}]  {verb} {place}")
        elif new_place != place:
            lines.append(f"  {kind} [{fold(members)}]  {verb} {new_place}, not at {place}")
    for members, place in after:
        if members not in old_places:
            lines.append(f"+ {kind} [{fold(members)}]  {verb} {place}")
    return lines


def _member_lines(prefix: str, members: MemberNames, suffix: str, full: bool) -> list[str]:
    """The names of members between two texts. A long list folds, or with `full` has a line for each name."""
    line = f"{prefix}{', '.join(members)}{suffix}"
    if len(line) <= WIDTH:
        return [line]
    if not full:
        return wrap(f"{prefix}{fold(members)}{suffix}")
    lines = [prefix.rstrip(), *(f"      {name}," for name in members)]
    return [*lines, f"  {suffix}"] if suffix else lines


def _frozen(value: Any) -> Any:
    """A decoded value with tuples in place of lists, at every depth."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _wrong_field(plan: Plan) -> str:
    """Say which field of a plan has a wrong type; "" if none has."""
    for field, buckets in (("gathers", plan.gathers), ("reductions", plan.reductions)):
        wrong = _wrong_buckets(field, buckets)
        if wrong:
            return wrong
    for name in ("dropped", "recomputed", "on_host", "notes"):
        value = getattr(plan, name)
        if not _are_strings(value):
            return f"{name} is {value!r}; it is a list of strings"
    if not isinstance(plan.program, str):
        return f"program is {plan.program!r}; it is the hash of a program"
    if plan.update not in _UPDATES:
        return f"update is {plan.update!r}; it is one of {', '.join(map(repr, _UPDATES))}"
    if plan.update == WRITTEN and not plan.is_empty:
        return f"update is {WRITTEN!r}, and a program as written has no buckets"
    return ""


def _wrong_buckets(field: str, buckets: object) -> str:
    """Say what is wrong with the buckets of a field; "" if nothing is."""
    pair = "of the names of members and of a place"
    if not isinstance(buckets, tuple):
        return f"{field} is {buckets!r}; it is a list of pairs, {pair}"
    for bucket in buckets:
        if not _is_bucket(bucket):
            return f"{field} holds {bucket!r}, which is not a pair {pair}"
    return ""


def _are_strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def _is_bucket(value: object) -> bool:
    """Whether a value is a pair of the names of members and the name of a place."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    members, place = value
    return _are_strings(members) and bool(members) and isinstance(place, str)
