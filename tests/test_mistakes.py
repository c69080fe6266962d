"""Mistakes that newcomers make: each error, or warning, names the line, the cause and the way out."""

import contextlib
import dataclasses
import logging
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.lifted import loop_of

HERE = Path(__file__).name
MESH = zt.AbstractMesh(dp=2)
STATE = {"w": torch.ones(8)}
X = torch.randn(4, 8)


@pytest.fixture
def mesh():
    yield zt.make_mesh("cpu", dp=1)
    torch.distributed.destroy_process_group()


def line(marker: str) -> str:
    """`test_mistakes.py:<line>` of the only line with this comment."""
    rows = Path(__file__).read_text().splitlines()
    return f"{HERE}:{next(i for i, row in enumerate(rows, 1) if row.endswith(f'# {marker}'))}"


def train_step(state, x):
    grad, loss = grad_and_value(lambda w: (x @ w).square().mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad}, loss


def lifted(model, optimizer=torch.optim.SGD, target=4, **options):
    optimizer = optimizer(model.parameters(), lr=0.1, **options)

    def loop_step(x):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :target])  # a line of the loop
        loss.backward()  # where the loop takes gradients
        optimizer.step()
        return loss

    return loop_step, zt.lift(loop_step, model, optimizer)


# ---- decorators


@pytest.mark.parametrize(
    "transform, call",
    [
        (zt.shard_params, "@zt.shard_params(mesh)"),
        (zt.overlap_grads, "@zt.overlap_grads()"),
        (zt.prefetch, "@zt.prefetch()"),
        (zt.fuse_cast_gather, "@zt.fuse_cast_gather()"),
        (zt.quantize_gathers, "@zt.quantize_gathers()"),
        (zt.quantize_grads, "@zt.quantize_grads()"),
        (zt.remat, "@zt.remat()"),
        (zt.delay_weight_grads, "@zt.delay_weight_grads()"),
    ],
)
def test_a_transform_above_a_step_without_a_call_is_refused(transform, call):
    with pytest.raises(TypeError) as e:

        @transform  # without a call
        def decorated(state, x):
            return state, x

    assert f"{call[4:].partition('(')[0]}: applied to decorated without a call" in str(e.value)
    assert line("without a call") in str(e.value) and f"Write {call}: " in str(e.value)


def test_an_option_that_is_passed_without_its_name_is_named():
    with pytest.raises(
        TypeError, match="If this function is an option, name it, one of where, memory"
    ):
        zt.offload(lambda path, leaf: "exp_avg" in path)


def test_a_step_that_was_decorated_is_named_too():
    with pytest.raises(TypeError, match="prefetch: applied to train_step without a call"):
        zt.prefetch(zt.shard_params(MESH)(train_step))


def test_shard_params_without_a_mesh_is_refused():
    with pytest.raises(
        TypeError,
        match=r"the mesh is 8, which is neither a DeviceMesh nor.*\nMake one: zt.make_mesh",
    ):
        zt.shard_params(8)


class Trainer:
    def __init__(self):
        self.model = nn.Linear(8, 1)

    def of_a_module(self, state, x):
        return state, self.model(x).mean()  # a module in self

    def without_a_state(self, x):
        return self.model(x).mean()


def test_a_method_that_reads_a_module_from_self_is_refused():
    with pytest.raises(
        ValueError, match=r"of_a_module reads a tensor \[1, 8\] .* neither its state nor its batch"
    ) as e:
        zt.shard_params(MESH)(Trainer().of_a_module).trace(STATE, X)
    assert line("a module in self") in str(e.value)
    assert "torch.func.functional_call(module, state['params'], args)" in str(e.value)


def test_a_method_that_takes_no_state_is_refused(mesh):
    step = zt.shard_params(mesh)(Trainer().without_a_state)
    with pytest.raises(
        TypeError, match=r"(?s)x: expected a DTensor.*takes its state first; zt\.lift"
    ):
        step(X)


# ---- inside a step


@pytest.mark.parametrize(
    "use", [np.exp, np.asarray, lambda x: x.numpy() * 2, lambda x: x.sum().numpy()]
)
def test_numpy_inside_a_step_is_refused(use):
    def computes(state, x):
        return state, torch.as_tensor(use(x)).sum()  # numpy

    with pytest.raises(RuntimeError, match=r"trace: computes: (numpy|__array__) failed") as e:
        zt.Step.of(computes).trace(STATE, X)
    assert HERE in str(
        e.value
    ) and "compute with torch inside the step, or with NumPy outside" in str(e.value)


