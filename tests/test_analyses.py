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
    (program,) = [row for row in analyses.rows(SMALL[:1], places=1) if row.stage == 3 and row.usual and row.budget is None]
    wrong = [
        replace(program, bound=2 * program.seconds),
        replace(program, budget=program.peak - 1),
    ]
    assert [what for what, _ in analyses.broken(wrong)] == ["bound", "budget"]
    more = [replace(program, budget=2 * program.peak, seconds=s) for s in (1.0, 1.02)]
    more[1] = replace(more[1], budget=3 * program.peak)
    assert [what for what, _ in analyses.broken(more)] == ["more"]
    stages = [replace(program, stage=stage, peak=peak) for stage, peak in ((0, 9), (2, 7), (3, 8))]
    assert [what for what, _ in analyses.broken(stages)] == ["stages"]
