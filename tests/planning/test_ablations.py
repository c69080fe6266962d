"""benchmarks/plans/ablations.py: versions of a step take turns, and the table shows what each choice gains."""

import pytest

from benchmarks.plans import ablations
from benchmarks.plans.ablations import CHOICES, Part, planned_step
from tests.support.evaluate import evaluate
from tests.support.synthetic import seven
from ztrans.planning.levers import PARTS, WHOLE
from ztrans.planning.solver.changes import CHANGES
from ztrans.planning.solver.search import solve
from ztrans.planning.solver.sweep import VALUES


def simulated(without: frozenset[str]):
    return lambda: 1.0 + len(without)


def test_a_report_keeps_the_parts_that_are_not_run(tmp_path):
    steps = (("case", simulated),)
    parts = {
        name: lambda name=name: Part(name, "measured", ("a", "b"), steps) for name in ("one", "two")
    }
    ablations.main(["one", "two"], 3, tmp_path, parts)
    text = ablations.main(["two"], 5, tmp_path, parts)
    assert text == (tmp_path / "ablations.md").read_text()
    assert text.count("## ") == 2 and "medians of 3" in text and "medians of 5" in text
    assert "| case | nothing | 1.0000 | 1.0000 | 1.000 |  |" in text
    assert "| case | a | 2.0000 | 2.0000 | 2.000 | 50.0% |" in text
    assert "| case | any of them | 3.0000 | 3.0000 | 3.000 | 66.7% |" in text


def test_a_simulated_part_runs_once_and_lists_the_steps_in_which_a_choice_matters(tmp_path):
    def step(without):
        return lambda: 1.0 + 0.5 * ("a" in without)

    steps = (("first", step), ("second", lambda without: lambda: 2.0))
    parts = {"search": lambda: Part("search", "simulated", ("a", "b"), steps, simulated=True)}
    text = ablations.main(["search"], 20, tmp_path, parts)
    assert "| a | +25.00% | +50.00% | first: 1000.0, 1500.0 (+50.0%) |" in text
    assert "| b | +0.00% | +0.00% |  |" in text and "Simulated seconds of 2 steps" in text


@pytest.mark.slow
def test_whatever_a_search_tries_can_be_left_out():
    problem = seven()[-1].problem
    assert planned_step(problem, frozenset())() == evaluate(problem, solve(problem)).seconds
    assert len(CHOICES) == len(CHANGES) + len((WHOLE, PARTS)) + len(VALUES)
    assert planned_step(problem, frozenset(CHOICES))() >= planned_step(problem, frozenset())()


def test_versions_take_turns_and_none_is_always_first():
    ran: list[str] = []
    steps = {name: lambda name=name: ran.append(name) or 1.0 for name in "abc"}
    seconds = ablations.interleaved(steps, 3)
    assert {name: len(each) for name, each in seconds.items()} == dict.fromkeys("abc", 3)
    assert "".join(ran) == "aaabbbccc" + "abc" + "bca" + "cab"
