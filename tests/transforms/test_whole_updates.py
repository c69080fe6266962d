"""Products that sum over the cut dim run on whole values, each of which is gathered once, where it is smallest."""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import grad_and_value

import ztrans as zt
from tests.support.worlds import ALL, clone, default_dtype, distance, slices

SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (12, 12), "uneven": (7, 5)}


class Matrices(nn.Module):
    """A model whose parameters are all matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(s) / 4) for name, s in SHAPES.items()}
        )

    def forward(self, x):
        return sum((x[:, : w.shape[1]] @ w.T).tanh().sum(1) for w in self.weights.values())


def muon(clipped=False):
    """A training loop with PyTorch's Muon, its model, and its optimizer."""
    model = Matrices()
    optimizer = optim.Muon(model.parameters(), lr=0.02, momentum=0.9)

    def loop_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return loop_step, model, optimizer


def batches(steps=3):
    torch.manual_seed(1)
    return [(torch.randn(24, 24), torch.randn(24)) for _ in range(steps)]


@functools.cache
def traced(ranks, clipped):
    """The first state of the lifted loop, and what a rank traces."""
    step, state = zt.lift(*muon(clipped))
    return state, zt.Step.of(step).trace(state, *slices(batches()[0], ranks)[0])


@functools.cache
def trained(ranks, stage, clipped=False):
    """The parameters after three steps in lockstep, and the lowered step."""
    state, program = traced(ranks, clipped)
    shard = zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage)
    lowered = program.with_transforms((shard, *ALL)).lower()
    state = clone(state)
    zt.ir.check(lowered.graph)
    for batch in batches():
        state, _ = lowered.lockstep(state, slices(batch, ranks))
    return state["params"], lowered


def of_update(lowered):
    return Counter(
        e.op.name for e in lowered.graph.eqns if e.provenance and e.provenance.role == "update"
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_has_the_bits_of_stage_0_with_one_message_for_each_matrix(stage, ranks):
    """On shards, it would need ten messages for each matrix, and would be off by 5.7e-2 after three steps."""
    loop_step, model, _ = muon()
    for batch in batches():
        loop_step(*batch)
    got, lowered = trained(ranks, stage)
    replicated, _ = trained(ranks, 0)
    assert all(torch.equal(got[name], x) for name, x in replicated.items()), (
        "the bits must be those of stage 0"
    )
    assert distance(got, dict(model.named_parameters())) < 1e-6
    assert of_update(lowered) == {"all_gather": len(SHAPES)}, (
        "each matrix is gathered once, and nothing else is sent"
    )
    for e in lowered.graph.eqns:
        if e.provenance and e.provenance.role == "update":
            assert {v.dtype for v in e.ins} == {torch.bfloat16}, (
                "it is gathered where it has the fewest bytes"
            )


@pytest.mark.slow
def test_clipping_with_muon_still_reduces_one_scalar():
    """The norm over all leaves is computed from shards, as without Muon."""
    got, lowered = trained(3, 2, clipped=True)
    assert distance(got, trained(3, 0, clipped=True)[0]) < 1e-6
    assert of_update(lowered) == {"all_gather": len(SHAPES), "all_reduce": 1}


def newton(a, steps=4):
    """The inverse square root of a positive matrix, by Newton's iteration."""
    eye = torch.eye(a.shape[-1])
    y = a / a.norm()
    z = eye
    for _ in range(steps):
        t = 0.5 * (3 * eye - z @ y)
        y = y @ t
        z = t @ z
    return z


def preconditioned(p, g):
    """Shampoo without averages: the gradient is multiplied on both sides, each by a chain of products."""
    return p - 0.1 * newton(g @ g.mT + torch.eye(g.shape[-2])) @ g @ newton(
        g.mT @ g + torch.eye(g.shape[-1])
    )


def low_rank(p, g):
    """A projection and its transpose, neither of which has the cut dim."""
    down = torch.ones(g.shape[-1], 2) / 3
    return p - 0.1 * (g @ down) @ down.mT


def once(p, g):
    """A single product over the cut dim."""
    return p - 0.1 * g @ (g.mT @ g)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*SHAPES.values(), (6, 5, 4)], ids=[*SHAPES, "batched"])
@pytest.mark.parametrize("update, gathers", [(preconditioned, 1), (low_rank, 0), (once, 1)])
def test_a_gradient_is_gathered_once_for_all_products_over_its_cut_dim(update, gathers, shape):
    def step(state, x):
        grads, loss = grad_and_value(lambda s: (s["w"].square().sum() + s["w"].sum()) * x.mean())(
            state
        )
        return {"w": update(state["w"], grads["w"])}, loss

    with default_dtype(torch.float64):
        torch.manual_seed(0)
        state = {"w": torch.randn(shape)}
        traced = zt.Step.of(step).trace(state, torch.rand(2, 3))
        for ranks in (2, 5):
            x = torch.rand(2 * ranks, 3)
            shard = zt.shard_params(zt.AbstractMesh(dp=ranks), stage=2)
            lowered = traced.with_transforms((shard,)).lower()
            zt.ir.check(lowered.graph)
            wanted, _ = step(state, x)
            got, _ = lowered.lockstep(state, slices((x,), ranks))
            assert distance(got, wanted) <= 1e-12
            if len(shape) == 2:
                assert of_update(lowered)["all_gather"] == gathers
            elif (
                shape[0] % ranks == 0
            ):  # it is cut along the batch dim, so no product needs another rank
                assert not of_update(lowered)["all_gather"]
