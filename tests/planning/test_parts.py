"""A plan may let the ranks of a host keep a parameter in parts from forward to backward, and gather it among them."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import ztrans as zt
from tests.support.programs import Case, regression
from tests.support.worlds import ALL, batches, distance, on_ranks, slices, unordered
from ztrans.ir.collectives import SHARD, is_start, rules
from ztrans.planning.formulate import formulate
from ztrans.planning.plan import Plan
from ztrans.planning.realise import PlanError
from ztrans.planning.simulate import simulate
from ztrans.planning.skeleton import skeleton
from ztrans.planning.solver.search import least_memory

SLOW = zt.cluster(
    "cpu", dp=zt.by_host(4, zt.Link("inside", 1e-7, 1e10), zt.Link("between", 1e-7, 1e7))
)
MESH = zt.AbstractMesh(dp=8)
WIDTH = 32


def deep(dtype):
    """Twelve layers, and a sample on each rank. Parameters are used in `dtype`."""

    def loss(layers, x, y):
        for w in layers:
            x = torch.tanh(x.to(dtype) @ w.to(dtype))
        return F.mse_loss(x.float(), y)

    def step(layers, batch):
        grads, value = grad_and_value(loss)(layers, *batch)
        return [w - 0.05 * g for w, g in zip(layers, grads)], value

    def state():
        generator = torch.Generator().manual_seed(0)
        return [0.2 * torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(12)]

    return Case(f"deep {dtype}", step, state, regression(WIDTH, WIDTH), samples=8)


DEEP = deep(torch.float32)
HALF = deep(torch.bfloat16)


def lower(case=DEEP, cluster=SLOW, transforms=ALL, mesh=MESH, **options):
    return on_ranks(case, 8, zt.shard_params(mesh, **options), *transforms, cluster=cluster)


def tight(case, share):
    """The same, with little more memory than any order needs."""
    hinted = unordered(case, 8, zt.shard_params(MESH), *ALL, cluster=SLOW)
    least = least_memory(formulate(skeleton(hinted), SLOW, float("inf")))
    return lower(
        case,
        transforms=(zt.overlap_grads(), zt.prefetch(memory=int(share * least)), ALL[-1]),
    )


def parts(plan):
    """The names of the gathers among neighbours that a plan sends."""
    names = itertools.chain.from_iterable(members for members, _ in plan.gathers)
    return [name for name in names if "@" in name]


def received(lowered, cluster=SLOW):
    """The bytes that a rank receives from other hosts, and from its own."""
    inside = between = 0.0
    for e in filter(is_start, lowered.graph.eqns):
        route = cluster.route(e, lowered.graph.axes)
        if route is None:
            inside += rules(e).wire_bytes(e, lowered.graph.axes)
        else:
            inside += route.inside
            between += route.between
    return between, inside


@pytest.mark.slow
def test_the_plan_says_which_values_are_kept_in_parts():
    lowered = lower()
    plan = lowered.plan
    text = plan.as_text(full=True)
    kept = parts(plan)
    assert (
        f"each 4 neighbours of dp keep {len(kept)} of the 11 values that are gathered again" in text
    )
    assert "dp/4 param" in text and kept[0] in text
    cuts = [e for e in lowered.graph.eqns if e.op is SHARD]
    assert [e.out.type for e in cuts] == ["f32[32@dp/4,32]"] * len(kept)
    assert {e.region for e in cuts} == {"forward"}


@pytest.mark.slow
@pytest.mark.parametrize("case, share", [(DEEP, 1.3), (HALF, 1.3)])
def test_no_bit_changes(case, share):
    lowered = tight(case, share)
    assert parts(lowered.plan)
    first = slices(batches(case, 1)[0], 8)
    planned = lowered.lockstep(case.state(), first)
    always = lower(case, transforms=(), reshard="always").lockstep(case.state(), first)
    assert distance(planned[0], always[0]) == 0
    assert distance(planned[1], always[1]) == 0


@pytest.mark.slow
def test_in_micro_batches():
    whole = slices(regression(WIDTH, WIDTH)(16), 8)

    def lowered(*transforms):
        step = zt.chain(zt.shard_params(MESH), *transforms, zt.accumulate(2))(DEEP.step)
        return step.lower(DEEP.state(), *whole[0], cluster=SLOW)

    plain = lowered()
    peak = plain.memory_analysis().peak
    planned = lowered(zt.overlap_grads(), zt.prefetch(memory=int(1.1 * peak)))
    states = [each.lockstep(DEEP.state(), whole)[0] for each in (plain, planned)]
    assert distance(*states) == 0
    assert parts(planned.plan)
    assert planned.timeline().bound[0] <= planned.timeline().seconds


@pytest.mark.slow
def test_fewer_bytes_come_from_other_hosts_than_at_stage_3_and_with_replicas():
    """The plan alone decides. With replicas, gradients are reduced over hosts in fp32, and nothing is gathered there."""
    between, _ = received(lower())
    always, _ = received(lower(reshard="always"))
    assert between < 0.75 * always
    hosts = zt.AbstractMesh(host=2, dp=4)
    links = {"dp": SLOW.link("dp/4"), "host": SLOW.link("dp")}
    replicated = lower(
        mesh=hosts, replicate_axis="host", cluster=zt.cluster("cpu", **links)
    ).cost_analysis()
    assert between <= 1.2 * (replicated.over("host", "grad"))


@pytest.mark.slow
def test_the_step_is_simulated_faster_than_at_stage_3_in_the_same_memory():
    always = lower(reshard="always")
    limit = zt.prefetch(memory=always.memory_analysis().peak)
    planned = lower(transforms=(zt.overlap_grads(), limit, ALL[-1]))
    assert planned.memory_analysis().peak <= always.memory_analysis().peak
    assert planned.timeline().seconds < 0.8 * always.timeline().seconds
    flat = lower(cluster=zt.cluster("cpu", dp=zt.Link("between", 1e-7, 1e7)))
    assert not parts(flat.plan), "the plan knows of no hosts"
    assert simulate(planned.graph, SLOW).seconds < simulate(flat.graph, SLOW).seconds
    for each in (planned, always):
        seconds, _ = each.timeline().bound
        assert seconds <= each.timeline().seconds


def test_with_enough_memory_values_are_kept_whole_where_that_saves_time():
    inside_is_slow = zt.cluster("cpu", dp=zt.by_host(4, "ethernet-1g", "ethernet-1g"))
    plenty = (zt.overlap_grads(), zt.prefetch(memory=1 << 30), zt.fuse_cast_gather())
    lowered = lower(cluster=inside_is_slow, transforms=plenty)
    assert not parts(lowered.plan) and lowered.plan.dropped


def test_a_saved_plan_says_which_values_are_kept_in_parts(tmp_path):
    lowered = lower()
    lowered.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.lever_options == ("dp/4",)
    again = lowered.with_plan(plan)
    texts = ([zt.ir.equation(e) for e in each.graph.eqns] for each in (lowered, again))
    assert next(texts) == next(texts)


def edited(lowered, change):
    plan = json.loads(json.dumps(lowered.plan._decisions() | {"notes": []}))
    change(plan)
    return lowered.with_plan(Plan.of(plan))


def test_a_plan_may_be_edited():
    """A gather of parts becomes one of all ranks, or of other neighbours, and no bit changes."""
    lowered = lower()
    first = slices(batches(DEEP, 1)[0], 8)
    truth = lowered.lockstep(DEEP.state(), first)

    def renamed(to):
        def change(plan):
            for bucket in plan["gathers"]:
                bucket[0] = [name.replace("@dp/4", to) for name in bucket[0]]

        return change

    for to in ("", "@dp/2"):
        result = edited(lowered, renamed(to))
        assert distance(result.lockstep(DEEP.state(), first), truth) == 0
    with pytest.raises(PlanError, match=r"the program has no gather 'layers.*@dp/3'"):
        edited(lowered, renamed("@dp/3"))


def test_a_plan_that_gathers_a_value_twice_is_refused():
    lowered = lower()
    name = parts(lowered.plan)[0]

    def twice(plan):
        plan["gathers"].append([[name.replace("@dp/4", "@dp/2")], plan["gathers"][-1][1]])

    with pytest.raises(
        PlanError, match="is replaced by another one, and dropped or replaced again"
    ):
        edited(lowered, twice)

    def missing(plan):
        for bucket in plan["gathers"]:
            bucket[0] = [each for each in bucket[0] if each != name]
        plan["gathers"] = [bucket for bucket in plan["gathers"] if bucket[0]]

    whole = name.removesuffix("@dp/4")
    with pytest.raises(PlanError, match=f"the gather '{whole}' is missing"):
        edited(lowered, missing)


@pytest.mark.slow
def test_reshard_always_and_a_number_leave_the_plan_no_choice():
    for reshard in ("always", 2):
        lowered = lower(reshard=reshard)
        assert not lowered.plan.dropped and not any("@dp/4" in name for name in parts(lowered.plan))


def test_one_host_has_no_parts():
    one = zt.cluster("cpu", dp=zt.by_host(8, "ethernet-100g", "ethernet-1g"))
    assert one.neighbours({"dp": 8}) == ()
    assert SLOW.neighbours({"dp": 8}) == ("dp/4",)
    assert SLOW.neighbours({"dp": 6}) == ()
    assert SLOW.link("dp/4").name == SLOW.link("dp/2").name == "inside"
    assert zt.cluster("cpu", dp="ethernet-1g").link("dp/4").name == "ethernet-1g"
