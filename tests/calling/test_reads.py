"""The Python values that a step reads besides its arguments: if one changes, the step is traced again."""

from __future__ import annotations

import argparse
import enum
import functools
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

import ztrans as zt
from tests.support import hyper
from tests.support.hyper import Config, scaled
from ztrans.calling.reads import LONGEST, Reads

HERE = Path(__file__).name
X = torch.linspace(-1, 1, 4)


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


RATE = 0.1
MODE = Mode.SUM
FAR = 3.0
TABLE = {"x": 1.0, "deep": [1.0]}
ITEMS = [1.0, 2.0]


@dataclass
class Hyper:
    rate: float = 1.0


@dataclass(slots=True)
class Slotted:
    rate: float


class Base:
    offset = 0.5

    def halved(self, x):
        return x / 2 + self.offset


class Loss(Base):
    """It has a property, and calls methods of its own class and of its base class."""

    power = 2.0

    def __init__(self):
        self._scale = 1.0
        self.calls = 0

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
        self.drop = nn.Dropout(0.5)
        self.gain = 2.0

    def forward(self, x):
        return self.drop(x) * self.gain


def inner(x):
    return x * RATE


def times_five(*arguments):
    return arguments[-1] * 5


def head(f):
    """The line on which the definition of a function begins, as messages show it."""
    return f"{HERE}:{f.__code__.co_firstlineno} {f.__name__}"


def decorated(f):
    @functools.wraps(f)
    def wrapper(*args):
        return f(*args)

    return wrapper


@decorated
def wrapped(x):
    return sum(y * FAR for y in [x])


HYPER = Hyper()
SLOTTED = Slotted(1.0)
ARGS = argparse.Namespace(rate=1.0)
LOSS = Loss()
MODEL = Model().eval()


def closure():
    """A step, a function that assigns to the variables of its closure, and a partial that it calls."""
    rate = 0.1
    deep = 1.0
    act = torch.tanh
    space = types.SimpleNamespace(rate=1.0)
    power = functools.partial(lambda x, p, offset: x * p + offset, p=2.0, offset=1.0)

    def step(state, x, times=2.0, *, plus=1.0):
        nested = lambda y: y * deep
        total = inner(x) * rate + nested(x) * times + plus + power(x) + act(x)
        total = total + hyper.factor + scaled(x) + Config.decay + SLOTTED.rate
        total = total + HYPER.rate + getattr(ARGS, "rate", 0.0) + space.rate + TABLE["deep"][0]
        total = (
            total + ITEMS[0] + wrapped(x) + LOSS(x) + MODEL(x) + grad(lambda z: (z * rate).sum())(x)
        )
        return state, total.sum() if MODE is Mode.SUM else total.mean()

    def assign(**values):
        nonlocal rate, deep, act
        rate = values.get("rate", rate)
        deep = values.get("deep", deep)
        act = values.get("act", act)
        vars(space).update(values.get("space", {}))

    return step, assign, power


def replaced(name, value):
    """Sets a global of this module, as `RATE = 0.2` does in a script."""
    return lambda *_: globals().update({name: value})


