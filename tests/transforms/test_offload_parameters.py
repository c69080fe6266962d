"""`offload` of leaves that forward reads: they come in for each region that reads them, and no bit changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, lower_traced, on_ranks, slices
from ztrans.ir.copies import TO_DEVICE, TO_HOST
from ztrans.ir.liveness import liveness

EVERYTHING = zt.offload(where="*", at_least=0)
WITH_GRADIENTS = zt.offload(where="*", gradients=True, at_least=0)
MESH = zt.AbstractMesh(dp=2)
WIDTH = 64


def same(a, b) -> bool:
    pairs = zip(*map(pytree.tree_leaves, (a, b)), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def layers_step(state, x):
    """Layers in bf16 with fp32 weights, all of which are cast before the first one runs."""
    params = {k: w.detach().requires_grad_() for k, w in state["params"].items()}
    half = {k: w.bfloat16() for k, w in params.items()}
    y = x.bfloat16()
    for w in half.values():
        y = torch.tanh(y @ w)
    loss = y.float().square().mean()
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
    m = {k: 0.9 * m + grads[k] for k, m in state["m"].items()}
    return {"params": {k: w - m[k] for k, w in state["params"].items()}, "m": m}, loss.detach()


def layers_state(layers: int = 4):
    torch.manual_seed(0)
    params = {f"w{k}": torch.randn(WIDTH, WIDTH) / 8 for k in range(layers)}
    return {"params": params, "m": {k: torch.zeros_like(w) for k, w in params.items()}}


X = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH)


def after(step, state, steps: int = 3):
    step = zt.Step.of(step)
    state = step.shard(state)
    for _ in range(steps):
        state, loss = step(state, X)
    return state, loss


def copies(graph) -> Counter:
    """The number of copies by direction, region and leaf."""
    found: Counter = Counter()
    for e in graph.eqns:
        if e.op in (TO_DEVICE, TO_HOST):
            found[e.op.name, e.region, *e.provenance.paths] += 1
    return found


@pytest.mark.parametrize("name", ["mlp_momentum", "clipped", "adamw_fused"])
@pytest.mark.parametrize("across_steps", [False, True])
def test_steps_have_the_same_bits_on_one_rank(name, across_steps):
    case = CASES[name]
    results = []
    for transform in (zt.chain(), zt.offload(where="*", at_least=0, across_steps=across_steps)):
        step = zt.chain(transform)(case.step)
        state = step.shard(case.state())
        for each in batches(case, 3):
            state, output = step(state, *each)
        results.append((state, output))
    assert same(*results)


def assert_same_in_lockstep(
    transform: zt.Transform, stage: int, schedules: tuple
) -> zt.stages.Lowered:
    """Compare two steps of two ranks with those on the device. Returns the program with the transform."""
    case = CASES["clipped"]
    results = []
    for transforms in ((), (transform,)):
        low = on_ranks(case, 2, zt.shard_params(MESH, stage=stage), *transforms, *schedules)
        state = case.state()
        for each in batches(case, 2):
            state, outputs = low.lockstep(state, slices(each, 2))
        results.append((state, outputs))
    assert same(*results)
    return low


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedules", [(), ALL], ids=["as written", "scheduled"])
def test_ranks_have_the_same_bits(stage, schedules):
    assert_same_in_lockstep(EVERYTHING, stage, schedules)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("schedules", [(), ALL], ids=["as written", "scheduled"])
def test_gradients_that_wait_for_their_norm_may_wait_on_the_host(stage, schedules):
    low = assert_same_in_lockstep(WITH_GRADIENTS, stage, schedules)
    leave = [e for e in low.graph.eqns if e.op is TO_HOST and "over" not in e.kwargs]
    assert len(leave) == len(CASES["clipped"].state()["params"])


def test_gradients_on_the_host_are_not_on_the_device_when_backward_ends():
    """Each norm is computed before its gradient leaves."""

    def clipped(state, x):
        params = {k: w.detach().requires_grad_() for k, w in state["params"].items()}
        y = x
        for w in params.values():
            y = torch.tanh(y @ w)
        loss = y.square().mean()
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        scale = torch.stack([g.square().sum() for g in grads.values()]).sum().rsqrt()
        m = {k: 0.9 * m + scale * grads[k] for k, m in state["m"].items()}
        return {"params": {k: w - m[k] for k, w in state["params"].items()}, "m": m}, loss.detach()

    shard = zt.shard_params(zt.AbstractMesh(dp=1))
    peaks = []
    for transform in (EVERYTHING, WITH_GRADIENTS):
        step = zt.chain(shard, transform, zt.overlap_grads(bucket=0))(clipped)
        low = step.lower(layers_state(16), X)
        peaks.append(low.memory_analysis().peak)
    assert peaks[1] < peaks[0] / 2
    state, (loss,) = low.lockstep(layers_state(16), [(X,)])
    plain = zt.Step.of(clipped)
    assert same((state, loss), plain(plain.shard(layers_state(16)), X))


def test_a_gradient_that_was_cast_to_a_wider_dtype_leaves_before_the_cast():
    def clipped(state, x):
        params = {k: w.detach().requires_grad_() for k, w in state.items()}
        y = x.bfloat16()
        for w in params.values():
            y = torch.tanh(y @ w.bfloat16())
        loss = y.float().square().mean()
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        scale = torch.stack([g.square().sum() for g in grads.values()]).sum().rsqrt()
        return {k: w - scale * grads[k] for k, w in state.items()}, loss.detach()

    state = layers_state()["params"]
    one_rank = (zt.shard_params(zt.AbstractMesh(dp=1)), WITH_GRADIENTS, *ALL)
    for transforms in ((WITH_GRADIENTS,), one_rank):
        graph = zt.chain(*transforms)(clipped).lower(state, X).graph
        leave = [e.out.dtype for e in graph.eqns if e.op is TO_HOST and "over" not in e.kwargs]
        assert leave == [torch.bfloat16] * 4
    assert same(after(WITH_GRADIENTS(clipped), state), after(clipped, layers_state()["params"]))


def test_an_update_that_waits_for_nothing_keeps_its_gradient():
    low = WITH_GRADIENTS(layers_step).lower(layers_state(), X)
    assert all("over" in e.kwargs for e in low.graph.eqns if e.op is TO_HOST)


def test_micro_batches_have_the_same_bits():
    case = CASES["clipped"]
    results = []
    for transforms in ((), (EVERYTHING,), (WITH_GRADIENTS,)):
        step = zt.chain(zt.accumulate(2), *transforms)(case.step)
        state = step.shard(case.state())
        for each in batches(case, 2):
            state, output = step(state, *each)
        results.append((state, output))
    assert same(*results[:2]) and same(*results[1:])


def test_a_leaf_comes_in_once_for_each_region_and_leaves_once():
    low = EVERYTHING(layers_step).lower(layers_state(), X)
    found = copies(dict(low.history)["offload"])
    assert set(found.values()) == {1}
    regions = {region for op, region, path in found if path == "params.w1" and op == "to_device"}
    assert {"forward", "backward"} <= regions
    assert found["to_host", "update", "params.w1"] == 1
    assert [region for op, region, path in found if path == "m.w1"] == ["update", "update"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_leaf_that_is_still_there_is_not_copied_again(ranks):
    """An update that follows backward finds the parameter that backward has brought, if the limit has room."""
    shard = zt.shard_params(zt.AbstractMesh(dp=ranks))
    limit = 1 << 20
    schedules = (zt.overlap_grads(bucket=0), zt.prefetch(memory=limit))
    low = zt.chain(shard, EVERYTHING, *schedules)(layers_step).lower(layers_state(8), X)
    before, after = copies(dict(low.history)["plan"]), copies(low.graph)
    brought = [("to_device", "update", f"params.w{k}") for k in range(8)]
    assert [before[copy] for copy in brought] == [1] * 8
    assert sum(after[copy] for copy in brought) < 4
    assert after["to_device", "update", "m.w4"] == 1
    assert low.memory_analysis().peak <= limit


def test_two_leaves_with_one_new_value_both_get_it():
    def step(state, x):
        return {"a": state["c"], "b": state["c"], "c": state["c"] + x}, x.sum()

    moved = zt.offload(where="[ab]", at_least=0)(step)
    state = {k: torch.full((4,), float(i)) for i, k in enumerate("abc")}
    new, _ = moved(moved.shard(state), torch.ones(4))
    assert [x[0].item() for x in new.values()] == [2.0, 2.0, 3.0]


@pytest.mark.parametrize("bandwidth", [1e6, 1e8, 1e10])
def test_across_steps_is_never_slower(bandwidth):
    cluster = zt.cluster("h100", host_link=zt.Link("link", 1e-5, bandwidth))
    traced = zt.Step.of(layers_step).trace(layers_state(), X)
    within, across = (
        lower_traced(
            traced,
            zt.offload(where="*", at_least=0, across_steps=flag)(layers_step),
            cluster=cluster,
        )
        for flag in (False, True)
    )
    assert across.timeline().seconds <= within.timeline().seconds


def test_no_cast_of_a_leaf_waits_for_backward():
    """Each region casts the leaves that it reads, and one layer after the other, though the step casts all at once."""
    graph = EVERYTHING(layers_step).lower(layers_state(), X).graph
    last = liveness(graph).last
    first_backward = next(i for i, e in enumerate(graph.eqns) if e.region == "backward")
    casts = [v for v in last if v.shape == (WIDTH, WIDTH) and v.dtype == torch.bfloat16]
    made = {v: i for i, e in enumerate(graph.eqns) for v in e.results}
    across = [v for v in casts if made[v] < first_backward < last[v]]
    assert not across
    assert same(after(EVERYTHING(layers_step), layers_state()), after(layers_step, layers_state()))


def test_at_stage_3_a_shard_comes_in_before_its_gather_and_is_gathered_in_half_precision():
    low = zt.chain(zt.shard_params(MESH), EVERYTHING, *ALL)(layers_step).lower(layers_state(), X)
    gathers = [e for e in low.graph.eqns if e.op.name == "all_gather"]
    assert gathers and all(e.kwargs["dtype"] == torch.bfloat16 for e in gathers)
    assert all(v.name.startswith("params.") and ".device" in v.name for e in gathers for v in e.ins)


def test_the_device_holds_no_state_between_steps():
    memory = EVERYTHING(layers_step).lower(layers_state(), X).memory_analysis()
    assert memory.state == 0
    assert memory.host_peak == 2 * 4 * WIDTH * WIDTH * 4
    one = zt.shard_params(zt.AbstractMesh(dp=1))
    early = zt.chain(one, EVERYTHING, zt.overlap_grads(bucket=0))(layers_step)
    wide = early.lower(layers_state(16), X).memory_analysis()
    assert wide.peak < wide.host_peak / 4


def test_a_view_of_a_leaf_that_the_step_returns_is_a_copy():
    def step(state, x):
        return {"w": state["w"] + x, "old": state["w"]}, (state["w"].t(), x.sum())

    state = {"w": torch.arange(16.0).view(4, 4), "old": torch.zeros(4, 4)}
    moved = EVERYTHING(step)
    assert same(
        moved(moved.shard(state), torch.ones(4, 4)),
        zt.Step.of(step)(zt.Step.of(step).shard(state), torch.ones(4, 4)),
    )


def test_a_leaf_that_two_forwards_read_comes_in_for_each():
    """A second loss of the old weights, as in a step of two losses."""

    def step(state, x):
        w = state["w"].detach().requires_grad_()
        (g,) = torch.autograd.grad((x @ w).square().mean(), [w])
        v = state["w"].detach().requires_grad_()
        (h,) = torch.autograd.grad((x @ torch.sin(v)).mean(), [v])
        return {"w": state["w"] - 0.1 * g - h}, g.sum()

    state = {"w": torch.ones(4, 4)}
    low = EVERYTHING(step).lower(state, torch.ones(4, 4))
    assert copies(dict(low.history)["offload"])["to_device", "forward", "w"] == 2
    moved = EVERYTHING(step)
    assert same(
        moved(moved.shard(state), torch.ones(4, 4)),
        zt.Step.of(step)(zt.Step.of(step).shard(state), torch.ones(4, 4)),
    )


def test_a_failed_step_leaves_the_old_parameters():
    def step(state, x, index):
        w = state["w"].detach().requires_grad_()
        y = (x @ w)[index].square().mean()
        (g,) = torch.autograd.grad(y, [w])
        return {"w": state["w"] - 0.1 * g}, y

    moved = EVERYTHING(step)
    state = moved.shard({"w": torch.ones(4, 4)})
    x = torch.arange(8.0).view(2, 4)
    state, _ = moved(state, x, torch.tensor([0, 1]))
    before = state["w"].clone()
    with pytest.raises(Exception, match="index"):
        moved(state, x, torch.tensor([0, 7]))
    assert torch.equal(state["w"], before)
    state, _ = moved(state, x, torch.tensor([0, 1]))
    assert not torch.equal(state["w"], before)


def test_a_checkpoint_has_the_parameters(tmp_path):
    step = EVERYTHING(layers_step)
    state = step.shard(layers_state())
    state, _ = step(state, X)
    zt.save(tmp_path / "checkpoint", state).result()
    loaded = zt.load(tmp_path / "checkpoint", state, step)
    plain = zt.Step.of(layers_step)
    on_device = zt.load(tmp_path / "checkpoint", plain.shard(layers_state()), plain)
    expected, _ = step(state, X)
    assert same(step(loaded, X)[0], expected)
    assert same(plain(on_device, X)[0], expected)


def test_a_host_that_is_too_small_is_an_error():
    cluster = zt.cluster("h100", host_memory=100_000)
    with pytest.raises(ValueError, match=r"keeps 128.00 KiB in the memory of the host"):
        EVERYTHING(layers_step).lower(layers_state(), X, cluster=cluster)


def test_it_commutes_with_the_schedules():
    case = CASES["clipped"]
    shard = zt.shard_params(MESH)
    texts = set()
    for transforms in ((EVERYTHING, *ALL), (*ALL, EVERYTHING)):
        texts.add(str(on_ranks(case, 2, shard, *transforms)).split("\n", 1)[1])
    assert len(texts) == 1
