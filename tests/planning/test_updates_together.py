"""Updates of several reductions that run together: in the program, in a saved plan, and in a plan that was edited."""

import functools
import json

import pytest

import ztrans as zt
from tests.support.across_steps import same
from tests.support.evaluate import evaluate
from tests.support.programs import CASES
from tests.support.worlds import batches, on_ranks, slices
from ztrans.planning.cluster import Link
from ztrans.planning.cost import memory
from ztrans.planning.formulate import formulate, frame
from ztrans.planning.plan_names import schedule_of
from ztrans.planning.simulate import simulate
from ztrans.planning.skeleton import skeleton

CASE = CASES["gpt_adam"]
SHARD = zt.shard_params(zt.AbstractMesh(dp=4))
# Launches take most of a small step, and messages are fast. Small buckets, so that there are several.
A100 = zt.cluster("a100", dp=Link("wire", 1e-6, 1e12))
WITH_NEXT = ", with the next"


@functools.cache
def planned(**options) -> zt.stages.Lowered:
    overlap = zt.overlap_grads(bucket=2000, **options)
    return on_ranks(CASE, 4, SHARD, overlap, zt.prefetch(), cluster=A100)


def edited(lowered, **fields):
    decisions = {**json.loads(json.dumps(lowered.plan._decisions())), "notes": [], **fields}
    return lowered.with_plan(zt.Plan.of(decisions))


def shared(plan: zt.Plan) -> list[tuple[str, ...]]:
    return [members for members, place in plan.reductions if place.endswith(WITH_NEXT)]


def test_the_plan_says_which_updates_run_together():
    lowered = planned()
    assert shared(lowered.plan)
    assert WITH_NEXT in lowered.plan.as_text(full=True)
    assert evaluated(lowered) == pytest.approx(simulate(lowered.graph, A100).seconds, rel=1e-5)


def evaluated(lowered) -> float:
    s = skeleton(lowered.unordered)
    problem = formulate(s, A100, float("inf"), lowered.plan.update)
    return evaluate(problem, schedule_of(lowered.plan, s, frame(s, lowered.plan.update))).seconds


def test_updates_that_run_together_share_launches():
    lowered = planned()
    apart = [[names, place.removesuffix(WITH_NEXT)] for names, place in lowered.plan.reductions]
    alone = edited(lowered, reductions=apart)
    assert not shared(alone.plan)
    assert lowered.cost_analysis().launches < alone.cost_analysis().launches
    assert simulate(lowered.graph, A100).seconds < simulate(alone.graph, A100).seconds


def test_no_bit_changes():
    lowered = planned()
    first = slices(batches(CASE, 1)[0], 4)
    written = on_ranks(CASE, 4, SHARD).lockstep(CASE.state(), first)
    assert same(lowered.lockstep(CASE.state(), first), written)


def test_a_saved_plan_gives_the_same_program(tmp_path):
    lowered = planned()
    lowered.plan.save(tmp_path / "step.plan")
    again = lowered.with_plan(zt.Plan.load(tmp_path / "step.plan"))
    assert str(again) == str(lowered) and again.plan == lowered.plan


def test_the_last_bucket_of_a_place_may_say_so_too():
    """Nothing follows it there, so its updates run after its wait."""
    lowered = planned()
    *others, (names, place) = lowered.plan.reductions
    assert not place.endswith(WITH_NEXT)
    also = edited(lowered, reductions=[*others, [names, place + WITH_NEXT]])
    assert str(also.graph) == str(lowered.graph)


def test_a_gather_cannot_say_so():
    lowered = planned()
    (names, _), *others = lowered.plan.gathers
    with pytest.raises(
        ValueError,
        match="the program has no place 'the start, with the next'; it may start at 'the start' only",
    ):
        edited(lowered, gathers=[[names, "the start" + WITH_NEXT], *others])


def test_a_limit_of_gradients_under_way_splits_no_group():
    """The last reduction starts once the first one has been waited for, and still updates run after the second wait."""
    lowered = planned(max_in_flight=3500)
    (first, _), (second, _), (third, end) = lowered.plan.reductions
    others = [[second, end], [third, end]]
    together = edited(lowered, reductions=[[first, end + WITH_NEXT], *others])
    apart = edited(lowered, reductions=[[first, end], *others])
    assert together.cost_analysis().launches < apart.cost_analysis().launches
    assert evaluated(together) == pytest.approx(simulate(together.graph, A100).seconds, rel=0.01)


@pytest.mark.parametrize("share", [1.0, 1.2])
def test_the_peak_of_the_program_is_within_the_limit(share):
    peak = memory(on_ranks(CASE, 4, SHARD).graph).peak
    limit = int(share * peak)
    transforms = (SHARD, zt.overlap_grads(bucket=2000), zt.prefetch(memory=limit))
    lowered = on_ranks(CASE, 4, *transforms, cluster=A100)
    assert lowered.memory_analysis().peak <= limit
