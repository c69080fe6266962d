"""None in a state is an empty subtree, in every stage of a step: it is no leaf, and comes back in its place."""

import re

import pytest
import torch
import torch.distributed as dist

import ztrans as zt
from ztrans.calling.call import BoundCall
from ztrans.calling.signature import Surroundings

X = torch.arange(24.0).view(8, 3) / 24
MESH = zt.AbstractMesh(dp=2)


def step(state, x):
    """SGD of a linear layer, with or without a bias, with a momentum of its weight alone."""
    w, bias, (momentum, none) = state["params"]["w"], state["params"]["bias"], state["momentum"]
    trained = [w] if bias is None else [w, bias]
    y = x @ w if bias is None else x @ w + bias
    loss = y.square().mean()
    grads = torch.autograd.grad(loss, trained)
    momentum = 0.9 * momentum + grads[0]
    new = {"w": w - 0.1 * momentum, "bias": None if bias is None else bias - 0.1 * grads[1]}
    return {"params": new, "momentum": (momentum, none)}, (loss.detach(), None)


def first(bias=None):
    torch.manual_seed(0)
    params = {"w": torch.randn(3, 2).requires_grad_(), "bias": bias}
    return {"params": params, "momentum": (torch.zeros(3, 2), None)}


def truth(steps, bias=None):
    """The results of the untouched step."""
    state, output = first(bias), None
    for _ in range(steps):
        state, output = step(state, X)
        state["params"] = {
            k: x if x is None else x.detach().requires_grad_() for k, x in state["params"].items()
        }
    return state, output


def assert_same(results, wanted, tolerance=0.0):
    (state, (loss, none)), (state_wanted, (loss_wanted, _)) = results, wanted
    assert none is None and state["momentum"][1] is None and [*state] == [*state_wanted]
    assert [x is None for x in state["params"].values()] == [
        x is None for x in state_wanted["params"].values()
    ]
    for x, y in [
        (loss, loss_wanted),
        (state["momentum"][0], state_wanted["momentum"][0]),
        *((state["params"][k], y) for k, y in state_wanted["params"].items() if y is not None),
    ]:
        assert (x - y).abs().max() <= tolerance


def test_a_step_has_no_input_for_it_and_returns_it():
    run = zt.Step.of(step)
    traced = run.trace(first(), X)
    assert [v.name for v in traced.graph.inputs] == ["params.w", "momentum.0", "x"]
    results = run(run.shard(first()), X)
    assert run._cache.match(BoundCall(results[0], (X,)), Surroundings.of(run._function)) is not None
    assert_same(run(results[0], X), truth(2))
    assert len(run._cache) == 1


def test_a_leaf_in_its_place_is_another_structure():
    run = zt.Step.of(step)
    state, _ = run(first(), X)
    for bias in (torch.ones(2).requires_grad_(), None, torch.ones(2).requires_grad_()):
        state["params"]["bias"] = bias
        state, _ = run(state, X)
        assert (state["params"]["bias"] is None) == (bias is None)
    assert len(run._cache) == 2
    assert_same(
        run(first(torch.ones(2).requires_grad_()), X), truth(1, torch.ones(2).requires_grad_())
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda s: s["params"].update(bias=torch.ones(2)),
            "called with state.params.bias, which it was compiled without",
        ),
        (
            lambda s: s.update(momentum=(None, None)),
            "called without state.momentum.0, which it was compiled with",
        ),
        (
            lambda s: s.update(momentum=(None, torch.ones(3, 2))),
            "called with state.momentum.1, .*; called without state.momentum.0",
        ),
        (
            lambda s: s.update(momentum=(s["momentum"][0],)),
            "compiled for arguments TreeSpec.*, called with TreeSpec",
        ),
    ],
)
def test_a_compiled_program_says_which_leaf_is_new_or_missing(change, message):
    compiled = zt.Step.of(step).lower(first(), X).compile()
    state, _ = compiled(first(), X)
    change(state)
    with pytest.raises(
        TypeError, match=f"(?s)step: {message}.*\nLower the step for such arguments"
    ):
        compiled(state, X)


def test_a_step_may_not_put_a_leaf_in_its_place():
    def filled(state, x):
        return {**state, "b": x.sum()}, 0.0

    with pytest.raises(ValueError, match=re.escape("new: ['b']")):
        zt.Step.of(filled).trace({"a": X, "b": None}, X)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_in_lockstep(stage):
    run = zt.shard_params(MESH, stage=stage)(step)
    lowered = run.lower(first(), X[:4])
    state, outputs = lowered.lockstep(first(), [(X[:4],), (X[4:],)])
    assert_same((state, outputs[0]), truth(1), 1e-6)


def test_micro_batches_and_a_divided_batch_with_none():
    def with_mask(state, x, mask):
        assert mask is None
        return step(state, x)

    run = zt.accumulate(2)(with_mask)
    assert_same(run(first(), X, None), truth(1), 1e-6)


def test_the_laws_hold_for_a_state_with_it():
    zt.testing.check_laws(zt.remat(), step, first(), (X,))


@pytest.fixture
def mesh():
    yield zt.make_mesh("cpu", dp=1)
    dist.destroy_process_group()


def test_shard_unshard_save_and_load(mesh, tmp_path):
    run = zt.shard_params(mesh)(step)
    state, _ = run(run.shard(first()), X)
    whole = run.unshard(state)
    assert_same((whole, truth(1)[1]), truth(1))
    zt.save(tmp_path / "a", state).result()
    meta = {"params": {"w": torch.empty(3, 2, device="meta").requires_grad_(), "bias": None}}
    meta["momentum"] = (torch.empty(3, 2, device="meta"), None)
    loaded = zt.load(tmp_path / "a", meta, run)
    state, output = run(loaded, X)
    assert_same((run.unshard(state), output), truth(2))
    meta["params"]["bias"] = torch.empty(2, device="meta")
    with pytest.raises(ValueError, match=r"The checkpoint does not have params.bias\."):
        zt.load(tmp_path / "a", meta, run)
    state["params"]["bias"] = torch.ones(2)
    with pytest.raises(TypeError, match=r"state.params.bias: expected a DTensor \[2\] laid out"):
        run(state, X)
