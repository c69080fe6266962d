"""The ports of known loops in `examples/ports`: what they change, and that two ranks train as the untouched loop does."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from pathlib import Path

import pytest

from tests.support.processes import run_ranks

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "ports"
PAGE = ROOT / "docs" / "coming-from.md"


PORTS = ("sac", "td3", "wgan_gp", "ddpm_ema", "dino", "word_language_model", "maml")


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("compare")


def test_every_port_is_compared(compare):
    assert compare.PORTS == PORTS
    assert {path.stem for path in FOLDER.glob("*.py")} == {*PORTS, "compare"}


def test_a_port_changes_at_most_ten_lines(compare):
    """Besides those that load data. A scheduler that steps after the lifted step stays where it was."""
    changed = {name: compare.changed_lines(importlib.import_module(name)) for name in compare.PORTS}
    assert {name: lines for name, lines in changed.items() if len(lines) > 10} == {}
    assert all(any("zt.lift(" in line for line in lines) for lines in changed.values())


def test_the_page_shows_lines_of_the_ports_and_counts_them(compare):
    page = PAGE.read_text()
    counts = re.findall(
        r"^\| \[.*\]\(../examples/ports/(\w+).py\) \| .* \| (\d+) \|", page, re.MULTILINE
    )
    ports = {name: importlib.import_module(name) for name in compare.PORTS}
    assert {name: int(count) for name, count in counts} == {
        name: len(compare.changed_lines(port)) for name, port in ports.items()
    }
    lines = {
        sign: {
            line.strip()
            for port in ports.values()
            for line in inspect.getsource(getattr(port, function)).splitlines()
        }
        for sign, function in (("-", "train"), ("+", "train_on_ranks"), (" ", "train"))
    }
    shown = "".join(re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)).splitlines()
    assert len(shown) > 40
    assert [line for line in shown if line[1:].strip() not in lines[line[0]]] == []


# The bounds are rounding in fp64, 1e-16 for a sum. The last bias of the critic of WGAN-GP has the gradient -1 + 1, and
# Adam divides its rounding by 1e-8.
BOUNDS = {"wgan_gp": 1e-8}
# What these three have is in the others, or in tests of one process. They would take 5 s more on each rank.
SLOW = ("sac", "wgan_gp", "ddpm_ema")
FAST = tuple(name for name in PORTS if name not in SLOW)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "names", [FAST, pytest.param(SLOW, marks=pytest.mark.exhaustive)], ids=" ".join
)
def test_two_ranks_train_as_the_untouched_loops(names):
    rows = run_ranks(2, str(FOLDER / "compare.py"), *names)
    assert [row["port"] for row in rows] == [*names]
    for row in rows:
        bound = BOUNDS.get(row["port"], 1e-12)
        assert max(row["losses_apart"], row["weights_apart"]) <= bound, row
        losses = row["losses"]
        assert len(set(losses)) == len(losses) >= 4 and all(map(math.isfinite, losses)), row
