"""Recomputation that is chosen together with the plan: within the limit, monotone, and worth more than it costs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import pytest

import ztrans as zt
from benchmarks.plans.analysis_models import MODELS, gpt
from benchmarks.plans.frontier_models import gpt as large_gpt
from tests.support.cover import parameters_of
from ztrans.planning.cost import memory
from ztrans.planning.limit import DoesNotFit

pytestmark = pytest.mark.slow  # each test plans several steps

SCHEDULES = (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())


@functools.cache
def traced(name):
    make = {"gpt": lambda: gpt(2, 512, 512, 4, heads=8), "large gpt": large_gpt}
    step, state, batch = make[name]() if name in make else MODELS[name].make()
    return zt.Step.of(step).trace(state, *batch)


def step(name, ranks, *remat):
    shard = zt.shard_params(zt.AbstractMesh(dp=ranks))
    return dataclasses.replace(traced(name), transforms=(shard, *SCHEDULES, *remat))


def lower(name, ranks, link, *remat, device="h100", **options):
    return step(name, ranks, *remat).lower(cluster=zt.cluster(device, dp=link), **options)


def planned(name, ranks, link, *remat):
    """As `lower`, but an error does not say what would fit."""
    return step(name, ranks, *remat).planned(zt.cluster("h100", dp=link))


@functools.cache
def kept(name, ranks, link):
    """The memory of the step in which everything is kept, as it is written."""
    return memory(step(name, ranks).without_order(zt.cluster("h100", dp=link)).unordered)


def limits(name, ranks, link, shares):
    """Limits between the state and the peak of the step in which everything is kept."""
    full = kept(name, ranks, link)
    return [int(full.state + share * (full.peak - full.state)) for share in shares]


SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)


@pytest.mark.parametrize(
    ("name", "ranks", "link", "shares"),
    parameters_of(
        [
            ("GPT 2 x 128, fp32", 8, "nvlink4", (1.0, 0.6)),
            ("GPT 2 x 128, fp32", 8, "nvlink4", SHARES),
            ("GPT 2 x 128, fp32", 64, "infiniband", SHARES),
            ("MLP 8 x 4096", 8, "nvlink4", SHARES),
            ("MLP, uneven and thin leaves", 8, "nvlink4", SHARES),
        ],
        [
            ("GPT 2 x 128, fp32", 8, "nvlink4", (1.0, 0.6)),
            ("MLP, uneven and thin leaves", 8, "nvlink4", SHARES),
        ],
    ),
)
def test_the_peak_is_within_the_limit_and_a_larger_one_is_hardly_slower(name, ranks, link, shares):
    """Each limit is searched by itself, and the search for an order does not always find the best one."""
    seconds = []
    for limit in limits(name, ranks, link, shares):
        try:
            lowered = planned(name, ranks, link, zt.remat(memory=limit))
        except DoesNotFit as error:
            assert error.least.peak > limit
            continue
        assert lowered.memory_analysis().peak <= limit
        seconds.append(lowered.timeline().seconds)
    assert seconds
    for larger, smaller in itertools.pairwise(seconds):
        assert larger <= 1.005 * smaller


@pytest.mark.exhaustive
def test_where_the_wire_binds_recomputation_makes_room_for_messages():
    """At the peak at which all fits, a step that recomputes a little is faster. Fitting activations tightly fails this."""
    written = kept("large gpt", 64, "infiniband").peak
    full = lower("large gpt", 64, "infiniband", zt.remat(memory=written, save="save_everything"))
    limit = full.memory_analysis().peak
    lowered = lower("large gpt", 64, "infiniband", zt.remat(memory=limit))
    assert lowered.memory_analysis().peak <= limit
    assert lowered.timeline().seconds <= 0.92 * full.timeline().seconds


@functools.cache
def half():
    (limit,) = limits("gpt", 8, "nvlink4", [0.5])
    return limit, lower("gpt", 8, "nvlink4", zt.remat(memory=limit))


def test_a_saved_plan_recomputes_the_same_values(tmp_path):
    limit, lowered = half()
    lowered.plan.save(tmp_path / "step.plan")
    plan = zt.Plan.load(tmp_path / "step.plan")
    assert plan.recomputed and plan == lowered.plan
    remat = zt.remat(memory=limit)
    assert str(lower("gpt", 8, "nvlink4", remat, plan=plan).graph) == str(lowered.graph)
    assert str(lowered.with_plan(plan).graph) == str(lowered.graph)
    assert "values recomputed" in str(plan) and "recomputed in backward" in str(plan)


@pytest.mark.parametrize(
    ("name", "remat", "message"),
    [
        ("nothing", True, "it recomputes 'nothing', and the program has no such value of forward"),
        ("gelu", False, "it recomputes 'gelu', and the step has no remat(memory=...)."),
    ],
)
def test_a_plan_with_an_unknown_value_is_refused(name, remat, message, tmp_path):
    limit, lowered = half()
    lowered.plan.save(tmp_path / "step.plan")
    edited = json.loads((tmp_path / "step.plan").read_text()) | {"recomputed": [name]}
    (tmp_path / "step.plan").write_text(json.dumps(edited))
    plan = zt.Plan.load(tmp_path / "step.plan")
    with pytest.raises(ValueError) as caught:
        lower("gpt", 8, "nvlink4", *([zt.remat(memory=limit)] if remat else []), plan=plan)
    text = str(caught.value)
    assert str(tmp_path / "step.plan") in text and message in text


def test_a_plan_fits_another_batch_size():
    """The names are those of another batch; the limit is checked again."""
    limit, lowered = half()
    step, state, batch = gpt(2, 512, 512, 2, heads=8)
    stage = zt.Step.of(step).trace(state, *batch)
    shard = zt.shard_params(zt.AbstractMesh(dp=8))
    stage = dataclasses.replace(stage, transforms=(shard, *SCHEDULES, zt.remat(memory=limit)))
    smaller = stage.lower(cluster=lowered.cluster, plan=lowered.plan)
    assert smaller.plan.recomputed == lowered.plan.recomputed
    assert smaller.memory_analysis().peak < lowered.memory_analysis().peak
    assert (
        stage.lower(cluster=lowered.cluster, plan=lowered.plan, follow=True).plan.recomputed
        == lowered.plan.recomputed
    )


def test_what_does_not_fit_is_an_error_that_names_the_least_peak_and_its_holders():
    with pytest.raises(DoesNotFit) as caught:
        planned("gpt", 8, "nvlink4", zt.remat(memory=1 << 20))
    text = str(caught.value)
    assert "memory=1048576" in text
    assert "is less than the step needs in any order tried" in text and "MiB" in text
    least = caught.value.least.peak
    assert planned("gpt", 8, "nvlink4", zt.remat(memory=least)).memory_analysis().peak <= least


def test_auto_is_the_memory_of_the_device():
    device = zt.cluster("h100", dp="nvlink4").device
    (limit,) = limits("gpt", 8, "nvlink4", [0.6])
    small = dataclasses.replace(device, memory=limit, reserve=0)
    lowered = lower("gpt", 8, "nvlink4", zt.remat(memory="auto"), device=small)
    assert lowered.plan.recomputed and lowered.memory_analysis().peak <= limit
    roomy = lower("gpt", 8, "nvlink4", zt.remat(memory="auto"))
    assert not roomy.plan.recomputed