CHANGES = {
    "rate was 0.1 and is 0.2": lambda step, assign, _: assign(rate=0.2),
    "deep was 1.0 and is 4.0": lambda step, assign, _: assign(deep=4.0),
    "act was <built-in method tanh": lambda step, assign, _: assign(act=torch.sin),
    "space.rate was 1.0 and is 2.0": lambda step, assign, _: assign(space={"rate": 2.0}),
    "RATE was 0.1 and is 0.3": replaced("RATE", 0.3),
    "MODE was <Mode.SUM: 1> and is <Mode.MEAN: 2>": replaced("MODE", Mode.MEAN),
    "FAR was 3.0 and is True": replaced("FAR", True),
    "HYPER.rate was 1.0 and is 7.0": replaced("HYPER", Hyper(7.0)),
    "TABLE was {'x': 1.0, 'deep': [1.0]} and is {'x': 1.0, 'deep': [9.0]}": lambda *_: TABLE[
        "deep"
    ].__setitem__(0, 9.0),
    "ITEMS was [1.0, 2.0] and is [5.0, 2.0]": lambda *_: ITEMS.__setitem__(0, 5.0),
    "factor was 2.0 and is 4.0": lambda *_: setattr(hyper, "factor", 4.0),
    "Config.decay was 0.5 and is 0.25": lambda *_: setattr(Config, "decay", 0.25),
    "HYPER.rate was 1.0 and is 2.0": lambda *_: setattr(HYPER, "rate", 2.0),
    "Slotted.rate was 1.0 and is 2.0": lambda *_: setattr(SLOTTED, "rate", 2.0),
    "ARGS.rate was 1.0 and is 2.0": lambda *_: setattr(ARGS, "rate", 2.0),
    "LOSS._scale was 1.0 and is 2.0": lambda *_: setattr(LOSS, "_scale", 2.0),
    "Base.offset was 0.5 and is 0.75": lambda *_: setattr(Base, "offset", 0.75),
    "LOSS.power was absent and is 3.0": lambda *_: setattr(LOSS, "power", 3.0),
    "MODEL.gain was 2.0 and is 3.0": lambda *_: setattr(MODEL, "gain", 3.0),
    "MODEL.drop.p was 0.5 and is 0.0": lambda *_: setattr(MODEL.drop, "p", 0.0),
    "MODEL.drop was a Dropout and is a Tanh": lambda *_: setattr(MODEL, "drop", nn.Tanh()),
    f"the code of inner was {head(inner)} and is {head(times_five)}": lambda *_: setattr(
        inner, "__code__", times_five.__code__
    ),
    "the code of halved was": lambda *_: setattr(Base, "halved", times_five),
    "MODEL.forward was absent": lambda *_: setattr(MODEL, "forward", times_five),
    "a default of step was [2.0] and is [3.0]": lambda step, *_: setattr(
        step, "__defaults__", (3.0,)
    ),
    "a keyword default of step was {'plus': 1.0} and is {'plus': 2.0}": lambda step, *_: (
        step.__kwdefaults__.update(plus=2.0)
    ),
    "the keywords of power was {'p': 2.0, 'offset': 1.0} and is": lambda step, _, power: (
        power.keywords.update(p=4.0)
    ),
}


@pytest.fixture
def restored():
    """Restores every setting after the test."""
    holders = [HYPER, ARGS, LOSS, MODEL, MODEL.drop, hyper]
    attributes = [dict(vars(holder)) for holder in holders]
    names = ("RATE", "MODE", "FAR", "HYPER")
    values = {name: globals()[name] for name in names}
    drop = MODEL.drop
    code = inner.__code__
    halved = Base.halved
    yield
    for holder, before in zip(holders, attributes):
        vars(holder).clear()
        vars(holder).update(before)
    globals().update(values)
    MODEL.drop = drop
    inner.__code__ = code
    Base.halved = halved
    Base.offset = 0.5
    ITEMS[0] = 1.0
    TABLE["deep"][0] = 1.0
    SLOTTED.rate = 1.0
    Config.decay = 0.5


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_that_changes_is_named(restored, change):
    step, *others = closure()
    reads = Reads(step)
    before = reads.values()
    assert reads.values() is before
    CHANGES[change](step, *others)
    now = reads.values()
    assert now != before and reads.values() is now
    assert any(text.startswith(change) for text in before.changes(now)), before.changes(now)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_is_traced_again_when_a_value_changes(restored, change):
    """It agrees with the plain function before and after the change. Without a change nothing is traced."""
    step, *others = closure()
    run = zt.Step.of(step)
    compiled = run.lower(torch.zeros(1), X + 1).compile()
    for _ in range(2):
        assert torch.equal(run(torch.zeros(1), X + 1)[1], step(torch.zeros(1), X + 1)[1])
    assert len(run._cache) == 1
    CHANGES[change](step, *others)
    for _ in range(2):
        assert torch.equal(run(torch.zeros(1), X + 1)[1], step(torch.zeros(1), X + 1)[1])
    assert len(run._cache) == 2
    text = r"step: its program was made for another call"
    with pytest.raises(TypeError, match=text) as e:
        compiled(torch.zeros(1), X + 1)
    assert f"* {change}" in str(e.value)
    assert str(e.value).endswith("or call the step itself, which makes a program for each.")


def programs(step, change, calls=3):
    """The number of programs of a step that is called, with a change before each further call."""
    run = zt.Step.of(step)
    run(torch.zeros(1), X)
    for _ in range(calls - 1):
        change()
        run(torch.zeros(1), X)
    return len(run._cache)


def test_a_namespace_in_a_closure_is_an_object_with_attributes():
    space = types.SimpleNamespace(rate=1.0, seen=0)
    step = lambda state, x: (state, x * space.rate)
    assert programs(step, lambda: None) == 1
    assert programs(step, lambda: setattr(space, "seen", space.seen + 1)) == 1
    assert programs(step, lambda: setattr(space, "rate", space.rate + 1)) == 3


