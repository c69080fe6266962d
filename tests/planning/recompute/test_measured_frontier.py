"""benchmarks/plans/measured_frontier.py: a small part of it, and what its page says of rows that break a rule."""

import pytest

from benchmarks.peers.model import Config
from benchmarks.plans import measured_frontier
from benchmarks.plans.frontier import OURS
from benchmarks.plans.measured_frontier import Row, broken, fastest_other, measure, report
from benchmarks.plans.measured_frontier_steps import Part

MIB = 1 << 20


def row(method, milliseconds, peak, limit=None, **changes):
    share = None if limit is None else 0.5
    figures = {"planned": peak, "loss": 1.0, "date": "today"} | changes
    seconds = [1e-3 * milliseconds] * 3
    return Row(1, method, "eager", share, limit, peak=peak, seconds=seconds, **figures)


def test_a_step_is_compared_with_the_fastest_that_fits_its_limit():
    ours = row(OURS, 10, 99 * MIB, 100 * MIB)
    fits = row("block", 12, 90 * MIB)
    slower = row("PyTorch, block", 13, 90 * MIB)
    larger = row("selective", 9, 110 * MIB)
    rows = [ours, slower, fits, larger]
    assert fastest_other(ours, rows) == fits
    assert fastest_other(ours, [ours, larger]) is None
    assert list(broken(rows)) == []
    text = report("a machine", rows)
    assert (
        "| 0.5 | 100.0 MiB | 99.0 MiB | 99.0 MiB | 10.0 | block | 90.0 MiB | 12.0 | 0.833 |" in text
    )
    assert "| selective | 110.0 MiB | 110.0 MiB | 9.0 |" in text
    assert "## One rank, eager; medians of 3, today" in text and "Every step is within" in text


def test_rows_that_break_a_rule_are_named():
    rows = [
        row(OURS, 12, 103 * MIB, 100 * MIB, planned=99 * MIB),
        row("block", 10, 90 * MIB),
        row("selective", 20, 90 * MIB, loss=1.1),
    ]
    wrong = [
        f"one rank, eager, {OURS}, 0.5: 103.0 MiB were live, 3.0% above the limit",
        f"one rank, eager, {OURS}, 0.5: slower, 1.200 of the time of block",
        "one rank, eager, selective: the last loss is 1.1, that of the first row 1.0",
    ]
    assert list(broken(rows)) == wrong
    text = report("a machine", rows)
    assert all(f"- {each}" in text for each in wrong)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_steps_within_a_limit_need_what_is_planned_and_compute_the_same():
    config = Config(layers=2, width=64, heads=2, vocab=64, sequence=256, batch=8)
    part = Part(config, 1, ["eager"])
    rows = measure(part, [*part.subjects([0.5], [])], 1)
    assert [row.method for row in rows] == [OURS, "block", "selective", "remat()", "PyTorch, block"]
    assert rows[0].limit == part.limits.limit(0.5) >= rows[0].planned
    for each in rows:
        assert each.planned is None or each.peak == pytest.approx(each.planned, rel=0.01)
        assert abs(each.loss / rows[0].loss - 1) < measured_frontier.LOSSES_APART
