"""fuse_cast_gather as text: the cast is done before the wire."""

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.net import lower
from tests.support.programs import CASES
from tests.support.worlds import ALL, on_ranks
from ztrans.ir.collectives import ALL_GATHER


def test_program(golden):
    assert str(lower(zt.fuse_cast_gather())) == golden


def test_diff(golden):
    assert zt.diff(lower(), lower(zt.fuse_cast_gather())) == golden


def test_all_four(golden):
    assert str(lower(zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())) == golden


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_the_bytes(stage):
    """All parameters are used in bf16: exactly half, with prefetch on, at every stage."""
    both = [(zt.overlap_grads(), zt.prefetch()), (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())]
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage, reshard="always")
    plain, fused = (on_ranks(CASES["cast_inside"], 4, shard, *t).cost_analysis() for t in both)
    assert plain.over("dp", "param") == 2 * fused.over("dp", "param") > 0
    assert plain.over("dp", "grad") == fused.over("dp", "grad")


@pytest.mark.parametrize("stage", [2, 3])
def test_under_autocast_what_is_cast_is_fused_and_norms_stay(stage):
    lowered = on_ranks(CASES["autocast"], 4, zt.shard_params(zt.AbstractMesh(dp=4), stage=stage), *ALL)
    dtypes = {p: e.outs[0].dtype for e in lowered.graph.eqns if e.op is ALL_GATHER for p in e.provenance.paths}
    assert dtypes["params.blocks.0.qkv.weight"] == torch.bfloat16
    assert dtypes["params.norm.weight"] == torch.float32


@pytest.mark.parametrize(
    "use",
    [lambda w, h: w.t().to(h), lambda w, h: w.view(2, 4, 8).to(h).view(8, 8), lambda w, h: w.permute(1, 0).to(h).T],
    ids=["t", "view", "permute"],
)
def test_through_views(use):
    def step(state, x):
        def loss(w):
            return (x.to(torch.bfloat16) @ use(w, torch.bfloat16)).float().square().mean()

        grads, value = grad_and_value(loss)(state["w"])
        return {"w": state["w"] - 0.1 * grads}, value

    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.fuse_cast_gather())(step).lower(
        {"w": torch.randn(8, 8)}, torch.randn(4, 8)
    )
    gathers = [e for e in lowered.graph.eqns if e.op is ALL_GATHER]
    assert gathers and all(e.outs[0].dtype == torch.bfloat16 for e in gathers)
    assert "cast(w" not in str(lowered)


def test_mixed_uses_are_left_alone():
    """Used once in bf16 and once in fp32: the gather stays fp32, which serves both."""

    def step(state, x):
        def loss(w):
            return (x.to(torch.bfloat16) @ w.to(torch.bfloat16)).float().square().mean() + w.square().sum()

        grads, value = grad_and_value(loss)(state["w"])
        return {"w": state["w"] - 0.1 * grads}, value

    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.fuse_cast_gather())(step).lower(
        {"w": torch.randn(8, 8)}, torch.randn(4, 8)
    )
    dtypes = [(e.region, e.outs[0].dtype) for e in lowered.graph.eqns if e.op is ALL_GATHER]
    assert ("forward", torch.float32) in dtypes


@pytest.mark.parametrize(
    "use",
    [lambda w: w[:, :4].to(torch.bfloat16).view(-1), lambda w: w[:1].expand(4, -1).to(torch.bfloat16).view(-1)],
    ids=["columns", "expanded"],
)
def test_a_cast_that_closes_gaps_stays(use):
    """Of a view with gaps it makes a dense value, which is what the next view stands on."""

    def step(state, x):
        grads, value = grad_and_value(lambda w: (use(w).float() * x.mean()).square().mean())(state["w"])
        return {"w": state["w"] - 0.1 * grads}, value

    state, x = {"w": torch.randn(8, 8)}, torch.randn(4, 8)
    fused = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.fuse_cast_gather())(step).lower(state, x[:2])
    new, _ = fused.lockstep(state, [(x,), (x,)])
    assert torch.allclose(new["w"], step(state, x)[0]["w"])


HALF, PAIRS = torch.bfloat16, torch.complex32
REAL, WIDE, COMPLEX, WHOLE = (
    torch.linspace(-3, 3, 64).view(8, 8).to(dtype).contiguous()
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.int64)
)
COMPLEX = COMPLEX * (1 + 2j)
# How a leaf is used, and whether the cast may cross the views before it.
VIEWS = {
    "bits": (REAL, lambda w: w.view(torch.int32).to(HALF).float() * 1e-9, False),
    "bits of half the size": (WHOLE, lambda w: w.view(torch.int32).to(torch.int16).float(), False),
    "pairs as complex": (WIDE, lambda w: torch.view_as_complex(w.view(8, 4, 2)).to(PAIRS).to(torch.complex64), False),
    "complex as pairs": (COMPLEX, lambda w: torch.view_as_real(w).to(HALF).float(), False),
    "real": (COMPLEX, lambda w: w.real.to(HALF).float(), False),
    "imag": (COMPLEX, lambda w: w.imag.to(HALF).float(), False),
    "imag of conj": (COMPLEX, lambda w: w.conj().imag.to(HALF).float(), False),
    "conj": (COMPLEX, lambda w: w.conj().to(PAIRS).to(torch.complex64) * (1 + 2j), False),
    "neg": (REAL, lambda w: torch._neg_view(w).to(HALF).float(), False),
    "complex": (COMPLEX, lambda w: w.t().to(PAIRS).to(torch.complex64) * (1 + 2j), True),
    "complex to real": (COMPLEX, lambda w: (w * 1.0).real + w.t().real, False),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_cast_crosses_only_views_that_keep_elements_and_dtype(name):
    leaf, use, crosses = VIEWS[name]

    def step(state, x):
        used = use(state["w"])
        grads, value = grad_and_value(lambda b: (used * b * x.mean()).abs().square().mean())(state["b"])
        return {"w": state["w"], "b": state["b"] - 0.1 * grads}, value

    state, x = {"w": leaf, "b": torch.ones(())}, torch.randn(4, 8)
    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.fuse_cast_gather())(step).lower(state, x)
    dtypes = {e.outs[0].dtype for e in zt.check(lowered.graph).eqns if e.op is ALL_GATHER and "w" in e.provenance.paths}
    assert dtypes == {PAIRS if crosses else leaf.dtype}
    new, outputs = lowered.lockstep(state, [(x,), (x,)])
    want, value = step(state, x)
    assert torch.equal(new["b"], want["b"]) and all(torch.equal(out, value) for out in outputs)