def test_an_array_of_numpy_is_fixed_when_the_step_is_traced():
    array = np.ones(8, dtype=np.float32)

    def takes(state, x):
        return state, (
            x + torch.from_numpy(array) + torch.tensor(array) + torch.as_tensor(array)
        ).sum()

    step = zt.Step.of(takes)
    torch.testing.assert_close(step(dict(STATE), X)[1], (X + 3).sum())
    array[:] = 2
    torch.testing.assert_close(step(dict(STATE), X)[1], (X + 3).sum())
    torch.testing.assert_close(zt.Step.of(takes)(dict(STATE), X)[1], (X + 6).sum())


def test_a_wrong_feature_dim_names_the_line_and_the_leaves(caplog):
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))
    _, (step, state) = lifted(model)
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError) as e:
        zt.Step.of(step).trace(state, torch.randn(4, 7))
    text = str(e.value)
    assert text.startswith(
        "trace: loop_step: linear failed: a and b must have same reduction dim, but got [4, 7] X"
    )
    assert line("a line of the loop") in text
    assert (
        "Its arguments are x: f32[4,7], params.0.weight: f32[32,8], params.0.bias: f32[32]." in text
    )
    assert text.endswith("call its function: step.fn(state, ...).")
    assert (
        not [r for r in caplog.records if r.levelno >= logging.WARNING]
        and not logging.getLogger("torch._subclasses.fake_tensor").disabled
    )


def test_leaves_have_their_names_inside_of_torch_func_too():
    with pytest.raises(
        RuntimeError,
        match=r"trace: train_step: matmul failed.*\n.*\nIts arguments are x: .*, w: f32\[8\]",
    ):
        zt.Step.of(train_step).trace(STATE, torch.randn(4, 7))


def test_errors_that_pytorch_raises_before_any_operation_have_the_line():
    def entropy(state, x, y):
        return state, F.cross_entropy(x, y)  # entropy

    with pytest.raises(
        ValueError, match=r"trace: entropy: cross_entropy failed: Expected input batch_size"
    ) as e:
        zt.Step.of(entropy).trace(STATE, X, torch.zeros(3, dtype=torch.int64))
    assert line("entropy") in str(e.value) and "x: f32[4,8], y: i64[3]" in str(e.value)


def test_errors_of_the_users_own_code_are_left_alone():
    def raises(state, x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        zt.Step.of(raises).trace(STATE, X)


def test_collecting_is_refused():
    losses = []

    def collects(state, x):
        losses.append(x.sum())  # collects
        return state, x.sum()

    text = r"(?s)collects changes what it reads.*losses was .*return what you want to see as output"
    with pytest.raises(ValueError, match=text) as e:
        zt.Step.of(collects).trace(STATE, X)
    assert line("collects") in str(e.value)


def test_reading_a_value_to_log_it_says_how():
    def logs(state, x):
        return state, x.sum().item()

    with pytest.raises(
        ValueError, match="To log a value, return its tensor as output, and read it after the step"
    ):
        zt.Step.of(logs).trace(STATE, X)


# ---- gradients


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_training_step_without_gradients_is_refused(off):
    _, (step, state) = lifted(nn.Linear(8, 4))
    with (
        off(),
        pytest.raises(
            ValueError, match=r"trace: loop_step takes gradients, and gradients are off"
        ) as e,
    ):
        zt.Step.of(step).trace(state, X)
    assert line("where the loop takes gradients") in str(e.value)
    assert "Call the step outside of torch.no_grad() and torch.inference_mode()" in str(e.value)


def test_a_frozen_model_has_no_gradients():
    model = nn.Linear(8, 4)
    _, (step, state) = lifted(model)
    model.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"(?s)the loss depends on nothing that requires a gradient.*leave requires_grad of at least one parameter on",
    ):
        zt.Step.of(step).trace(state, X)


