"""Copies and pickles of steps, steps under torch.compile, and numbers that no program holds."""

import copy
import pickle

import pytest
import torch

import ztrans as zt
from tests.support.lifted import batch, lifted

STATE = {"w": torch.zeros(3)}
X = torch.ones(2, 3)


def train_step(state, x):
    return {"w": state["w"] - x.mean(0)}, x.sum()


@zt.remat()
def decorated(state, x):
    return {"w": state["w"] - 2 * x.mean(0)}, x.sum()


class Trainer:
    def __init__(self, rate):
        self.rate = rate
        self.step = zt.remat()(self.train)

    def train(self, state, x):
        return {"w": state["w"] - self.rate * x.mean(0)}, x.sum()


def after_a_step(step) -> list[float]:
    return step({"w": torch.zeros(3)}, X)[0]["w"].tolist()


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_step_is_copied_without_its_programs(copied):
    step = zt.chain(zt.remat(), zt.shard_params(zt.AbstractMesh(dp=2)))(train_step)
    assert copied(step) == step and repr(copied(step)) == repr(step)
    step = zt.remat()(train_step)
    after_a_step(step)
    assert after_a_step(copied(step)) == [-1.0] * 3
    assert len(step._cache) == 1
    after_a_step(decorated)
    assert after_a_step(copied(decorated)) == [-2.0] * 3


def test_a_pickled_decorated_function_is_the_function_of_its_module():
    after_a_step(decorated)
    assert pickle.loads(pickle.dumps(decorated)) is decorated


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_object_has_a_step_of_its_own(copied):
    trainer = Trainer(1.0)
    after_a_step(trainer.step)
    other = copied(trainer)
    other.rate = 3.0
    assert after_a_step(other.step) == [-3.0] * 3 and after_a_step(trainer.step) == [-1.0] * 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lifted_step_refuses_to_be_copied(copied):
    _, _, step, _ = lifted()
    with pytest.raises(
        TypeError, match=r"loop_step: a lifted step cannot be copied or pickled(?s:.*)zt.lift\("
    ):
        copied(step)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_transformed_lifted_step_refuses_to_be_copied(copied):
    step = zt.remat()(lifted()[2])
    with pytest.raises(TypeError, match=r"loop_step: a lifted step cannot be copied or pickled"):
        copied(step)


@pytest.mark.parametrize("stage", ["Traced", "Lowered", "Compiled"])
def test_a_stage_is_copied_and_refuses_to_be_pickled(stage):
    lowered = zt.remat()(train_step).lower(STATE, X)
    by_name = {"Traced": lowered.traced, "Lowered": lowered, "Compiled": lowered.compile()}
    program = by_name[stage]
    assert str(copy.copy(program)) == str(copy.deepcopy(program)) == str(program)
    with pytest.raises(
        TypeError, match=rf"train_step: a {stage} cannot be pickled(?s:.*)step.with_plan\("
    ):
        pickle.dumps({"program": program})


def test_a_pickled_step_and_a_saved_plan_give_the_same_program(tmp_path):
    """As the error says."""
    lowered = zt.remat()(train_step).lower(STATE, X)
    lowered.plan.save(tmp_path / "plan.json")
    there = pickle.loads(pickle.dumps(zt.remat()(train_step)))
    again = there.with_plan(zt.Plan.load(tmp_path / "plan.json")).lower(STATE, X)
    assert str(again) == str(lowered)


def compiled_calls():
    step, lifted_step = zt.Step.of(train_step), zt.Step.of(lifted()[2])
    program = step.lower(STATE, X).compile()
    return {
        "step": (lambda: torch.compile(step, backend="eager"), STATE, X),
        "in a function": (
            lambda: torch.compile(lambda s, x: step(s, 2 * x), backend="eager"),
            STATE,
            X,
        ),
        "lifted": (lambda: torch.compile(lifted_step, backend="eager"), lifted()[3], batch(0)),
        "program": (lambda: torch.compile(program, backend="eager"), STATE, X),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["step", "in a function", "lifted", "program"])
def test_a_step_refuses_to_run_under_torch_compile(name):
    make, state, x = compiled_calls()[name]
    torch._dynamo.reset()
    with pytest.raises(
        TypeError, match=r"called under torch.compile(?s:.*)torch.compiler.disable\(step\)"
    ):
        make()(state, x)
    assert STATE["w"].tolist() == [0.0] * 3


@pytest.mark.filterwarnings("ignore")
def test_a_step_runs_beside_torch_compile():
    """As the error says: outside of Dynamo, or with a compiled function inside."""
    torch._dynamo.reset()
    outside = torch.compiler.disable(zt.Step.of(train_step))
    compiled = torch.compile(lambda s, x: outside(s, x * 2), backend="eager")
    for _ in range(2):
        assert compiled({"w": torch.zeros(3)}, X)[0]["w"].tolist() == [-2.0] * 3
    inside = torch.compile(lambda w, x: (w * x).sum(), backend="eager")
    step = zt.Step.of(lambda state, x: (state, inside(state["w"], x)))
    assert step({"w": torch.ones(3)}, X)[1] == 6.0


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**100])
def test_an_integer_of_more_than_64_bits_is_refused(number, tmp_path):
    def scaled(state, x, k):
        return state, x * k

    text = f"the number {number} does not fit into 64 bits"
    step = zt.Step.of(scaled)
    step({"w": torch.zeros(3)}, X, 2)
    with pytest.raises(OverflowError, match=text):
        step({"w": torch.zeros(3)}, X, number)
    with pytest.raises(OverflowError, match=text):
        zt.Step.of(scaled)({"w": torch.zeros(3), "n": number}, X, 2)
    with pytest.raises(OverflowError, match=text):
        zt.save(tmp_path / "a", {"n": number})


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
def test_integers_of_64_bits_pass(number):
    step = zt.Step.of(lambda state, x, k: (state, x * 0 + k))
    assert (
        step({"w": torch.zeros(3)}, torch.zeros(2, dtype=torch.int64), number)[1].tolist()
        == [number] * 2
    )
