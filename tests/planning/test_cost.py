"""Costs and memory of small programs, compared with figures that are computed by hand."""

import functools

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import lower_traced, sharded
from ztrans.ir.collectives import WAIT
from ztrans.ir.liveness import liveness
from ztrans.planning.cost import cost as cost_of
from ztrans.planning.cost import memory as memory_of


def step(state, batch):
    def loss(params):
        h = torch.relu(batch[0] @ params["a"])
        return ((h @ params["b"]) - batch[1]).square().mean()

    grads, value = grad_and_value(loss)(state)
    return {k: p - 0.1 * grads[k] for k, p in state.items()}, value


CPUS = zt.cluster("cpu", dp="ethernet-1g")


@functools.cache
def traced() -> zt.stages.Traced:
    state = {"a": torch.zeros(64, 128), "b": torch.zeros(128, 32)}
    return zt.Step.of(step).trace(state, (torch.zeros(16, 64), torch.zeros(16, 32)))


def lowered(mesh=zt.AbstractMesh(dp=4), cluster=None, **options) -> zt.stages.Lowered:  # noqa: B008
    chain = zt.chain(zt.shard_params(mesh, **options), zt.overlap_grads())
    return lower_traced(traced(), chain(step), cluster=cluster)


def test_flops_of_matmuls():
    """One product with a and one with b in forward; in backward two for b, and one for a, as the batch needs none."""
    a, b = 2 * 16 * 64 * 128, 2 * 16 * 128 * 32
    flops = lowered().cost_analysis().flops
    pointwise = flops - (2 * a + 3 * b)
    assert 0 < pointwise < 0.2 * flops


def test_wire_bytes_by_role():
    a, b = 64 * 128 * 4, 128 * 32 * 4
    for stage, gathers in ((0, 0), (1, a + b), (2, a + b), (3, a + 2 * b)):
        wire = lowered(stage=stage).cost_analysis()
        assert wire.over("dp", "param") == gathers * 3 // 4
        assert wire.over("dp", "grad") == (a + b) * 3 // 4 * (2 if stage == 0 else 1)
        assert wire.over("dp", "output") == 4 * 2 * 3 // 4
        assert wire.over() == wire.wire_bytes == sum(n for _, n in wire.wire)


