"""Budgets that cannot be met, plans of another program, and sizes that make no sense: the whole text of each error."""

import dataclasses
import functools

import pytest
import torch
from torch.func import grad

import ztrans as zt

W = 64  # three layers of 16 KiB each in fp32; on four ranks the shard of one layer is 4 KiB


def step(params, x):
    grads = grad(loss)(params, x)
    return {k: p - 0.1 * grads[k] for k, p in params.items()}, None


def loss(params, x):
    for w in params.values():
        x = torch.tanh(x @ w)
    return x.square().mean()


@functools.cache
def traced(rows):
    return zt.Step.of(step).trace({k: torch.zeros(W, W) for k in "abc"}, torch.zeros(rows, W))


def transformed(*transforms, stage=3, rows=2):
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=stage)
    return dataclasses.replace(traced(rows), transforms=(shard, *transforms))


def lower(*transforms, stage=3, rows=2, **how):
    return transformed(*transforms, stage=stage, rows=rows).lower(**how)


def refused(memory: int, **how) -> list[str]:
    with pytest.raises(ValueError) as caught:
        lower(zt.overlap_grads(), zt.prefetch(memory=memory), **how)
    return str(caught.value).splitlines()


def test_the_error_of_a_small_budget_says_how_much_is_needed_where_and_for_what():
    first, *holders, last = refused(1000)
    needs = int(first.split("any order tried: ")[1].split()[0])
    assert first == (
        f"prefetch(memory=1000): 1000 B is less than the step needs in any order tried: {needs} bytes "
        f"({needs / 1024:.2f} KiB) at {__file__}:22 in loss."
    )
    # No order needs less than the state, one gathered layer, one gradient, and the received parts of its reduction.
    assert (
        3 * 4096 + 16384 + 16384 + 3 * 4096
        <= needs
        <= 3 * 4096 + 2 * 16384 + 4 * 4096 + 16 * 2 * W * 4
    )
    assert len(holders) == 5 and all(" KiB  " in row for row in holders)
    assert holders[0].split()[:2] == ["16.00", "KiB"] and "f32[64,64]" in holders[0]
    assert holders[0].endswith("  # test_budgets.py:22 loss"), "the user's line"
    assert last == "Give it that much, or a smaller batch.", "no rank more makes room for a layer"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rows", [2, 200])
def test_the_budget_that_the_error_names_is_enough_and_a_byte_less_is_not(stage, rows):

    def planned(memory):
        """As `lower`, but an error does not say what would fit."""
        schedules = zt.overlap_grads(), zt.prefetch(memory=memory)
        return transformed(*schedules, stage=stage, rows=rows).planned(None)

    def needs_of_error(memory):
        with pytest.raises(ValueError) as caught:
            planned(memory)
        return int(str(caught.value).split("any order tried: ")[1].split()[0])

    needs = needs_of_error(1)
    fits = planned(needs)
    assert fits.memory_analysis().peak <= needs and zt.ir.check(fits.graph)
    assert needs_of_error(needs - 1) == needs


def every_other(params, x):
    """Trains layers 0, 2 and 4. At the peak five gathered layers are live, and the received gradient of the last."""
    fixed = {k: w for i, (k, w) in enumerate(params.items()) if i % 2}
    free = {k: w for k, w in params.items() if k not in fixed}
    grads = grad(lambda free: loss({k: {**free, **fixed}[k] for k in params}, x))(free)
    return {k: w - 0.1 * grads[k] if k in grads else w for k, w in params.items()}, None


