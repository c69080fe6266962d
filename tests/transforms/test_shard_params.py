"""`shard_params`: where a program gathers, reduces and computes on shards, by stage."""

import pytest
import torch

import ztrans as zt
from tests.support.net import accumulate, lower
from tests.support.programs import CASES
from tests.support.worlds import ALL, distance, on_ranks, sharded
from ztrans.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, is_start


def starts(graph, op, role=None):
    return [e for e in graph.eqns if e.op is op and role in (None, e.provenance.role)]


def test_the_traced_program_prints(golden):
    assert str(lower().history[1][1]) == golden


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_program_of_a_stage_prints(stage, golden):
    assert str(lower(stage=stage)) == golden


def test_stage_1_accumulates_unsharded(golden):
    """With two micro-batches, the whole gradients are added, and only their sum is reduced."""
    assert str(lower(stage=1, fn=accumulate)) == golden
    for stage, reductions in ((0, 2), (1, 2), (2, 4), (3, 4)):
        graph = lower(stage=stage, fn=accumulate).graph
        assert sum(is_start(e) and e.provenance.role == "grad" for e in graph.eqns) == reductions


def test_the_program_with_a_replicate_axis_prints(golden):
    assert str(lower(mesh=zt.AbstractMesh(host=2, dp=2), replicate_axis="host")) == golden


def test_stage_3_gathers_again_in_backward():
    graph = lower(stage=3).graph
    regions = {
        p: [e.region for e in starts(graph, ALL_GATHER) if e.provenance.paths == (p,)]
        for p in ("params.up", "params.down")
    }
    # The gradient of the input is not needed, so backward does not read `up`.
    assert regions == {"params.up": ["forward"], "params.down": ["forward", "backward"]}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tied_weights_are_gathered_and_reduced_once(stage):
    _, _, lowered = sharded(CASES["gpt_adam"], 4, stage, steps=1)
    for op, role, most in (
        (ALL_GATHER, "param", 2 if stage == 3 else 1),
        (REDUCE_SCATTER, "grad", 1),
    ):
        messages = [
            e
            for e in starts(lowered.graph, op, role)
            if "params.tokens.weight" in e.provenance.paths
        ]
        assert 1 <= len(messages) <= most


def test_frozen_parameters_are_not_reduced():
    _, _, lowered = sharded(CASES["lora"], 4, steps=1)
    reduced = {p for e in starts(lowered.graph, REDUCE_SCATTER) for p in e.provenance.paths}
    gathered = {p for e in starts(lowered.graph, ALL_GATHER) for p in e.provenance.paths}
    assert reduced == {"adapters.0.a", "adapters.0.b", "adapters.2.a", "adapters.2.b"}
    assert {"base.0.weight", "base.2.bias"} <= gathered


def test_clipping_by_the_global_norm_costs_one_scalar():
    _, _, lowered = sharded(CASES["clipped"], 4, steps=1)
    (norm,) = starts(lowered.graph, ALL_REDUCE, "update")
    assert norm.outs[0].numel == 4  # the norms of four parameters, in one reduction
    assert lowered.cost_analysis().over("dp", "update") == 4 * 4 * 2 * 3 // 4


@pytest.mark.slow
def test_every_gradient_is_reduced_whatever_the_optimizer():
    """PyTorch's own passes recognise gradients by patterns, and find none if the optimizer is in the graph."""
    for name in (
        "gpt_adam",
        "clipped",
        "adamw_fused",
        "adamw_foreach",
        "accumulation",
        "sam",
        "weight_penalty",
    ):
        _, _, lowered = sharded(CASES[name], 4, steps=1)
        trained = {v.name for v in lowered.graph.inputs if v.name.startswith("params.")}
        reduced = {
            p for e in starts(lowered.graph, REDUCE_SCATTER, "grad") for p in e.provenance.paths
        }
        assert {p for p in reduced if p.startswith("params.")} == trained or name == "sam", name


def test_the_update_runs_on_shards_only():
    for name in ("gpt_adam", "adamw_fused", "clipped"):
        _, _, lowered = sharded(CASES[name], 4, steps=1)
        for e in lowered.graph.eqns:
            if e.region == "update" and not is_start(e):
                assert all(
                    o.split or o.numel <= 30 for o in e.outs if o is not None and len(o.shape) > 1
                ), e


def test_the_peak_falls_with_the_stage():
    """From stage 1 on each rank holds a fourth of the state. On GPUs a plan may use the memory that is there."""
    peaks = {}
    for stage in (0, 1, 2, 3):
        shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage)
        cpus = zt.cluster("cpu", dp="ethernet-1g")
        lowered = on_ranks(CASES["gpt_adam"], 4, shard, *ALL, cluster=cpus)
        memory = lowered.memory_analysis()
        peaks[stage] = memory.peak - sum(v.numel * v.dtype.itemsize for v in lowered.graph.batch)
        whole = sum(v.numel * v.dtype.itemsize for v in lowered.graph.state)
        rows = [(v.shape, v.dtype.itemsize) for v in lowered.graph.state]
        ceil = sum((-(-s[0] // 4) * torch.Size(s[1:]).numel() if s else 1) * b for s, b in rows)
        assert memory.state == (whole if stage == 0 else ceil)
    assert peaks[0] > peaks[1] >= peaks[2] > peaks[3]


def test_reduce_dtype_does_not_apply_to_complex_gradients():
    """A cast to a real dtype would drop their imaginary part."""
    wanted, _, _ = sharded(CASES["complex_weights"], 2, steps=2)
    state, _, lowered = sharded(CASES["complex_weights"], 2, steps=2, reduce_dtype=torch.bfloat16)
    assert distance(state, wanted) == 0
    assert all(e.kwargs["dtype"] is None for e in starts(lowered.graph, REDUCE_SCATTER, "grad"))