def test_an_object_that_is_replaced_by_an_equal_one_needs_no_other_program():
    space = types.SimpleNamespace(hyper=Hyper(), rates=[1.0, 2.0], act=lambda x: x * 2)

    def change():
        space.hyper = Hyper()
        space.rates = [float(rate) for rate in ("1", "2")]

    step = lambda state, x: (state, space.act(x) * space.hyper.rate + space.rates[0])
    assert programs(step, change) == 1


def test_a_function_that_is_replaced_is_followed_to_what_it_reads():
    def scaling(factor):
        return lambda x: x * factor

    space = types.SimpleNamespace(act=scaling(2.0))
    run = zt.Step.of(lambda state, x: (state, space.act(x)))
    for factor in (2.0, 3.0, 2.0):
        space.act = scaling(factor)
        assert torch.equal(run(torch.zeros(1), X)[1], X * factor)
    assert len(run._cache) == 2


def test_an_attribute_that_appears_is_read():
    class Settings:
        pass

    settings = Settings()
    run = zt.Step.of(lambda state, x: (state, x * getattr(settings, "rate", 1.0)))
    assert torch.equal(run(torch.zeros(1), X)[1], X)
    settings.rate = 2.0
    assert torch.equal(run(torch.zeros(1), X)[1], X * 2)


def test_attributes_of_functions_are_read():
    def loss(x):
        return x * loss.scale

    loss.scale = 1.0
    step = lambda state, x: (state, loss(x))
    assert programs(step, lambda: setattr(loss, "scale", loss.scale + 1)) == 3


def test_whether_an_object_has_an_attribute_is_read():
    space = types.SimpleNamespace()
    run = zt.Step.of(lambda state, x: (state, x * 2 if hasattr(space, "double") else x))
    assert torch.equal(run(torch.zeros(1), X)[1], X)
    space.double = True
    assert torch.equal(run(torch.zeros(1), X)[1], X * 2)


def test_modules_are_read_whoever_wrote_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LeakyReLU())
    reads = Reads(lambda state, x: (state, model(x)))
    before = reads.values()
    model.eval()
    model[2].negative_slope = 0.5
    assert before.changes(reads.values()) == [
        "model.training was True and is False",
        "model.0.training was True and is False",
        "model.1.training was True and is False",
        "model.2.training was True and is False",
        "model.2.negative_slope was 0.01 and is 0.5",
    ]
    model.train()
    model[2].negative_slope = 0.01
    assert reads.values() == before and hash(reads.values()) == hash(before)
    model.append(nn.Tanh())
    assert "model.3 was absent and is a Tanh" in before.changes(reads.values())


def test_a_parameter_that_is_replaced_is_read():
    model = nn.Linear(2, 2, bias=False)
    reads = Reads(lambda state, x: (state, model(x)))
    before = reads.values()
    model.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model.bias = nn.Parameter(torch.ones(2))
    after = reads.values()
    assert before.changes(after) == [
        "model.weight.requires_grad was True and is False",
        "model.bias.requires_grad was None and is True",
    ]
    model.bias.requires_grad_(False)
    assert after.changes(reads.values()) == ["model.bias.requires_grad was True and is False"]


def test_an_attribute_in_a_class_pattern_is_read():
    hyper = Hyper(1.0)

    def step(state, x):
        match hyper:
            case Hyper(rate=rate):
                return state, x * rate

    reads = Reads(step)
    before = reads.values()
    hyper.rate = 2.0
    (change,) = before.changes(reads.values())
    assert change.startswith("hyper.rate was 1.0 and is 2.0")


def test_floats_are_told_apart_by_their_bits():
    space = types.SimpleNamespace(rate=0.0)
    reads = Reads(lambda state, x: (state, x * space.rate))
    seen = set()
    for rate in (0.0, -0.0, complex(0.0, 0.0), complex(0.0, -0.0), float("nan"), float("nan")):
        space.rate = rate
        seen.add(reads.values())
    assert len(seen) == 5


class Table:
    """Python calls its methods without naming them."""

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

    def __getattr__(self, name):
        return self.__dict__["entries"][name]


def entered(table, x):
    with table as rate:
        return x * rate


