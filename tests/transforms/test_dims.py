"""`shard_params(dim=...)`: leaves that are cut along another dim than the first."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.worlds import ALL, distance

EXPERTS = 2  # fewer than ranks
WIDTH = 6
INNER = 7  # the ranks do not divide it


def step(state, x):
    """Stacked experts, each of which sees every row, with momentum and a clipped norm."""

    def loss(params):
        h = torch.relu(torch.einsum("nw,ewi->eni", x, params["up"]))
        return (torch.einsum("eni,eiw->nw", h, params["down"]) + params["bias"]).square().mean()

    grads, value = grad_and_value(loss)(state["params"])
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    m = {k: 0.9 * m + grads[k] / (1 + norm) for k, m in state["m"].items()}
    return {"params": {k: p - 0.1 * m[k] for k, p in state["params"].items()}, "m": m}, value


def state():
    random = torch.Generator().manual_seed(0)
    shapes = {"up": (EXPERTS, WIDTH, INNER), "down": (EXPERTS, INNER, WIDTH), "bias": (WIDTH,)}
    draw = lambda shape: torch.randn(shape, generator=random, dtype=torch.float64)
    return {
        "params": {k: draw(s) for k, s in shapes.items()},
        "m": {k: draw(s) for k, s in shapes.items()},
    }


def inner(path: str, leaf: torch.Tensor) -> int | None:
    """The inner dim of experts."""
    return {"up": -1, "down": 1}.get(path.rpartition(".")[2])


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("transforms", [(), ALL])
def test_leaves_cut_along_other_dims_compute_the_same(stage, transforms):
    mesh = zt.AbstractMesh(dp=4)
    batches = list(torch.randn(3, 8, WIDTH, dtype=torch.float64))
    sharded = zt.chain(zt.shard_params(mesh, stage=stage, dim=inner), *transforms)(step)
    lowered = sharded.lower(state(), batches[0].chunk(4)[0])
    new = state()
    truth = state()
    for x in batches:
        truth, loss = step(truth, x)
        new, losses = lowered.lockstep(new, [(part,) for part in x.chunk(4)])
    assert distance(new, truth) < 1e-12 and distance(losses[0], loss) < 1e-12
    if stage:
        assert "params.up: f64[2,6,7@dp]" in str(lowered) and "params.bias: f64[6@dp]" in str(
            lowered
        )


def test_experts_cost_what_they_hold():
    """8 experts on 64 ranks: cut along the experts, each would be padded to 8 times its bytes, so they are not cut."""
    weight = torch.empty(8, 512, 512, device="meta")

    def expert(state, x):
        grads, value = grad_and_value(lambda w: torch.einsum("nw,ewi->eni", x, w).square().mean())(
            state["w"]
        )
        return {"w": state["w"] - 0.1 * grads}, value

    lower = lambda **how: zt.shard_params(zt.AbstractMesh(dp=64), **how)(expert).lower(
        {"w": weight}, torch.empty(4, 512, device="meta")
    )
    assert "w: f32[8,512,512]," in str(lower()), "whole on every rank"
    lowered = lower(dim=lambda path, leaf: 1)
    assert "w: f32[8,512@dp,512]," in str(lowered)
    assert lowered.cost_analysis().over(role="param") == weight.nbytes * 63 // 64
    assert lowered.cost_analysis().over(role="grad") == weight.nbytes * 63 // 64


def test_a_dim_that_a_leaf_does_not_have_is_refused():
    sharded = zt.shard_params(zt.AbstractMesh(dp=2), dim=lambda path, leaf: 1)(step)
    with pytest.raises(
        ValueError,
        match=r"shard_params: dim\(\.\.\.\) is 1 for params.bias, which has the shape \[6\]",
    ):
        sharded.lower(state(), torch.randn(4, WIDTH, dtype=torch.float64))
