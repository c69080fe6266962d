"""Costs and memory that can be counted by hand."""

import torch
from programs import CASES
from torch.func import grad_and_value
from worlds import sharded

import ztrans as zt


def step(state, batch):
    def loss(params):
        h = torch.relu(batch[0] @ params["a"])
        return ((h @ params["b"]) - batch[1]).square().mean()

    grads, value = grad_and_value(loss)(state)
    return {k: p - 0.1 * grads[k] for k, p in state.items()}, value


def lowered(ranks: int = 4, **options) -> zt.Lowered:
    state = {"a": torch.zeros(64, 128), "b": torch.zeros(128, 32)}
    batch = (torch.zeros(16, 64), torch.zeros(16, 32))
    return zt.chain(zt.shard_params(zt.AbstractMesh(dp=ranks), **options), zt.overlap_grads())(step).lower(state, batch)


def test_flops_of_matmuls():
    """Forward a and b, backward b twice and a once: no gradient for the batch is needed."""
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
        memory = lowered(stage=stage).memory_analysis()
        assert memory.state == (whole if stage == 0 else whole // 4)
        assert memory.peak == max(memory.live) and memory.peak >= memory.state
        assert sum(n for _, n, _ in memory.holders) == memory.peak
        peaks.append(memory.peak)
    assert peaks[0] > peaks[1] >= peaks[2] >= peaks[3]


def test_the_peak_names_its_holders_and_lines():
    memory = lowered(stage=2).memory_analysis()
    assert "test_cost.py" in str(memory.at.source)
    assert memory.holders[0][1] >= memory.holders[-1][1]
    assert "peak" in str(memory) and "state" in str(memory) and "test_cost.py" in str(memory)


def test_live_memory_by_hand():
    """x: 16 KiB in, two temporaries of 16 KiB: relu in place of neg, a sum beside it."""

    def plain(state, x):
        return state, (torch.relu(-x) + 1).sum()

    memory = zt.Step(plain).lower({"s": torch.zeros(1)}, torch.zeros(64, 64)).memory_analysis()
    assert memory.peak == 4 + 2 * 64 * 64 * 4 + 4  # state, x, one temporary changed in place, the sum


def test_costs_print():
    text = str(lowered().cost_analysis())
    assert "wire dp param" in text and "FLOP" in text and "KiB" in text


def test_hosts_exchange_parts():
    _, _, hsdp = sharded(CASES["mlp_momentum"], 8, mesh=zt.AbstractMesh(host=2, dp=4), replicate_axis="host", steps=1)
    wire = hsdp.cost_analysis()
    inner, outer = wire.over("dp", "grad"), wire.over("host", "grad")
    # An all_reduce over 2 hosts of a quarter: 2 * 1/2 * 1/4, beside 3/4 of the whole inside.
    assert abs(outer / inner - (1 / 4) / (3 / 4)) < 0.01
