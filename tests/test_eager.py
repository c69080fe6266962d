"""`zt.eager()`: the function of a step runs as ordinary Python, and computes what its program computes."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.lifted import batch, lifted
from tests.support.processes import run_ranks
from ztrans.eager_step import one_set_of_axes
from ztrans.ir.layout import LeafSharding


def of(figures: list[dict], check: str) -> list[dict]:
    rows = [f for f in figures if f["check"] == check]
    assert rows, f"eager_ranks.py did not report {check}"
    return rows


@pytest.fixture(scope="module")
def two() -> list[dict]:
    checks = ("programs", "bits", "loops", "draws", "failures", "anomaly")
    return run_ranks(2, "eager_ranks.py", *checks)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_compute_what_the_plain_step_computes(ranks, request):
    figures = (
        request.getfixturevalue("two") if ranks == 2 else run_ranks(3, "eager_ranks.py", "programs")
    )
    rows = of(figures, "plain")
    assert {f["stage"] for f in rows if f["case"] == "mlp_momentum"} == {0, 1, 2, 3}
    for f in rows:
        assert f["distance"] < 1e-14 and f["in_place"], f


@pytest.mark.distributed
def test_an_eager_step_between_two_steps_of_the_program_changes_no_bit(two):
    (row,) = of(two, "bits")
    assert row["equal"] and row["split"]


@pytest.mark.distributed
def test_a_lifted_loop_with_accumulate_is_the_untouched_loop(two):
    (row,) = of(two, "lift")
    assert row["distance"] < 1e-6


@pytest.mark.distributed
def test_draws_differ_from_rank_to_rank_except_in_the_update(two):
    (row,) = of(two, "draws")
    assert not row["dropout"] and row["noise"]
    (row,) = of(two, "draws_kept")
    assert row["state"] and not row["output"]


@pytest.mark.distributed
def test_an_error_on_one_rank_ends_the_step_on_all_and_the_state_is_the_old_one(two):
    (row,) = of(two, "failure")
    first, second = row["errors"]
    assert (
        first.startswith("LostRank")
        and "Rank 1 failed in step 1 of step with FloatingPointError: the loss" in first
    )
    assert (
        second.startswith("FloatingPointError")
        and "The state is as it was before the step." in second
    )
    assert row["loss"] == pytest.approx(torch.tensor(12.0).log().item())


@pytest.mark.distributed
def test_detect_anomaly_works_and_all_ranks_get_its_text(two):
    (row,) = of(two, "anomaly")
    assert all("Function 'PowBackward0' returned nan values" in text for text in row["errors"])


def test_print_branches_and_hooks_work(capsys):
    model = nn.Linear(3, 1)
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop_step(x):
        sgd.zero_grad()
        loss = model(x).square().mean()
        print("loss", round(loss.item(), 3))
        if loss > 0:
            loss.backward()
            sgd.step()
        return loss

    torch.manual_seed(0)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    loop, state = zt.lift(loop_step, model, sgd)
    step = zt.Step.of(loop)
    state = step.shard(state)
    with zt.eager():
        new, loss = step(state, torch.ones(2, 3))
    assert capsys.readouterr().out == "loss 9.0\n" and seen[0].tolist() == [[3.0], [3.0]]
    assert new["params"]["weight"] is state["params"]["weight"] and not loss.requires_grad
    torch.testing.assert_close(new["params"]["weight"], torch.full((1, 3), 1 - 0.1 * 6.0))
    with pytest.raises(ValueError, match="reads a tensor's value while it is traced"):
        step(new, torch.ones(2, 3))


def test_a_lifted_loop_has_the_results_of_its_program():
    *_, loop_step, first = lifted()
    step = zt.Step.of(loop_step)
    compiled, eager = step.shard(first), step.shard(first)
    for i in range(3):
        compiled, expected = step(compiled, batch(i))
        with zt.eager():
            eager, loss = step(eager, batch(i))
    torch.testing.assert_close(eager, compiled, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(loss, expected)


def test_numbers_of_the_state_become_tensors_and_new_leaves_keep_their_types():
    step = zt.Step.of(lambda state, x: ({"w": state["w"] + x, "n": state["n"] + 1}, state["n"]))
    with zt.eager():
        state, _ = step({"w": torch.zeros(2), "n": 3}, 2)
    assert (
        state["n"].item() == 4
        and state["n"].dtype == torch.int64
        and state["w"].tolist() == [2.0, 2.0]
    )
    wrong = zt.Step.of(lambda state, x: ({"w": state["w"].double()}, x))
    with (
        zt.eager(),
        pytest.raises(ValueError, match=r"was given state.w as torch.float32 \[2\] and returned"),
    ):
        wrong({"w": torch.zeros(2)}, 2)


def test_a_branch_of_cond_and_a_checkpoint_run_as_python(capsys):
    def branch(a):
        print("taken")
        return a.sin()

    def step(state, x):
        w = state.detach().requires_grad_()
        h = torch.cond(x.sum() > 0, branch, torch.cos, (x * w,))
        checkpoint(lambda a: a.exp().sum(), h, use_reentrant=False).backward()
        return state - w.grad, h

    with zt.eager():
        state, output = zt.Step.of(step)(torch.ones(2), torch.ones(2))
    one = torch.ones(2)
    torch.testing.assert_close(state, 1 - one.sin().exp() * one.cos())
    assert capsys.readouterr().out == "taken\n" and not output.requires_grad
    # Outside of the context PyTorch can still compile a branch.
    sine = torch.cond(one.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (one,))
    torch.testing.assert_close(sine, one.sin())


def test_leaves_on_different_axes_are_refused_by_name():
    shardings = LeafSharding(("dp",)), LeafSharding(("dp", "ep"))
    with pytest.raises(
        ValueError, match=r"eager: state.w lives on the axes 'dp', and the step on 'dp', 'ep'"
    ) as error:
        one_set_of_axes("step", ["state.w", "state.v"], [1.0, 2.0], shardings, ("dp", "ep"))
    assert "step.check_finite(state, *batch)" in str(error.value)
    apart = [LeafSharding(("dp",), independent=("host",))]
    assert one_set_of_axes("step", ["state.w"], [1.0], apart, ("dp", "host")) == ("dp",)


def test_an_evaluation_runs_eagerly_too():
    seen = []
    step = zt.Step.of(lambda state, x: (state - x.mean(), x.sum()))
    evaluate = step.eval(lambda state, x: seen.append(state.tolist()) or (state * x).sum())
    with zt.eager():
        assert evaluate(torch.ones(2), torch.ones(2)).item() == 2.0
    assert seen == [[1.0, 1.0]]


def test_outside_of_eager_anomaly_detection_is_refused_with_what_to_write():
    step = zt.Step.of(lambda state, x: (state - x.mean(), x.sum()))
    state = torch.ones(2)
    compiled = step.lower(state, torch.ones(2)).compile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anomaly = torch.autograd.detect_anomaly()
    with anomaly:
        for call in (step, compiled):
            with pytest.raises(
                RuntimeError, match=r"detect_anomaly.*\n.*check_finite\(state.*zt\.eager\(\)"
            ):
                call(state, torch.ones(2))
        assert step.check_finite(state, torch.ones(2)) is None
        with zt.eager():
            step(state, torch.ones(2))


def test_a_trace_under_anomaly_detection_is_the_same():
    def step(state, x):
        w = state.detach().requires_grad_()
        (w * x).sum().backward()
        return state - w.grad, x.sum()

    with torch.autograd.set_detect_anomaly(True):
        program = str(zt.Step.of(step).trace(torch.ones(2), torch.ones(2)))
    assert program == str(zt.Step.of(step).trace(torch.ones(2), torch.ones(2)))
