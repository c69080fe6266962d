"""Numbers of lifted optimizers are inputs: step counts, bias corrections, rates and betas of the untouched optimizer."""

import copy
import math

import pytest
import torch
from test_lift import OPTIMIZERS, everything, loop, make_matrices, of, started
from torch import nn, optim

import ztrans as zt
from tests.support import optimizers as written
from tests.support.worlds import ALL, clone, distance, slices
from ztrans.lift.numbers import Numbers
from ztrans.tracing.tensor_scalars import with_tensor_scalar

FUSED = [name for name in OPTIMIZERS if name.endswith("_fused")]
MORE = {
    "counting": started(lambda m: written.Counting(m.parameters())),
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
    """Run the untouched loop and the lifted step. Returns their distance, and the names of values whose bits differ.

    Ordinary training goes on from the state that is written back, and the distance is also that after its next step.
    """
    model = make().to(dtype)
    optimizer = make_optimizer(model)
    lifted_model = copy.deepcopy(model)
    lifted_optimizer = make_optimizer(lifted_model)
    (
        lifted_model.load_state_dict(model.state_dict()),
        lifted_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    )
    plain, lifted_loop = loop(model, optimizer), loop(lifted_model, lifted_optimizer)
    step, state = zt.lift(lifted_loop, lifted_model, lifted_optimizer)
    run = zt.Step(step)
    state = run.shard(state)
    for batch in batches(dtype, steps):
        plain(*batch)
        state, _ = run(state, *batch)
    zt.write_back(lifted_model, lifted_optimizer, state)
    mine, theirs = everything(lifted_model, lifted_optimizer), everything(model, optimizer)
    differ = [
        k for k in theirs if not torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k]))
    ]
    assert len(run._cache) == 1, "counts and rates are inputs, so one program suffices"
    assert mine.keys() == theirs.keys()
    plain(*batch), lifted_loop(*batch)
    after = distance(everything(lifted_model, lifted_optimizer), everything(model, optimizer))
    return max(distance(mine, theirs), after), differ


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_the_lifted_step_agrees_with_the_loop(name, dtype):
    """Fused optimizers have its bits. Others run in their capturable form, which computes in another order."""
    make_optimizer = {**OPTIMIZERS, **MORE}[name]
    error, differ = compare(make_matrices if name == "muon" else Small, make_optimizer, dtype)
    assert error <= 1e-6
    assert not differ or name not in FUSED, differ


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FUSED, "adam", "nadam", "adagrad_initial", "adamax"])
def test_an_optimizer_that_has_taken_steps_agrees_with_the_loop(name):
    """The step count is an input, so a program does not depend on where it starts."""
    error, differ = compare(Small, started(OPTIMIZERS[name]), torch.float32)
    assert error <= 1e-6
    assert not differ or name not in FUSED, differ


def test_bfloat16_parameters_have_the_bits_of_the_loop():
    """If 32 divides their sizes. PyTorch computes 32 elements at once, and rounds the remaining ones twice.

    The first step of its own fused SGD leaves a part of a buffer in bf16 as it was allocated.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4, bias=False))
    for name in ("sgd", "momentum", "adamw_fused", "adagrad_fused"):
        assert compare(lambda: copy.deepcopy(model), OPTIMIZERS[name], torch.bfloat16)[1] == [], (
            name
        )


def test_betas_of_bfloat16_parameters_are_not_rounded():
    """PyTorch's Adam would round a beta that is a tensor to bf16: 0.999 would be 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4, bias=False))
    error, _ = compare(
        lambda: copy.deepcopy(model), of("AdamW", lr=0.01, betas=(0.999, 0.999)), torch.bfloat16
    )
    assert error <= 2e-2


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
    zt.write_back(lifted_model, lifted_optimizer, state)
    assert distance(everything(lifted_model, lifted_optimizer), everything(model, optimizer)) <= (
        1e-12 if name == "adamw" else 1e-7
    )


