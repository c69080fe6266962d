"""LiftedStep: a lifted loop is recognised by its class, and looks like the loop step."""

import inspect

import torch
from torch import nn

import ztrans as zt
from tests.support.lifted import loop_of
from ztrans.lift.lifted_step import LiftedStep


class Scale:
    """A step of the user whose attributes have the names that a lifted step once had."""

    def __init__(self):
        self.extra = {"rate": 0.5}
        self.settings = (1, 2)
        self.missing = {"w": None}

    def __call__(self, state, x):
        return {"w": state["w"] * self.extra["rate"]}, (state["w"] * x).sum()


def test_a_callable_object_with_attributes_of_any_name_is_a_plain_step():
    step = zt.Step(Scale())
    state, output = step({"w": torch.ones(3)}, torch.full((3,), 2.0))
    assert output == 6 and torch.equal(state["w"], torch.full((3,), 0.5))


def test_a_lifted_step_has_the_name_the_docstring_and_the_arguments_of_the_loop():
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loop_step = loop_of(model, sgd)
    loop_step.__doc__ = "A loop step."
    step, _ = zt.lift(loop_step, model, sgd)
    assert isinstance(step, LiftedStep)
    assert (step.__name__, step.__doc__) == ("loop_step", "A loop step.")
    assert list(inspect.signature(step).parameters) == ["state", "x"]
    assert zt.Step(step).__name__ == "loop_step"
