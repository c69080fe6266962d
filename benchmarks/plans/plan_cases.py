"""The planner's schedules of seven training steps, beside simple schedules and the lower bound.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.plan_cases        # from the project's root; half a minute

The steps are chains of layers with the shapes of Llama-3-8B on H100s, and a small model over slow Ethernet
(tests/support/synthetic.py). All times are simulated in the same way, except for the planner's own, which are measured
in processor seconds. Prints and writes benchmarks/results/plan_cases.md. Fails if a plan takes more than 1.05 of its
bound, has a peak above its memory, or takes more than two seconds to find.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date

from tests.support.evaluate import Outcome, evaluate
from tests.support.synthetic import Case, by_size, fsdp2, seven
from ztrans.planning.solver.bound import Bound, bound
from ztrans.planning.solver.problem import Problem
from ztrans.planning.solver.search import solve
from ztrans.planning.solver.validate import validate

from .. import RESULTS

LANES = {
    "One queue for all messages": ("wire", "wire"),
    "A queue for gathers and one for reductions, on one link": ("gather", "reduce"),
}
HEADER = (
    "case", "compute ms", "bound ms", "FSDP2-like", "25 MB, one ahead",
    "plan, FSDP2's peak", "plan, more memory", "plan, no limit", "planning s",
)  # fmt: skip
NOTES = """\
Cells are milliseconds of the step, the ratio to the bound at that memory, and GB live at the peak. The bound is
the one with the memory of the FSDP2-like schedule, with the term that binds. FSDP2-like: a bucket for each
layer, one gather ahead, one reduction under way, the last layer's parameters kept. 25 MB: buckets of that size,
one gather ahead. More memory is 4 GB, and 0.1 GB for gloo. Planning times are processor seconds of the three plans.
"""


@dataclass(frozen=True)
class Result:
    """A simulated schedule of a problem."""

    outcome: Outcome
    bound: Bound
    planning: float = 0.0  # processor seconds

    @property
    def ratio(self) -> float:
        return self.outcome.seconds / self.bound.seconds

    def __str__(self) -> str:
        return f"{_ms(self.outcome.seconds)} (×{self.ratio:.3f}; {self.outcome.peak / 1e9:.2f})"


def plan(problem: Problem) -> Result:
    """The planner's schedule, and the processor seconds in which it was found."""
    start = time.process_time()
    schedule = solve(problem)
    planning = time.process_time() - start
    validate(problem, schedule)
    return Result(evaluate(problem, schedule), bound(problem), planning)


def row(case: Case) -> tuple[list[str], list[str]]:
    """One line of the table, and the conditions that it breaks."""
    outcomes = [evaluate(case.problem, schedule(case)) for schedule in (fsdp2, by_size)]
    simple = [Result(o, bound(replace(case.problem, memory=o.peak))) for o in outcomes]
    peak = outcomes[0].peak
    problems = [
        replace(case.problem, memory=memory) for memory in (peak, peak + case.more, float("inf"))
    ]
    plans = [plan(problem) for problem in problems]
    limit = plans[0].bound
    wrong = []
    for problem, result in zip(problems, plans):
        if result.ratio > 1.05 or result.outcome.peak > problem.memory or result.planning > 2.0:
            wrong.append(
                f"{case.name}: {result}, found in {result.planning:.2f} s, for {problem.memory / 1e9:.2f} GB"
            )
    if plans[0].outcome.seconds > outcomes[0].seconds:
        wrong.append(f"{case.name}: {plans[0]} is slower than the FSDP2-like schedule, {simple[0]}")
    cells = [
        case.name,
        _ms(sum(case.problem.seconds)),
        f"{_ms(limit.seconds)} {limit.binds}",
        *map(str, simple),
        *map(str, plans),
        ", ".join(f"{result.planning:.2f}" for result in plans),
    ]
    return cells, wrong


def tables(failed: list[str]) -> Iterator[str]:
    """The tables, line by line; broken conditions are added to `failed`."""
    for title, lanes in LANES.items():
        yield from (f"## {title}", "", line(HEADER), line(["---"] * len(HEADER)))
        for case in seven(lanes):
            cells, wrong = row(case)
            failed += wrong
            yield line(cells)
        yield ""


def line(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 2.0 else f"{seconds * 1e3:.0f}"


def main() -> None:
    solve(seven()[-1].problem)  # imports and caches
    where = (
        f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, one process, "
        f"{os.cpu_count()} processors with {os.getloadavg()[0]:.0f} processes in the last minute."
    )
    lines, failed = ["# Plans for seven training steps", "", where, "", NOTES], []
    print(*lines, sep="\n")
    for text in tables(failed):
        print(text, flush=True)
        lines.append(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "plan_cases.md").write_text("\n".join(lines))
    if failed:
        sys.exit("\n".join(["broken conditions:", *failed]))


if __name__ == "__main__":
    main()
