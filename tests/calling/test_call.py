"""Calls: the arguments of a step are known by their positions, whatever their names are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ztrans as zt
from tests.support.worlds import slices
from ztrans.calling.call import BoundCall, StepFunction

MESH = zt.AbstractMesh(dp=2)


def descends(state, param_groups):
    """A linear step on a batch with an unlucky name."""
    weight = state["w"].detach().requires_grad_()
    loss = (param_groups["x"] @ weight).square().mean()
    (gradient,) = torch.autograd.grad(loss, [weight])
    return {"w": state["w"] - 0.1 * gradient}, loss.detach()


def test_a_batch_may_be_called_as_extra_inputs_are():
    state, batch = {"w": torch.randn(3, 2)}, ({"x": torch.randn(8, 3)},)
    wanted, _ = descends(state, *batch)
    lowered = zt.shard_params(MESH)(descends).lower(state, slices(batch, 2)[0][0])
    new, _ = lowered.lockstep(state, slices(batch, 2))
    torch.testing.assert_close(new["w"], wanted["w"])


def test_such_a_batch_is_cut_into_micro_batches():
    state, batch = {"w": torch.randn(3, 2)}, {"x": torch.randn(8, 3)}
    wanted, _ = descends(state, batch)
    new, _ = zt.accumulate(2)(descends)(state, batch)
    torch.testing.assert_close(new["w"], wanted["w"])


def test_a_lifted_loop_may_call_its_batch_so_too():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop_step(param_groups):
        sgd.zero_grad()
        loss = model(param_groups).square().mean()
        loss.backward()
        sgd.step()
        return loss.detach()

    lifted, state = zt.lift(loop_step, model, sgd)
    x = torch.randn(8, 3)
    lowered = zt.shard_params(MESH)(lifted).lower(state, param_groups=x[:4])
    names = [v.name for v in lowered.graph.inputs]
    assert names[-2:] == ["param_groups", "param_groups_.0.lr"]
    new, _ = lowered.lockstep(state, [(x[:4],), (x[4:],)])
    loop_step(x)
    torch.testing.assert_close(new["params"]["weight"], model.weight.detach())


class Trainer:
    """A callable object whose attributes have the names that a lifted step once had."""

    def __init__(self) -> None:
        self.extra = {"rate": 0.5}
        self.settings = {"depth": 3}
        self.missing = ["nothing"]

    def __call__(self, state, x):
        return state - self.extra["rate"] * x.mean(), x.sum()


def test_attributes_of_a_callable_object_mean_nothing():
    step, x = zt.Step.of(Trainer()), torch.arange(4.0)
    state, total = step(torch.ones(3), x)
    assert torch.equal(state, torch.ones(3) - 0.5 * x.mean()) and total == x.sum()
    assert step.lower(state, x).compile()(state, x)[1] == x.sum()


def test_equal_calls_are_equal_however_they_are_passed():
    def step(state, x, scale=1.0, *, plus=0.0): ...

    call = BoundCall.of(StepFunction(step), ("s", 2, 3.0), {})
    assert call == BoundCall.of(StepFunction(step), ("s",), {"scale": 3.0, "x": 2})
    by_name = BoundCall.of(StepFunction(step), ("s", 2), {"plus": 4.0})
    assert by_name == BoundCall("s", (2, 4.0), ("plus",))
    assert by_name.parameters(StepFunction(step)) == ["state", "x", "plus"]


def test_a_call_runs_its_function_with_other_arguments_of_the_same_tree():
    def step(state, x, *, plus):
        return state, x + plus

    call = BoundCall.of(StepFunction(step), ([1],), {"x": 2, "plus": 3})
    assert call.run(step) == ([1], 5)
    assert call.of_tree(([4], 5, 6)).run(step) == ([4], 11)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_batch_that_cannot_be_cut_is_named(rows):
    call = BoundCall({}, ({"x": torch.ones(rows, 2)},))
    with pytest.raises(ValueError, match=rf"accumulate: batch.x has {rows} rows"):
        call.micro_batch(StepFunction(lambda state, batch: None), 2)


def test_arguments_after_the_parameters_have_names_of_their_own():
    def step(state, *xs, **options):
        return state, sum(xs) * options["scale"]

    function = StepFunction(step)
    call = BoundCall.of(function, ("s", 1, 2, 3), {"scale": 4})
    assert call.parameters(function) == ["state", "xs", "arg2", "arg3", "scale"]
