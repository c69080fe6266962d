"""A step is a pure function: what it reads and the random generators are the same before and after a trace."""

from __future__ import annotations

import collections
import copy
import random
from pathlib import Path
from random import uniform

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.lifted import loop_of
from ztrans.calling.purity import ImpureStepError

HERE = Path(__file__).name
X = torch.linspace(-1, 1, 6).view(2, 3)
S = torch.zeros(1)
COUNT = 0
LAST = None


def line(function, marker):
    """The line of this file with `marker`, the first one after the head of a function or a class."""
    text = Path(__file__).read_text().splitlines()
    heads = (f"def {function}(", f"class {function}(")
    start = next(i for i, row in enumerate(text) if row.strip().startswith(heads))
    number = next(i for i, row in enumerate(text[start:], start + 1) if marker in row)
    return f"{HERE}:{number}"


def counts(state, x):
    global COUNT
    COUNT += 1
    return state, x


def counting():
    seen = 0

    def step(state, x):
        nonlocal seen
        seen = seen + 1
        return state, x

    return step


def collecting(values):
    def step(state, x):
        values.append(x.sum())
        return state, x

    return step


def growing(values):
    def step(state, x):
        values[len(values)] = 1
        return state, x

    return step


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Appears(nn.Module):
    def forward(self, x):
        self.seen = getattr(self, "seen", 0) + 1
        return x


def calling(module):
    return lambda state, x: (state, module(x))


