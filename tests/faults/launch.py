"""Start ranks of which a test may kill or stop one: no launcher then ends the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import Ended, Running, start_ranks

SCENARIOS = Path(__file__).parent / "scenarios.py"


@dataclass(frozen=True)
class Rank:
    """The result of one process: exit code, its reports by name, its stderr, and how many seconds it took."""

    code: int
    reports: dict[str, dict]
    errors: str
    seconds: float


def launch(
    scenario: str,
    ranks: int,
    seconds: float = 120.0,
    after_start: Callable[[list[Running]], None] | None = None,
) -> list[Rank]:
    """Run a scenario of `scenarios.py` on `ranks` ranks.

    A process is killed (code -9) if it runs longer than `seconds`, or if it is stopped when the ranks before it have
    ended.
    """
    running = start_ranks(ranks, SCENARIOS, scenario)
    if after_start is not None:
        after_start(running)
    return [_result(process.end(0 if process.is_stopped else seconds)) for process in running]


def _result(ended: Ended) -> Rank:
    reports = {row.pop("name"): row for row in ended.rows}
    return Rank(ended.code, reports, ended.errors, ended.seconds)