@pytest.mark.parametrize(
    "read",
    [
        lambda table, x: x * table["rate"],
        lambda table, x: x * float(table),
        lambda table, x: x * table.rate,
        entered,
    ],
    ids=["an item", "a number", "an attribute by __getattr__", "a context"],
)
def test_methods_that_code_calls_without_their_names_are_followed(read):
    table = Table()
    step = lambda state, x: (state, read(table, x))
    assert programs(step, lambda: table.entries.update(rate=table["rate"] + 1)) == 3


class Schedule:
    warm_up = 1.0

    @classmethod
    def rate(cls):
        return cls.warm_up

    @staticmethod
    def scaled(x):
        return x * RATE


def test_class_methods_and_static_methods_are_followed(restored):
    reads = Reads(lambda state, x: (state, Schedule.scaled(x) * Schedule.rate()))
    assert {"Schedule.warm_up", "RATE"} <= set(reads.values().names)


def test_attributes_that_only_a_constructor_names_are_not_read():
    """Also where a method calls that of its base class, as `Loss.halved` does."""
    loss = Loss()
    step = lambda state, x: (state, loss(x))
    assert programs(step, lambda: setattr(loss, "calls", loss.calls + 1)) == 1


def test_slices_ranges_and_numbers_of_numpy_are_read():
    space = types.SimpleNamespace(rows=slice(0, 1), steps=range(2), flag=np.bool_(False))
    reads = Reads(lambda state, x: (state, x[space.rows] * len(space.steps) if space.flag else x))
    seen = {reads.values()}
    for name, value in {"rows": slice(0, 2), "steps": range(3), "flag": np.bool_(True)}.items():
        setattr(space, name, value)
        seen.add(reads.values())
    assert len(seen) == 4


def test_equal_numbers_of_other_types_are_other_values():
    space = types.SimpleNamespace(rate=1)
    reads = Reads(lambda state, x: (state, x * space.rate))
    seen = set()
    for rate in (1, 1.0, True, np.float32(1), np.float64(1)):
        space.rate = rate
        seen.add(reads.values())
    assert len(seen) == 5


def test_a_value_without_a_hash_is_not_read():
    class Odd(int):
        __hash__ = None

    odd = Odd(3)
    values = Reads(lambda state, x: (state, x * odd)).values()
    assert "odd" in values.names and isinstance(hash(values), int)


def test_a_long_container_is_data_and_fixed():
    data = [1.0] * LONGEST
    reads = Reads(lambda state, x: (state, x * data[0]))
    before = reads.values()
    data[0] = 2.0
    assert reads.values() != before
    data.append(1.0)
    before = reads.values()
    data[0] = 3.0
    assert reads.values() == before


def test_a_container_may_contain_itself():
    ring = [1.0]
    ring.append(ring)
    Reads(lambda state, x: (state, x * ring[0])).values()


@pytest.mark.parametrize(
    "read",
    [
        lambda space, x: x * vars(space)["rate"],
        lambda space, x: x * getattr(space, "".join(["ra", "te"])),
        lambda space, x: x * float(space.taps[0]),
        lambda space, x: x * next(space.rates),
        lambda space, x: x * space.state.step,
    ],
    ids=["all attributes", "a computed name", "an array", "an iterator", "an object of a library"],
)
def test_what_is_read_in_other_ways_is_fixed(read):
    """docs/limits.md lists it."""
    library = torch.optim.swa_utils.SWALR(torch.optim.SGD([torch.ones(1)], lr=1.0), swa_lr=0.1)
    library.step = 1.0
    rates = iter([1.0, 2.0, 3.0])
    space = types.SimpleNamespace(rate=1.0, taps=np.ones(1), rates=rates, state=library)

    def step(state, x):
        return state, read(space, x)

    run = zt.Step.of(step)
    first = run(torch.zeros(1), X)[1]
    space.rate = 2.0
    space.taps[0] = 2.0
    library.step = 2.0
    assert torch.equal(run(torch.zeros(1), X)[1], first) and len(run._cache) == 1
    run.retrace()
    assert not torch.equal(run(torch.zeros(1), X)[1], first)


def test_a_hook_that_is_added_later_is_not_in_the_program():
    model = nn.Linear(4, 4)
    state = dict(model.named_parameters())
    run = zt.Step.of(lambda state, x: (state, torch.func.functional_call(model, state, (x,))))
    first = run(state, X)[1]
    model.register_forward_hook(lambda module, args, y: y * 2)
    assert torch.equal(run(state, X)[1], first)


