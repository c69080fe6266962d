"""`shard_params` over several axes: joint axes, an axis for each leaf, and two transforms for different leaves."""

from __future__ import annotations

import pytest
import torch

import ztrans as zt
from tests.support.programs import CASES
from tests.support import experts
from tests.support.parallel import dual
from tests.support.parallel import own as c10d
from tests.support.worlds import ALL, default_dtype, distance, plain, sharded

JOINT = zt.AbstractMesh(dp=2, cp=3)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_step_over_two_axes_as_one_computes_the_same(stage, hosts):
    """Odd dims are cut over six ranks; with two hosts the shards are replicated."""
    hsdp = {"replicate_axis": "host"} if hosts > 1 else {}
    mesh = zt.AbstractMesh(host=hosts, dp=2, cp=2) if hosts > 1 else JOINT
    with default_dtype(torch.float64):
        for name in ("uneven", "clipped"):
            case = CASES[name]
            truth, outputs = plain(case, steps=3)
            state, each, lowered = sharded(case, 24 // 4 if hosts == 1 else 8, stage, 3, mesh=mesh, axis=("dp", "cp"), **hsdp)
            assert distance(state, truth) < 1e-10
            assert distance(each[-1][0], outputs[-1]) < 1e-10
            assert ("@dp*cp" in str(lowered)) == (stage > 0)
            assert {e.kwargs["axis"] for e in lowered.graph.eqns if "axis" in e.kwargs} <= {"dp*cp", "host"}


def exchange(x: torch.Tensor) -> torch.Tensor:
    """Send row r to rank r of `ep`, and receive a row from each."""
    return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), [1, 1], [1, 1], "ep"))


exchanged = dual(exchange, lambda g: exchanged(g))
EXPERTS = zt.AbstractMesh(dp=2, ep=2)


def axis(path: str, leaf: torch.Tensor) -> str | tuple[str, ...]:
    return "dp" if experts.is_expert(path) else ("dp", "ep")


def two(mesh: zt.AbstractMesh, **options) -> zt.Transform:
    """One `shard_params` for experts, and one for all other leaves."""
    dense = zt.shard_params(mesh, axis=("dp", "ep"), where=lambda path, leaf: not experts.is_expert(path), **options)
    return zt.chain(dense, zt.shard_params(mesh, axis="dp", where=experts.is_expert, **options))


def of_function(mesh: zt.AbstractMesh, **options) -> zt.Transform:
    return zt.shard_params(mesh, axis=axis, dim=lambda path, leaf: 2 * experts.is_expert(path), **options)


@pytest.mark.parametrize("shard", [of_function, two])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("hosts", [1, 2])
def test_experts_and_dense_layers_are_reduced_in_one_step(shard, stage, hosts):
    """Gradients of experts are summed over `ep` by the step's own messages, and reduced over `dp`; all others over both."""
    mesh = zt.AbstractMesh(dp=2, ep=2) if hosts == 1 else zt.AbstractMesh(host=2, dp=2, ep=2)
    hsdp = {"replicate_axis": "host"} if hosts > 1 else {}
    data, plain_step, truth = experts.batches(3), experts.make_step(), experts.state()
    for x in data:
        truth, value = plain_step(truth, x)
    step = zt.chain(shard(mesh, stage=stage, **hsdp), *ALL)(experts.make_step(exchanged, ranks=2))
    lowered = step.lower(experts.of_rank(experts.state(), 0, 2), data[0].chunk(4 * hosts)[0])
    new, values = experts.trained(lowered.graph, experts.state(), data)
    assert distance(new, truth) < 1e-12
    assert distance(values[0], value) < 1e-12
    over = {p: e.kwargs["axis"] for e in lowered.graph.eqns if e.provenance and e.provenance.role == "grad" for p in e.provenance.paths
            if e.kwargs["axis"] != "host"}  # fmt: skip
    assert over == {f"params.{k}": "dp" if experts.is_expert(k) else "dp*ep" for k in experts.state()["params"]}
