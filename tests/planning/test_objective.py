"""The solver predicts the seconds of a schedule before there is a program; the simulator, those of the program."""

from dataclasses import replace

import pytest

import ztrans as zt
from tests.support.evaluate import evaluate
from tests.support.programs import CASES
from tests.support.worlds import on_ranks
from ztrans.planning.cluster import Link
from ztrans.planning.formulate import formulate, frame
from ztrans.planning.plan import schedule_of
from ztrans.planning.simulate import simulate
from ztrans.planning.skeleton import skeleton

SLOW = Link("wire", 1e-4, 1e7)
A100 = zt.cluster("a100", dp="infiniband")
REPLICAS = zt.cluster("cpu", dp=SLOW, host=Link("hosts", 1e-4, 2e6))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["gpt_adam", "clipped"])
def test_the_solver_predicts_the_simulated_seconds_of_reductions_over_replicas(name, stage):
    """Without a second reduction they are equal. With one, the order of what one place waits for may differ."""
    predicted = {}
    for cluster, mesh, options in (
        (zt.cluster("cpu", dp=SLOW), {"dp": 4}, {}),
        (REPLICAS, {"host": 2, "dp": 2}, {"replicate_axis": "host"}),
    ):
        shard = zt.shard_params(zt.AbstractMesh(**mesh), stage=stage, **options)
        lowered = on_ranks(
            CASES[name], 4, shard, zt.overlap_grads(), zt.prefetch(), cluster=cluster
        )
        s = skeleton(lowered.unordered)
        problem = formulate(s, cluster, float("inf"), lowered.plan.update)
        schedule = schedule_of(lowered.plan, s, frame(s, lowered.plan.update))
        seconds = simulate(lowered.graph, cluster).seconds
        tolerance = 0.015 if options else 1e-5
        assert evaluate(problem, schedule).seconds == pytest.approx(seconds, rel=tolerance)
        predicted[len(mesh)] = problem, schedule, seconds
    problem, schedule, seconds = predicted[2]
    without_second = [r._replace(second=None) for r in problem.reductions]
    before = evaluate(replace(problem, reductions=tuple(without_second)), schedule).seconds
    assert before < 0.85 * seconds, "the second reductions take a large part of the step"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt_adam", "clipped"])
def test_the_solver_predicts_the_simulated_seconds_of_a_gpu(name, stage):
    """Updates that run at one place share their launches, and those of several places do not.

    The simulator also counts that updates wait for memory while messages move.
    """
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage)
    lowered = on_ranks(CASES[name], 4, shard, zt.overlap_grads(), zt.prefetch(), cluster=A100)
    s = skeleton(lowered.unordered)
    problem = formulate(s, A100, float("inf"), lowered.plan.update)
    schedule = schedule_of(lowered.plan, s, frame(s, lowered.plan.update))
    seconds = simulate(lowered.graph, A100).seconds
    assert evaluate(problem, schedule).seconds == pytest.approx(seconds, rel=0.01)
