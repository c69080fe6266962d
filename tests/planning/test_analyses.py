"""What the analyses say of real programs, held against each other; `python -m benchmarks.analyses` is the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import analyses

SMALL = ("GPT 2 x 128, fp32", "MLP, uneven and thin leaves")


@pytest.mark.parametrize("model", SMALL)
def test_bounds_budgets_and_stages_hold_in_real_programs(model):
    """The bound is no higher than the step, a peak than its budget, a peak than that of a lower stage; and a larger
    budget makes no step slower."""
    programs = list(analyses.rows([model], places=1))
    assert len(programs) == 11
    assert [text for _, text in analyses.broken(programs)] == []
    assert len(list(analyses._pairs(programs))) == 7 and len(list(analyses._stages(programs))) == 2


def test_what_does_not_hold_is_found():
    rows = [row for row in analyses.rows(SMALL[:1], places=1) if row.usual and row.budget is None]
    program, *lower = sorted(rows, key=lambda row: -row.stage)
    found = lambda *rows: [what for what, _ in analyses.broken([*lower, *rows])]
    assert [row.stage for row in (program, *lower)] == [3, 2, 0] and found(program) == []
    assert found(replace(program, bound=2 * program.seconds)) == ["bound"]
    assert found(replace(program, budget=program.peak - 1)) == ["budget"]
    asked = [replace(program, budget=n * program.peak, seconds=s) for n, s in ((2, 1.0), (3, 1.02))]
    assert found(*asked) == ["more"]
    assert found(replace(program, peak=lower[0].peak + 1)) == ["stages"]
