"""Operators of torch.library and functions of torch.autograd, in forward and in the update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.func import grad_and_value

import ztrans as zt
from tests.support.worlds import ALL, clone, distance, slices

torch.manual_seed(0)
STATE, X = {"w": torch.randn(6, 4), "b": torch.randn(6)}, torch.randn(8, 6)
FILE = Path(__file__).name


@torch.library.custom_op("custom::gate", mutates_args=())
def gate(x: Tensor, slope: float) -> Tensor:
    return x * torch.sigmoid(slope * x)


@gate.register_fake
def _(x, slope):
    return torch.empty_like(x)


@torch.library.custom_op("custom::gate_backward", mutates_args=())
def gate_backward(dy: Tensor, x: Tensor, slope: float) -> Tensor:
    s = torch.sigmoid(slope * x)
    return dy * (s + slope * x * s * (1 - s))


@gate_backward.register_fake
def _(dy, x, slope):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.slope = inputs[1]


gate.register_autograd(
    lambda ctx, dy: (gate_backward(dy, *ctx.saved_tensors, ctx.slope), None), setup_context=_save
)


@torch.library.custom_op("custom::descend", mutates_args=())
def descend(p: Tensor, g: Tensor, lr: float) -> Tensor:
    return p - lr * g


@torch.library.custom_op("custom::descend_by_rule", mutates_args=())
def descend_by_rule(p: Tensor, g: Tensor, lr: float) -> Tensor:
    return p - lr * g


@torch.library.custom_op("custom::descend_by_pattern", mutates_args=())
def descend_by_pattern(p: Tensor, g: Tensor, lr: float) -> Tensor:
    return p - lr * g


for _operator in (descend, descend_by_rule, descend_by_pattern):
    _operator.register_fake(lambda p, g, lr: torch.empty_like(p))


@register_sharding(torch.ops.custom.descend_by_rule.default)
def _(p, g, lr):
    parts = [([Shard(d)], [Shard(d), Shard(d), None]) for d in range(p.ndim)]
    return [*parts, ([Replicate()], [Replicate(), Replicate(), None])]


register_sharding(torch.ops.custom.descend_by_pattern.default)(zt.sharding_rule("... -> ..."))


@torch.library.custom_op("custom::scale_", mutates_args=("x",))
def scale_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


scale_.register_fake(lambda x, factor: None)


@torch.library.custom_op("custom::halve_", mutates_args=("x",))
def halve_(x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(0.5)
    return x.square(), x.sum()


halve_.register_fake(lambda x: (torch.empty_like(x), x.new_empty(())))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


class OlderSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


FORWARDS = {
    "custom_op": lambda x: gate(x, 2.0),
    "setup_context": Square.apply,
    "older form": OlderSquare.apply,
}


def make(activation=torch.tanh, update=lambda p, g: p - 0.1 * g):
    def step(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        loss = activation(x @ params["w"] + params["b"] @ params["w"]).square().mean()
        grads = torch.autograd.grad(loss, [*params.values()])
        return {k: update(p.detach(), g) for (k, p), g in zip(params.items(), grads)}, loss.detach()

    return step


def by_func(activation):
    def step(state, x):
        grads, loss = grad_and_value(lambda state, x: activation(x @ state["w"]).mean())(state, x)
        return {k: p - 0.1 * grads[k] for k, p in state.items()}, loss

    return step


def sharded(step, stage=3, **options):
    """The step on two ranks, as a lowered program and the new state."""
    transforms = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage, **options), *ALL)
    halves = slices((X,), 2)
    lowered = transforms(step).lower(STATE, *halves[0])
    return lowered, lowered.lockstep(clone(STATE), halves)[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", FORWARDS)
def test_in_forward(kind, stage):
    step = make(FORWARDS[kind])
    assert (
        distance(zt.Step.of(step).lower(STATE, X).compile()(clone(STATE), X), step(STATE, X)) == 0
    )
    lowered, state = sharded(step, stage)
    assert distance(state, step(STATE, X)[0]) < 1e-6
    if kind == "custom_op":
        mine = {
            e.op: e.region for e in lowered.graph.eqns if e.op.__class__ is torch._ops.OpOverload
        }
        assert mine[torch.ops.custom.gate.default] == "forward"
        assert mine[torch.ops.custom.gate_backward.default] == "backward"


def test_in_forward_by_torch_func():
    step = by_func(Square.apply)
    assert distance(sharded(step)[1], step(STATE, X)[0]) < 1e-6


@pytest.mark.parametrize("activation", [FORWARDS["custom_op"]])
def test_torch_func_does_not_support_an_operator_with_register_autograd(activation):
    with pytest.raises(RuntimeError, match="setup_context"):
        by_func(activation)(STATE, X)
    with pytest.raises(
        RuntimeError,
        match=rf"(?s)step: gate.* failed.*{FILE}:\d+.*by torch.autograd.grad\(loss, params\)",
    ):
        zt.Step.of(by_func(activation)).lower(STATE, X)


@pytest.mark.parametrize("operator", [descend_by_rule, descend_by_pattern])
def test_in_the_update_by_a_registered_rule(operator):
    """It runs on shards, and nothing is gathered for it."""
    step = make(update=lambda p, g: operator(p, g, 0.1))
    lowered, state = sharded(step)
    assert distance(state, step(STATE, X)[0]) < 1e-6
    updates = [e for e in lowered.graph.eqns if e.op is operator._opoverload]
    assert {e.out.type for e in updates} == {"f32[6@dp,4]", "f32[6@dp]"}
    assert not lowered.cost_analysis().over(role="update")


def test_in_the_update_without_a_rule():
    step = make(update=lambda p, g: descend(p, g, 0.1))
    message = (
        rf"(?s)descend has no sharding rule for f32\[6@dp,4\], f32\[6@dp,4\].*at .*{FILE}:\d+ .*"
        r"@torch.distributed.tensor.experimental.register_sharding\(torch.ops.custom.descend.default\). "
        r"Or leave these leaves whole: shard_params\(..., where=lambda"
    )
    with pytest.raises(ValueError, match=message):
        sharded(step)
    want = step(STATE, X)[0]
    assert distance(sharded(step, stage=0)[1], want) < 1e-6, "its arguments are whole"
    assert distance(sharded(step, where=lambda path, leaf: False)[1], want) < 1e-6


@pytest.mark.parametrize("stage", [0, 3])
def test_an_operator_that_changes_its_argument(stage):
    def update(p, g):
        step_size = g.clone()
        scale_(step_size, 0.1)
        return p - step_size

    step = make(update=update)
    assert (
        distance(zt.Step.of(step).lower(STATE, X).compile()(clone(STATE), X), step(STATE, X)) == 0
    )
    if stage == 0:  # its arguments are whole
        assert distance(sharded(step, stage)[1], step(STATE, X)[0]) < 1e-6
        return
    with pytest.raises(ValueError, match=rf"(?s)shards: scale_ has no sharding rule.*{FILE}:\d+"):
        sharded(step, stage)


def test_an_operator_that_changes_its_argument_and_returns_tensors():
    def update(p, g):
        step_size = g.clone()
        square, total = halve_(step_size)
        return p - step_size * square - total

    step = make(update=update)
    assert (
        distance(zt.Step.of(step).lower(STATE, X).compile()(clone(STATE), X), step(STATE, X)) == 0
    )


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated"
)  # as TorchDynamo is imported
@pytest.mark.parametrize("stage", [0, 3])
def test_a_region_that_is_compiled_is_traced_as_other_code(stage):
    gelu = lambda x: torch.nn.functional.gelu(x)
    step = make(torch.compile(gelu))
    want = make(gelu)(STATE, X)
    assert distance(zt.Step.of(step).lower(STATE, X).compile()(clone(STATE), X), want) == 0
    assert distance(sharded(step, stage)[1], want[0]) < 1e-6


@torch.library.custom_op("custom::split_", mutates_args=("x",))
def split_(x: Tensor) -> list[Tensor]:
    x.mul_(0.5)
    return [x + 1, x.sum()]


split_.register_fake(lambda x: [torch.empty_like(x), x.new_empty(())])


def test_an_operator_that_changes_its_argument_and_returns_a_list_is_refused():
    def update(p, g):
        step_size = g.clone()
        return p - split_(step_size)[0]

    with pytest.raises(
        ValueError,
        match=rf"(?s)operator custom.split_.default changes an argument and returns a list.*{Path(__file__).name}:\d+ in .*update.*Return a tuple",
    ):
        zt.Step.of(make(update=update)).trace(STATE, X)


@torch.library.custom_op("custom::row_sums", mutates_args=())
def row_sums(x: Tensor) -> Tensor:
    assert x.is_contiguous(), x.stride()  # as operators in C++ check
    return x.sum(1)


row_sums.register_fake(lambda x: x.new_empty(x.shape[0]))


def test_an_operator_gets_its_arguments_with_the_strides_that_they_had_in_the_step():
    def step(state, x):
        gate = torch.sigmoid(
            state["w"].t()
        )  # x * gate could be written over it, and would not be contiguous
        return state, row_sums((x * gate).contiguous())

    state, x = {"w": torch.randn(6, 4)}, torch.randn(4, 6)
    assert distance(zt.Step.of(step)(clone(state), x), step(state, x)) == 0