def test_state_and_peak_by_stage():
    whole = (64 * 128 + 128 * 32) * 4
    peaks = []
    for stage in (0, 1, 2, 3):
        memory = lowered(stage=stage, cluster=CPUS).memory_analysis()
        assert memory.state == (whole if stage == 0 else whole // 4)
        assert memory.peak == max(memory.live) and memory.peak >= memory.state
        assert sum(n for _, n, _ in memory.holders) == memory.peak
        peaks.append(memory.peak)
    assert peaks[0] > peaks[1] >= peaks[2]
    assert peaks[3] <= 1.05 * peaks[2]  # on CPUs a plan may take 5% more


def test_the_peak_names_its_holders_and_lines():
    memory = lowered(stage=2).memory_analysis()
    assert "test_cost.py" in str(memory.peak_eqn.source)
    assert memory.holders[0][1] >= memory.holders[-1][1]
    assert "peak" in str(memory) and "state" in str(memory) and "test_cost.py" in str(memory)


def test_live_memory_by_hand():
    """`x` has 16 KiB. A temporary of 16 KiB holds the results of neg, relu and add, one after the other."""

    def plain(state, x):
        return state, (torch.relu(-x) + 1).sum()

    memory = zt.Step(plain).lower({"s": torch.zeros(1)}, torch.zeros(64, 64)).memory_analysis()
    assert (
        memory.peak == 4 + 2 * 64 * 64 * 4 + 4
    )  # state, x, one temporary changed in place, the sum


def test_a_cost_analysis_prints():
    text = str(lowered().cost_analysis())
    assert "wire dp param" in text and "FLOP" in text and "KiB" in text


def test_padding_crosses_the_wire():
    """Seven rows over four ranks are padded to eight: every rank sends and receives two rows."""

    def scales(state, batch):
        grads, value = grad_and_value(lambda w: (batch * w).sum())(state)
        return state - 0.1 * grads, value

    for reduce_dtype, size in ((None, 4), (torch.bfloat16, 2)):
        step = zt.shard_params(zt.AbstractMesh(dp=4), reduce_dtype=reduce_dtype)(scales)
        graph = step.lower(torch.zeros(7, 5), torch.zeros(7, 5)).graph
        cost = cost_of(graph)
        memory = memory_of(graph)
        part, whole = 2 * 5 * 4, 7 * 5 * 4
        assert dict(cost.wire) == {
            ("dp", "param"): 3 * part,
            ("dp", "grad"): 3 * 2 * 5 * size,
            ("dp", "output"): 4 * 2 * 3 // 4,
        }
        # Forward and backward work on 35 elements (two products) and on one (a sum, a constant one). The update works
        # on 10 elements (scale, subtract).
        assert cost.flops == 2 * 35 + 2 + 2 * 10
        assert memory.state == part
        # While the gather is under way, the state, the batch and the receive buffer of four padded shards are live.
        assert memory.live[0] == part + whole + 4 * part
        # At the reduce_scatter also the gradient, the loss, four padded shards to send and three to receive.
        assert memory.live[7] == part + whole + whole + 4 + (4 + 3) * 2 * 5 * size


def test_the_state_of_uneven_leaves_is_that_of_the_rank_with_most():
    _, _, uneven = sharded(CASES["uneven"], 8, steps=1)
    # The leaves are [7,5], [7,3], [2], [1], [] and [0,4]. A leaf with fewer rows than half of the ranks is not cut.
    held = {"a": 5, "b": 3, "tiny": 2, "one": 1, "scalar": 1, "empty": 0}
    assert uneven.memory_analysis().state == 4 * sum(held.values())


@pytest.mark.slow
def test_gathers_in_half_precision_cost_half():
    case = CASES["cast_inside"]
    wide = sharded(case, 4, steps=1, transforms=())[2].cost_analysis()
    fused = sharded(case, 4, steps=1, transforms=(zt.fuse_cast_gather(),))[2].cost_analysis()
    assert fused.over("dp", "param") * 2 == wide.over("dp", "param")
    assert fused.over("dp", "grad") == wide.over("dp", "grad")
    assert fused.flops < wide.flops and fused.bytes < wide.bytes


def test_hosts_reduce_shards_and_not_whole_gradients():
    mesh, whole = zt.AbstractMesh(host=2, dp=4), (64 * 128 + 128 * 32) * 4
    wire = lowered(stage=2, mesh=mesh, replicate_axis="host").cost_analysis()
    assert dict(wire.wire) == {
        ("dp", "param"): whole * 3 // 4,
        ("dp", "grad"): whole * 3 // 4,
        ("host", "grad"): 2 * (whole // 4) // 2,  # an all_reduce of a quarter over 2 hosts
        ("dp", "output"): 2 * 4 * 3 // 4,
        ("host", "output"): 2 * 4 // 2,
    }
    assert wire.over("host") == wire.over("host", "grad") + wire.over("host", "output")


def test_a_reduction_in_half_precision_returns_a_new_storage():
    """A gradient that is all-reduced in bf16 is cast to f32 at its wait. Otherwise the wait returns a view."""
    for dtype, own in ((torch.bfloat16, True), (None, False)):
        graph = lowered(stage=0, reduce_dtype=dtype).graph
        reduced = next(e for e in graph.eqns if e.op is WAIT and e.outs[0].name == "b.grad")
        assert reduced.outs[0].type == "f32[128,32]"
        assert (liveness(graph).root[reduced.outs[0]] is reduced.outs[0]) == own


def test_the_analyses_of_an_empty_program_print():
    nothing = zt.ir.Graph("f", (), (), (), 0)
    assert str(memory_of(nothing)) == "peak 0 B\nstate 0 B"
    host = "host                    0 calls, 0 kernel launches"
    assert (
        str(cost_of(nothing))
        == f"compute                 0.00 FLOP\nmemory traffic          0 B\n{host}"
    )
    x, y = zt.ir.Var("x", torch.float32, (1024, 1024)), zt.ir.Var("y", torch.float32, (1024, 1024))
    relu = zt.ir.Graph("f", (x,), (zt.ir.Eqn(torch.ops.aten.relu.default, (x,), (y,)),), (y,), 0)
    assert str(memory_of(relu)).splitlines()[:2] == ["peak 8.00 MiB at y", "state 0 B"]
    lines = ["compute                 1.05 MFLOP", "memory traffic          8.00 MiB"]
    assert str(cost_of(relu)).splitlines() == [
        *lines,
        "host                    1 call, 1 kernel launch",
    ]


def test_the_timeline_of_micro_batches_has_the_peak_of_the_memory_analysis():
    """It has the batches of the other micro-batches, and what those before return."""

    def loss_of(w, x):
        y = torch.tanh(x @ w)
        return y.square().mean(), y

    def step(state, x):
        grad, (_, y) = grad_and_value(loss_of, has_aux=True)(state["w"], x)
        return {"w": state["w"] - 0.1 * grad}, y

    state = {"w": torch.zeros(16, 4)}
    lowered = zt.accumulate(8)(step).lower(state, torch.zeros(4096, 16))
    assert lowered.timeline().peak == lowered.memory_analysis().peak


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_mean_that_becomes_a_leaf_is_scattered(stage, hosts):
    """No rank needs more of it than its own part of the leaf; a mean that the caller gets too is whole."""

    def step(state, x):
        return {"mean": zt.pmean(x.mean(0)), "decayed": 0.9 * zt.pmean(x.sum(0))}, zt.pmean(x[0])

    hsdp = {"replicate_axis": "host"} if hosts > 1 else {}
    mesh = zt.AbstractMesh(host=2, dp=2) if hosts > 1 else zt.AbstractMesh(dp=2)
    state = {"mean": torch.zeros(48), "decayed": torch.zeros(48)}
    lowered = zt.shard_params(mesh, stage=stage, **hsdp)(step).lower(state, torch.ones(4, 48))
    wire = lowered.cost_analysis()
    leaf = 48 * 4
    parts = 1 if stage == 0 else 2
    # An all_reduce among two ranks sends a value once, and a reduce_scatter half of it.
    assert wire.over("dp", "pmean") == 2 * leaf // parts + leaf
    assert wire.over("host", "pmean") == (2 * leaf // parts + leaf) * (hosts - 1)


def test_an_embedding_and_a_loss_read_some_elements_of_a_large_argument():
    """A batch of 8 tokens reads 8 rows of the table; a loss reads one log-probability for each of its targets."""

    def lookup(state, table, tokens):
        return state, torch.nn.functional.embedding(tokens, table)

    def loss(state, scores, targets):
        return state, torch.nn.functional.nll_loss(scores, targets)

    whole, indices = torch.zeros(8, 4096), torch.zeros(8, dtype=torch.int64)
    for step, x, at_most in ((lookup, torch.zeros(4096, 4), 8 * 4 * 4 * 2), (loss, whole, 16)):
        graph = zt.Step(step).trace(torch.zeros(1), x, indices).graph
        assert cost_of(graph).bytes <= indices.nbytes + at_most < x.nbytes
