"""The solver predicts the seconds of a schedule before there is a program; the simulator, those of the program."""

from dataclasses import replace

import pytest
import torch

import ztrans as zt
from tests.support.evaluate import evaluate
from tests.support.formats import SentAs
from tests.support.programs import CASES, Case, regression
from tests.support.worlds import on_ranks
from ztrans.ir.wire_format import Coded
from ztrans.planning.cluster import Link
from ztrans.planning.durations import equation_seconds, messages
from ztrans.planning.formulate import formulate, frame
from ztrans.planning.plan_names import schedule_of
from ztrans.planning.play import play
from ztrans.planning.simulate import simulate
from ztrans.planning.skeleton import skeleton
from ztrans.planning.solver.bound import bound

SLOW = Link("wire", 1e-4, 1e7)
A100 = zt.cluster("a100", dp=Link("wire", 1e-6, 1e12))  # launches take most of a small step


def without_launches(cluster: zt.Cluster) -> zt.Cluster:
    """The plan counts launches as in the program without collectives, whose waits may part updates at the end."""
    device = replace(cluster.device, kernel_gap=0.0, call_overhead=0.0, launch_overhead=0.0)
    return replace(cluster, device=device)


ONE_AXIS = without_launches(zt.cluster("cpu", dp=SLOW))
REPLICAS = without_launches(zt.cluster("cpu", dp=SLOW, host=Link("hosts", 1e-4, 2e6)))
GPUS = zt.cluster("h100", dp=Link("wire", 1e-6, 1e10), host=Link("hosts", 1e-5, 2e9))


def predicted_and_played(lowered, cluster: zt.Cluster) -> tuple[float, float]:
    """The seconds of a schedule, and those of its program before messages and kernels share the memory of a GPU."""
    s = skeleton(lowered.unordered)
    problem = formulate(s, cluster, float("inf"), lowered.plan.update)
    schedule = schedule_of(lowered.plan, s, frame(s, lowered.plan.update))
    sent = [each.message for each in messages(lowered.graph, cluster)]
    played = play(equation_seconds(lowered.graph, cluster), sent)
    return evaluate(problem, schedule).seconds, played.seconds


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [ONE_AXIS, REPLICAS, GPUS], ids=["one", "replicas", "gpus"])
@pytest.mark.parametrize("name", ["clipped", "loss_scaled", "muon", "accumulation"])
def test_a_program_does_everything_in_the_order_of_its_schedule(name, cluster):
    """So both take the same seconds. An order of its own would take up to a fifth longer, as it once did."""
    two = cluster is not ONE_AXIS
    mesh = zt.AbstractMesh(**({"host": 2, "dp": 2} if two else {"dp": 4}))
    for stage, most in ((0, None), (2, 4000), (3, None)):
        shard = zt.shard_params(mesh, stage=stage, replicate_axis="host" if two else None)
        transforms = (shard, zt.overlap_grads(max_in_flight=most), zt.prefetch(max_in_flight=most))
        lowered = on_ranks(CASES[name], 4, *transforms, cluster=cluster)
        predicted, played = predicted_and_played(lowered, cluster)
        assert predicted == pytest.approx(played, rel=1e-12), stage


SLOW_CODES = replace(ONE_AXIS, device=replace(ONE_AXIS.device, coding=50.0))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [SLOW_CODES, REPLICAS, GPUS], ids=["one", "replicas", "gpus"])
def test_codes_take_their_seconds_in_plans_and_programs(cluster):
    """Within a limit too, which no peak exceeds; and no plan beats its bound."""
    two = cluster is not SLOW_CODES
    mesh = zt.AbstractMesh(**({"host": 2, "dp": 2} if two else {"dp": 4}))
    shard = zt.shard_params(mesh, axis="dp", replicate_axis="host" if two else None)
    coded = SentAs(Coded(8, 64), Coded(4, 32))
    limit = None
    for share in (None, 1.02, 1.3):
        prefetch = zt.prefetch() if limit is None else zt.prefetch(memory=int(share * limit))
        transforms = shard, zt.overlap_grads(), prefetch, coded
        lowered = on_ranks(CASES["clipped"], 4, *transforms, cluster=cluster)
        predicted, played = predicted_and_played(lowered, cluster)
        assert predicted == pytest.approx(played, rel=1e-9)
        timeline = lowered.timeline()
        assert timeline.bound[0] <= timeline.seconds * (1 + 1e-9)
        limit = limit or timeline.peak
        assert share is None or timeline.peak <= int(share * limit)
    wide = on_ranks(CASES["clipped"], 4, shard, zt.overlap_grads(), zt.prefetch(), cluster=cluster)
    assert timeline.compute > wide.timeline().compute


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["gpt_adam", "clipped"])
def test_the_solver_predicts_the_simulated_seconds_of_reductions_over_replicas(name, stage):
    predicted = {}
    for cluster, mesh, options in (
        (ONE_AXIS, {"dp": 4}, {}),
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
        # The bytes of uneven parts are estimated.
        assert evaluate(problem, schedule).seconds == pytest.approx(seconds, rel=1e-5)
        predicted[len(mesh)] = problem, schedule, seconds
    problem, schedule, seconds = predicted[2]
    without_second = [r._replace(second=None) for r in problem.reductions]
    before = evaluate(replace(problem, reductions=tuple(without_second)), schedule).seconds
    assert before < 0.85 * seconds, "the second reductions take a large part of the step"


WIDTH = 64


def returns_a_late_loss(state, batch):
    """SGD with momentum. The loss is computed again after the update, so an update that writes what it reads stays."""

    def loss(params, x, y):
        for weight in params.values():
            x = torch.tanh(x @ weight)
        return torch.nn.functional.mse_loss(x, y)

    params, moments = state
    grads = torch.func.grad(loss)(params, *batch)
    new_params = {}
    new_moments = {}
    for name in params:
        new_moments[name] = 0.9 * moments[name] + grads[name]
        new_params[name] = params[name] - 0.1 * new_moments[name]
    return (new_params, new_moments), loss(params, *batch)


def late_loss() -> Case:
    layers = lambda: {name: torch.randn(WIDTH, WIDTH) for name in ("first", "second")}
    state = lambda: (layers(), layers())
    return Case("late_loss", returns_a_late_loss, state, regression(WIDTH, WIDTH))


STEPS = {**CASES, "late_loss": late_loss()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "name", ["gpt_adam", "clipped", "late_loss", "loss_scaled", "muon", "accumulation"]
)
def test_the_solver_predicts_the_simulated_seconds_of_a_gpu(name, stage):
    """Updates that run at one place share their launches, and those of several places do not.

    The simulator also counts that updates wait for memory while messages move.
    """
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage)
    lowered = on_ranks(STEPS[name], 4, shard, zt.overlap_grads(), zt.prefetch(), cluster=A100)
    problem = formulate(skeleton(lowered.unordered), A100, float("inf"), lowered.plan.update)
    predicted, played = predicted_and_played(lowered, A100)
    assert predicted == pytest.approx(played, rel=1e-7)  # the bytes of uneven parts are estimated
    seconds = simulate(lowered.graph, A100).seconds
    assert predicted == pytest.approx(seconds, rel=0.01)
    assert bound(problem).seconds <= seconds
