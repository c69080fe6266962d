"""Batches and outputs in any container: dataclasses, named tuples, mappings, None, and arguments by name."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import ztrans as zt
from tests.support.worlds import ALL
from ztrans.calling.trees import leaf_names

W = torch.arange(12.0).view(4, 3)
X = torch.ones(6, 4)


@dataclass
class Data:
    x: torch.Tensor
    scale: float = 2.0
    mask: torch.Tensor | None = None
    name: str = "some"
    more: list = field(default_factory=list)
    rows: int = field(init=False, default=0)

    def __post_init__(self):
        self.rows = len(self.x)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    scale: float = 2.0
    mask: torch.Tensor | None = None


class Named(NamedTuple):
    x: torch.Tensor
    scale: float = 2.0
    mask: torch.Tensor | None = None


Short = namedtuple("Short", "x scale mask", defaults=(2.0, None))


class Encoding(UserDict):
    """As the BatchEncoding of transformers, whose entries are attributes too."""

    def __init__(self, data=None):
        super().__init__(data)

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


def encoding(x, scale=2.0, mask=None):
    return Encoding({"x": x, "scale": scale, "mask": mask})


def step(state, batch):
    product = batch.scale * batch.x @ state["w"]
    if batch.mask is not None:
        product = product * batch.mask[:, None]
    return state, {"sum": product.sum(), "kind": type(batch).__name__, "batch": batch}


@pytest.mark.parametrize("make", [Data, Frozen, Named, Short, encoding])
def test_a_batch_is_a_container(make):
    """The step gets a batch of the same class, and returns one. A number in it is an input, and None a constant."""
    own = zt.Step.of(step)
    state = own.shard({"w": W})
    for scale in (2.0, 3.0):
        state, out = own(state, make(X, scale))
        assert out["sum"] == (scale * X @ W).sum() and out["kind"] == type(make(X)).__name__
        assert (
            type(out["batch"]) is type(make(X))
            and torch.equal(out["batch"].x, X)
            and out["batch"].mask is None
        )
    assert len(own._cache) == 1
    state, out = own(state, make(X, 2.0, torch.zeros(6)))
    assert out["sum"] == 0 and len(own._cache) == 2


def test_containers_are_nested_in_each_other():
    def nested(state, batches):
        return state, sum((b.x @ state["w"]).sum() for inner in batches["all"] for b in inner.more)

    batch = encoding(X)
    own = zt.Step.of(nested)
    _, out = own(
        own.shard({"w": W}),
        {"all": [Data(X, more=[batch, Frozen(2 * X)]), Data(X, more=[Named(X)])]},
    )
    assert out == 4 * (X @ W).sum()


def test_a_container_is_passed_by_name():
    own = zt.Step.of(
        lambda state, *, batch, **rest: (state, (batch.x @ state["w"]).sum() * rest["scale"])
    )
    _, out = own(own.shard({"w": W}), batch=Data(X), scale=3.0)
    assert out == 3 * (X @ W).sum()


def test_names_in_a_program_are_those_of_the_fields():
    graph = zt.Step.of(step).trace({"w": W}, Data(X)).graph
    assert [v.name for v in graph.inputs] == ["w", "batch.x", "batch.scale", "batch.rows"]


def test_a_key_may_be_empty():
    def scaled(state, batch):
        return state, {"": state[""]["w"] * batch[""]}

    state = {"": {"w": W}}
    _, output = zt.Step.of(scaled)(state, {"": 2 * W})
    assert torch.equal(output[""], 2 * W * W)


@pytest.mark.parametrize("make", [Data, Frozen, Named, encoding])
def test_every_rank_has_its_own_batch(make):
    sharded = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *ALL)(
        lambda state, batch: (state, (batch.x @ state["w"]).sum())
    )
    lowered = sharded.lower({"w": W}, make(X))
    _, outputs = lowered.lockstep({"w": W}, [(make(X),), (make(3 * X),)])
    assert [float(x) for x in outputs] == [2 * float((X @ W).sum())] * 2


def test_a_lifted_loop_takes_its_batch_by_name():
    """As a tokenizer gives it: `step(state, **batch)`."""
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"x": X, "y": torch.ones(6, 3)})
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop_step(inputs, **named):
        optimizer.zero_grad()
        loss = (model(inputs["x"]) - inputs.y).square().mean() * named["scale"] if inputs else 0.0
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    run = zt.Step(step)
    expected = 2 * (model(X) - 1).square().mean()
    _, loss = run(run.shard(state), batch, scale=2.0)
    assert torch.equal(loss, expected)


def test_a_class_of_ones_own_without_fields_is_still_refused():
    class Own:
        __hash__ = None

    with pytest.raises(TypeError, match="an argument holds a"):
        zt.Step.of(step).trace({"w": W}, Own())
    assert not dataclasses.is_dataclass(Own)


class Loss:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "value",
    [Loss(torch.ones(())), Path("runs/1"), np.zeros(3), object()],
    ids=lambda x: type(x).__name__,
)
def test_an_object_is_no_output(value):
    step = zt.Step.of(lambda state, x: (state, {"loss": value}))
    kind = type(value).__name__
    message = rf"the output\['loss'\] is a {kind}, an object that is neither.*\n.*dataclass"
    with pytest.raises(TypeError, match=message):
        step(W.clone(), X)


@pytest.mark.parametrize("value", [np.float64(0.1), np.int32(3), dict, torch.float32, "text"])
def test_an_output_is_any_constant(value):
    step = zt.Step.of(lambda state, x: (state, (x.sum(), value)))
    output = step(W.clone(), X)[1][1]
    assert output == value and type(output) is type(value)


@pytest.mark.parametrize("transforms", [(), (zt.shard_params(zt.AbstractMesh(dp=2)),)])
def test_a_leaf_of_the_state_and_an_argument_may_have_one_name(transforms):
    """The leaf keeps the name, by which transforms know it."""

    def step(state, x, lr, w):
        grads = torch.func.grad(lambda p: (x @ p).square().mean())(state["w"])
        new = state["w"] - lr * state["lr"] * grads
        return {"w": new, "lr": state["lr"]}, (w["w"].sum(), lr)

    def renamed(state, x, rate, more):
        return step(state, x, rate, more)

    batch = torch.ones(2, 4), 0.5, {"w": torch.ones(3)}
    graphs = []
    for fn in (step, renamed):
        graph = zt.chain(*transforms)(fn).lower({"w": W.clone(), "lr": 0.1}, *batch).graph
        graphs.append(graph)
    assert [v.name for v in graphs[0].inputs] == ["w", "lr", "x", "argument.lr", "w.w"]
    assert [v.name for v in graphs[1].inputs] == ["w", "lr", "x", "rate", "more.w"]


def test_a_step_runs_if_a_leaf_and_an_argument_have_one_name():
    def step(state, x, lr):
        return {"lr": state["lr"] + 1.0, "x": state["x"] * lr}, x.sum() + lr

    run = zt.Step.of(step)
    state, out = run({"lr": torch.zeros(()), "x": torch.ones(2)}, torch.ones(3), 0.5)
    assert out == 3.5 and state["lr"] == 1.0 and state["x"].tolist() == [0.5, 0.5]


def test_names_are_distinct_whatever_the_keys():
    args = ({"a": {"b": 1}, "a.b": 2, "state.a.b": 3, "c": 4}, {"b": 5}, 6)
    names, _ = leaf_names(("state", "a", "c"), args)
    assert len(set(names)) == len(names) == 6
    assert names[0] == "a.b" and names[3:] == ["c", "argument.a.b", "argument.c"]
