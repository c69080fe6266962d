"""Values that a step reads besides its arguments.

If one changes, the step is traced anew, and a program that is called directly raises an error.
"""

from __future__ import annotations

import argparse
import collections
import functools
import re
import types
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.func import grad

import ztrans as zt
from tests.support import hyper
from tests.support.hyper import Config, scaled

HERE = Path(__file__).name
TAPS = np.array([1.0, 2.0])
RATE, MODE, TABLE, ITEMS = 0.1, "sum", {"x": 1.0, "deep": [1.0]}, [1.0, 2.0]


@dataclass
class Hyper:
    rate: float = 1.0


@dataclass
class Slotted:
    __slots__ = ("rate",)
    rate: float


class Base:
    offset = 0.5

    def halved(self, x):
        return x / 2 + self.offset


class Loss(Base):
    """A callable that reads attributes and a property, and calls methods of its own class and of its base class."""

    power = 2.0

    def __init__(self):
        self._scale = 1.0

    @property
    def scale(self):
        return self._scale

    def __call__(self, x):
        return self.halved(x) ** self.power * self.scale

    def halved(self, x):
        return super().halved(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.gain = nn.Dropout(0.5), 2.0

    def forward(self, x):
        return self.drop(x) * self.gain


def inner(x):
    return x * RATE


def decorated(f):
    @functools.wraps(f)
    def wrapper(*args):
        return f(*args)

    return wrapper


@decorated
def behind(x):
    return sum(y * FAR for y in [x])


FAR = 3.0
HYPER, SLOTTED, ARGS, LOSS, MODEL = Hyper(), Slotted(1.0), argparse.Namespace(rate=1.0), Loss(), Model().eval()


def closure():
    rate, deep = 0.1, 1.0
    power = functools.partial(lambda x, p, offset: x * p + offset, p=2.0, offset=1.0)

    def step(state, x, times=2.0, *, plus=1.0):
        nested = lambda y: y * deep
        total = inner(x) * rate + nested(x) * times + plus + power(x)
        total = total + hyper.factor + scaled(x) + Config.decay + HYPER.rate + SLOTTED.rate + ARGS.rate
        total = total + TABLE["deep"][0] + ITEMS[0] + behind(x) + LOSS(x) + MODEL(x) + float(TAPS.sum()) + grad(lambda z: (z * rate).sum())(x)
        return state, total.sum() if MODE == "sum" else total.mean()

    def change(**values):
        nonlocal rate, deep
        rate, deep = values.get("rate", rate), values.get("deep", deep)

    return step, change, power


def replaced(name, value):
    """Sets a global of this module, as `RATE = 0.2` does in a script."""
    return lambda *_: globals().update({name: value})


CHANGES = {
    "rate was 0.1 and is 0.2": lambda step, change, _: change(rate=0.2),
    "deep was 1.0 and is 4.0": lambda step, change, _: change(deep=4.0),
    "RATE was 0.1 and is 0.3": replaced("RATE", 0.3),
    "MODE was 'sum' and is 'mean'": replaced("MODE", "mean"),
    "FAR was 3.0 and is True": replaced("FAR", True),
    "inner is another object": replaced("inner", lambda x: x * 5),
    "HYPER is another object": replaced("HYPER", Hyper(7.0)),
    "TABLE was {'x': 1.0, 'deep': [1.0]} and is {'x': 1.0, 'deep': [9.0]}": lambda *_: TABLE["deep"].__setitem__(0, 9.0),
    "ITEMS was [1.0, 2.0] and is [5.0, 2.0]": lambda *_: ITEMS.__setitem__(0, 5.0),
    "TAPS was": lambda *_: TAPS.__setitem__(0, 5.0),
    "hyper.factor was 2.0 and is 4.0": lambda *_: setattr(hyper, "factor", 4.0),
    "Config.decay was 0.5 and is 0.25": lambda *_: setattr(Config, "decay", 0.25),
    "HYPER.rate was 1.0 and is 2.0": lambda *_: setattr(HYPER, "rate", 2.0),
    "SLOTTED.rate was 1.0 and is 2.0": lambda *_: setattr(SLOTTED, "rate", 2.0),
    "ARGS.rate was 1.0 and is 2.0": lambda *_: setattr(ARGS, "rate", 2.0),
    "LOSS._scale was 1.0 and is 2.0": lambda *_: setattr(LOSS, "_scale", 2.0),
    "LOSS.offset was 0.5 and is 0.75": lambda *_: setattr(Base, "offset", 0.75),
    "LOSS.power was 2.0 and is 3.0": lambda *_: setattr(LOSS, "power", 3.0),
    "MODEL.gain was 2.0 and is 3.0": lambda *_: setattr(MODEL, "gain", 3.0),
    "MODEL.drop.p was 0.5 and is 0.0": lambda *_: setattr(MODEL.drop, "p", 0.0),
    "a default of step was [2.0] and is [3.0]": lambda step, *_: setattr(step, "__defaults__", (3.0,)),
    "a default of step was {'plus': 1.0} and is {'plus': 2.0}": lambda step, *_: setattr(step, "__kwdefaults__", {"plus": 2.0}),
    "the keywords of power was {'p': 2.0, 'offset': 1.0} and is {'p': 4.0, 'offset': 1.0}": lambda step, _, power: power.keywords.update(p=4.0),
}  # fmt: skip


@pytest.fixture
def restored():
    """Restores every setting after the test."""
    kept = [(owner, dict(vars(owner))) for owner in (HYPER, ARGS, LOSS, MODEL, MODEL.drop, hyper)]
    names = {name: globals()[name] for name in ("RATE", "MODE", "FAR", "inner", "HYPER")}
    yield
    for owner, values in kept:
        vars(owner).clear()
        vars(owner).update(values)
    globals().update(names)
    TAPS[0] = 1.0
    ITEMS[0], TABLE["deep"][0], SLOTTED.rate, Config.decay, Base.offset = 1.0, 1.0, 1.0, 0.5, 0.5


X = torch.linspace(-1, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_traced_anew(restored, change):
    """The step agrees with the plain function before and after the change. Without a change nothing is traced."""
    step, *rest = closure()
    run = zt.Step.of(step)
    compiled = run.lower(torch.zeros(1), X).compile()
    for _ in range(2):
        assert torch.equal(run(torch.zeros(1), X)[1], step(torch.zeros(1), X)[1])
    assert len(run._cache) == 1
    CHANGES[change](step, *rest)
    for _ in range(2):
        assert torch.equal(run(torch.zeros(1), X)[1], step(torch.zeros(1), X)[1])
    assert len(run._cache) == 2
    with pytest.raises(TypeError, match=r"step: what the step reads besides its arguments has changed since it was") as e:
        compiled(torch.zeros(1), X)
    assert f"* {change}" in str(e.value)
    assert str(e.value).endswith("Lower it again, or call the step itself, which is then traced anew.")


class Table:
    """A callable of settings, which Python reads without naming a method."""

    def __init__(self):
        self.entries = {"rate": 1.0}

    def __getitem__(self, key):
        return self.entries[key]

    def __float__(self):
        return self.entries["rate"]

    def __enter__(self):
        return self.entries["rate"]

    def __exit__(self, *_):
        pass


@dataclass
class Deep:
    hyper: Hyper


class Name(str):
    pass


def inside(x):
    from tests.support import hyper as imported

    return x * imported.factor


def entered(settings, x):
    with settings.table as rate:
        return x * rate


READS = {
    "an attribute by its name": (lambda c, x: x * getattr(c, "rate", 1.0), lambda c: setattr(c, "rate", 2.0)),
    "all attributes of a namespace": (lambda c, x: x * vars(c)["rate"], lambda c: setattr(c, "rate", 2.0)),
    "all fields of a dataclass": (lambda c, x: x * asdict(c.deep)["hyper"]["rate"], lambda c: setattr(c.deep.hyper, "rate", 2.0)),
    "a module imported inside": (lambda c, x: inside(x), lambda c: setattr(hyper, "factor", 3.0)),
    "an item of an object": (lambda c, x: x * c.table["rate"], lambda c: c.table.entries.update(rate=2.0)),
    "an object as a number": (lambda c, x: x * float(c.table), lambda c: c.table.entries.update(rate=2.0)),
    "an object as a context": (entered, lambda c: c.table.entries.update(rate=2.0)),
    "a slice": (lambda c, x: x[c.rows], lambda c: setattr(c, "rows", slice(0, 2))),
    "a range": (lambda c, x: x * sum(c.steps), lambda c: setattr(c, "steps", range(4))),
    "a list of many lists": (lambda c, x: x * c.rows_of_three[79][2], lambda c: c.rows_of_three[79].__setitem__(2, 5.0)),
    "a deque": (lambda c, x: x * sum(c.last), lambda c: c.last.append(5.0)),
    "a read-only mapping": (lambda c, x: x * c.fixed["rate"], lambda c: c.below.update(rate=2.0)),
    "a truth value of NumPy": (lambda c, x: x * 2 if c.flag else x, lambda c: setattr(c, "flag", np.bool_(True))),
    "a string of a class": (lambda c, x: x.sum() if c.mode == "sum" else x, lambda c: setattr(c, "mode", Name("sum"))),
}  # fmt: skip


@pytest.mark.parametrize("how", READS)
def test_what_a_step_reads_in_other_ways_is_compared_too(restored, how):
    below = {"rate": 1.0}
    settings = argparse.Namespace(
        rate=1.0, deep=Deep(Hyper()), table=Table(), rows=slice(1, 2), steps=range(3), last=collections.deque([1.0], maxlen=2), below=below,
        fixed=types.MappingProxyType(below), flag=np.bool_(False), mode=Name("none"),
        rows_of_three=[[1.0, 2.0, 3.0] for _ in range(80)],
    )  # fmt: skip
    reads, change = READS[how]
    step = lambda state, x: (state, reads(settings, x))
    run = zt.Step.of(step)
    first = run(torch.zeros(1), X)[1]
    assert torch.equal(first, step(torch.zeros(1), X)[1])
    change(settings)
    assert not torch.equal(step(torch.zeros(1), X)[1], first)
    assert torch.equal(run(torch.zeros(1), X)[1], step(torch.zeros(1), X)[1])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.settings = 1.0, {}

    def forward(self, x):
        return (x * self.factor if self.training else x * 3 * self.factor).sum()


ARGUMENTS = {
    "a function": (lambda x: (x * RATE).sum(), lambda f: globals().update(RATE=5.0)),
    "the mode of a module": (Scaled(), lambda m: m.eval()),
    "an attribute of a module": (Scaled(), lambda m: setattr(m, "factor", 2.0)),
    "an object": (LOSS, lambda loss: setattr(loss, "_scale", 4.0)),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_an_argument_reads_is_compared_too(restored, kind):
    criterion, change = ARGUMENTS[kind]
    step = lambda state, x, criterion: (state, criterion(x))
    run = zt.Step.of(step)
    compiled = run.lower(torch.zeros(1), X + 1, criterion).compile()
    compiled(torch.zeros(1), X + 1, criterion)
    for _ in range(2):
        assert torch.equal(run(torch.zeros(1), X + 1, criterion)[1], step(torch.zeros(1), X + 1, criterion)[1])
    assert len(run._cache) == 1
    change(criterion)
    assert torch.equal(run(torch.zeros(1), X + 1, criterion)[1], step(torch.zeros(1), X + 1, criterion)[1])
    assert len(run._cache) == 2
    with pytest.raises(TypeError, match="step: a value that the step reads in its argument criterion has changed"):
        compiled(torch.zeros(1), X + 1, criterion)


def test_an_object_that_knows_its_attributes_only(restored):
    class Strict:
        def __init__(self):
            self.__dict__["entries"] = {"rate": 1.0}

        def __getattr__(self, name):
            return self.entries[name]

    settings = Strict()
    run = zt.Step.of(lambda state, x: (state, x * settings.rate))
    assert torch.equal(run(torch.zeros(1), X)[1], X)
    settings.entries["rate"] = 2.0
    assert torch.equal(run(torch.zeros(1), X)[1], X * 2)


def test_the_error_names_the_line_that_reads_the_value(restored):
    step, change, _ = closure()
    lowered = zt.Step.of(step).lower(torch.zeros(1), X)
    change(rate=0.5)
    number = next(n for n, row in enumerate(Path(__file__).read_text().splitlines(), 1) if "inner(x) * rate" in row)
    for call in (lambda: lowered.lockstep(torch.zeros(1), [(X,)]), lambda: lowered.compile().profile(torch.zeros(1), X)):
        with pytest.raises(TypeError, match=re.escape(f"rate was 0.1 and is 0.5 ({HERE}:{number} closure.<locals>.step)")):
            call()
    change(rate=0.1)
    assert torch.equal(lowered.lockstep(torch.zeros(1), [(X,)])[1][0], step(torch.zeros(1), X)[1])


def test_lockstep_refuses_another_flag():
    lowered = zt.Step.of(lambda s, x, twice: (s, x * (2 if twice else 1))).lower(torch.zeros(1), X, False)
    with pytest.raises(TypeError, match=r"compiled for twice=False, called with True"):
        lowered.lockstep(torch.zeros(1), [(X, True)])
    with pytest.raises(TypeError, match=r"called with arg3, which it was compiled without.*\nLower the step for such arguments"):
        lowered.lockstep(torch.zeros(1), [(X, False, 3)])


def test_a_change_around_a_lifted_loop_is_noticed():
    """Of a number in the loop's closure, of the module's mode, and of a setting of the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    sgd, weight = optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 1.0

    def loop_step(x):
        sgd.zero_grad()
        loss = (model(x) * weight).square().mean()
        loss.backward()
        sgd.step()
        return loss

    model.eval()
    step, state = zt.lift(loop_step, model, sgd)
    run, x = zt.Step.of(step), torch.ones(2, 4)
    compiled = run.lower(run.shard(state), x).compile()
    first = run(run.shard(state), x)[1]
    for change, text in (
        (lambda: sgd.param_groups[0].update(momentum=0.5), "a setting of the module or of an optimizer has changed"),
        (model.train, r"model.training was False and is True"),
    ):
        change()
        with pytest.raises(TypeError, match=text):
            compiled(run.shard(state), x)
    model.eval()
    weight = 3.0
    assert torch.allclose(run(run.shard(state), x)[1], 9 * first)


def test_the_places_that_a_step_reads_are_searched_once(restored):
    """Later calls only compare the values there. Of a long container only the length is compared."""
    data = list(range(100_000))
    run = zt.Step.of(lambda s, x: (s, x * len(data)))
    run(torch.zeros(1), X)
    (readings,) = run._captured._readings
    run(torch.zeros(1), X)
    assert run._captured._readings == [readings]
    data.append(1)
    assert torch.equal(run(torch.zeros(1), X)[1], X * 100_001)


def test_a_container_may_contain_itself():
    ring = [1.0]
    ring.append(ring)
    run = zt.Step.of(lambda s, x: (s, x * ring[0]))
    run(torch.zeros(1), X)
    ring[0] = 2.0
    assert torch.equal(run(torch.zeros(1), X)[1], X * 2)


def test_attributes_that_a_step_does_not_read_do_not_matter():
    settings = argparse.Namespace(rate=1.0, seen=0)
    run = zt.Step.of(lambda s, x: (s, x * settings.rate))
    for k in range(3):
        settings.seen = k
        run(torch.zeros(1), X)
    assert len(run._cache) == 1


def times_five(*arguments):
    return arguments[-1] * 5


REPLACED = {
    "the code of inner": ("the code of inner is another object", lambda: setattr(inner, "__code__", times_five.__code__)),
    "the code of a method": ("the code of halved", lambda: setattr(Base.halved, "__code__", times_five.__code__)),
    "a method": ("LOSS.halved is another object", lambda: setattr(Base, "halved", times_five)),
    "a method of one object": ("LOSS.halved is another object", lambda: setattr(LOSS, "halved", times_five)),
    "forward of a class": ("MODEL.forward is another object", lambda: setattr(Model, "forward", times_five)),
    "forward of a module": ("MODEL.forward is another object", lambda: setattr(MODEL, "forward", times_five)),
    "forward of a library's": ("MODEL.drop.forward is another object", lambda: setattr(MODEL.drop, "forward", times_five)),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_code_that_is_replaced_is_noticed(restored, kind):
    """As `%autoreload 2` does it, and as code does that patches a class or an object."""
    text, replace = REPLACED[kind]
    step, *_ = closure()
    run, kept = zt.Step.of(step), (inner.__code__, Base.halved, Base.halved.__code__, Model.forward)
    compiled = run.compiled(torch.zeros(1), X + 1)
    first = run(torch.zeros(1), X + 1)[1]
    try:
        replace()
        for _ in range(2):
            assert torch.equal(run(torch.zeros(1), X + 1)[1], step(torch.zeros(1), X + 1)[1])
        assert not torch.equal(run(torch.zeros(1), X + 1)[1], first)
        assert len(run._cache) == 2
        with pytest.raises(TypeError, match=text):
            compiled(torch.zeros(1), X + 1)
    finally:
        inner.__code__, Base.halved, Base.halved.__code__, Model.forward = kept
    for owner in (LOSS, MODEL, MODEL.drop):
        for name in ("halved", "forward"):
            vars(owner).pop(name, None)
    assert torch.equal(run(torch.zeros(1), X + 1)[1], first)
