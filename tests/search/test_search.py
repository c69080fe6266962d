"""The search: its winner is what a full plan says it is, no row beats its bound, and its text makes the same program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt
from tests.support.lifted import loop_of
from ztrans.planning.devices import H100
from ztrans.search.found import Found
from ztrans.search.small_steps import small_steps

WIDTH, VOCABULARY, LAYERS = 256, 512, 8
TOKENS = torch.zeros(4, 64, dtype=torch.int64, device="meta")
MESH = zt.AbstractMesh(dp=16)
LINKS = {"dp": zt.by_host(8, "nvlink4", "infiniband")}
# Rates at which a small step is as busy as a large one: no launches, and slow products.
FIGURES = {"launch_overhead": 0.0, "edge": 0.0, "kernel_gap": 1e-6, "reserve": 0}


def cluster(memory: float, slower: float = 50) -> zt.Cluster:
    gpu = dataclasses.replace(H100.with_clock(1 / slower), name="small", memory=memory, **FIGURES)
    return zt.cluster(gpu, **LINKS)


ROOMY, TIGHT = cluster(1e9), cluster(14e6)
SETTINGS = {
    "micro_batches": (1, 2),
    "stage": (3, 1),
    "replicas": (False,),
    "on_host": ("nothing",),
    "tile": (0,),
}
ONE = {name: values[:1] for name, values in SETTINGS.items()}


def train_step(
    state: dict, tokens: torch.Tensor, layers: int = LAYERS
) -> tuple[dict, torch.Tensor]:
    def loss_fn(p):
        x = F.embedding(tokens, p["embed"])
        for i in range(layers):
            x = x + F.linear(F.gelu(F.linear(x, p[f"up{i}"])), p[f"down{i}"])
        return F.cross_entropy(F.linear(x, p["head"]).flatten(0, 1), tokens.flatten())

    grads, loss = torch.func.grad_and_value(loss_fn)(state["p"])
    m = {k: 0.9 * v + grads[k] for k, v in state["m"].items()}
    return {"p": {k: v - 0.1 * m[k] for k, v in state["p"].items()}, "m": m}, loss


def state_of(layers: int = LAYERS) -> dict:
    shapes = {"embed": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH)}
    for i in range(layers):
        shapes |= {f"up{i}": (2 * WIDTH, WIDTH), f"down{i}": (WIDTH, 2 * WIDTH)}
    return {part: {k: torch.empty(s, device="meta") for k, s in shapes.items()} for part in "pm"}


STEP = zt.shard_params(MESH)(train_step)


def search(machines: zt.Cluster, knobs: dict) -> Found:
    return zt.search(STEP, state_of(), TOKENS, cluster=machines, knobs=knobs, seconds=1e6)


@functools.cache
def found() -> Found:
    return search(ROOMY, SETTINGS)


def check_winner(rows: Found) -> None:
    """Compare the winner with the plan of the whole step."""
    winner = rows[0]
    assert winner.layers == "2 and 4 of 6"
    lowered = winner.lower()
    assert winner.seconds == pytest.approx(lowered.timeline().seconds, rel=0.02)
    assert winner.peak <= winner.cluster.device.limit
    assert winner.peak == pytest.approx(lowered.memory_analysis().peak, rel=0.02)
    assert winner.received == pytest.approx(lowered.cost_analysis().wire_bytes, rel=0.02)


def check_rows(rows: Found) -> None:
    """No row beats its bound; rows are sorted, and those that no other one beats are marked."""
    assert all(row.seconds >= row.bound > 0 for row in rows)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    for row in rows:
        faster_and_smaller = [r for r in rows if r.seconds <= row.seconds and r.peak <= row.peak]
        assert row.is_pareto == (faster_and_smaller == [row])


def test_the_whole_plan_of_the_winner_is_what_its_row_says():
    check_winner(found())
    check_rows(found())
    assert "with twice the bandwidth of infiniband over dp" in str(found())


@pytest.mark.exhaustive
def test_the_same_within_a_limit_of_memory():
    rows = search(TIGHT, {**SETTINGS, "micro_batches": (1,)})
    check_winner(rows)
    check_rows(rows)
    assert "more memory the first row keeps everything" in rows.notes[0]


def test_the_text_of_a_chain_makes_the_same_program():
    for row in found():
        names: dict[str, Any] = {"zt": zt, "train_step": train_step}
        exec(row.code(), names)
        # Equal functions, transforms and meshes have equal programs.
        assert names["step"] == row.step
    assert found().code() == found()[0].code()


@pytest.mark.parametrize("smaller", [{"stage": (3,)}, {"micro_batches": (2,)}])
def test_a_smaller_space_has_no_better_winner(smaller):
    rows = search(ROOMY, {**SETTINGS, **smaller})
    assert rows[0].seconds >= found()[0].seconds
    if "micro_batches" in smaller:
        check_winner(rows)


def test_a_replica_on_each_host_has_a_mesh_of_two_axes():
    (row,) = search(ROOMY, {**ONE, "replicas": (True,)})
    assert "mesh = zt.AbstractMesh(host=2, dp=8)" in row.code()
    assert "replicate_axis='host'" in row.code()
    assert row.cluster.link("host").name == "infiniband"
    assert row.cluster.link("dp").name == "nvlink4"
    assert row.samples_per_second == pytest.approx(4 * 16 / row.seconds)


def test_the_memory_of_the_host_is_not_tried_where_everything_fits():
    rows = search(ROOMY, {**ONE, "on_host": ("nothing", "activations", "moments", "everything")})
    assert [row.setting for row in rows] == ["stage 3"]
    assert "3 of 4 settings: cannot be as fast as the first row" in rows.notes


def test_a_search_ends_in_time_and_says_what_is_left():
    rows = zt.search(STEP, state_of(), TOKENS, cluster=ROOMY, knobs={"stage": (3, 1)}, seconds=1e-9)
    assert len(rows) == 1
    assert any("settings: no time was left" in note for note in rows.notes)


def test_a_step_without_equal_layers_is_planned_whole():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    rows = zt.search(step, state, torch.ones(8, 16), seconds=1e6, knobs={"micro_batches": (1,)})
    assert rows[0].layers == "all" and "layers planned" in str(rows)
    assert "mesh" not in rows.code()


def test_codes_that_a_step_leaves_open_are_tried():
    """Over the slow link the winner sends codes, over the fast one it does not; each says so in its text."""
    state = {"w0": torch.ones(256, 256), "w1": torch.ones(256, 256)}

    def step(state, x):
        loss = lambda w: (x @ w["w0"] @ w["w1"]).square().mean()
        grads = torch.func.grad(loss)(state)
        return {name: w - grads[name] for name, w in state.items()}, None

    auto = zt.chain(zt.shard_params(zt.AbstractMesh(dp=4)), zt.quantize_gathers("auto"))(step)
    few = {"micro_batches": (1,), "stage": (3,), "tile": (0,), "on_host": ("nothing",)}
    for bandwidth, codes in ((1e11, False), (1e7, True)):
        machines = zt.cluster("cpu", dp=zt.Link("wire", 1e-6, bandwidth))
        rows = zt.search(auto, state, torch.ones(4, 256), cluster=machines, seconds=1e6, knobs=few)
        assert ("zt.quantize_gathers()" in rows[0].code()) == codes
        assert "bits=" not in rows[0].code()


def test_kinds_of_layers_are_cut_each_for_itself():
    """Every third layer is wide: 12 narrow ones and 6 wide ones, whose times add up to that of the whole."""

    def step(p, x):
        def loss_fn(p):
            y = x
            for i in range(18):
                y = y + torch.tanh(y @ p[f"up{i}"]) @ p[f"down{i}"]
            return y.square().mean()

        return torch.func.grad(loss_fn)(p), ()

    p = {}
    for i in range(18):
        width = 64 if i % 3 == 2 else 16
        p |= {f"up{i}": torch.empty(32, width), f"down{i}": torch.empty(width, 32)}
    traced = zt.Step.of(step).trace(p, torch.empty(8, 32))
    small = small_steps(traced)
    assert small.layers == "2 and 4 of 5 and 11"
    counts = [len(t.graph.eqns) for t in small.programs]
    assert len(counts) == 3
    assert small.whole(counts) == pytest.approx(len(traced.graph.eqns))
    leaves = [sum(v.numel for v in t.graph.state) for t in small.programs]
    assert small.whole(leaves) == sum(v.numel for v in traced.graph.state)


def test_errors_say_what_to_write():
    with pytest.raises(ValueError, match="no knob 'stages'; there are micro_batches, order, stage"):
        zt.search(STEP, state_of(), TOKENS, cluster=ROOMY, knobs={"stages": (3,)})
    with pytest.raises(ValueError, match=r"write the values to try, such as \(3,\)"):
        zt.search(STEP, state_of(), TOKENS, cluster=ROOMY, knobs={"stage": 3})
    for knobs, text in [
        ({"stage": (3, 7)}, "has 7; its values are 0, 1, 2, 3"),
        ({"on_host": ("moment",)}, "has 'moment'; its values are 'nothing', 'activations'"),
    ]:
        with pytest.raises(ValueError, match=text):
            zt.search(STEP, state_of(), TOKENS, cluster=ROOMY, knobs=knobs)
    with pytest.raises(ValueError, match="seconds='1m'; it is a number of seconds above 0"):
        zt.search(STEP, state_of(), TOKENS, cluster=ROOMY, seconds="1m")
    with pytest.raises(
        ValueError, match=r"1 of 1 settings: more than the memory.*\nTake more ranks"
    ):
        zt.search(STEP, state_of(), TOKENS, cluster=cluster(1e4), knobs=ONE)
