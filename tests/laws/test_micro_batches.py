"""Micro-batches compute what the whole batch does, or, where a loss is no mean over samples, what a loop computes."""

import dataclasses
import functools

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import COVER, parameters_of
from tests.support.programs import CASES, EXACT
from tests.support.worlds import ALL, batches, clone, default_dtype, distance, plain, slices

NONLINEAR = (
    "sam",
    "weight_penalty",
    "token_weighted",
    "batch_norm_mean",
)  # a half batch has another loss
MEANS = [case for case in EXACT if case.name not in NONLINEAR]
WORLDS = [(1, 0, "auto"), (2, 2, "auto"), (3, 3, "auto")]
HOW = ((2, 1, "auto"), (3, 3, "whole"), (2, 0, "shard"))


@functools.cache
def traced(rank, micro, dtype):
    """What a rank traces for its samples."""
    return zt.accumulate(micro)(rank.step).trace(rank.state(), *batches(rank, 1)[0])


def accumulated(case, ranks, stage, keep, transforms=ALL, micro=2, steps=2):
    """The sharded step in micro-batches, on every rank's slice: the new state, the outputs of rank 0, the program."""
    chain = zt.chain(
        zt.accumulate(micro, keep=keep),
        zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage),
        *transforms,
    )
    rank = dataclasses.replace(case, samples=case.samples // ranks)
    lowered = dataclasses.replace(
        traced(rank, micro, torch.get_default_dtype()), transforms=chain(case.step).transforms
    ).lower()
    state, outputs = case.state(), []
    for batch in batches(case, steps):
        state, each = lowered.lockstep(state, slices(batch, ranks))
        outputs.append(each[0])
    return state, outputs, lowered


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    parameters_of(MEANS, [case for case in MEANS if case.name in COVER]),
    ids=lambda c: c.name,
)
def test_micro_batches_equal_the_whole_batch(case):
    """A rank has as many samples in each world, so that its program is traced once."""
    with default_dtype(torch.float64):
        for ranks, stage, keep in WORLDS:
            world = dataclasses.replace(case, samples=ranks * case.samples // 4)
            truth, outputs = plain(world, 1)
            state, each, lowered = accumulated(world, ranks, stage, keep, steps=1)
            zt.ir.check(lowered.graph)
            assert distance(state, truth) <= 1e-10, f"{ranks} ranks, stage {stage}"
            assert distance(each, outputs) <= 1e-8, f"outputs, {ranks} ranks, stage {stage}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "stage", "keep"),
    parameters_of(
        [(name, *how) for how in HOW for name in NONLINEAR],
        [(name, *how) for name, how in zip(2 * NONLINEAR, 3 * HOW)],
    ),
)
def test_micro_batches_equal_the_loop(name, ranks, stage, keep):
    """The update is linear in the gradient, so the mean of the steps on single micro-batches is the step on all."""
    case = CASES[name]
    with default_dtype(torch.float64):
        state, outputs, _ = accumulated(case, ranks, stage, keep, steps=1)
        parts = [slices(part, 2) for part in slices(batches(case, 1)[0], ranks)]
        steps, old = [], case.state()
        for rows in zip(*parts):  # the same micro-batch on all ranks
            whole = pytree.tree_map(lambda *x: torch.cat(x), *rows)
            steps.append(case.step(clone(old), *whole))
            if "stats" in old:  # statistics change with every micro-batch
                old = {**old, "stats": steps[-1][0]["stats"]}
        mean = pytree.tree_map(lambda *x: sum(x) / 2, *[new for new, _ in steps])
        wanted = {**mean, "stats": old["stats"]} if "stats" in old else mean
        assert distance(state, wanted) <= 1e-10
        assert distance(outputs[0], sum(out for _, out in steps) / 2) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("stage", parameters_of(range(4), (0, 3)))
def test_accumulate_stands_anywhere_in_a_chain(stage):
    case, micro = CASES["autocast"], zt.accumulate(2)
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    rank = dataclasses.replace(case, samples=case.samples // 2)
    trace = traced(rank, 2, torch.float32)
    orders = [
        (micro, shard, *ALL),
        (shard, micro, *ALL),
        (shard, *ALL, micro),
        (shard, *ALL[::-1], micro),
    ]
    lowered = [
        dataclasses.replace(trace, transforms=zt.chain(*order)(case.step).transforms).lower()
        for order in orders
    ]
    assert len({str(each) for each in lowered}) == 1
    assert micro(micro(case.step)) == micro(case.step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedules",
    [ALL[:1], ALL[1:2], (*ALL, zt.remat(), zt.delay_weight_grads())],
    ids=["overlap", "prefetch", "all"],
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_schedules_and_exact_rewrites_change_no_bit_of_micro_batches(stage, schedules):
    case = CASES["mlp_momentum"]
    a, b = (accumulated(case, 2, stage, "auto", more)[0] for more in ((), schedules))
    assert all(torch.equal(x, y) for x, y in zip(*map(pytree.tree_leaves, (a, b))))