def test_backward_in_a_pure_step_needs_a_leaf_that_requires_a_gradient():
    def stale(state, x):
        loss = (x @ state["w"]).square().mean()
        loss.backward()
        return {"w": state["w"] - 0.1 * state["w"].grad}, loss.detach()

    def as_advised(state, x):
        w = state["w"].detach().requires_grad_()
        loss = (x @ w).square().mean()
        loss.backward()
        return {"w": w.detach() - 0.1 * w.grad}, loss.detach()

    state, x = {"w": torch.ones(8)}, torch.randn(4, 8)
    with pytest.raises(ValueError) as error:
        zt.Step.of(stale)(state, x)
    assert "w = state['w'].detach().requires_grad_() before loss.backward() and w.grad" in str(
        error.value
    )
    expected = torch.func.grad(lambda w: (x @ w).square().mean())(state["w"])
    expected = state["w"] - 0.1 * expected
    torch.testing.assert_close(zt.Step.of(as_advised)(state, x)[0]["w"], expected)


def test_a_state_that_lacks_a_part_is_refused_with_the_name_of_the_part():
    model = nn.Linear(8, 4)
    _, (step, state) = lifted(model)
    evaluate, _ = zt.lift(torch.no_grad()(lambda x: model(x).sum()), model)
    part = {"params": state["params"], "buffers": state["buffers"]}
    assert zt.Step.of(evaluate)(part, X)[1].isfinite()
    with pytest.raises(
        TypeError, match="the state that loop_step was called with has no 'optimizer'"
    ):
        zt.Step.of(step)(part, X)
    with pytest.raises(TypeError, match="the state that <lambda> was called with has no 'buffers'"):
        zt.Step.of(evaluate)({"params": state["params"]}, X)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_steps_that_need_no_autograd_run_without_gradients(off):
    def evaluates(state, x):
        return state, (x @ state["w"]).square().mean()

    with off():
        _, loss = zt.Step.of(evaluates)(dict(STATE), X)
        new, same = zt.Step.of(train_step)({"w": STATE["w"].clone()}, X)
    expected, value = train_step(STATE, X)
    torch.testing.assert_close([loss, same, new["w"]], [value, value, expected["w"]])


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 4), reentrant

    def forward(self, x):
        hidden = checkpoint(
            self.first, x, use_reentrant=self.reentrant
        )  # does not require a gradient: see below
        return checkpoint(
            lambda h: self.second(h.tanh()), self.first(x) + hidden, use_reentrant=self.reentrant
        )


