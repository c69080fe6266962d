"""Side effects of a step on Python objects while it is traced.

They are undone. They are an error or a warning with the name and the user's line, unless they are harmless.
"""

from __future__ import annotations

import functools
import itertools
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.lifted import loop_of

HERE = Path(__file__).name
X, S = torch.linspace(-1, 1, 6).view(2, 3), torch.zeros(1)
COUNT, LOSSES, SEEN, LAST = 0, [], {}, None
RNG, OLDER, OWN = np.random.default_rng(3), np.random.RandomState(4), random.Random(5)
BITS, SYSTEM = np.random.PCG64(6), random.SystemRandom()


def line(function, marker):
    """`test_leaks.py:<line>` of the first line after the function's or class's head that contains `marker`."""
    text = Path(__file__).read_text().splitlines()
    start = next(i for i, row in enumerate(text) if row.strip().startswith((f"def {function}(", f"class {function}(")))
    return f"{HERE}:{next(i for i, row in enumerate(text[start:], start + 1) if marker in row)}"


class Mean(nn.Module):
    """A module that keeps a running mean in a plain attribute."""

    def __init__(self, first):
        super().__init__()
        self.mean, self.layer = first, nn.Linear(3, 3)

    def forward(self, x):
        mean = x.mean(0).detach()
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return self.layer(x) - self.mean


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


MODULES = {"none": Mean(None), "zero": Mean(0.0), "counts": Counts()}


def lifted(model):
    """A function that traces the lifted training loop of `model`."""
    sgd = optim.SGD([*model.parameters()] or [nn.Parameter(S.clone())], lr=0.1)
    step, state = zt.lift(loop_of(model, sgd), model, sgd)
    return lambda: zt.Step.of(step).trace(state, X)


def counts(state, x):
    global COUNT
    COUNT += 1
    return state, x


def collects(state, x):
    LOSSES.append(x.sum())
    return state, x


def collects_numbers(state, x):
    SEEN[len(SEEN)] = 1
    return state, x


def carries(state, x):
    global LAST
    LAST = x.sum() if LAST is None else LAST + x.sum()
    return state, LAST


def calling(model):
    return lambda state, x: (state, model(x))


def closure():
    seen = 0

    def step(state, x):
        nonlocal seen
        seen = seen + 1
        return state, x

    return step


