"""Two plans of a step, both measured: which one is kept, how much faster it is, and where the two differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..ir.printer import format_seconds
from ..planning.plan import Plan
from ..report.table import columns
from .profile import Profile


class MeasuredPlan(NamedTuple):
    """A plan, and the steps that were recorded with it.

    Attributes:
        plan: the plan.
        profile: what this rank has recorded.
        seconds: the median seconds of a step on the slowest rank, the same on all ranks.
    """

    plan: Plan
    profile: Profile
    seconds: float


@dataclass(frozen=True, repr=False)
class Tuning:
    """The plan of a step before `tune`, and the one that was made from its measured times. The faster one is kept.

    Printing it says which one that is, and where they differ.

    Attributes:
        name: the name of the step.
        before, after: the two plans, as they were measured.
    """

    name: str
    before: MeasuredPlan
    after: MeasuredPlan

    @property
    def kept(self) -> MeasuredPlan:
        """The faster plan; the one before if both take as long."""
        return self.after if self.after.seconds < self.before.seconds else self.before

    @property
    def change(self) -> float:
        """The seconds of the new plan as a share of those before, less one: -0.1 if a step takes 10% less time."""
        return self.after.seconds / self.before.seconds - 1

    @property
    def verdict(self) -> str:
        """Which plan is kept, and the measured seconds of both, on one line."""
        before = format_seconds(self.before.seconds)
        after = format_seconds(self.after.seconds)
        if self.before.plan == self.after.plan:
            return f"the measured times lead to the same plan, whose steps took {before}, and then {after}"
        if self.kept is self.after:
            return f"the new plan is kept: {after} a step, and {before} before ({self.change:+.1%})"
        return f"the plan before is kept: {before} a step, and {after} with the new one ({self.change:+.1%})"

    def __repr__(self) -> str:
        return f"Tuning({self.name}: {self.verdict})"

    def __str__(self) -> str:
        both = self.before, self.after
        timelines = [measured.profile.timeline for measured in both]
        rows = [["", "before", "new"]]
        rows.append(["step, slowest rank", *(format_seconds(each.seconds) for each in both)])
        rows.append(["exposed", *(format_seconds(timeline.stalled) for timeline in timelines)])
        exposed = [timeline.exposed for timeline in timelines]
        for axis, role in sorted({*exposed[0], *exposed[1]}):
            seconds = [each.get((axis, role), 0.0) for each in exposed]
            if any(seconds):
                rows.append([f"  {axis} {role}", *map(format_seconds, seconds)])
        lines = [f"{self.name}: {self.verdict}", columns(rows)]
        lines += [note for note in self.after.plan.notes if note.startswith("expected ")]
        differences = self.before.plan.diff(self.after.plan)
        if differences:
            lines += ["from the plan before (-) to the new one (+):", differences]
        return "\n".join(lines)
