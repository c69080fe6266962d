"""`fuse_cast_gather`: a gathered value that is only used in half precision is cast before it is sent."""

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.net import lower
from tests.support.programs import CASES
from tests.support.worlds import ALL, on_ranks
from ztrans.ir.collectives import ALL_GATHER
from ztrans.ir.printer import equation, program
from ztrans.ir.rewriter import Rewriter
from ztrans.ir.wire_format import Coded


def test_the_program_prints(golden):
    assert str(lower(zt.fuse_cast_gather())) == golden


def test_the_difference_prints(golden):
    assert zt.ir.diff(lower(), lower(zt.fuse_cast_gather())) == golden


def test_the_program_of_all_four_transforms_prints(golden):
    assert str(lower(zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())) == golden


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_are_used_in_bf16_cost_half_of_the_bytes(stage):
    both = [
        (zt.overlap_grads(), zt.prefetch()),
        (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()),
    ]
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage, reshard="always")
    plain, fused = (on_ranks(CASES["cast_inside"], 4, shard, *t).cost_analysis() for t in both)
    assert plain.over("dp", "param") == 2 * fused.over("dp", "param") > 0
    assert plain.over("dp", "grad") == fused.over("dp", "grad")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_under_autocast_matrices_are_gathered_in_bf16_and_norms_in_fp32(stage):
    lowered = on_ranks(
        CASES["autocast"], 4, zt.shard_params(zt.AbstractMesh(dp=4), stage=stage), *ALL
    )
    dtypes = {}
    for e in lowered.graph.eqns:
        if e.op is ALL_GATHER:
            dtypes.update(dict.fromkeys(e.provenance.paths, e.outs[0].dtype))
    assert dtypes["params.blocks.0.qkv.weight"] == torch.bfloat16
    assert dtypes["params.norm.weight"] == torch.float32


@pytest.mark.parametrize(
    "use",
    [
        lambda w, h: w.t().to(h),
        lambda w, h: w.view(2, 4, 8).to(h).view(8, 8),
        lambda w, h: w.permute(1, 0).to(h).T,
    ],
    ids=["t", "view", "permute"],
)
def test_a_cast_after_views_is_fused(use):
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


def test_a_view_that_the_strides_of_the_gathered_value_do_not_allow_is_fused_too():
    """The update computes the transpose on shards, so it is gathered by rows, where the trace has it by columns."""

    def step(state, x):
        b = state["b"].detach().requires_grad_()
        moved = state["w"].t() * 2.0
        value = (moved.t().view(-1).to(torch.bfloat16) * b * x).square().mean()
        (g,) = torch.autograd.grad(value, [b])
        return {**state, "b": state["b"] - 0.1 * g, "most": moved.abs().max()}, value

    state = {"w": torch.randn(6, 4), "b": torch.ones(()), "most": torch.ones(())}
    x = torch.randn(24)
    results = []
    for more in ((), (zt.fuse_cast_gather(),)):
        lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), *more)(step).lower(state, x)
        results.append(lowered.lockstep(state, [(x,), (x,)]))
    assert torch.equal(results[0][0]["b"], results[1][0]["b"])
    assert {e.outs[0].dtype for e in lowered.graph.eqns if e.op is ALL_GATHER} == {torch.bfloat16}


def test_a_parameter_that_is_used_in_two_dtypes_is_gathered_in_fp32():

    def step(state, x):
        def loss(w):
            return (
                x.to(torch.bfloat16) @ w.to(torch.bfloat16)
            ).float().square().mean() + w.square().sum()

        grads, value = grad_and_value(loss)(state["w"])
        return {"w": state["w"] - 0.1 * grads}, value

    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.fuse_cast_gather())(step).lower(
        {"w": torch.randn(8, 8)}, torch.randn(4, 8)
    )
    dtypes = [(e.region, e.outs[0].dtype) for e in lowered.graph.eqns if e.op is ALL_GATHER]
    assert ("forward", torch.float32) in dtypes


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w[:, :4].to(torch.bfloat16).view(-1),
        lambda w: w[:1].expand(4, -1).to(torch.bfloat16).view(-1),
    ],
    ids=["columns", "expanded"],
)
def test_a_cast_of_a_view_with_gaps_stays(use):
    """The cast makes a contiguous value, which the next view needs."""

    def step(state, x):
        grads, value = grad_and_value(lambda w: (use(w).float() * x.mean()).square().mean())(
            state["w"]
        )
        return {"w": state["w"] - 0.1 * grads}, value

    state = {"w": torch.randn(8, 8)}
    x = torch.randn(4, 8)
    fused = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.fuse_cast_gather())(step).lower(
        state, x
    )
    new, _ = fused.lockstep(state, [(x,), (x,)])
    assert torch.allclose(new["w"], step(state, x)[0]["w"])