@pytest.mark.slow
def test_the_order_stays_as_written_if_no_other_order_fits(tmp_path):
    """A note in the plan says so."""
    shard = zt.shard_params(zt.AbstractMesh(dp=4), stage=1)
    arguments = {k: torch.zeros(W, W) for k in "abcde"}, torch.zeros(2, W)
    plain = shard(every_other).lower(*arguments)
    peak = plain.memory_analysis().peak
    within = lambda memory: zt.chain(shard, zt.overlap_grads(), zt.prefetch(memory=memory))(
        every_other
    )
    lowered = within(peak).lower(*arguments)
    assert lowered.memory_analysis().peak == peak and lowered.plan.update == "as written"
    (note,) = lowered.plan.notes
    assert note.startswith("the order is as written: any other needs ") and note in str(
        lowered.plan
    )
    assert [str(e.outs) for e in lowered.graph.eqns] == [str(e.outs) for e in plain.graph.eqns]
    lowered.plan.save(tmp_path / "plan")
    assert str(lowered.with_plan(zt.Plan.load(tmp_path / "plan"))) == str(lowered)
    with pytest.raises(
        ValueError, match=f"less than the step needs in any order tried: {peak} bytes"
    ):
        within(peak - 1).lower(*arguments)
    assert within(2 * peak).lower(*arguments).plan.update == "eager"


def test_a_plan_of_another_program_is_refused():
    plan = lower(zt.overlap_grads()).plan
    assert lower(zt.overlap_grads(), rows=3, plan=plan).plan == plan, "the batch size may differ"
    prefetching = lower(zt.overlap_grads(), zt.prefetch())
    with pytest.raises(ValueError) as caught:
        lower(zt.overlap_grads(), zt.prefetch(), plan=plan)
    assert str(caught.value) == (
        f"plan: it was made for program {plan.program}, and this one is {prefetching.plan.program}: another model, mesh, "
        f"or other transforms.\nLower without it, and save lowered.plan again."
    )
    with pytest.raises(ValueError) as caught:
        lower(
            zt.overlap_grads(),
            plan=dataclasses.replace(plan, reductions=((("nobody",), "the end"),)),
        )
    assert str(caught.value) == (
        "plan: the program has no reduction 'nobody'.\nLower without the plan, and save it again."
    )


def test_a_file_without_a_plan_is_refused(tmp_path):
    (tmp_path / "plan").write_text('{"program": "x"}')
    with pytest.raises(ValueError) as caught:
        zt.Plan.load(tmp_path / "plan")
    assert str(caught.value) == (
        f"plan: {tmp_path / 'plan'} does not hold a plan (it has no 'gathers').\nMake one: lowered.plan.save(path)."
    )


def test_an_axis_without_a_link_is_refused():
    with pytest.raises(ValueError) as caught:
        lower(zt.overlap_grads(), cluster=zt.cluster("a100", tp="nvlink3"))
    assert str(caught.value) == (
        "cluster: no link for mesh axis 'dp'; it knows 'tp'.\n"
        "Say what it crosses: zt.cluster('a100', dp='infiniband'), or measure it with zt.calibrate(mesh)."
    )


@pytest.mark.parametrize("options, message", [
    ({"memory": 0}, "prefetch: memory=0; it is a number of bytes, or 'auto'."),
    ({"memory": None}, "prefetch: memory=None; it is a number of bytes, or 'auto'."),
    ({"memory": 0.5}, "prefetch: memory=0.5; it is a number of bytes, or 'auto'."),
    ({"max_in_flight": -1}, "prefetch: max_in_flight=-1; it is a number of bytes, or None."),
    ({"max_in_flight": "auto"}, "prefetch: max_in_flight='auto'; it is a number of bytes, or None."),
    ({"max_in_flight": True}, "prefetch: max_in_flight=True; it is a number of bytes, or None."),
])  # fmt: skip
def test_sizes_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError) as caught:
        zt.prefetch(**options)
    assert str(caught.value) == message


def test_a_size_may_be_written_as_a_float():
    assert zt.prefetch(memory=40e9, max_in_flight=1e6) == zt.prefetch(
        memory=40 * 10**9, max_in_flight=10**6
    )
    assert zt.remat(memory=40e9) == zt.remat(memory=40 * 10**9)
    assert zt.offload(memory=40e9) == zt.offload(memory=40 * 10**9)
    assert zt.overlap_grads(bucket=25e6) == zt.overlap_grads(bucket=25 * 10**6)
