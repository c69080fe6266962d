"""Copies between two memories start early and are waited for late, and the peak of memory does not rise."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ztrans as zt
from tests.support.pages import data_of
from tests.support.programs import CASES
from tests.support.worlds import batches, lower_traced, traced
from ztrans.ir.copies import TO_DEVICE, TO_HOST, is_copy
from ztrans.ir.pairing import pair
from ztrans.planning.cluster import HOST_LINKS
from ztrans.planning.cost import cost, memory
from ztrans.planning.place_copies import copied_when_needed, place_copies

LAYERS = 8
WIDTH = 256


def step(state, x):
    """Each layer has a weight and a momentum; their updates follow backward, because they are clipped."""
    weights = {k: w.detach().requires_grad_() for k, w in state["weights"].items()}
    y = x
    for w in weights.values():
        y = torch.tanh(y @ w)
    grads = torch.autograd.grad(y.square().mean(), list(weights.values()))
    norm = sum(g.square().sum() for g in grads).sqrt()
    moments = {k: 0.9 * state["moments"][k] + g / norm for k, g in zip(weights, grads)}
    new = {k: w - moments[k] for k, w in state["weights"].items()}
    return {"weights": new, "moments": moments}, y.mean()


def state(layers: int = LAYERS):
    weights = {f"w{i:02}": torch.zeros(WIDTH, WIDTH) for i in range(layers)}
    return {"weights": weights, "moments": dict(weights)}


@functools.cache
def traced_step(rows: int):
    return zt.Step.of(step).trace(state(), torch.zeros(rows, WIDTH))


@functools.cache
def lowered(bandwidth: float = 50e9, rows: int = 4096, **changes):
    link = dataclasses.replace(HOST_LINKS["pcie5"], bandwidth=bandwidth, **changes)
    moved = zt.offload(where="moments.*", at_least=0)(step)
    return lower_traced(traced_step(rows), moved, cluster=zt.cluster("h100", host_link=link))


def places(graph) -> dict[str, list[tuple[int, int]]]:
    """The index of the start and of the wait of each copy, by direction."""
    found = {"in": [], "out": []}
    for e, started in pair(graph, include_copies=True).starts.items():
        if is_copy(e):
            found["in" if e.op is TO_DEVICE else "out"].append((started.index, started.first_wait))
    return found


def test_copies_to_the_device_are_hidden_under_backward():
    low = lowered(7e9)
    timeline = low.timeline()
    first = min(start for start, _ in places(low.graph)["in"])
    assert low.graph.eqns[first - 1].region == "backward"
    stalls = [e.stall for e in timeline.events if e.lane == "host in"]
    assert sum(stalls) < 0.01 * timeline.seconds


def test_on_a_slow_link_copies_start_earlier():
    fast, slow = (min(places(lowered(b).graph)["in"])[0] for b in (50e9, 10e9))
    assert slow < fast


def test_devices_that_share_a_link_copy_more_slowly():
    alone, shared = (lowered(10e9, latency=0.0, shared=n).timeline() for n in (1, 2))
    assert shared.busy("host in") == pytest.approx(2 * alone.busy("host in"), rel=1e-6)


def test_both_directions_are_queues_in_the_order_of_need():
    for waits in places(lowered(5e9).graph).values():
        assert waits == sorted(waits), "a copy that starts first is waited for first"


def test_the_step_ends_with_the_last_copy_to_the_host():
    graph = lowered(5e9).graph
    last = max(wait for _, wait in places(graph)["out"])
    assert last == len(graph.eqns) - 1


@pytest.mark.parametrize("bandwidth", [1e9, 5e9, 50e9, 500e9])
def test_the_peak_does_not_rise(bandwidth):
    graph = lowered(bandwidth).graph
    assert memory(graph).peak <= memory(copied_when_needed(graph)).peak


def test_the_peak_falls_by_the_bytes_moved():
    plain = traced_step(4096).lower()
    moved = lowered()
    size = LAYERS * WIDTH * WIDTH * 4
    assert memory(plain.graph).peak - memory(moved.graph).peak == size
    assert moved.memory_analysis().host_peak == size


def test_compute_keeps_its_order_but_for_updates_which_stand_together_by_leaf():
    plain = traced_step(64).lower().graph
    moved = lowered(rows=64).graph
    computed = [e for e in moved.eqns if not is_copy(e) and not e.ins[0].future]
    for region in ("forward", "backward"):
        assert names(plain.eqns, region) == names(computed, region)
    assert sorted(names(plain.eqns, "update")) == sorted(names(computed, "update"))


def names(eqns, region):
    return [e.out.name for e in eqns if e.region == region]


@pytest.mark.parametrize("bandwidth", [1e9, 50e9])
def test_updates_take_as_few_launches_as_without_copies(bandwidth):
    """Equal updates that stand together take one launch, so no copy stands between them."""
    plain = traced_step(4096).lower().graph
    moved = lowered(bandwidth).graph
    assert cost(moved).launches - sum(map(is_copy, moved.eqns)) == cost(plain).launches


def test_leaves_are_copied_alone_if_sets_would_raise_the_peak():
    """With a small batch the peak is in the update."""
    moved = lowered(rows=8).graph
    assert memory(moved).peak == memory(copied_when_needed(moved)).peak
    assert memory(moved).peak < memory(copied_when_needed(moved, 1 << 30)).peak


def test_a_slow_copy_of_what_the_step_also_returns_ends_with_the_step():
    def with_momentum(state, x):
        m = state["m"] + x
        return {"m": m}, m

    link = zt.Link("slow", latency=1.0, bandwidth=1e9)
    moved = zt.offload(where="m", at_least=0)(with_momentum)
    ones = torch.ones(4)
    low = moved.lower({"m": ones}, ones, cluster=zt.cluster("h100", host_link=link))
    assert places(low.graph)["out"][0][1] == len(low.graph.eqns) - 1


def test_placing_twice_is_placing_once():
    low = lowered(5e9)
    again = place_copies(low.graph, low.cluster)
    assert [e.out for e in again.eqns] == [e.out for e in low.graph.eqns]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    bandwidth=st.sampled_from([1e8, 1e9, 1e10, 1e11]),
    latency=st.sampled_from([0.0, 1e-5, 1e-3]),
    name=st.sampled_from(["mlp_momentum", "clipped", "adamw_single"]),
)
def test_any_link_gives_a_valid_program_that_needs_no_more_memory(bandwidth, latency, name):
    case = CASES[name]
    link = zt.Link("link", latency, bandwidth)
    moved = zt.offload(where="m.*", at_least=0)(case.step)
    low = lower_traced(traced(case, 1), moved, cluster=zt.cluster("h100", host_link=link))
    zt.ir.check(low.graph)
    assert memory(low.graph).peak <= memory(copied_when_needed(low.graph)).peak


def test_a_host_without_the_memory_is_an_error():
    cluster = zt.cluster("h100", host_memory=1 << 20)
    with pytest.raises(
        ValueError, match=r"keeps 2.00 MiB in the memory of the host, .* has 1.00 MiB there"
    ):
        zt.offload(where="moments.*", at_least=0)(step).lower(
            state(), torch.zeros(8, WIDTH), cluster=cluster
        )


def test_more_ranks_are_named_if_they_can_help_the_host():
    """Each has a smaller part of the moments then. They cannot help a step that keeps them whole on each rank."""

    def error(least, *transforms):
        cluster = zt.cluster("h100", dp="nvlink4", host_memory=least)
        with pytest.raises(ValueError, match="in the memory of the host") as caught:
            zt.chain(*transforms, zt.offload(where="moments.*", at_least=0))(step).lower(
                state(), torch.zeros(8, WIDTH), cluster=cluster
            )
        return str(caught.value).splitlines()[-1]

    fewer = "Choose fewer leaves with `where`"
    assert error(1 << 20) == f"{fewer}."
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    assert (
        error(1 << 19, shard)
        == f"{fewer}, or shard the state over more ranks (2 times as many may be enough)."
    )
    assert error(1 << 19, zt.shard_params(zt.AbstractMesh(dp=2), stage=0)) == f"{fewer}."


def test_the_timeline_has_both_memories_and_both_lanes(tmp_path):
    timeline = lowered().timeline()
    assert {"host in", "host out"} <= set(timeline.lanes)
    assert ("host", "offload") in timeline.exposed
    assert timeline.host_peak == LAYERS * WIDTH * WIDTH * 4
    assert "on the host      2.00 MiB" in str(timeline)
    timeline.to_perfetto(tmp_path / "trace.json")
    assert '"name": "on the host"' in (tmp_path / "trace.json").read_text()
    timeline.save(tmp_path / "page.html")
    (shown,) = data_of((tmp_path / "page.html").read_text())["timelines"]
    assert shown["memories"][1]["points"][0] == [0.0, 2097152]


def test_the_pairs_of_a_program_have_its_copies():
    graph = lowered().graph
    assert not pair(graph).starts, "a step on one rank has no collectives"
    ops = [e.op for e in pair(graph, include_copies=True).starts]
    assert ops.count(TO_DEVICE) == ops.count(TO_HOST) == LAYERS


def test_a_measured_timeline_has_both_memories_too():
    case = CASES["mlp_momentum"]
    step = zt.offload(where="m.*", at_least=0)(case.step)
    state, batch = step.shard(case.state()), batches(case, 1)[0]
    measured = step.compiled(state, *batch).profile(state, *batch, steps=1).timeline
    assert {"host in", "host out"} <= set(measured.lanes)
    assert measured.host_peak == sum(x.nbytes for x in state["m"].values())


def adam_like(state, x):
    """Many small updates, which share launches."""
    weights = {k: w.detach().requires_grad_() for k, w in state["weights"].items()}
    y = x
    for w in weights.values():
        y = torch.tanh(y @ w)
    grads = torch.autograd.grad(y.square().mean(), list(weights.values()))
    norm = sum(g.square().sum() for g in grads).sqrt()
    new = {"weights": {}, "m": {}, "v": {}}
    for g, (k, w) in zip(grads, state["weights"].items()):
        m = torch.lerp(state["m"][k], g / norm, 0.1)
        v = torch.lerp(state["v"][k], (g / norm).square(), 0.1)
        new["weights"][k] = w - 0.1 * m / (v.sqrt() + 1e-6)
        new["m"][k] = m
        new["v"][k] = v
    return new, y.mean()


@pytest.mark.parametrize("across_steps, micro_batches", [(False, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"replica": 2, "dp": 2}])
def test_no_placement_of_copies_beats_the_bound(across_steps, micro_batches, axes):
    """Sets of leaves share launches of updates, and a leaf that stays on the device is not copied again."""
    mesh = zt.AbstractMesh(**axes)
    replicate_axis = "replica" if "replica" in axes else None
    chain = [zt.shard_params(mesh, stage=3, replicate_axis=replicate_axis)]
    if micro_batches > 1:
        chain.append(zt.accumulate(micro_batches))
    chain += [
        zt.offload(where="*", across_steps=across_steps, at_least=0),
        zt.prefetch(),
        zt.overlap_grads(),
    ]
    leaves = {f"w{i}": torch.empty(16, 16) for i in range(4)}
    small = {"weights": leaves, "m": leaves, "v": leaves}
    cluster = zt.cluster("a100", **dict.fromkeys(axes, "nvlink3"))
    lowered = zt.chain(*chain)(adam_like).lower(small, torch.empty(8, 16), cluster=cluster)
    timeline = lowered.timeline()
    assert timeline.bound[0] <= timeline.seconds * (1 + 1e-9)
