"""`check_finite` names the equation of the first NaN or infinity that reaches the results."""

import math

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.processes import run_ranks
from ztrans.profiling.check_finite import Found, Range, Trail, find


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return run_ranks(2, "eager_ranks.py", "first_nan")


def of(figures: list[dict], check: str) -> list[dict]:
    rows = [f for f in figures if f["check"] == check]
    assert rows, f"eager_ranks.py did not report {check}"
    return rows


def sgd(loss):
    """A step of gradient descent on `loss(w, x)`."""

    def step(state, x):
        grads, value = grad_and_value(loss)(state, x)
        return state - 0.1 * grads, value

    return zt.Step.of(step)


def test_an_equation_its_line_and_the_ranges_of_its_operands():
    step = sgd(lambda w, x: (x @ w).log().mean())
    state, x = torch.ones(4), torch.ones(3, 4)
    assert step.check_finite(state, x) is None
    x[0] = -1.0
    found = step.check_finite(state, x)
    line = test_an_equation_its_line_and_the_ranges_of_its_operands.__code__.co_firstlineno + 1
    assert str(found).splitlines() == [
        "step: log has 1 NaN, in forward.",
        f"  at {__file__}:{line} in test_an_equation_its_line_and_the_ranges_of_its_operands",
        "  log: f32[3] = log(mv)",
        "    mv  f32[3]  -4 to 4, mean magnitude 4",
        "    log  f32[3]  1.386 to 1.386, mean magnitude 1.386, 1 NaN",
        "It reaches the output.",
    ]
    assert state.tolist() == [1.0] * 4 and state._version == 0


def masked(w, x):
    scores = (x * w) @ (x * w).T
    weights = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf).softmax(-1)
    safe = torch.where(x > 0, x, 1.0).reciprocal()
    return (weights @ x).square().mean() + torch.where(x > 0, safe, 0.0).sum() * w.sum()


def test_masks_and_branches_that_reach_nothing_are_not_at_fault():
    x = torch.arange(12.0).view(3, 4)
    assert sgd(masked).check_finite(torch.ones(4), x) is None
    # The usual trap: the branch that `where` does not take is infinite, and so its derivative is not a number.
    trap = sgd(lambda w, x: masked(w, x) + torch.where(x > 0, 1 / (x * w), 0.0).sum())
    found = trap.check_finite(torch.ones(4), x)
    assert found.equation.startswith("reciprocal") and found.results[0].inf == 1
    assert found.region == "forward" and "= mul(" in found.first_nan


@pytest.mark.parametrize(
    ("loss", "equation", "faults"),
    [
        (lambda w, x: (w * 100).exp().sum() + x.sum(), "exp", (4, 0)),
        (lambda w, x: (x - x).sum() / (x - x).sum() * w.sum(), "div", (0, 1)),
        # All keys of a row are masked.
        (lambda w, x: (w * x).masked_fill(x > 0, -math.inf).softmax(-1).sum(), "_softmax", (0, 8)),
        # Only an infinity that the step wrote itself reaches the loss.
        (lambda w, x: (w.sum() * x).masked_fill(x > 6, math.inf).sum(), "masked_fill", (1, 0)),
    ],
)
def test_the_first_fault(loss, equation, faults):
    found = sgd(loss).check_finite(torch.ones(4), torch.arange(8.0).view(2, 4))
    assert found.equation.startswith(equation)
    # The first row of the third case has an element that is not masked.
    inf, nan = found.results[0].inf, found.results[0].nan
    assert (inf, nan) == ((0, 4) if equation == "_softmax" and nan == 4 else faults)


def test_inputs_that_are_not_finite():
    step = sgd(lambda w, x: ((x @ w).tanh() * w.sum()).sum())
    x = torch.ones(2, 4)
    x[1, 2] = math.nan
    found = step.check_finite(torch.ones(4), x)
    assert not found.equation and str(found).startswith("step: x has 1 NaN before the step.\n")

    state = torch.tensor([1.0, math.inf, -math.inf, 1.0])
    found = step.check_finite(state, torch.ones(2, 4))
    assert found.results[0].nan and [x.name for x in found.inputs] == ["state"]


