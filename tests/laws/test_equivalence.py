"""The law above all others: a sharded step on N ranks computes what the plain step computes on the whole batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value

import ztrans as zt
from tests.support.programs import CASES, EXACT, GPT, ConvNet, adam, images, params_of, sgd
from tests.support.worlds import (
    ALL,
    Case,
    batches,
    clone,
    default_dtype,
    distance,
    plain,
    sharded,
    slices,
)
from ztrans.ir.collectives import REDUCE_SCATTER

STAGES = (0, 1, 2, 3)
# The stages on each number of ranks. On one rank every stage is the same program. Three ranks divide few dims, so they
# have all stages; eight are more than some leaves have rows.
WORLDS = {1: (3,), 3: STAGES, 8: (3,)}
FURTHER_WORLDS = {2: (0, 2), 4: (1,), 8: (2,)}
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
# What fp32 could add is a value computed in another dtype, in any world.
WORLDS_BY_DTYPE = {torch.float64: WORLDS, torch.float32: {1: (3,), 3: STAGES}}


def _marks(case: Case, dtype: torch.dtype) -> tuple:
    if case.name in QUICK:
        return () if dtype is torch.float64 else (pytest.mark.slow,)
    return (pytest.mark.slow,) if dtype is torch.float64 else (pytest.mark.exhaustive,)


QUICK = {"uneven", "adamw_fused"}  # these run in `make quick`, in f64, and in f32 in `make test`
PROGRAMS = [
    *(pytest.param(case, torch.float64, marks=_marks(case, torch.float64)) for case in EXACT),
    *(pytest.param(case, torch.float32, marks=_marks(case, torch.float32)) for case in EXACT),
]


@pytest.mark.slow
@pytest.mark.parametrize("case, dtype", PROGRAMS, ids=lambda x: getattr(x, "name", None))
def test_sharded_equals_plain(case, dtype):
    compare_with_plain(case, dtype, WORLDS_BY_DTYPE[dtype])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_sharded_equals_plain_in_further_worlds(case):
    compare_with_plain(case, torch.float64, FURTHER_WORLDS)


def compare_with_plain(case, dtype, worlds):
    """A rank has as many samples in each world, so that its program is traced once."""
    bound = BOUNDS[dtype]
    with default_dtype(dtype):
        for ranks, stages in worlds.items():
            world = replace(case, samples=ranks * case.samples // max(WORLDS))
            truth, outputs = plain(world, 3)
            for stage in stages:
                state, each, _ = sharded(world, ranks, stage, 3)
                assert distance(state, truth) <= bound, f"{ranks} ranks, stage {stage}"
                first = [o[0] for o in each]
                assert distance(first, outputs) <= 100 * bound, (
                    f"outputs, {ranks} ranks, stage {stage}"
                )


def by_hand(case, loss, update, ranks, steps=5):
    """Data parallelism written out: the mean of the ranks' gradients, then the plain update."""
    state = clone(case.state())
    for batch in batches(case, steps):
        grads = [loss(state, *part) for part in slices(batch, ranks)]
        mean = {k: sum(g[k] for g in grads) / ranks for k in grads[0]}
        state = update(state, mean)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        *WORLDS.items(),
        *(pytest.param(*world, marks=pytest.mark.exhaustive) for world in FURTHER_WORLDS.items()),
    ],
)
def test_autocast_equals_data_parallelism_by_hand(ranks, stages):
    """bf16 gradients are rounded on each rank before they are averaged, so the truth must do so too."""
    autocast = CASES["autocast"]
    case = replace(autocast, samples=ranks * autocast.samples // max(WORLDS))
    gpt = GPT(width=16, layers=1)

    def grads(state, batch):
        def loss(params):
            with torch.autocast("cpu", torch.bfloat16):
                logits = functional_call(gpt, params, (batch[0],))
                return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

        return grad_and_value(loss)(state["params"])[0]

    truth = by_hand(case, grads, adam, ranks)
    for stage in stages:
        state, _, _ = sharded(case, ranks, stage)
        assert distance(state, truth) <= 1e-5, f"stage {stage}"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_for_half_precision_copies(stage):
    case = CASES["cast_outside"]
    state, _, lowered = sharded(case, 4, stage)
    truth, _ = plain(case)
    assert distance(state, truth) <= 2e-2  # each rank's gradient is rounded to 8 bits
    assert "bf16" in str(lowered)


def test_batch_norm_buffers_are_those_of_ddp():
    """Each rank normalises by its own statistics, and the running ones are averaged."""
    model = ConvNet()
    buffers = {k: b.clone() for k, b in model.named_buffers()}

    def loss(params, stats, x, y):
        stats = dict(stats)
        return F.cross_entropy(functional_call(model, {**params, **stats}, (x,)), y), stats

    def step(state, batch):
        grads, (value, stats) = grad_and_value(loss, has_aux=True)(
            state["params"], state["buffers"], *batch
        )
        return {"params": sgd(state["params"], grads), "buffers": stats}, value

    case = Case(
        "batch_norm", step, lambda: {"params": params_of(model), "buffers": clone(buffers)}, images
    )
    for stage in (0, 3):
        state, _, lowered = sharded(case, 4, stage)
        hand = clone(case.state())
        for batch in batches(case, 5):
            grads, stats = [], []
            for part in slices(batch, 4):
                g, (_, s) = grad_and_value(loss, has_aux=True)(
                    hand["params"], clone(hand["buffers"]), *part[0]
                )
                grads.append(g)
                stats.append(s)
            mean = lambda each, k: sum(e[k] for e in each) / 4
            hand["params"] = sgd(hand["params"], {k: mean(grads, k) for k in grads[0]})
            hand["buffers"] = {k: mean(stats, k).to(b.dtype) for k, b in hand["buffers"].items()}
        assert distance(state, hand) <= 1e-5
        assert "native_batch_norm" in str(lowered)


def test_local_outputs_are_left_alone():
    case = CASES["mlp_momentum"]
    _, each, _ = sharded(case, 4, steps=1, outputs="local")
    _, mean, _ = sharded(case, 4, steps=1)
    assert len({o.item() for o in each[0]}) == 4
    assert torch.allclose(torch.stack(each[0]).mean(), mean[0][0])


@pytest.mark.slow
def test_hierarchical_sharding_equals_plain():
    case = CASES["gpt_adam"]
    with default_dtype(torch.float64):
        truth, _ = plain(case)
        for stage in (1, 3):
            mesh = zt.AbstractMesh(host=2, dp=4)
            state, _, lowered = sharded(case, 8, stage, mesh=mesh, replicate_axis="host")
            assert distance(state, truth) <= 1e-10
            wire = lowered.cost_analysis()
            # Across hosts only shards are reduced; parameters never cross.
            assert wire.over("host", "param") == 0
            assert 0 < wire.over("host", "grad") < wire.over("dp", "grad")


def test_where_leaves_leaves_whole():
    case = CASES["mlp_momentum"]
    with default_dtype(torch.float64):
        truth, _ = plain(case)
        state, _, lowered = sharded(case, 4, where=lambda path, leaf: leaf.ndim > 1)
        assert distance(state, truth) <= 1e-10
        types = {v.name: v.type for v in lowered.graph.inputs}
        assert types["params.0.weight"] == "f64[16@dp,6]"
        assert types["params.0.bias"] == "f64[16]"


def test_an_update_may_mix_whole_and_cut_matrices():
    def step(state, batch):
        grads, value = grad_and_value(lambda w: (batch[0] @ w).square().mean())(state["w"])
        mixed = torch.addmm(state["mixed"], state["mixed"], grads, alpha=-0.1)
        return {"w": state["w"] - 0.1 * mixed, "mixed": mixed}, value

    case = Case(
        "mixed",
        step,
        lambda: {"w": torch.eye(6), "mixed": torch.ones(6, 6)},
        lambda n: ((torch.randn(n, 6),),),
    )
    with default_dtype(torch.float64):
        truth, _ = plain(case)
        state, _, _ = sharded(case, 4, where=lambda path, leaf: path == "w")
        assert distance(state, truth) <= 1e-10


def test_reduce_dtype_is_a_numerics_change_by_name():
    case = CASES["mlp_momentum"]
    truth, _ = plain(case)
    state, _, lowered = sharded(case, 4, reduce_dtype=torch.bfloat16)
    _, _, whole = sharded(case, 4)
    assert 1e-6 < distance(state, truth) < 2e-2
    assert 2 * lowered.cost_analysis().over("dp", "grad") == whole.cost_analysis().over(
        "dp", "grad"
    )


@pytest.mark.slow
def test_the_loss_in_bf16_keeps_the_law_bitwise_on_one_rank():
    for case in (CASES["autocast"], CASES["cast_outside"]):
        truth, _ = plain(case)
        state, _, _ = sharded(case, 1, transforms=ALL)
        assert (
            distance(state, truth) <= 1e-6
        )  # what torch.optim does with Python floats is done with tensors


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_the_step_rounds_is_sent_rounded(stage):
    """A wider `reduce_dtype` changes the sum, and not the terms."""

    def step(state, batch):
        w = state["w"]
        (gradient,) = torch.autograd.grad((batch[0] @ w.float()).square().sum(), w)
        return {"w": gradient}, 0.0

    state = {"w": torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True)}
    batches = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(k)),) for k in range(2)]
    by_rank = [step(state, batch)[0]["w"] for batch in batches]
    transform = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage, reduce_dtype=torch.float32)
    lowered = transform(step).lower(state, batches[0])
    new, _ = lowered.lockstep(state, [(batch,) for batch in batches])
    assert torch.equal(new["w"], torch.stack(by_rank).float().mean(0).bfloat16())


@pytest.mark.slow
def test_gradients_that_are_bf16_cross_as_they_are():
    """Widening a gradient and rounding it again for the wire changes nothing, so neither is done."""
    _, _, lowered = sharded(CASES["autocast"], 4, 2, reduce_dtype=torch.bfloat16)
    members = [v for e in lowered.graph.eqns if e.op is REDUCE_SCATTER for v in e.ins]
    assert {v.dtype for v in members} == {torch.bfloat16, torch.float32}
    sums = [o for e in lowered.graph.eqns if e.op is REDUCE_SCATTER for o in e.outs]
    assert {o.dtype for o in sums} == {torch.float32}