def test_arguments_that_are_neither_tensors_nor_numbers_are_compared_by_equality():
    """Nothing is read in them: an object that compares by identity is fixed."""
    step = lambda state, x, hyper: (state, x * hyper.rate)
    loss = Loss()
    run = zt.Step.of(lambda state, x, loss: (state, loss(x)))
    first = run(torch.zeros(1), X, loss)[1]
    loss._scale = 4.0
    assert torch.equal(run(torch.zeros(1), X, loss)[1], first)
    run = zt.Step.of(step)
    frozen = dataclass(frozen=True)(type("Frozen", (), {"__annotations__": {"rate": "float"}}))
    for rate in (1.0, 1.0, 2.0):
        assert torch.equal(run(torch.zeros(1), X, frozen(rate))[1], X * rate)


@pytest.mark.slow
def test_code_without_a_file_reads_what_it_names():
    """Code of `python -c` has the file of the methods that a dataclass generates, which read nothing."""
    program = """
import torch, ztrans as zt
RATE = 2.0
class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * RATE
model = Scaled()
run = zt.Step.of(lambda state, x: (state, model(x)))
for RATE in (2.0, 3.0):
    print(run(torch.zeros(1), torch.ones(1))[1].item())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["2.0", "3.0"]


def test_the_error_names_the_line_that_reads_the_value(restored):
    step, assign, _ = closure()
    lowered = zt.Step.of(step).lower(torch.zeros(1), X)
    assign(rate=0.5)
    rows = Path(__file__).read_text().splitlines()
    number = next(n for n, row in enumerate(rows, 1) if "inner(x) * rate" in row)
    text = re.escape(f"rate was 0.1 and is 0.5 ({HERE}:{number} closure.<locals>.step)")
    with pytest.raises(TypeError, match=text):
        lowered.lockstep(torch.zeros(1), [(X,)])
    with pytest.raises(TypeError, match=text):
        lowered.compile().profile(torch.zeros(1), X)
    assign(rate=0.1)
    assert torch.equal(lowered.lockstep(torch.zeros(1), [(X,)])[1][0], step(torch.zeros(1), X)[1])


def test_a_change_around_a_lifted_loop_is_noticed():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = 1.0

    def loop_step(x):
        sgd.zero_grad()
        loss = (model(x) * weight).square().mean()
        loss.backward()
        sgd.step()
        return loss

    step, state = zt.lift(loop_step, model, sgd)
    run = zt.Step.of(step)
    x = torch.ones(2, 4)
    compiled = run.lower(run.shard(state), x).compile()
    first = run(run.shard(state), x)[1]
    model.train()
    with pytest.raises(TypeError, match=r"model.training was False and is True"):
        compiled(run.shard(state), x)
    model.eval()
    weight = 3.0
    assert torch.allclose(run(run.shard(state), x)[1], 9 * first)


def test_a_function_of_a_library_leads_to_the_functions_that_it_was_given():
    rate = 1.0
    loss = torch.no_grad()(lambda x: F.relu(x) * rate)
    cached = functools.cache(lambda: rate)
    for f in (lambda state, x: (state, loss(x)), lambda state, x: (state, x * cached())):
        reads = Reads(f)
        assert "rate" in reads.values().names


@pytest.mark.parametrize("kind", [float, np.float16, np.float32, np.float64, np.longdouble])
def test_signs_of_zeros_and_nans_of_numpy_are_told_apart(kind):
    """0.0 equals -0.0, and nan equals nothing, not even itself."""
    space = types.SimpleNamespace(offset=kind(0.0))
    run = zt.Step.of(lambda state, x: (state, x / float(space.offset)))
    for value, quotient in ((0.0, torch.inf), (-0.0, -torch.inf), (0.0, torch.inf)):
        space.offset = kind(value)
        assert torch.equal(run(torch.zeros(1), torch.ones(2))[1], torch.full((2,), quotient))
    assert len(run._cache) == 2
    for _ in range(3):
        space.offset = kind("nan")
        run(torch.zeros(1), torch.ones(2))
    assert len(run._cache) == 3


def test_parts_of_complex_numbers_of_numpy_are_told_apart():
    space = types.SimpleNamespace(factor=np.complex64(complex(1.0, 0.0)))
    run = zt.Step.of(lambda state, x: (state, x * complex(space.factor)))
    x = torch.ones(1, dtype=torch.complex64)
    run(torch.zeros(1), x)
    space.factor = np.complex64(complex(1.0, -0.0))
    run(torch.zeros(1), x)
    assert len(run._cache) == 2