REFUSED = {
    "a global": ("COUNT", lambda: zt.Step.of(counts).trace(S, X), line("counts", "COUNT += 1")),
    "a list": ("LOSSES", lambda: zt.Step.of(collects).trace(S, X), line("collects", "LOSSES.append")),
    "a dict": ("SEEN", lambda: zt.Step.of(collects_numbers).trace(S, X), line("collects_numbers", "SEEN[len")),
    "a tensor": ("LAST", lambda: zt.Step.of(carries).trace(S, X), line("carries", "LAST = ")),
    "a closure": ("seen", lambda: zt.Step.of(closure()).trace(S, X), line("closure", "seen = seen + 1")),
    "a mean": ("model.mean", lifted(MODULES["none"]), line("forward", "self.mean = ")),
    "a mean from zero": ("model.mean", lifted(MODULES["zero"]), line("forward", "self.mean = ")),
    "a count": ("model.calls", lambda: zt.Step.of(calling(MODULES["counts"])).trace(S, X), line("Counts", "self.calls += 1")),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_side_effect_that_the_program_would_not_repeat_is_refused_and_undone(kind):
    name, run, at = REFUSED[kind]
    for _ in range(2):  # the second trace raises the same error, as the first leaves no effect
        with pytest.raises(ValueError, match=rf" changes {name} while it is traced, and its program will not do so again") as e:
            run()
        assert f"{at} " in str(e.value)
    assert (COUNT, LOSSES, SEEN, LAST, MODULES["counts"].calls) == (0, [], {}, None, 0)
    assert MODULES["none"].mean is None and MODULES["zero"].mean == 0.0


class Auxiliary(nn.Module):
    """A module that stores a term of the loss in an attribute, and sets a flag in its first call."""

    def __init__(self):
        super().__init__()
        self.layer, self.term, self.ready = nn.Linear(3, 3), None, False

    def forward(self, x):
        if not self.ready:
            self.ready = True
        y = self.layer(x)
        self.term = y.square().mean()
        return y


def test_an_attribute_that_a_step_writes_before_it_reads_it_is_a_warning():
    """As the auxiliary loss of a mixture of experts, or features that a hook stores. Outside they cannot be read."""
    torch.manual_seed(0)
    model, features = Auxiliary(), {}
    model.layer.register_forward_hook(lambda _, __, y: features.update(layer=y))
    sgd = optim.SGD(model.parameters(), lr=0.1)

    def loop_step(x):
        sgd.zero_grad()
        loss = model(x).mean() + model.term + features["layer"].abs().mean()
        loss.backward()
        sgd.step()
        return loss

    step, state = zt.lift(loop_step, model, sgd)
    run = zt.Step.of(step)
    state = run.shard(state)
    with pytest.warns(UserWarning) as warned:
        state, got = run(state, X)
    messages = sorted(str(w.message) for w in warned)
    assert len(messages) == 2 and all("leaves a tensor in" in text and HERE in text for text in messages)
    assert "model.term while it is traced. Its program does not do so: after a step, model.term is what" in messages[1]
    assert "features['layer']" in messages[0]
    assert model.term is None and not model.ready and features == {}
    losses = [got, run(state, X)[1]]
    assert len(run._cache) == 1
    assert torch.allclose(torch.stack(losses), torch.stack([loop_step(X).detach() for _ in range(2)]))


@pytest.mark.slow
def test_a_cache_that_keeps_a_tensor():
    """The trace that fills the cache warns. The next trace would read a tensor without values, and is refused."""

    @functools.lru_cache
    def mask(n):
        return torch.ones(n, n).tril()

    def step(state, x):
        return state, x @ mask(3)

    with pytest.warns(UserWarning, match="step leaves a tensor in a .* while it is traced") as told:
        zt.Step.of(step).trace(S, X)
    assert line("mask", "tril()") in str(told[0].message)
    with pytest.raises(ValueError, match=r"step reads a tensor \[3, 3\] that an earlier trace left") as e:
        zt.Step.of(step).trace(S, X[:1])
    assert line("test_a_cache_that_keeps_a_tensor", "x @ mask") in str(e.value)


DRAWS = {
    "random": lambda x: x * random.random(),
    "a choice": lambda x: x if random.choice([True, False]) else -x,
    "numpy": lambda x: x * float(np.random.rand()),
    "numpy in a call": lambda x: x + sum(float(v) for v in np.random.permutation(3)),
    "a generator of numpy's": lambda x: x * float(RNG.normal()),
    "an older generator of numpy's": lambda x: x * float(OLDER.rand()),
    "the bits of a generator": lambda x: x * float(BITS.random_raw() % 7),
    "a generator of Python's": lambda x: x * OWN.uniform(0, 1),
    "a seed": lambda x: (random.seed(3), x)[1],
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_python_are_refused_at_their_line(name):
    draw = DRAWS[name]

    def step(state, x):
        y = x + 1
        y = draw(y)
        return state, y.sum()

    states = lambda: (random.getstate(), str([np.random.get_state(), OLDER.get_state()]), RNG.bit_generator.state, BITS.state, OWN.getstate())
    before = states()
    with pytest.raises(ValueError, match="step draws a random number of Python's or NumPy's, which would be drawn once") as e:
        zt.Step.of(step).trace(S, X)
    number = next(n for n, row in enumerate(Path(__file__).read_text().splitlines(), 1) if f'"{name}": lambda' in row)
    assert f"{HERE}:{number} " in str(e.value) and "torch.rand(())" in str(e.value)
    assert states() == before


def test_a_generator_of_the_system_is_a_warning():
    def step(state, x):
        return state, x.sum() * SYSTEM.random()

    with pytest.warns(UserWarning, match="step reads SYSTEM, a random.SystemRandom. It has no state.*draw outside") as caught:
        zt.Step.of(step).trace(S, X)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_step_that_prints_is_a_warning(capsys):
    def prints(state, x):
        y = x * 2
        print("mean", y.mean())
        for k in range(2):
            print(k)
        return state, y

    with pytest.warns(UserWarning, match="prints prints while it is traced, and its program will not") as told:
        run = zt.Step.of(prints)
        run(S.clone(), X)
    assert [line("prints", marker) in str(w.message) for w, marker in zip(told, ('"mean"', "print(k)"), strict=True)] == [True] * 2
    assert capsys.readouterr().out.count("\n") == 3
    run(S.clone(), X)
    assert not capsys.readouterr().out


def test_a_failed_trace_undoes_its_side_effects():
    model = Auxiliary()

    def fails(state, x):
        random.random()
        return state, model(x).item()

    state = random.getstate()
    with pytest.raises(ValueError, match="reads a tensor"):
        zt.Step.of(fails).trace(S, X)
    assert model.term is None and not model.ready and random.getstate() == state


def test_attributes_that_torchs_own_modules_write_are_allowed():
    """A recurrent layer keeps a list of its weights, and weight norm computes an attribute before every forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.LSTM(4, 3))
    sgd = optim.SGD(model.parameters(), lr=0.1)

    def loop_step(x):
        sgd.zero_grad()
        loss = model(x)[0].square().mean()
        loss.backward()
        sgd.step()
        return loss

    step, state = zt.lift(loop_step, model, sgd)
    run = zt.Step.of(step)
    state, got = run(run.shard(state), X)
    assert torch.allclose(got, loop_step(X).detach())


@pytest.mark.parametrize("n", [8, 9])
def test_a_list_of_any_length_that_is_made_anew_by_every_call_is_refused(n):
    table = {"rates": [0.0] * n}

    def step(state, x):
        rates = torch.tensor(table["rates"])
        table["rates"] = [1.0] * n
        return state, x * rates

    with pytest.raises(ValueError, match="table"):
        zt.Step.of(step)(S.clone(), torch.ones(n))


def forever():
    while True:
        yield 2.0


ITERATORS = {
    "a generator": forever,
    "a list's": lambda: iter([1.0, 2.0]),
    "a count": lambda: itertools.count(1),
    "a cycle": lambda: itertools.cycle([1.0, 2.0]),
    "enumerate": lambda: enumerate([1.0, 2.0]),
    "zip": lambda: zip([1.0], [2.0]),
    "a loader's": lambda: iter(torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2)),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_a_step_that_takes_the_next_value_of_an_iterator_is_refused(kind):
    """The iterator stays where it was, wherever the step finds it."""
    batches = ITERATORS[kind]()
    held, entries = types.SimpleNamespace(batches=batches), {"batches": batches}

    def of_closure(state, x):
        return state, x * next(batches)

    def of_object(state, x):
        return state, [x * batch for _, batch in zip(range(1), held.batches)]

    def of_dict(state, x):
        return state, x * next(entries["batches"])

    for step, name in ((of_closure, "batches"), (of_object, "held"), (of_dict, "entries")):
        with pytest.raises(ValueError, match=rf"takes the next value of an iterator, {name}, while it is traced") as e:
            zt.Step.of(step).trace(S, X)
        assert line(step.__name__, "return state") in str(e.value)
        assert str(e.value).endswith("Call next(...) outside of the step, and pass the value in as an argument.")
    assert held.batches is batches is entries["batches"]
    assert str(next(batches)) == str(next(ITERATORS[kind]()))


def test_an_iterator_among_defaults_and_arguments_is_refused():
    batches = forever()

    def by_default(state, x, batches=batches):
        return state, x * next(batches)

    with pytest.raises(ValueError, match="takes the next value of an iterator, a default of by_default") as e:
        zt.Step.of(by_default).trace(S, X)
    assert line("by_default", "def by_default") in str(e.value)
    with pytest.raises(TypeError, match=r"holds a builtins.generator, which is neither.*\nCall next\(...\) outside of the"):
        zt.Step.of(by_default)(S, X, forever())


def forks(x):
    with torch.random.fork_rng():
        return x + torch.rand(3)


def seeds(x):
    torch.manual_seed(1)
    return x + torch.rand(3)


def replays(x):
    state = torch.get_rng_state()
    y = F.dropout(x)
    torch.set_rng_state(state)
    return y - F.dropout(x)


SEEDING = {
    "fork_rng": (forks, "torch.random.fork_rng"),
    "manual_seed": (seeds, "torch.manual_seed"),
    "set_rng_state": (replays, "torch.set_rng_state"),
}


@pytest.mark.parametrize("called", SEEDING)
def test_a_step_that_sets_the_state_of_a_generator_of_pytorch_is_refused(called):
    """Also if the state is as before after the step. A checkpoint, which would do the same, is recomputed."""
    f, marker = SEEDING[called]
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf" uses torch\.random\.{called}, which is no input of the program") as e:
        zt.Step.of(calling(f)).trace(S, X)
    assert line(f.__name__, marker) in str(e.value) and "seed it outside of the step" in str(e.value)
    assert torch.equal(torch.get_rng_state(), before)
    checkpointed = lambda state, x: (state, checkpoint(F.dropout, x, use_reentrant=False, preserve_rng_state=True))
    zt.Step.of(checkpointed).trace(S, X.clone().requires_grad_())
