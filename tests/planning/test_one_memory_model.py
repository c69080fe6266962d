"""The planner predicts the peak memory of a program to the byte, as the memory analysis computes it."""

from __future__ import annotations

import pytest

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.planning.cluster import Link
from ztrans.planning.cost import memory
from ztrans.planning.formulate import formulate, frame
from ztrans.planning.plan_names import resolve
from ztrans.planning.program_order import skeleton
from ztrans.planning.solver.evaluation import evaluate

SLOW, FAST = (zt.cluster("cpu", dp=Link("wire", latency, bandwidth)) for latency, bandwidth in ((1e-4, 1e7), (1e-7, 1e11)))
# They have packed and large leaves, casts, padding, updates in place, a global norm, several gradients of one leaf.
PROGRAMS = ["mlp_momentum", "clipped", "uneven", "cast_inside", "lora"]


def lower(name: str, ranks: int, stage: int, budget: int | None, cluster: zt.Cluster) -> zt.Lowered:
    shard = zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage)
    prefetch = zt.prefetch() if budget is None else zt.prefetch(memory=budget)
    return on_ranks(CASES[name], ranks, shard, zt.overlap_grads(), prefetch, zt.fuse_cast_gather(), cluster=cluster)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_planners_peak_is_that_of_the_memory_analysis(name, ranks, stage):
    """The schedule is resolved from the names of the plan, so nothing that the planner has computed is reused."""
    cluster = SLOW if ranks == 2 else FAST
    peak = None
    for share in (None, 1.02, 1.5):
        lowered = lower(name, ranks, stage, None if share is None else int(share * peak), cluster)
        peak = peak or lowered.memory_analysis().peak
        plan, s = lowered.plan, skeleton(lowered.hinted)
        if plan.update == "as written":
            continue
        problem = formulate(s, cluster, float("inf"), plan.update)
        schedule = resolve(s, frame(s, plan.update), plan.gathers, plan.reductions, plan.dropped)
        assert evaluate(problem, schedule).peak == lowered.memory_analysis().peak == memory(lowered.graph).peak
        assert share is None or lowered.memory_analysis().peak <= int(share * peak)