SIZES = [(), (1,), (7,), (16,), (33,), (1000,), (65, 67)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SIZES for dtype in (torch.float32, torch.float64)]
    # In half precision a kernel rounds the elements after the last 32 twice.
    + [((64, 9), dtype) for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_a_tensor_scalar_gives_the_bits_of_a_python_number(shape, dtype):
    """With a Python number, PyTorch rounds the sum of a value and a scaled term only once."""
    x, y, z = (torch.randn(shape, dtype=dtype) for _ in range(3))
    number = -0.0123456789
    scalar = torch.tensor(number, dtype=torch.float64)
    for op, args, key in (
        ("add", (y,), "alpha"),
        ("sub", (y,), "alpha"),
        ("addcmul", (y, z), "value"),
        ("addcdiv", (y, z), "value"),
    ):
        wanted = getattr(torch.Tensor, op)(x, *args, **{key: number})
        assert torch.equal(
            with_tensor_scalar(getattr(torch.Tensor, op), (x, *args), {key: scalar}), wanted
        ), op
        changed = x.clone()
        with_tensor_scalar(getattr(torch.Tensor, f"{op}_"), (changed, *args), {key: scalar})
        assert torch.equal(changed, wanted), f"{op}_"
        results = with_tensor_scalar(
            getattr(torch, f"_foreach_{op}"), ([x, x], *([a, a] for a in args)), {key: scalar}
        )
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


class Rows(optim.Optimizer):
    """Keeps in its groups what is no float: a shape, and a function of one gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "shape": (-1, 2), "scaled": torch.sign})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            rows = p.grad.flatten()[: p.numel() // 2 * 2].view(group["shape"])
            p.sub_(group["scaled"](p.grad), alpha=group["lr"])
            p.sub_(rows.sum() * 1e-3)


def test_shapes_and_functions_among_hyperparameters_are_constants():
    assert compare(Small, lambda m: Rows(m.parameters()), torch.float64)[0] <= 1e-12


class Chooses(optim.Optimizer):
    """Reads its step count as a Python number: to choose by it, to make a tensor of it, or to compute with it."""

    def __init__(self, params, number):
        super().__init__(params, {"lr": 0.1})
        self.number = number

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("step", torch.zeros(()))
            state["step"] += 1
            p.sub_(p.grad, alpha=self.number(state["step"]))


READS = {
    "if": lambda step: 0.1 if step.item() > 3 else 0.01,
    "float": lambda step: 0.1 / torch.tensor(float(step)),
    "math": lambda step: 0.1 / math.sqrt(step),
}


@pytest.mark.parametrize("number", READS.values(), ids=READS)
def test_an_optimizer_that_reads_a_number_is_refused(number):
    model = make_matrices()
    optimizer = Chooses(model.parameters(), number)
    loop(model, optimizer)(*batches(torch.float32)[0])
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    message = r"reads a tensor's value(?s:.)*test_numbers.py:\d+.*\nChooses.step\(\) reads it as a Python number(?s:.)*torch.as_tensor\(step\)"
    with pytest.raises(ValueError, match=message):
        zt.Step(step).trace(state, *batches(torch.float32)[0])


def test_an_optimizer_computes_with_its_count_as_a_tensor():
    def make_optimizer(model):
        return Chooses(model.parameters(), lambda step: 0.1 / torch.as_tensor(step).sqrt())

    assert compare(Small, started(make_optimizer), torch.float32)[0] <= 1e-6


class Aliased(optim.Optimizer):
    """Adds to a name of its count, and then uses another name of it, as one may with Python numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("count", 0)
            count = before = state["count"]
            count += 1
            rate = self.param_groups[0]["lr"]
            rate *= 0.5**before
            p.sub_(p.grad * rate)
            state["count"] = count


def test_a_number_is_not_changed_in_place():
    assert compare(Small, started(lambda m: Aliased(m.parameters())), torch.float64)[0] <= 1e-12


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_quotient_is_rounded_down(dtype):
    model = nn.Linear(3, 2).to(dtype)
    with torch.no_grad():
        model.weight.fill_(30.0)
    optimizer = written.Floored(model.parameters())
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    new, _ = zt.Step(step)(clone(state), torch.ones(4, 3, dtype=dtype), torch.ones(4, 2))
    assert torch.equal(new["params"]["weight"], torch.full((2, 3), 4.0, dtype=dtype))


def test_a_number_on_the_left_is_not_rounded_to_half_precision():
    torch.manual_seed(0)
    number = torch.tensor(0.97, dtype=torch.float64)
    x = torch.randn(1000).bfloat16()
    with Numbers([(number, 1)]):
        left = number * x
        right = x * number
    assert torch.equal(left, 0.97 * x) and torch.equal(right, x * 0.97)