def test_a_leaf_that_the_step_leaves_alone_may_be_infinite():
    def step(state, x):
        return {
            "w": state["w"] + x.sum(),
            "mask": state["mask"],
            "best": state["best"].minimum(x.sum()),
        }, x

    state = {
        "w": torch.ones(2),
        "mask": torch.full((2,), -math.inf),
        "best": torch.tensor(math.inf),
    }
    assert zt.Step.of(step).check_finite(state, torch.ones(2)) is None
    found = zt.Step.of(step).check_finite(state, torch.tensor([1e38, 3e38]))
    assert found.reaches == ("the new state.w", "the new state.best")
    assert str(found).endswith("It reaches the new state.w, the new state.best.")
    assert found.equation.startswith("sum:")


def test_random_generators_stay_as_they_are():
    step = sgd(lambda w, x: (torch.nn.functional.dropout(x, 0.5) * w).sum())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    step.check_finite(torch.ones(4), torch.ones(2, 4))
    assert torch.equal(before, torch.get_rng_state())


def test_gathers_and_copies_of_the_step_before():
    def momentum(state, x):
        grads, value = grad_and_value(lambda w: (x @ w).log().mean())(state["w"])
        m = 0.9 * state["m"] + grads
        return {"w": state["w"] - 0.1 * m, "m": m}, value

    mesh = zt.make_mesh("cpu", dp=-1)
    moved = zt.offload(where="m", at_least=0, across_steps=True)
    step = zt.chain(zt.shard_params(mesh), moved, zt.prefetch(across_steps=True))(momentum)
    state = step.shard({"w": torch.ones(4), "m": torch.zeros(4)})
    state, _ = step(state, torch.ones(2, 4))
    found = step.check_finite(state, -torch.ones(2, 4))
    assert found.equation.startswith("log") and found.results[0].nan == 2
    state, value = step(state, torch.ones(2, 4))
    assert value.item() == pytest.approx(math.log(3.9))


def test_a_fault_of_another_rank():
    """Rank 1 has a NaN in its term; the reduction brings it to the part of rank 0 alone."""
    key = lambda name: (0, name)
    rank_1 = {
        key("term"): Trail((0, 3), True, False, (key("log"),)),
        key("log"): Trail((0, 2), True, False, (key("x"),)),
    }
    rank_0 = {
        key("grad"): Trail((0, 4), True, False, (key("term"),), is_exchanged=True),
        key("w1"): Trail((0, 5), True, False, (key("grad"),), reaches="the new w"),
    }
    assert find([rank_0, rank_1]) == Found((1, key("log")), None, (), ("the new w",))
    assert find([{}, rank_1]) is None


def test_the_range_of_complex_half_precision_and_fp8_numbers():
    assert Range.of("x", torch.tensor([1 + 2j, complex(math.nan, 0)])).nan == 1
    assert Range.of("x", torch.full((70_000,), 2.0, dtype=torch.float16)).finite == (2.0, 2.0, 2.0)
    assert Range.of("x", torch.ones(2).to(torch.float8_e4m3fn)).is_finite
    assert str(Range.of("x", torch.ones(0))) == "x  f32[0]  empty"


@pytest.mark.distributed
def test_all_ranks_name_the_rank_at_every_stage(two):
    rows = of(two, "first_nan")
    assert [f["stage"] for f in rows] == [0, 1, 2, 3]
    for f in rows:
        assert f["same"] and f["kept"] and f["rank"] == 1
        assert "has 1 inf on rank 1 of 2, in backward." in f["text"] and "div(" in f["text"]
    (row,) = of(two, "finite")
    assert row["same"] and row["rank"] is None


@pytest.mark.distributed
def test_micro_batches_overflows_of_reductions_and_lifted_loops(two):
    (row,) = of(two, "in_parts")
    assert row["same"] and row["kept"] and (row["rank"], row["micro_batch"]) == (1, 1)
    (row,) = of(two, "overflow")
    assert row["same"] and "= all_reduce([sum], sum, axis=dp)" in row["text"]
    (row,) = of(two, "loop")
    assert row["same"] and row["kept"] and "Before the step:\n    x " in row["text"]
