"""Compiled steps: which state is updated in place, and which state a step refuses because it cannot be."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import ztrans as zt
from ztrans import backends, compiled
from ztrans.runtime.executable import executable

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


def test_a_step_may_exchange_two_leaves():
    run = zt.Step.of(lambda s, x: ({"a": s["b"], "b": s["a"]}, s["a"]))
    state, held = {"a": torch.zeros(3), "b": torch.ones(3)}, []
    for _ in range(3):
        state, output = run(state, X)
        held.append(output)
    assert state["a"].tolist() == [1, 1, 1] and state["b"].tolist() == [0, 0, 0]
    assert [h[0].item() for h in held] == [0, 1, 0], (
        "the next step overwrites the state, but not an output"
    )


def test_two_leaves_with_one_new_value_get_memory_of_their_own():
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
def test_leaves_that_cannot_be_written_in_place_are_refused(message):
    state, x = SHARED[message]
    run = zt.Step.of(step)
    with pytest.raises(
        TypeError, match=rf"step: {message}.*\nCall `state = step.shard\(state\)` once"
    ):
        run(state, x)
    own = run.shard(state)
    want = step(state, x)
    new, output = run(own, x)
    assert all(map(torch.equal, (*new.values(), output), (*want[0].values(), want[1])))
    assert torch.equal(W, torch.zeros(6)) and torch.equal(X, torch.arange(3.0))


def test_leaves_may_be_parts_of_one_buffer():
    flat = torch.zeros(6)
    zt.Step.of(step)({"a": flat[:3], "b": flat[3:]}, X)
    assert flat.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_step_may_return_the_conjugate_of_its_state():
    """A lazy conjugate shares the memory of its tensor and differs only in a flag, so it must be computed."""
    run = zt.Step.of(lambda z, x: (z.conj(), (z.conj() * x).sum()))
    z, x = torch.complex(X, X + 1), torch.complex(X, X * 2)
    want = z.conj().resolve_conj()
    new, output = run(z.clone(), x.conj())
    assert torch.equal(new, want) and torch.equal(output, (want * x.conj()).sum())
    with pytest.raises(
        TypeError, match="z is conjugated or negated only when it is read, and a step writes"
    ):
        run(z.clone().conj(), x)
    assert torch.equal(run(run.shard(z.clone().conj()), x)[0], z)


def test_lockstep_takes_state_in_any_memory_order():
    run = zt.shard_params(zt.AbstractMesh(dp=2))(lambda s, x: (s * 2, (s.view(-1) * x.sum()).sum()))
    state = torch.randn(6, 4).t()
    new, _ = run.lower(state, X).lockstep(state, [(X,), (X,)])
    assert torch.equal(new, state * 2)


def test_a_compiled_step_refuses_another_flag():
    def flagged(state, batch):
        return state, batch["x"] * (2 if batch["twice"] else 1)

    compiled = zt.Step.of(flagged).lower(W, {"x": X, "twice": False}).compile()
    assert torch.equal(compiled(W, {"x": X, "twice": False})[1], X)
    with pytest.raises(TypeError, match=r"batch\.twice was False and is True"):
        compiled(W, {"x": X, "twice": True})


def test_a_leaf_inside_a_batch_is_refused_also_if_another_batch_lies_between_them():
    memory = torch.arange(100.0)
    run = zt.Step.of(lambda state, *batch: ({"w": state["w"] + 1000}, sum(x.sum() for x in batch)))
    with pytest.raises(TypeError, match="share memory"):
        run({"w": memory[30:40]}, memory, memory[10:20])


def test_leaves_that_begin_to_share_memory_are_refused():
    """As when a target network is set to the trained network, instead of to a copy of it."""
    run = zt.Step.of(step)
    state, _ = run({"a": torch.zeros(3), "b": torch.ones(3)}, X)
    state["b"] = state["a"]
    with pytest.raises(TypeError, match="step: a and b share memory"):
        run(state, X)
    state["b"] = state["a"].clone()
    assert run(state, X)[0]["b"].tolist() == [2, 2, 2]


def test_numpy_scalars_are_numbers():
    def scaled(state, x, rate, times):
        return state - rate * x, x * times

    run = zt.Step.of(scaled)
    for rate in (np.float32(0.5), 0.5, np.float64(0.25)):
        state, output = run(torch.zeros(3), X, rate, np.int64(2))
        assert torch.allclose(state, -float(rate) * X) and torch.equal(output, 2 * X)
    assert len(run._cache) == 1
    with pytest.raises(
        TypeError, match=r"an argument holds a numpy.ndarray.*\nMake it a tensor: torch.as_tensor"
    ):
        run(torch.zeros(3), X.numpy(), 0.5, 2)


@pytest.mark.parametrize("leaf", ["adam", True, None])
def test_a_state_leaf_must_be_a_tensor_or_a_number(leaf):
    with pytest.raises(
        TypeError, match=rf"state leaf s.ema is {leaf!r}, which is neither a tensor nor a number"
    ):
        zt.Step.of(lambda s, x: (s, x)).shard({"ema": leaf})
    with pytest.raises(TypeError, match=r"(?s)state leaf s.ema is.*Leave it out of the state"):
        zt.Step.of(lambda s, x: (s, x))({"w": X, "ema": leaf}, X)


def test_a_step_may_not_return_none_for_a_leaf():
    with pytest.raises(ValueError, match=r"was given state.ema: f32\[3\] and returned None"):
        zt.Step.of(lambda state, x: ({"ema": None}, None)).trace({"ema": X}, X)


def differentiated(state, x):
    """A step whose leaves must require gradients, as those of `model.named_parameters()` do."""
    (g,) = torch.autograd.grad((state["w"] @ x).square().sum(), [state["w"]])
    return {"w": state["w"] - 0.1 * g}, 0.0


@pytest.fixture
def mesh():
    yield zt.make_mesh("cpu", dp=1)
    torch.distributed.destroy_process_group()


def test_sharded_leaves_require_gradients_if_the_full_ones_do(mesh):
    w = torch.eye(3, requires_grad=True)
    want = differentiated({"w": w}, X)[0]["w"].detach()
    for run in (zt.Step.of(differentiated), zt.shard_params(mesh)(differentiated)):
        state = run.shard({"w": w})
        assert state["w"].requires_grad and torch.equal(w, torch.eye(3))
        for _ in range(2):
            state, _ = run(state, X)
        wanted, _ = differentiated({"w": want.clone().requires_grad_()}, X)
        assert torch.allclose(run.unshard(state)["w"], wanted["w"])


@pytest.mark.parametrize("source", [None, 0])
def test_shard_copies(mesh, source):
    """Also replicated leaves, leaves sent from one rank, and leaves that are sharded already."""
    run = zt.shard_params(mesh, stage=0)(step)
    own = {"a": torch.zeros(3), "b": torch.ones(3)}
    state = run.shard(own, source=source)
    kept = run.shard(state)
    run(state, X)
    for untouched in (own, run.unshard(kept)):
        assert untouched["a"].tolist() == [0, 0, 0] and untouched["b"].tolist() == [1, 1, 1]


def test_shard_changes_the_layout_of_a_sharded_state(mesh):
    whole, cut = (zt.shard_params(mesh, stage=stage)(step) for stage in (0, 3))
    state = cut.shard(whole.shard({"a": torch.zeros(3), "b": torch.ones(3)}))
    second_mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("host", "dp"))
    for layout in (state, cut.shard(zt.shard_params(second_mesh)(step).shard(state))):
        assert cut(layout, X)[0]["a"].full_tensor().tolist() == [1, 1, 1]
    with pytest.raises(
        ValueError, match="shard: source=1 on a mesh of 2 axes; only its first rank"
    ):
        zt.shard_params(second_mesh)(step).shard({"a": X, "b": X}, source=1)


def test_a_module_that_holds_a_compiled_step_can_be_copied():
    """The copy binds the program anew."""
    step = zt.Step.of(lambda state, x: (state + x, state.sum()))
    compiled = step.lower(torch.ones(2), torch.ones(2)).compile()
    compiled(torch.ones(2), torch.ones(2))
    same, total = copy.deepcopy(compiled)(torch.ones(2), torch.ones(2))
    assert same.tolist() == [2, 2] and total == 2


def test_traced_and_lowered_steps_are_keys():
    traced = zt.Step.of(step).trace({"a": torch.zeros(3), "b": torch.ones(3)}, X)
    lowered = traced.lower()
    assert len({traced, traced}) == 1 and len({lowered, lowered}) == 1


@pytest.mark.parametrize("device", [None, torch.device("cuda", 1)], ids=str)
def test_the_gpu_of_the_state_is_the_current_one_while_a_step_is_bound_and_run(monkeypatch, device):
    """Streams and events are made, and kernels of Triton launched, on the current device."""
    current = [0]

    @contextlib.contextmanager
    def device_index(index):
        current.append(current[-1] if index is None else index)
        yield
        current.pop()

    bound_on, ran_on = [], []

    def bind(graph, mesh, on_write, groups, device):
        bound_on.append(current[-1])
        run = executable(graph, mesh, on_write, groups)
        return lambda inputs: ran_on.append(current[-1]) or run(inputs)

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(compiled, "device_of", lambda inputs: device)
    monkeypatch.setattr(backends, "executable", bind)
    step = zt.Step.of(lambda state, x: (state - 0.1 * x, x.sum()))
    state = torch.ones(3)
    for _ in range(2):
        state, _ = step(state, torch.ones(3))
    index = 0 if device is None else 1
    assert (bound_on, ran_on, current) == ([index], [index] * 2, [0])
