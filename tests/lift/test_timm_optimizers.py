"""The table of timm's optimizers in docs/evidence.md: what it says of each is so after 20 steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_lift import make_matrices
from test_optimizer_table import assert_refused, train_both

from tests.support.worlds import distance

timm = pytest.importorskip("timm.optim", exc_type=ImportError)

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
BOUNDS = {"equal to 1e-6": 1e-6, "equal to 1e-3": 1e-3, "refused": None}
TABLE = PAGE.read_text().partition("\n| timm | |\n")[2]
ROWS = {name: BOUNDS[says] for says, names in re.findall(r"^\| ([\w -]+) \| (`.*) \|$", TABLE, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)}  # fmt: skip


def test_the_table_has_rows():
    assert len(ROWS) > 80 and set(ROWS.values()) == set(BOUNDS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore")  # timm's own
def test_an_optimizer_of_timm_does_what_the_table_says(name):
    plain, lifted = (
        (model, timm.create_optimizer_v2(model, opt=name, lr=0.01, weight_decay=0.01))
        for model in (make_matrices(), make_matrices())
    )
    if ROWS[name] is None:
        assert_refused(*lifted)
        return
    train_both(plain, lifted)
    pairs = zip(lifted[0].parameters(), plain[0].parameters(), strict=True)
    assert max(distance(mine, wanted) for mine, wanted in pairs) <= ROWS[name]
