"""`prefetch`: gathers start before their values are used.

How to test a new transform: copy this file, and write

1. a golden of the program of one small net, and the difference that the transform makes (`tests/support/net.py`;
   `pytest --update-golden` writes them, and they are reviewed as code);
2. a row in TRANSFORMS of `tests/testing/test_check_laws.py`, which checks all laws for each option;
3. if it changes no bit, its name among the rewrites or schedules of `tests/laws/test_laws.py`, which runs it on all steps
   of `tests/support/programs.py`; `on_ranks` and `sharded` of `tests/support/worlds.py` lower and run such a step;
4. what it is for, as counts, bytes or an order of equations, in a program made for it (here: `ahead`), never as seconds;
5. each option that it refuses, with the text of the error.
"""

import pytest

import ztrans as zt
from tests.support.net import lower
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.ir.collectives import ALL_GATHER, WAIT
from ztrans.planning.cluster import Link


def test_the_program_prints(golden):
    assert str(lower(zt.prefetch())) == golden


def test_the_difference_prints(golden):
    assert zt.ir.diff(lower(), lower(zt.prefetch())) == golden


def ahead(lowered) -> int:
    """How many computations run between the starts of gathers and their first waits, in total."""
    total = 0
    started = {}
    computed = 0
    for e in lowered.graph.eqns:
        if e.op is ALL_GATHER:
            started.update(dict.fromkeys(e.outs, (e, computed)))
        elif e.op is WAIT and e.args[0] in started:
            start, at = started[e.args[0]]
            total += computed - at
            for out in start.outs:
                started.pop(out)
        else:
            computed += 1
    return total


@pytest.mark.slow
def test_gathers_over_a_slower_link_start_earlier():
    """A gather starts as late as the transfer can still be hidden, within the bytes in flight that are allowed."""
    case = CASES["gpt_adam"]

    def depth(bandwidth, **options):
        machine = zt.cluster("cpu", dp=Link("wire", 0.0, bandwidth))
        early = zt.prefetch(memory=1 << 30, **options)
        return ahead(
            on_ranks(case, 4, zt.shard_params(zt.AbstractMesh(dp=4)), early, cluster=machine)
        )

    assert depth(1e12) < depth(2e7) > depth(2e7, max_in_flight=0)


@pytest.mark.parametrize("options, message", [
    ({"memory": "all"}, "prefetch: memory='all'; it is a number of bytes, or 'auto'."),
    ({"memory": -1}, "prefetch: memory=-1; it is a number of bytes, or 'auto'."),
    ({"memory": True}, "prefetch: memory=True; it is a number of bytes, or 'auto'."),
    ({"max_in_flight": 1.5}, "prefetch: max_in_flight=1.5; it is a number of bytes, or None."),
])  # fmt: skip
def test_wrong_sizes_are_refused(options, message):
    with pytest.raises(ValueError) as caught:
        zt.prefetch(**options)
    assert str(caught.value) == message


def test_the_error_of_a_small_budget_says_what_the_step_needs():
    case = CASES["gpt_adam"]
    shard = zt.shard_params(zt.AbstractMesh(dp=4))
    with pytest.raises(
        ValueError,
        match=r"prefetch\(memory=1000\): 1000 B is less than the step needs in any order tried: \d+ bytes",
    ) as caught:
        on_ranks(case, 4, shard, zt.prefetch(memory=1000))
    needs = int(str(caught.value).split("order tried: ")[1].split()[0])
    assert "programs.py:" in str(caught.value), (
        "the error names the user's lines that hold the memory"
    )
    assert on_ranks(case, 4, shard, zt.prefetch(memory=needs)).memory_analysis().peak <= needs
