"""Values of forward go to the host until a step fits its limit; no bit changes, and compute hides the copies."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.worlds import ALL
from ztrans.ir.copies import is_copy
from ztrans.planning.cost import memory
from ztrans.planning.limit import DoesNotFit
from ztrans.planning.realise import PlanError

LAYERS, WIDTH, ROWS = 6, 64, 512


def step(state, x):
    weights = {k: w.detach().requires_grad_() for k, w in state.items()}
    y = x
    for w in weights.values():
        y = y + F.gelu(y @ w)
    loss = y.square().mean()
    grads = torch.autograd.grad(loss, list(weights.values()))
    return {k: w - 0.1 * g for (k, w), g in zip(state.items(), grads)}, loss


def state(width=WIDTH, device="cpu"):
    torch.manual_seed(0)
    return {f"w{k}": torch.randn(width, width, device=device) / width**0.5 for k in range(LAYERS)}


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
CPU = functools.partial(zt.cluster, "cpu", host_link=zt.Link("fast", 0.0, 1e12))


def same(a, b) -> bool:
    return all(map(torch.equal, *map(pytree.tree_leaves, (a, b))))


def peak_of_plain() -> tuple[int, int]:
    """The peak without a limit, and the bytes of the state."""
    plain = memory(zt.Step(step).lower(state(), X).graph)
    return plain.peak, plain.state


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.8, 0.65, 0.5])
def test_the_peak_is_within_the_limit_and_the_bits_are_the_same(share):
    peak, size = peak_of_plain()
    limit = size + int(share * (peak - size))
    low = zt.offload(memory=limit)(step).lower(state(), X, cluster=CPU())
    counted = low.memory_analysis()
    assert counted.peak <= limit
    assert (counted.host_peak > 0) == (share < 1.0)
    assert same(low.compile()(state(), X), zt.Step(step)(state(), X))


def test_no_more_is_moved_than_the_limit_asks_for():
    peak, size = peak_of_plain()
    moved = []
    for share in (0.9, 0.7, 0.5):
        limit = size + int(share * (peak - size))
        low = zt.offload(memory=limit)(step).lower(state(), X, cluster=CPU())
        moved.append(low.memory_analysis().host_peak)
    assert moved == sorted(set(moved)) and moved[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("moved", [3, 6])
def test_micro_batches_stay_within_the_limit(moved):
    """In the last micro-batch the sums of gradients are live from the beginning, beside all values of forward."""
    slow = zt.cluster("cpu", host_link=zt.Link("slow", 0.0, 1e7))
    wide, x = state(256), torch.randn(128, 256)
    plain = zt.accumulate(2)(step).lower(wide, x, cluster=slow).memory_analysis()
    limit = plain.peak - moved * 64 * 256 * 4
    low = zt.chain(zt.accumulate(2), zt.offload(memory=limit))(step).lower(wide, x, cluster=slow)
    assert low.plan.on_host
    assert low.memory_analysis().peak <= limit


def limit_of(share: float) -> int:
    peak, size = peak_of_plain()
    return size + int(share * (peak - size))


def test_with_too_little_memory_of_the_host_values_are_recomputed():
    limit = limit_of(0.8)
    poor = CPU(host_memory=1)
    both = zt.chain(zt.remat(memory=limit), zt.offload(memory=limit))
    low = both(step).lower(state(), X, cluster=poor)
    assert low.plan.recomputed and not low.plan.on_host
    with pytest.raises(DoesNotFit):
        zt.offload(memory=limit)(step).lower(state(), X, cluster=poor)


@pytest.mark.parametrize("what", ["recomputed", "on_host"])
def test_a_step_with_a_plan_of_another_program_is_planned_again(what):
    plan = zt.Plan("another program", **{what: ("nothing",)})
    planned = zt.offload(memory=limit_of(0.8))(step).with_plan(plan)
    with pytest.warns(UserWarning, match="This program is planned again"):
        low = planned.lower(state(), X, cluster=CPU())
    assert low.plan.on_host


def test_the_earliest_layers_go_first():
    low = zt.offload(memory=limit_of(0.8))(step).lower(state(), X, cluster=CPU())
    names = [e.ins[0].name for e in low.graph.eqns if is_copy(e) and e.out.memory == "host"]
    computed = [v.name for e in low.graph.eqns for v in e.results]
    assert [computed.index(name) for name in names] == sorted(map(computed.index, names))
    last_layer = [
        e.out.name for e in low.graph.eqns if e.region == "forward" and "mm" in e.out.name
    ]
    assert last_layer[-1] not in names, "it is needed again at once"
    assert "3 values of forward, 384.00 KiB, wait for backward on the host" in low.plan.notes


@pytest.mark.slow
def test_ranks_have_the_same_bits():
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    batches = [(X[:256],), (X[256:],)]
    plain = zt.chain(shard, *ALL)(step).lower(state(), *batches[0], cluster=CPU(dp="ethernet-1g"))
    counted = plain.memory_analysis()
    limit = counted.state + int(0.75 * (counted.peak - counted.state))
    moved = zt.chain(shard, zt.offload(memory=limit), *ALL)(step).lower(
        state(), *batches[0], cluster=CPU(dp="ethernet-1g")
    )
    assert any(map(is_copy, moved.graph.eqns)) and moved.memory_analysis().peak <= limit
    assert same(moved.lockstep(state(), batches), plain.lockstep(state(), batches))


def test_with_micro_batches():
    both = []
    for transforms in ((zt.offload(memory=limit_of(0.3)),), ()):
        trained = zt.chain(zt.accumulate(2), *transforms)(step)
        low = trained.lower(state(), X, cluster=CPU())
        both.append(low.compile()(state(), X))
    assert same(*both)


def test_copies_are_hidden_where_backward_is_long():
    shapes = {k: torch.empty(4096, 4096, device="meta") for k in state()}
    x = torch.empty(8192, 4096, device="meta")
    plain = zt.Step(step).lower(shapes, x)
    counted = plain.memory_analysis()
    limit = counted.state + int(0.9 * (counted.peak - counted.state))
    moved = zt.offload(memory=limit)(step).lower(
        shapes, x, cluster=zt.cluster("h100", host_link="c2c")
    )
    assert moved.memory_analysis().peak <= limit
    assert moved.timeline().seconds < 1.02 * plain.timeline(moved.cluster).seconds


def test_a_limit_below_what_the_host_can_help_is_an_error():
    with pytest.raises(
        ValueError, match=r"offload\(memory=1000\): 1000 B is less than the step needs"
    ):
        zt.offload(memory=1000)(step).lower(state(), X, cluster=CPU())


def test_without_a_limit_nothing_moves():
    low = zt.offload(memory="auto")(step).lower(state(), X, cluster=CPU())
    assert not any(map(is_copy, low.graph.eqns))


def test_options():
    with pytest.raises(TypeError, match=r"offload: nothing is to be moved. Pass where="):
        zt.offload()
    with pytest.raises(
        ValueError, match="offload: memory='all'; it is a number of bytes, or 'auto'"
    ):
        zt.offload(memory="all")
    with pytest.raises(ValueError, match="are two limits of one step"):
        zt.chain(zt.prefetch(memory=10), zt.offload(memory=20))(step).lower(state(), X)


# Together with recomputation.


def both(limit, *transforms, **options):
    transforms = (*transforms, zt.remat(memory=limit), zt.offload(memory=limit))
    return zt.chain(*transforms)(step).lower(state(), X, **options)


# Compute on a CPU hides two of the copies that this link makes.
SLOW = functools.partial(zt.cluster, "cpu", host_link=zt.Link("host", 0.0, 5e8))


def test_one_limit_is_met_by_both_memories_and_the_bits_are_the_same():
    limit = limit_of(0.8)
    low = both(limit, cluster=SLOW())
    assert low.plan.recomputed and low.plan.on_host
    assert set(low.plan.recomputed).isdisjoint(low.plan.on_host)
    assert low.memory_analysis().peak <= limit
    assert same(low.compile()(state(), X), zt.Step(step)(state(), X))


def test_both_together_are_faster_than_either():
    limit = limit_of(0.8)
    joint = both(limit, cluster=SLOW()).timeline().seconds
    for alone in (zt.remat(memory=limit), zt.offload(memory=limit)):
        low = zt.chain(alone)(step).lower(state(), X, cluster=SLOW())
        assert joint < 0.98 * low.timeline().seconds


@pytest.mark.slow
def test_ranks_have_the_same_bits_with_both():
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    batches = [(X[:256],), (X[256:],)]
    cluster = SLOW(dp="ethernet-1g")
    plain = zt.chain(shard, *ALL)(step).lower(state(), *batches[0], cluster=cluster)
    counted = plain.memory_analysis()
    limit = counted.state + int(0.7 * (counted.peak - counted.state))
    transforms = (shard, zt.remat(memory=limit), zt.offload(memory=limit), *ALL)
    low = zt.chain(*transforms)(step).lower(state(), *batches[0], cluster=cluster)
    assert low.plan.on_host and low.memory_analysis().peak <= limit
    assert same(low.lockstep(state(), batches), plain.lockstep(state(), batches))


def test_a_saved_plan_moves_the_same_values(tmp_path):
    limit = limit_of(0.8)
    low = both(limit, cluster=SLOW())
    low.plan.save(tmp_path / "step.plan")
    plan = zt.Plan.load(tmp_path / "step.plan")
    assert plan.on_host and plan == low.plan
    assert str(both(limit, cluster=SLOW(), plan=plan).graph) == str(low.graph)
    assert str(low.with_plan(plan).graph) == str(low.graph)
    assert "on the host until backward: " in str(plan)
    smaller = zt.chain(zt.remat(memory=limit), zt.offload(memory=limit))(step)
    other = smaller.lower(state(), X[:256], cluster=SLOW(), plan=plan)
    assert other.plan.on_host == plan.on_host


@pytest.mark.parametrize(
    ("name", "moves", "message"),
    [
        ("nothing", True, "it moves 'nothing' to the host, and the program has no such value"),
        ("mm", False, "it moves 'mm' to the host, and the step has no offload(memory=...)."),
    ],
)
def test_a_plan_that_moves_what_it_cannot_is_refused(name, moves, message):
    plan = zt.Plan("", on_host=(name,))
    transforms = (zt.offload(memory=limit_of(0.8)),) if moves else ()
    with pytest.raises(PlanError) as caught:
        zt.chain(zt.remat(), *transforms)(step).lower(state(), X, plan=plan)
    assert message in str(caught.value)


def test_a_plan_for_which_the_host_is_too_small_is_made_again():
    limit = limit_of(0.6)
    low = both(limit, cluster=SLOW())
    assert low.plan.on_host
    poor = SLOW(host_memory=low.memory_analysis().host_peak - 1)
    made = zt.chain(zt.remat(memory=limit), zt.offload(memory=limit))(step).with_plan(low.plan)
    with pytest.warns(UserWarning, match="planned again"):
        again = made.lower(state(), X, cluster=poor)
    assert again.memory_analysis().host_peak < low.memory_analysis().host_peak
