"""Numbers in lifted optimizers: step counts, bias corrections and rates have the bits of the untouched optimizer."""

import copy

import pytest
import torch
from test_lift import OPTIMIZERS, everything, loop, make_matrices, of, started
from torch import nn, optim

import ztrans as zt
from tests.support import optimizers as written
from tests.support.worlds import ALL, clone, distance, slices
from ztrans.tracing.tensor_scalars import with_tensor_scalar

# RAdam and ASGD choose between two updates by a value. Their capturable forms, which choose by torch.where, multiply in
# another order.
REORDERED = {"radam", "asgd"}
MORE = {
    "counting": lambda m: written.Counting(m.parameters()),
    "reading": lambda m: written.Reading(m.parameters()),
    "foreach": of("SGD", lr=0.1, momentum=0.9, foreach=True),
    "maximize": of("AdamW", lr=0.01, maximize=True, amsgrad=True),
}


class Small(nn.Module):
    """A model that also has a parameter without dims, and one with a single element."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale, self.shift = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        return self.body(x) * self.scale + self.shift


def batches(dtype, steps=8):
    torch.manual_seed(1)
    return [(torch.randn(12, 6).to(dtype), torch.randn(12, 4).to(dtype)) for _ in range(steps)]


def compare(make, make_optimizer, dtype, steps=8):
    """Run the untouched loop and the lifted step. Returns their distance, and the names of values whose bits differ."""
    model = make().to(dtype)
    optimizer = make_optimizer(model)
    lifted_model = copy.deepcopy(model)
    lifted_optimizer = make_optimizer(lifted_model)
    lifted_model.load_state_dict(model.state_dict()), lifted_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain, lifted_loop = loop(model, optimizer), loop(lifted_model, lifted_optimizer)
    step, state = zt.lift(lifted_loop, lifted_model, lifted_optimizer)
    run = zt.Step(step)
    state = run.shard(state)
    for batch in batches(dtype, steps):
        plain(*batch)
        state, _ = run(state, *batch)
    zt.restore(lifted_model, lifted_optimizer, state)
    mine, theirs = everything(lifted_model, lifted_optimizer), everything(model, optimizer)
    differ = [k for k in theirs if not torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k]))]
    assert len(run._cache) == 1, "counts and rates are inputs, so one program suffices"
    return distance(mine, theirs), differ


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_the_lifted_step_has_the_bits_of_the_loop(name, dtype):
    """Also with fp64 parameters, whose counts PyTorch stores in fp32 but computes with as Python numbers."""
    make_optimizer = {**OPTIMIZERS, **MORE}[name]
    error, differ = compare(make_matrices if name == "muon" else Small, make_optimizer, dtype)
    assert error <= (1e-6 if dtype == torch.float32 else 1e-12)
    assert not differ or name in REORDERED, differ


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "adagrad_initial", "adamax"])
def test_an_optimizer_that_has_taken_steps_has_the_bits_of_the_loop(name):
    """The step count is an input, so a program does not depend on where it starts."""
    assert compare(Small, started(OPTIMIZERS[name]), torch.float32)[1] == []


def test_bfloat16_parameters_have_the_bits_of_the_loop():
    """If 32 divides their sizes. PyTorch computes 32 elements at once, and rounds the remaining ones twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4, bias=False))
    for name in ("sgd", "momentum", "adam", "adamw", "rmsprop"):
        assert compare(lambda: copy.deepcopy(model), OPTIMIZERS[name], torch.bfloat16)[1] == [], name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["adamw", "nadam", "counting"])
def test_scalars_stay_fp64_on_several_ranks(name, stage):
    """The parameters are fp64 and the default dtype is fp32. A bias correction in fp32 would be off by 1e-5."""
    make_optimizer = {**OPTIMIZERS, **MORE}[name]
    model = Small().double()
    lifted_model = copy.deepcopy(model)
    optimizer, lifted_optimizer = make_optimizer(model), make_optimizer(lifted_model)
    plain, lifted_loop = loop(model, optimizer), loop(lifted_model, lifted_optimizer)
    step, state = zt.lift(lifted_loop, lifted_model, lifted_optimizer)
    data = batches(torch.float64)
    run = zt.chain(zt.shard_params(zt.AbstractMesh(dp=3), stage=stage), *ALL)(step)
    lowered, state = run.lower(state, *slices(data[0], 3)[0]), clone(state)
    for batch in data:
        plain(*batch)
        state, _ = lowered.lockstep(state, slices(batch, 3))
    zt.restore(lifted_model, lifted_optimizer, state)
    assert distance(everything(lifted_model, lifted_optimizer), everything(model, optimizer)) <= 1e-12


SIZES = [(), (1,), (7,), (16,), (33,), (1000,), (65, 67)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_a_tensor_scalar_gives_the_bits_of_a_python_number(shape, dtype):
    """With a Python number, PyTorch rounds the sum of a value and a scaled term only once."""
    x, y, z = (torch.randn(shape, dtype=dtype) for _ in range(3))
    number = -0.0123456789
    scalar = torch.tensor(number, dtype=torch.float64)
    for op, args, key in (("add", (y,), "alpha"), ("sub", (y,), "alpha"), ("addcmul", (y, z), "value"), ("addcdiv", (y, z), "value")):
        wanted = getattr(torch.Tensor, op)(x, *args, **{key: number})
        assert torch.equal(with_tensor_scalar(getattr(torch.Tensor, op), (x, *args), {key: scalar}), wanted), op
        changed = x.clone()
        with_tensor_scalar(getattr(torch.Tensor, f"{op}_"), (changed, *args), {key: scalar})
        assert torch.equal(changed, wanted), f"{op}_"
        results = with_tensor_scalar(getattr(torch, f"_foreach_{op}"), ([x, x], *([a, a] for a in args)), {key: scalar})
        assert all(torch.equal(e, wanted) for e in results), f"_foreach_{op}"


class Limits(optim.Optimizer):
    """Compares its rate with a limit, as a tensor, and chooses by the results."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            lr = torch.as_tensor(self.param_groups[0]["lr"], dtype=torch.float64)
            is_large, is_small = lr > 0.2, ~(lr > 0.05)
            p.sub_(p.grad * torch.where(is_large | is_small, torch.ones_like(lr), lr / 3))


def test_comparisons_of_numbers_are_bools():
    assert compare(Small, lambda m: Limits(m.parameters()), torch.float64) == (0.0, [])


def test_branching_on_a_number_is_refused():
    """A number that the optimizer reads may be used in arithmetic. An `if` on it is an error with the line."""

    class Chooses(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state.setdefault("step", torch.zeros(()))
                state["step"] += 1
                p.sub_(p.grad, alpha=0.1 if state["step"].item() > 3 else 0.01)

    model = Small()
    optimizer = Chooses(model.parameters())
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(ValueError, match=r"reads a tensor's value(?s:.)*test_scalars.py:\d+"):
        zt.Step(step).trace(state, *batches(torch.float32)[0])


def test_reading_a_value_outside_of_the_optimizer_is_refused():
    """`.item()` in the loop itself is refused. PyTorch's flag `is_compiling` is restored."""
    model = Small()
    optimizer = of("AdamW", lr=0.1)(model)
    plain = loop(model, optimizer)

    def loop_step(x, y):
        assert torch.compiler.is_compiling()
        loss = plain(x, y)
        assert torch.compiler.is_compiling()
        return loss.item()

    step, state = zt.lift(loop_step, model, optimizer)
    with pytest.raises(ValueError, match="reads a tensor's value"):
        zt.Step(step).trace(state, *batches(torch.float32)[0])
    assert not torch.compiler.is_compiling()

