"""The analyses of real programs agree with each other. `python -m benchmarks.plans.analyses` checks many more programs."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from benchmarks.plans import analyses

SMALL = ("GPT 2 x 128, fp32", "MLP, uneven and thin leaves")


@functools.cache
def programs_of(model: str) -> list[analyses.Row]:
    return list(analyses.rows([model], places=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(SMALL[0], marks=pytest.mark.exhaustive), *SMALL[1:]]
)
def test_bounds_budgets_and_stages_hold_in_real_programs(model):
    """No step beats its bound, no peak exceeds its budget, and a higher stage fits where a lower one does.

    A larger budget makes no step slower.
    """
    programs = programs_of(model)
    assert len(programs) >= 11
    assert [text for _, text in analyses.broken(programs)] == []
    assert len(list(analyses._pairs(programs))) >= 7 and len(list(analyses._stages(programs))) == 2


@pytest.mark.slow
def test_a_broken_law_is_reported():
    rows = [row for row in programs_of(SMALL[1]) if row.usual and row.budget is None]
    program, *lower = sorted(rows, key=lambda row: -row.stage)
    broken_laws = lambda *rows: [law for law, _ in analyses.broken([*lower, *rows])]
    assert [row.stage for row in (program, *lower)] == [3, 2, 0] and broken_laws(program) == []
    assert broken_laws(replace(program, bound=2 * program.seconds)) == ["bound"]
    assert broken_laws(replace(program, budget=program.peak - 1)) == ["budget"]
    asked = [replace(program, budget=n * program.peak, seconds=s) for n, s in ((2, 1.0), (3, 1.02))]
    assert broken_laws(*asked) == ["more"]
    largest = replace(program, model=analyses.LARGEST, bound=0.96 * program.seconds)
    assert broken_laws(largest) == []
    assert broken_laws(replace(largest, bound=0.95 * program.seconds)) == ["near"]
    low = lower[0]
    above = replace(program, peak=low.peak + 1, bound=0.0)
    assert broken_laws(above) == ["stages"]
    within = replace(above, budget=low.peak, peak=low.peak)
    assert broken_laws(above, within) == []
    too_much = replace(within, peak=low.peak + 1)
    assert broken_laws(above, too_much) == ["budget", "stages"]