def test_a_reentrant_checkpoint_computes_what_the_untouched_loop_does():
    torch.manual_seed(0)
    model, twin = Checkpointed(True), Checkpointed(True)
    twin.load_state_dict(model.state_dict())
    untouched, _ = lifted(twin)
    _, (step, state) = lifted(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradients that the first checkpoint does not compute
        for x in (torch.randn(4, 8), torch.randn(4, 8)):
            state, loss = zt.Step.of(step)(state, x)
            assert torch.equal(loss, untouched(x))
    assert all(torch.equal(state["params"][name], p) for name, p in twin.named_parameters())


def test_sparse_gradients_and_their_optimizer_are_refused():
    model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step, state = zt.lift(loop_of(model, sgd), model, sgd)
    with pytest.raises(
        ValueError, match=r"backward makes a sparse gradient(?s:.)*Leave out sparse"
    ):
        zt.Step.of(step)(state, torch.tensor([1, 5, 5, 2]))
    sparse = torch.optim.SparseAdam([model[0].weight])
    with pytest.raises(
        ValueError, match=r"SparseAdam takes sparse gradients.*dense.\nUse torch.optim.Adam"
    ):
        zt.lift(loop_of(model, sparse), model, sparse)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_the_lifted_step_of_adamw_runs_without_a_transform(options):
    torch.manual_seed(0)
    model, twin = nn.Linear(8, 4), nn.Linear(8, 4)
    twin.load_state_dict(model.state_dict())
    _, (step, state) = lifted(model, torch.optim.AdamW, **options)
    untouched, _ = lifted(twin, torch.optim.AdamW, **options)
    for _ in range(3):
        x = torch.randn(4, 8)
        state, loss = step(state, x)
        assert torch.equal(loss, untouched(x))
    assert all(torch.equal(state["params"][name], p) for name, p in twin.named_parameters())


# ---- states


@dataclass
class TrainState:
    w: torch.Tensor


class Holder:
    def __init__(self):
        self.w = torch.ones(8)


@pytest.mark.parametrize(
    "state, way_out",
    [
        (TrainState(torch.ones(8)), r"torch\.export\.register_dataclass\(TrainState\)"),
        (Holder(), "Use a dict, a tuple or a registered dataclass for Holder"),
        (
            nn.Linear(8, 1),
            r"zt\.lift\(loop_step, module, optimizer\).*dict\(module\.named_parameters\(\)\)",
        ),
        (torch.optim.SGD([torch.ones(1)]), r"zt\.lift\(loop_step, module, optimizer\)"),
    ],
)
def test_a_state_that_pytorch_cannot_flatten_is_refused(state, way_out):
    def passes(state, x):
        return state, x.sum()

    step, name = (
        zt.shard_params(MESH)(passes),
        re.escape(f"{type(state).__module__}.{type(state).__qualname__}"),
    )
    for use in (step.trace, step.lower):
        with pytest.raises(TypeError, match=f"(?s)state.* a {name}, which is neither.*{way_out}"):
            use(state, X)


# ---- transforms of one's own


def test_a_transform_with_options_is_a_dataclass():
    class Clip(zt.Transform):
        def __init__(self, most):
            self.most = most

    class Annotated(zt.Transform):
        most: int = 1

    for make in (lambda: Clip(1), lambda: Clip(most=1), lambda: Annotated(most=2)):
        with pytest.raises(
            TypeError,
            match=r"a transform with options is a frozen dataclass.*\nWrite @dataclass\(froz",
        ):
            make()

    @dataclass(frozen=True)
    class Right(zt.Transform):
        most: int = 1

    class Plain(zt.Transform):
        pass

    assert Right(1) == Right() != Right(2) and Right(most=3).most == 3 and Plain() == Plain()
    assert dataclasses.replace(Right(1), most=2) == Right(2)


# ---- lockstep


def test_lockstep_refuses_other_sizes_and_other_numbers_of_batches():
    lowered = zt.shard_params(MESH)(train_step).lower(STATE, X)
    expected, _ = train_step(STATE, X)
    state, _ = lowered.lockstep(STATE, [(X,), (X,)])
    torch.testing.assert_close(state, expected)
    with pytest.raises(
        TypeError,
        match=r"lockstep, rank 1: its program .*:\n  \* x was f32\[4,8\] and is f32\[3,8\]\nLower",
    ):
        lowered.lockstep(STATE, [(X,), (X[:3],)])
    with pytest.raises(
        TypeError,
        match=r"lockstep, rank 0: its program .*:\n  \* state.w was f32\[8\] and is f32\[7\]",
    ):
        lowered.lockstep({"w": torch.ones(7)}, [(X,), (X,)])
    with pytest.raises(
        ValueError, match=r"3 batches for the 2 ranks of the mesh.\nPass a list with the batch"
    ):
        lowered.lockstep(STATE, [(X,)] * 3)
    with pytest.raises(ValueError, match=r"a Tensor for the 2 ranks"):
        lowered.lockstep(STATE, X)
    with pytest.raises(
        TypeError, match=r"the batch of rank 0 is a Tensor.\nPass its arguments as a tuple, \(x,\)"
    ):
        lowered.lockstep(STATE, [X, X])


# ---- meshes


@pytest.mark.parametrize(
    "args, sizes, error, text",
    [
        ((8,), {}, TypeError, r"the device is 8, .*\n.*zt\.make_mesh\('cpu', dp=8\)"),
        (
            (MESH,),
            {},
            TypeError,
            r"the device is AbstractMesh\(dp=2\), .*\n.*zt\.make_mesh\('cpu', dp=-1\)",
        ),
        (
            ("cpu",),
            {},
            ValueError,
            r"the mesh has no axes.\nName one: zt\.make_mesh\('cpu', dp=-1\)",
        ),
        (("cpu",), {"dp": "2"}, TypeError, r"dp='2'; a size is a number of ranks, or -1"),
        (("cpu",), {"dp": 0}, TypeError, "dp=0; a size is a number of ranks, or -1"),
        (("cpu",), {"dp": -1, "tp": -1}, ValueError, r"two sizes are -1, .*\nOne of them may be"),
    ],
)
def test_wrong_meshes_are_refused(args, sizes, error, text):
    with pytest.raises(error, match=f"make_mesh: {text}"):
        zt.make_mesh(*args, **sizes)


@pytest.fixture
def no_group(monkeypatch):
    """As in a new process: torch.distributed has not been started."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("RANK")


def test_a_world_size_without_a_rank_is_refused(no_group, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        RuntimeError,
        match=r"WORLD_SIZE is 4, and RANK is not set.*\nStart the script with torchrun",
    ):
        zt.make_mesh("cpu", dp=-1)
