"""`bits="auto"`: a plan sends codes where they make a step faster."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import ztrans as zt
from ztrans.ir.collectives import ALL_REDUCE, REDUCE_SCATTER, is_start, role
from ztrans.ir.wire_format import Coded
from ztrans.planning.cluster import Link
from ztrans.stages import Lowered, Traced

FAST, SLOW = (
    zt.cluster("cpu", dp=Link("wire", latency=1e-6, bandwidth=bandwidth))
    for bandwidth in (1e11, 1e7)
)
WIDTH = 128
AUTO = zt.quantize_gathers("auto"), zt.quantize_grads("auto")


def train_step(state, x):
    def loss(params):
        y = x
        for w in params.values():
            y = torch.tanh(y @ w)
        return y.square().mean()

    grads, value = torch.func.grad_and_value(loss)(state)
    return {name: w - 0.1 * grads[name] for name, w in state.items()}, value


def traced(*formats: zt.Transform, rows: int = 8, stage: int = 3):
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage)
    step = zt.chain(shard, zt.overlap_grads(), zt.prefetch(), *formats)(train_step)
    state = {f"w{k}": torch.eye(WIDTH) for k in range(3)}
    return step.trace(state, torch.ones(rows, WIDTH))


@functools.cache
def lowered(cluster: zt.Cluster, *formats: zt.Transform) -> Lowered:
    return traced(*formats).lower(cluster=cluster)


def formats_of(program: Lowered) -> dict[str, set]:
    """The formats of all messages, by role."""
    formats: dict[str, set] = {}
    for e in filter(is_start, program.graph.eqns):
        formats.setdefault(role(e), set()).add(e.kwargs["dtype"])
    return formats


CODED = Coded(8, 256)


def test_codes_are_sent_over_a_slow_link_and_not_over_a_fast_one():
    """Encoding takes longer than the bytes that it saves on a fast link, and never slower than either extreme."""
    for cluster, wire in ((FAST, None), (SLOW, CODED)):
        auto = lowered(cluster, *AUTO)
        assert formats_of(auto) == {"param": {wire}, "grad": {wire}, "output": {None}}
        wide = lowered(cluster).timeline().seconds
        coded = lowered(cluster, zt.quantize_gathers(), zt.quantize_grads()).timeline().seconds
        assert auto.timeline().seconds <= 1.01 * min(wide, coded)
        assert (coded > 1.01 * wide) == (cluster is FAST)
    assert "chosen: quantize_gathers(), quantize_grads(): " in str(lowered(SLOW, *AUTO).plan)


def test_each_transform_is_chosen_by_itself():
    """At stage 1 a leaf is gathered once, so it may be that only one of the two is worth its codes."""
    device = dataclasses.replace(SLOW.device, coding=1e-3)
    cheap = dataclasses.replace(SLOW, device=device)
    only = traced(zt.quantize_grads("auto")).lower(cluster=cheap)
    assert formats_of(only) == {"param": {None}, "grad": {CODED}, "output": {None}}


def test_a_plan_keeps_the_choice_whatever_the_cluster_and_the_batch(tmp_path):
    """So a saved plan, and programs for other batch sizes that follow the plan of the first, send the same bits."""
    path = tmp_path / "plan.json"
    lowered(SLOW, *AUTO).plan.save(path)
    plan = zt.Plan.load(path)
    for rows, cluster in ((8, FAST), (2, FAST), (4096, SLOW)):
        followed = traced(*AUTO, rows=rows).lower(cluster=cluster, plan=plan)
        assert formats_of(followed)["param"] == formats_of(followed)["grad"] == {CODED}


def test_a_batch_that_cannot_follow_the_plan_gets_one_with_the_same_codes():
    """As a batch that does not fit in the order of the first: its program is planned again."""
    other = traced(*AUTO, rows=2).with_bits_of(lowered(SLOW, *AUTO).traced)
    assert formats_of(other.lower(cluster=FAST))["grad"] == {CODED}
    stage = traced(*AUTO, stage="auto").with_bits_of(lowered(SLOW, *AUTO).traced)
    assert len(stage.variants) == 3, "a stage changes no bits, so it may be chosen anew"


def test_reductions_over_replicas_share_a_bucket_only_if_both_messages_do():
    """Half of a small leaf is 64 elements, which are shorter as codes; a quarter is not."""
    state = {"large": torch.eye(64), "small": torch.ones(64, 2), "last": torch.ones(2, 64)}

    def step(state, x):
        grads = torch.func.grad(
            lambda w: (x @ w["large"] @ w["small"] @ w["last"]).square().mean()
        )(state)
        return {name: w - grads[name] for name, w in state.items()}, None

    mesh = zt.AbstractMesh(host=2, dp=2)
    shard = zt.shard_params(mesh, axis="dp", replicate_axis="host")
    chain = zt.chain(shard, zt.overlap_grads(bucket=1 << 20), zt.quantize_grads(block=128))
    program = chain(step).lower(state, torch.ones(4, 64))
    second = [e.kwargs["dtype"] for e in program.graph.eqns if e.op is ALL_REDUCE]
    assert len(second) == 2 and None in second and Coded(8, 128) in second


def test_codes_may_be_sent_between_replicas_alone():
    """Inside a fast host codes take longer than they save, and between hosts they save more."""
    mesh = zt.AbstractMesh(host=2, dp=4)
    shard = zt.shard_params(mesh, axis="dp", replicate_axis="host")
    machines = dataclasses.replace(SLOW, links=(*FAST.links, ("host", SLOW.links[0][1])))

    fast = dataclasses.replace(machines, links=(*FAST.links, ("host", FAST.links[0][1])))

    def program(*formats: zt.Transform) -> Traced:
        state = {f"w{k}": torch.eye(WIDTH) for k in range(3)}
        step = zt.chain(shard, zt.overlap_grads(), zt.prefetch(), *formats)(train_step)
        return step.trace(state, torch.ones(8, WIDTH))

    for between, wire in ((None, CODED), (4, Coded(4, 64))):
        auto = zt.quantize_grads("auto", between=between)
        low = program(auto).lower(cluster=machines)
        formats = {
            op: {e.kwargs["dtype"] for e in low.graph.eqns if e.op is op and role(e) == "grad"}
            for op in (REDUCE_SCATTER, ALL_REDUCE)
        }
        assert formats == {REDUCE_SCATTER: {None}, ALL_REDUCE: {wire}}
        for other in (), (zt.quantize_grads(between=between),):
            assert (
                low.timeline().seconds < program(*other).lower(cluster=machines).timeline().seconds
            )
        followed = program(auto).lower(cluster=fast, plan=low.plan)
        assert str(followed.graph) == str(low.graph)


def test_open_bits_are_chosen_before_a_program_is_rewritten():
    graph = lowered(FAST).graph
    for transform in AUTO:
        with pytest.raises(ValueError, match=r"the bits are chosen by Step\.lower\. Name them to"):
            transform.rewrite(graph)