REFUSED = {
    "a global": (counts, "COUNT was 1 and is 2", line("counts", "COUNT += 1")),
    "a closure": (counting(), "seen was 1 and is 2", line("counting", "seen = seen + 1")),
    "a list": (
        collecting([]),
        "values was [a Tensor] and is [a Tensor, a Tensor]",
        line("collecting", "values.append"),
    ),
    "a dict": (growing({}), "values was {0: 1} and is {0: 1, 1: 1}", line("growing", "values[len")),
    "an attribute": (
        calling(Counts()),
        "module.calls was 1 and is 2",
        line("Counts", "self.calls += 1"),
    ),
    "an attribute that appears": (
        calling(Appears()),
        "module.seen was 1 and is 2",
        line("Appears", "self.seen = "),
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_step_that_changes_what_it_reads_is_refused_at_its_line(kind):
    step, change, where = REFUSED[kind]
    with pytest.raises(ImpureStepError, match=r"^trace: \w+ changes what it reads, and its") as e:
        zt.Step.of(step).trace(S, X)
    assert f"  * {change} ({where} " in str(e.value)
    assert "count and collect outside of the step" in str(e.value)


class Prepares(nn.Module):
    """It sets a flag in its first run, and changes something then."""

    def __init__(self, prepare):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.prepare = prepare
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.prepare(self)
            self.ready = True
        return self.layer(x)


def test_a_module_may_prepare_itself_in_its_first_run():
    """A flag that it sets stays set, so a hook that it adds is added once, and the step is traced once."""
    torch.manual_seed(0)
    double = lambda model: model.layer.register_forward_hook(lambda module, args, y: y * 2)
    model = Prepares(double)
    step, state = zt.lift(lambda x: model(x).square().mean(), model)
    run = zt.Step.of(step)
    state = run.shard(state)
    losses = [run(state, x)[1] for x in (X, X, torch.cat([X, X]))]
    assert model.ready and len(model.layer._forward_hooks) == 1
    assert len(run._cache) == 2
    zt.write_back(model, (), state)
    wanted = model(X).square().mean()
    assert all(torch.allclose(loss, wanted) for loss in losses)


def test_steps_that_set_the_mode_of_a_module_are_traced_once_each():
    """A training step calls train(), an evaluation calls eval(): each finds the mode that the other one left."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    sgd = optim.SGD(model.parameters(), lr=0.1)
    runs = collections.deque()  # whose entries are no reads

    def train(x):
        runs.append("train")
        model.train()
        sgd.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        sgd.step()
        return loss

    @torch.no_grad()
    def evaluate(x):
        runs.append("evaluate")
        model.eval()
        return model(x).square().mean()

    step, state = zt.lift(train, model, sgd)
    training = zt.Step.of(step)
    evaluation = zt.Step.of(zt.lift(evaluate, model)[0])
    state = training.shard(state)
    model.eval()
    for _ in range(3):
        state, _ = training(state, X)
        state, _ = evaluation(state, X)
    assert list(runs) == ["train", "train", "evaluate", "evaluate"]
    model.train()
    state, _ = training(state, X)
    state, _ = evaluation(state, X)
    assert len(runs) == 4


class WarmsUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.warm = False

    def forward(self, x):
        y = x * 2 if self.warm else x + 1
        self.warm = True
        return y


def test_a_first_run_that_differs_from_the_others_is_refused():
    with pytest.raises(ImpureStepError, match="was traced twice, and its programs differ") as e:
        zt.Step.of(calling(WarmsUp())).trace(S, X)
    text = str(e.value)
    assert f"module.warm was False and is True ({line('WarmsUp', 'self.warm = True')} " in text
    assert "first:  add: f32[2,3] = add(x, 1)" in text
    assert "second: mul: f32[2,3] = mul(x, 2)" in text
    assert "If only the first run changes it, run that code once before the step." in text


class Auxiliary(nn.Module):
    """It stores a term of the loss in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.term = None

    def forward(self, x):
        y = self.layer(x)
        self.term = y.square().mean()
        return y


def test_an_attribute_that_a_step_writes_before_it_reads_it_is_allowed():
    """As the auxiliary loss of a mixture of experts, or features that a hook stores."""
    torch.manual_seed(0)
    model = Auxiliary()
    features = {}
    model.layer.register_forward_hook(lambda module, args, y: features.update(layer=y))
    sgd = optim.SGD(model.parameters(), lr=0.1)

    def loop_step(x):
        sgd.zero_grad()
        loss = model(x).mean() + model.term + features["layer"].abs().mean()
        loss.backward()
        sgd.step()
        return loss

    step, state = zt.lift(loop_step, model, sgd)
    initial = copy.deepcopy(state)
    run = zt.Step.of(step)
    state = run.shard(state)
    losses = []
    for _ in range(2):
        state, loss = run(state, X)
        losses.append(loss)
    assert len(run._cache) == 1
    zt.write_back(model, sgd, initial)
    assert torch.allclose(
        torch.stack(losses), torch.stack([loop_step(X).detach() for _ in range(2)])
    )


class Mean(nn.Module):
    """It keeps a running mean in a plain attribute."""

    def __init__(self, first):
        super().__init__()
        self.mean = first

    def forward(self, x):
        mean = x.mean(0).detach()
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return x - self.mean


@pytest.mark.parametrize("first", [None, 0.0])
def test_a_tensor_that_one_trace_leaves_is_not_read_in_the_next(first):
    step = calling(Mean(first))
    with pytest.raises(ValueError, match=r"reads a tensor \[3\] that an earlier trace left") as e:
        zt.Step.of(step).trace(S, X)
    assert line("Mean", "self.mean = mean if") in str(e.value)


DRAWS = {
    "random": ("Python's random", lambda x: x * random.random()),
    "a choice": ("Python's random", lambda x: x * random.choice([2.0, 3.0])),
    "numpy": ("numpy.random", lambda x: x * float(np.random.rand())),
    "a permutation": ("numpy.random", lambda x: x + float(np.random.permutation(9999)[0])),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_number_drawn_in_python_that_a_program_depends_on_is_refused(kind):
    generator, draw = DRAWS[kind]

    def step(state, x):
        y = x + 1
        for _ in range(20):
            y = draw(y)
        return state, y.sum()

    with pytest.raises(ImpureStepError, match="was traced twice, and its programs differ") as e:
        zt.Step.of(step).trace(S, X)
    assert f"  * it draws from {generator}\n  first:  " in str(e.value)
    row = next(
        row for row in Path(__file__).read_text().splitlines() if row.startswith(f'    "{kind}"')
    )
    number = Path(__file__).read_text().splitlines().index(row) + 1
    assert f"{HERE}:{number}" in str(e.value)
    assert str(e.value).endswith("or outside of it, and pass the number in as an argument.")


def test_a_draw_that_changes_nothing_is_allowed():
    """As the layers of a library that are skipped with probability 0."""

    def step(state, x):
        skip = np.random.uniform() < 0.0 or random.random() < 0.0
        return state, x if skip else x * 2

    run = zt.Step.of(step)
    for _ in range(2):
        assert torch.equal(run(S.clone(), X)[1], X * 2)
    assert len(run._cache) == 1


BRANCHES = {
    "a small probability": lambda: random.random() < 0.1,
    "a large probability": lambda: random.uniform(0, 1) < 0.9,
    "an imported function": lambda: uniform(0, 1) < 0.1,
    "a choice": lambda: random.choice([True, False]),
    "an integer": lambda: random.randrange(6) == 0,
    "numpy": lambda: np.random.rand() < 0.1,
    "an integer of numpy": lambda: np.random.randint(6) == 0,
}


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("seed", range(4))
def test_a_branch_that_depends_on_a_draw_is_refused_whatever_is_drawn(kind, seed):
    def step(state, x):
        return state, x * 2 if BRANCHES[kind]() else x

    random.seed(seed)
    np.random.seed(seed)
    with pytest.raises(ImpureStepError, match="draws from"):
        zt.Step.of(step).trace(S, X)


def test_a_trace_with_draws_advances_the_generators_once():
    def step(state, x):
        random.random()
        np.random.rand()
        return state, x

    random.seed(0)
    np.random.seed(0)
    zt.Step.of(step).trace(S, X)
    drawn = random.random(), np.random.rand()
    random.seed(0)
    np.random.seed(0)
    random.random()
    np.random.rand()
    assert drawn == (random.random(), np.random.rand())


def test_a_step_that_seeds_pytorch_is_refused_at_its_line():
    def step(state, x):
        torch.manual_seed(1)
        return state, x + torch.rand(3)

    with pytest.raises(ImpureStepError, match="step seeds torch's default generator or sets") as e:
        zt.Step.of(step).trace(S, X)
    where = line("test_a_step_that_seeds_pytorch_is_refused_at_its_line", "torch.manual_seed(1)")
    assert where in str(e.value) and "Seed it outside of the step" in str(e.value)


def test_a_checkpoint_that_keeps_the_random_state_is_allowed():
    dropped = lambda x: checkpoint(F.dropout, x, use_reentrant=False, preserve_rng_state=True)
    zt.Step.of(lambda state, x: (state, dropped(x))).trace(S, X.clone().requires_grad_())


@pytest.mark.slow
def test_attributes_that_torchs_own_modules_write_are_allowed():
    """A recurrent layer keeps a list of its weights, weight norm computes one before every forward."""
    torch.manual_seed(0)
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    model = nn.Sequential(linear, nn.LSTM(4, 3))
    sgd = optim.SGD(model.parameters(), lr=0.1)

    def loop_step(x):
        sgd.zero_grad()
        loss = model(x)[0].square().mean()
        loss.backward()
        sgd.step()
        return loss

    step, state = zt.lift(loop_step, model, sgd)
    run = zt.Step.of(step)
    _, loss = run(run.shard(state), X)
    zt.write_back(model, sgd, state)
    assert torch.allclose(loss, loop_step(X).detach()) and len(run._cache) == 1


def test_nothing_that_python_does_while_a_step_is_traced_is_undone(capsys):
    seen = []

    def fails(state, x):
        print("traced")
        seen.append(x.sum())
        return state, x.sum().item()

    with pytest.raises(ValueError, match="reads a tensor"):
        zt.Step.of(fails).trace(S, X)
    assert len(seen) == 1 and capsys.readouterr().out == "traced\n"


def test_a_lifted_loop_that_counts_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), Counts())
    sgd = optim.SGD(model.parameters(), lr=0.1)
    step, state = zt.lift(loop_of(model, sgd), model, sgd)
    with pytest.raises(ImpureStepError, match=r"model\.1\.calls was 1 and is 2"):
        zt.Step.of(step).trace(state, X)


def test_two_closures_of_one_function_are_told_apart():
    """They have the same names and lines. Here the first one counts, and the second one does not run."""

    def counter():
        calls = 0

        def count(x):
            nonlocal calls
            calls += 1
            return x

        return count

    first, second = counter(), counter()

    def step(state, x):
        return state, (first(x) if x.ndim else second(x)).sum()

    with pytest.raises(
        ImpureStepError, match=r"step changes what it reads(?s:.)*calls was 1 and is 2"
    ):
        zt.Step(step).trace({}, torch.ones(2))
