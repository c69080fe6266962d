"""Compiled steps without a mesh: what is written in place, and what such a step refuses to write."""

import pytest
import torch

import ztrans as zt

X = torch.arange(3.0)


def step(state, x):
    return {"a": state["a"] + 1, "b": state["b"] * 2}, x * 1


def test_state_is_updated_in_place_and_batches_are_not():
    state, x = {"a": torch.zeros(3), "b": torch.ones(3)}, X.clone()
    new, output = zt.Step.of(step)(state, x)
    assert new["a"] is state["a"] and new["b"] is state["b"]
    assert state["a"].tolist() == [1, 1, 1] and state["b"].tolist() == [2, 2, 2]
    output.zero_()
    assert torch.equal(x, X)


def test_leaves_that_trade_places():
    run = zt.Step.of(lambda s, x: ({"a": s["b"], "b": s["a"]}, s["a"]))
    state, held = {"a": torch.zeros(3), "b": torch.ones(3)}, []
    for _ in range(3):
        state, output = run(state, X)
        held.append(output)
    assert state["a"].tolist() == [1, 1, 1] and state["b"].tolist() == [0, 0, 0]
    assert [h[0].item() for h in held] == [0, 1, 0], "an output is not the state, which the next step writes"


def test_one_value_for_two_leaves():
    run = zt.Step.of(lambda s, x: ({"a": s["a"] + 1, "b": s["a"] + 1}, s["a"] + 1))
    state, output = run({"a": torch.zeros(3), "b": torch.zeros(3)}, X)
    state["a"].zero_(), output.sub_(5)
    assert state["b"].tolist() == [1, 1, 1]


W = torch.zeros(6)
SHARED = {
    "a and b share memory": ({"a": W, "b": W}, X),
    "a and b share memory, ": ({"a": W[:4], "b": W[2:]}, X),
    "b and x share memory": ({"a": torch.zeros(3), "b": X}, X),
    "a is not contiguous": ({"a": torch.zeros(2, 3).t(), "b": W}, X),
}


@pytest.mark.parametrize("message", SHARED)
def test_leaves_that_cannot_be_written_in_place(message):
    state, x = SHARED[message]
    run = zt.Step.of(step)
    with pytest.raises(TypeError, match=rf"step: {message}.*\nCall `state = step.shard\(state\)` once"):
        run(state, x)
    own = run.shard(state)
    want = step(state, x)
    new, output = run(own, x)
    assert all(map(torch.equal, (*new.values(), output), (*want[0].values(), want[1])))
    assert torch.equal(W, torch.zeros(6)) and torch.equal(X, torch.arange(3.0))


def test_parts_of_one_buffer_can_be_written():
    flat = torch.zeros(6)
    zt.Step.of(step)({"a": flat[:3], "b": flat[3:]}, X)
    assert flat.tolist() == [1, 1, 1, 0, 0, 0]


def test_lockstep_takes_state_in_any_memory_order():
    run = zt.shard_params(zt.AbstractMesh(dp=2))(lambda s, x: (s * 2, (s.view(-1) * x.sum()).sum()))
    state = torch.randn(6, 4).t()
    new, _ = run.lower(state, X).lockstep(state, [(X,), (X,)])
    assert torch.equal(new, state * 2)


def test_a_compiled_step_is_for_its_flags():
    def flagged(state, batch):
        return state, batch["x"] * (2 if batch["twice"] else 1)

    compiled = zt.Step.of(flagged).lower(W, {"x": X, "twice": False}).compile()
    assert torch.equal(compiled(W, {"x": X, "twice": False})[1], X)
    with pytest.raises(TypeError, match=r"compiled for batch\.twice=False, called with True"):
        compiled(W, {"x": X, "twice": True})