HALF = torch.bfloat16
PAIRS = torch.complex32
REAL, WIDE, COMPLEX, WHOLE = (
    torch.linspace(-3, 3, 64).view(8, 8).to(dtype).contiguous()
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.int64)
)
COMPLEX = COMPLEX * (1 + 2j)
# By name: the leaf, its use, and whether the cast may move before the views.
VIEWS = {
    "bits": (REAL, lambda w: w.view(torch.int32).to(HALF).float() * 1e-9, False),
    "bits of half the size": (WHOLE, lambda w: w.view(torch.int32).to(torch.int16).float(), False),
    "pairs as complex": (
        WIDE,
        lambda w: torch.view_as_complex(w.view(8, 4, 2)).to(PAIRS).to(torch.complex64),
        False,
    ),
    "complex as pairs": (COMPLEX, lambda w: torch.view_as_real(w).to(HALF).float(), False),
    "real": (COMPLEX, lambda w: w.real.to(HALF).float(), False),
    "imag": (COMPLEX, lambda w: w.imag.to(HALF).float(), False),
    "imag of conj": (COMPLEX, lambda w: w.conj().imag.to(HALF).float(), False),
    "conj": (COMPLEX, lambda w: w.conj().to(PAIRS).to(torch.complex64) * (1 + 2j), False),
    "neg": (REAL, lambda w: torch._neg_view(w).to(HALF).float(), False),
    "complex": (COMPLEX, lambda w: w.t().to(PAIRS).to(torch.complex64) * (1 + 2j), True),
    "complex to real": (COMPLEX, lambda w: (w * 1.0).real + w.t().real, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_cast_moves_only_before_views_that_keep_elements_and_dtype(name):
    leaf, use, crosses = VIEWS[name]

    def step(state, x):
        used = use(state["w"])
        grads, value = grad_and_value(lambda b: (used * b * x.mean()).abs().square().mean())(
            state["b"]
        )
        return {"w": state["w"], "b": state["b"] - 0.1 * grads}, value

    state = {"w": leaf, "b": torch.ones(())}
    x = torch.randn(4, 8)
    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.fuse_cast_gather())(step).lower(
        state, x
    )
    dtypes = {
        e.outs[0].dtype
        for e in zt.ir.check(lowered.graph).eqns
        if e.op is ALL_GATHER and "w" in e.provenance.paths
    }
    assert dtypes == {PAIRS if crosses else leaf.dtype}
    new, outputs = lowered.lockstep(state, [(x,), (x,)])
    want, value = step(state, x)
    assert torch.equal(new["b"], want["b"]) and all(torch.equal(out, value) for out in outputs)


def test_codes_are_decoded_in_the_dtype_that_the_step_uses():
    """A format of the wire and the dtype of a gathered value commute."""

    def in_codes(graph):
        new = Rewriter(graph)
        for e in graph.eqns:
            if e.op is ALL_GATHER and e.out.dtype.itemsize > 1:
                new.replace(e, e.replace(kwargs={**e.kwargs, "dtype": Coded(8, 64)}))
        return new.applied()

    fuse = zt.fuse_cast_gather().rewrite
    graph = lower().graph
    fused = in_codes(fuse(graph))
    assert program(fuse(in_codes(graph))) == program(fused)
    zt.ir.check(fused)
    gathers = [equation(e) for e in fused.eqns if e.op is ALL_GATHER]
    assert gathers and all("bf16[" in text and "i8/64" in text for text in gathers), gathers
