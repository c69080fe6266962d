"""Checkpoints in all their forms: backward recomputes what they drop, and no bit differs from PyTorch's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.func import functional_call, grad_and_value
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ztrans as zt
from tests.support.lifted import loop_of
from tests.support.worlds import ALL, clone, distance, slices

WIDTH = 16
X = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).sin()
TANH = torch.ops.aten.tanh.default


class Blocks(nn.Module):
    """Two blocks, each of which `around` calls."""

    def __init__(self, around=lambda block, x: block(x)):
        super().__init__()
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.first, self.second, self.around = block(), block(), around

    def forward(self, x):
        return self.around(self.second, self.around(self.first, x))


def wrapped(impl):
    model = Blocks()
    for name in ("first", "second"):
        wrapper = checkpoint_wrapper(getattr(model, name), checkpoint_impl=impl)
        setattr(model, name, wrapper)
    return model


def composed():
    model = Blocks()
    composable(model.first), composable(model.second)
    return model


def nested():
    inner = lambda block, x: checkpoint(
        block[2], checkpoint(block[:2], x, use_reentrant=False), use_reentrant=False
    )
    return Blocks(lambda block, x: checkpoint(inner, block, x, use_reentrant=False))


def in_segments(block, x):
    """The last of two segments is not recomputed."""
    return checkpoint_sequential(nn.Sequential(block, nn.Identity()), 2, x, use_reentrant=False)


FORMS = {
    "not reentrant": lambda: Blocks(partial(checkpoint, use_reentrant=False)),
    "reentrant": lambda: Blocks(partial(checkpoint, use_reentrant=True)),
    "sequential": lambda: Blocks(in_segments),
    "composable": composed,
    "wrapper": lambda: wrapped(CheckpointImpl.NO_REENTRANT),
    "nested": nested,
}


def by_func(model):
    """A step by torch.func.grad and functional_call, which PyTorch's own checkpoints do not support."""

    def step(params, x):
        loss = lambda params, x: (
            functional_call(model, params, (x * params["scale"],)).square().mean()
        )
        grads, value = grad_and_value(loss)(params, x)
        return {k: p - 0.1 * grads[k] for k, p in params.items()}, value

    return step


def by_autograd(model):
    def step(params, x):
        params = {k: p.detach().requires_grad_() for k, p in params.items()}
        value = functional_call(model, params, (x * params["scale"],)).square().mean()
        grads = torch.autograd.grad(value, list(params.values()))
        return {k: p.detach() - 0.1 * g for (k, p), g in zip(params.items(), grads)}, value.detach()

    return step


def params_of(model):
    """The parameters of a model, and one that is no parameter of it: a reentrant checkpoint needs an argument to
    differentiate by. They differ from the parameters that the model itself holds."""
    return {k: 2 * p.detach() for k, p in model.named_parameters()} | {"scale": torch.ones(())}


@pytest.mark.slow
@pytest.mark.parametrize("take_gradients", [by_func, by_autograd])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_the_bits_of_the_step_without_it(form, take_gradients):
    model, plain = FORMS[form](), Blocks()
    params = params_of(model)
    want, loss = by_autograd(plain)(params_of(plain), X)
    lowered = zt.Step.of(take_gradients(model)).lower(params, X)
    new, value = lowered.compile()(clone(params), X)
    assert (
        torch.equal(value, loss) and distance([*new.values()], [*want.values()]) == 0
    )  # wrappers change the names
    tanhs = [e.region for e in lowered.graph.eqns if e.op is TANH]
    assert tanhs == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_is_sharded(stage):
    model = Blocks(partial(checkpoint, use_reentrant=False))
    step, params = by_func(model), params_of(model)
    sharded = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *ALL)(step)
    halves = slices((X,), 2)
    state, _ = sharded.lower(params, *halves[0]).lockstep(params, halves)
    assert distance(state, by_autograd(Blocks())(params, X)[0]) < 1e-6


def test_a_nested_checkpoint_drops_what_its_inner_ones_keep():
    plain, inside = (FORMS[form]() for form in ("not reentrant", "nested"))
    peaks = [
        zt.Step.of(by_func(m)).lower(params_of(m), X).memory_analysis().peak
        for m in (plain, inside)
    ]
    assert peaks[0] == peaks[1]


def test_a_composable_checkpoint_of_a_lifted_loop():
    def lifted(model):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        loop_step = loop_of(model, sgd)
        return loop_step, zt.lift(loop_step, model, sgd)

    _, (step, state) = lifted(composed())
    untouched = composed()
    loop_step, _ = lifted(untouched)
    for _ in range(2):
        state, loss = zt.Step.of(step)(state, X)
        assert torch.equal(loss, loop_step(X))
    assert all(torch.equal(state["params"][name], p) for name, p in untouched.named_parameters())


def test_dropout_in_a_checkpoint_keeps_its_mask():
    """PyTorch restores its generator to draw the mask again; a program keeps the mask. Both have the same values."""

    def made(call):
        return by_autograd(Blocks(lambda block, x: call(nn.Sequential(block, nn.Dropout(0.5)), x)))

    params, plain, results = params_of(Blocks()), made(lambda module, x: module(x)), []
    for reentrant in (False, True):
        compiled = (
            zt.Step.of(made(partial(checkpoint, use_reentrant=reentrant)))
            .lower(params, X)
            .compile()
        )
        torch.manual_seed(1)
        results.append(compiled(clone(params), X))
    torch.manual_seed(1)
    want = plain(params, X)
    assert [distance(result, want) for result in results] == [0, 0]
