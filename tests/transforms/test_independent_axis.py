"""`shard_params(independent_axis=...)`: replicas that train apart, as in local SGD, and what synchronizes them."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support import dtensors
from tests.support.processes import run_ranks
from tests.support.worlds import ALL, clone, distance
from ztrans.ir.layout import as_tensor
from ztrans.runtime.state import with_replicas

HOSTS = zt.AbstractMesh(host=2, dp=2)


def state() -> dict:
    draw = torch.Generator().manual_seed(0)
    params = {"up": torch.randn(6, 5, generator=draw), "down": torch.randn(5, generator=draw)}
    return {"params": params, "moved": pytree.tree_map(torch.zeros_like, params), "lr": 0.1}


def local_step(state, x, is_last: bool, over: str | None = "host"):
    """A step of SGD with momentum, clipped by the norm. The last of several averages the parameters over `over`."""
    params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
    loss = (torch.relu(x @ params["up"]) @ params["down"] - x[:, 0]).square().mean()
    grads = dict(zip(params, torch.autograd.grad(loss, [*params.values()])))
    norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
    moved = {k: 0.9 * m + grads[k] / (1 + norm) for k, m in state["moved"].items()}
    new = {k: p - state["lr"] * moved[k] for k, p in state["params"].items()}
    if is_last and over is not None:
        new = {k: zt.pmean(p, over) for k, p in new.items()}
    return {"params": new, "moved": moved, "lr": state["lr"]}, loss.detach()


def batches(steps: int) -> list[list[torch.Tensor]]:
    """The batch of each of four ranks in each step."""
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 6, generator=draw) for _ in range(4)] for _ in range(steps)]


@functools.cache
def own_loops(steps: int) -> tuple[list[dict], list[list[torch.Tensor]]]:
    """The state of each host after a plain loop on the samples of its two ranks, and the loss of each step and host."""
    hosts, losses = [state(), state()], []
    for step, xs in enumerate(batches(steps), 1):
        new = [
            local_step(hosts[h], torch.cat(xs[2 * h : 2 * h + 2]), False, None) for h in range(2)
        ]
        hosts = [s for s, _ in new]
        losses.append([loss for _, loss in new])
        if step == 4:
            mean = {k: (p + hosts[1]["params"][k]) / 2 for k, p in hosts[0]["params"].items()}
            hosts = [{**s, "params": mean} for s in hosts]
    return hosts, losses


@pytest.mark.parametrize("stage", range(4))
def test_replicas_train_apart_and_become_equal_where_the_step_says_so(stage):
    shard = zt.shard_params(HOSTS, stage=stage, independent_axis="host")
    step = zt.chain(shard, *ALL)(local_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart = step.lower(state(), batches(1)[0][0], False)
    new, seen = state(), []
    for number, xs in enumerate(batches(5), 1):
        lowered = apart if number != 4 else step.lower(state(), xs[0], True)
        new, losses = lowered.lockstep(new, [(x, number == 4) for x in xs])
        seen.append(losses)
        if number == 4:
            for p in new["params"].values():
                assert torch.equal(p[0], p[1])
            assert any(not torch.equal(m[0], m[1]) for m in new["moved"].values())
        if number == 3:
            check_bits_of_a_host_alone(new, stage)
    hosts, losses = own_loops(5)
    for host in range(2):
        replica = pytree.tree_map(lambda x, host=host: x[host], new)
        assert distance(replica["params"], hosts[host]["params"]) < 1e-5
        assert distance(replica["moved"], hosts[host]["moved"]) < 1e-5
        for ranks, truth in zip(seen, losses):
            own = ranks[2 * host : 2 * host + 2]
            assert torch.equal(*own) and torch.allclose(own[0], truth[host])
    assert not apart.cost_analysis().over("host"), "nothing is sent between hosts"


def check_bits_of_a_host_alone(new: dict, stage: int) -> None:
    """After three steps a replica has the bits of the same step on the two ranks of its host."""
    alone = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *ALL)(local_step)
    lowered = alone.lower(state(), batches(1)[0][0], False)
    for host in range(2):
        truth = state()
        for xs in batches(3):
            truth, _ = lowered.lockstep(truth, [(x, False) for x in xs[2 * host : 2 * host + 2]])
        for x, y in zip(pytree.tree_leaves(new), pytree.tree_leaves(truth), strict=True):
            assert torch.equal(x[host], torch.as_tensor(y))


def test_a_statistic_of_one_replica_is_updated_on_shards():
    """The step sends what it sends on one host alone."""

    def step(state, x):
        grads = torch.func.grad(lambda w: (x @ w).square().mean())(state["w"])
        mean = 0.9 * state["mean"] + 0.1 * zt.pmean(x.mean(0))
        return {"w": state["w"] - 0.1 * grads / (1 + mean.norm()), "mean": mean}, None

    first = {"w": torch.ones(6), "mean": torch.zeros(6)}
    (xs,) = batches(1)
    apart = zt.shard_params(HOSTS, independent_axis="host")(step).lower(first, xs[0])
    alone = zt.shard_params(zt.AbstractMesh(dp=2))(step).lower(first, xs[0])
    assert apart.cost_analysis().over("dp") == alone.cost_analysis().over("dp") > 0
    new, _ = apart.lockstep(first, [(x,) for x in xs])
    for host in range(2):
        truth, _ = alone.lockstep(first, [(x,) for x in xs[2 * host : 2 * host + 2]])
        assert torch.equal(new["w"][host], truth["w"])
        assert torch.equal(new["mean"][host], truth["mean"])


def test_a_second_step_on_the_same_state_synchronizes():
    def sync(state):
        params = {k: zt.pmean(p, "host") for k, p in state["params"].items()}
        return {**state, "params": params}, None

    lowered = zt.shard_params(HOSTS, independent_axis="host")(sync).lower(state())
    two = pytree.tree_map(lambda x: torch.stack([as_tensor(x), as_tensor(x) + 1]), state())
    new, _ = lowered.lockstep(two, [()] * 4)
    for key, p in state()["params"].items():
        assert torch.allclose(new["params"][key], (p + 0.5).expand(2, *p.shape))
    assert torch.equal(new["lr"], two["lr"])
    assert lowered.cost_analysis().over("host") == (3 * 5 + 3) * 4, (
        "bytes: each rank sends its part"
    )


def test_a_lifted_loop_of_replicas():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop_step(x, is_last):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if is_last:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(zt.pmean(p, "host"))
        return loss

    step, first = zt.lift(loop_step, model, optimizer)
    new = first
    step = zt.chain(zt.shard_params(HOSTS, independent_axis="host"), *ALL)(step)
    for is_last, xs in zip((False, True), batches(2)):
        lowered = step.lower(first, xs[0], is_last)
        new, losses = lowered.lockstep(new, [(x, is_last) for x in xs])
        assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
        are_equal = [torch.equal(p[0], p[1]) for p in new["params"].values()]
        assert are_equal == [is_last] * 6
    assert not torch.equal(*new["buffers"]["1.running_mean"]), "a statistic of each host's samples"


def test_the_types_of_the_leaves_say_so():
    step = zt.shard_params(HOSTS, independent_axis="host")(local_step)
    text = str(step.lower(state(), batches(1)[0][0], True))
    assert "    params.up: f32[6@dp,5]{own@host},\n" in text
    assert "    lr: f64[]{own@host},\n" in text
    assert "shard_params(axis='dp', stage=3, independent_axis='host')" in text
    # A rank sends its part of a leaf to the other host.
    assert "params.up" in text and "pmean: f32[6@dp,5]" in text
    one = zt.shard_params(zt.AbstractMesh(host=1, dp=2), independent_axis="host")(local_step)
    assert "own@" not in str(one.lower(state(), batches(1)[0][0], True))


@pytest.mark.parametrize("stage", [0, 3])
def test_leaves_that_all_replicas_share(stage):
    """DiLoCo in one step. A gradient is the mean over a host, and not divided by the number of hosts."""

    def axis(path, leaf):
        return ("host", "dp") if path.startswith("outer") else "dp"

    def step(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        loss = (torch.relu(x @ params["up"]) @ params["down"]).square().mean()
        grads = dict(zip(params, torch.autograd.grad(loss, [*params.values()])))
        new = {k: p - 0.1 * grads[k] for k, p in state["params"].items()}
        outer = {k: o - 0.7 * zt.pmean(o - new[k], "host") for k, o in state["outer"].items()}
        return {"params": {k: o.clone() for k, o in outer.items()}, "outer": outer}, loss.detach()

    first = {"params": state()["params"], "outer": state()["params"]}
    shard = zt.shard_params(HOSTS, axis=axis, stage=stage, independent_axis="host")
    (xs,) = batches(1)
    new, _ = zt.chain(shard, *ALL)(step).lower(first, xs[0]).lockstep(first, [(x,) for x in xs])
    truth = clone(first)
    grads = {k: 0 for k in truth["params"]}
    for x in xs:
        params = {k: p.detach().requires_grad_() for k, p in truth["params"].items()}
        loss = (torch.relu(x @ params["up"]) @ params["down"]).square().mean()
        for k, g in zip(params, torch.autograd.grad(loss, [*params.values()])):
            grads[k] = grads[k] + g / 4
    outer = {k: p - 0.7 * 0.1 * grads[k] for k, p in truth["params"].items()}
    assert distance(new["outer"], outer) < 1e-6
    assert new["outer"]["up"].shape == (6, 5) and new["params"]["up"].shape == (2, 6, 5)


def test_only_a_reduction_that_names_the_axis_crosses_it():
    """The mean of a metric, and a loss that is a mean over the samples, are those of one replica."""

    def step(state, x, mask):
        w = state["w"].detach().requires_grad_()
        loss = zt.global_mean(((x @ w).square() * mask).sum(), mask.sum())
        (g,) = torch.autograd.grad(loss, [w])
        mean = zt.pmean(x.mean())
        return {"w": state["w"] - 0.1 * g}, (loss.detach(), mean, zt.pmean(mean, "host"))

    draw = torch.Generator().manual_seed(2)
    xs = [torch.randn(4, 6, generator=draw) for _ in range(4)]
    masks = [torch.arange(4) < n for n in (2, 3, 1, 4)]  # ranks with other numbers of samples
    lowered = zt.shard_params(HOSTS, independent_axis="host")(step).lower(
        {"w": torch.ones(6)}, xs[0], masks[0]
    )
    new, outputs = lowered.lockstep({"w": torch.ones(6)}, [*zip(xs, masks)])
    for host in range(2):
        ranks = slice(2 * host, 2 * host + 2)
        x, mask = torch.cat(xs[ranks]), torch.cat(masks[ranks])
        w = torch.ones(6, requires_grad=True)
        loss = ((x @ w).square() * mask).sum() / mask.sum()
        (g,) = torch.autograd.grad(loss, [w])
        assert torch.allclose(new["w"][host], 1 - 0.1 * g, atol=1e-5)
        for seen_loss, seen_mean, mean_of_all in outputs[ranks]:
            assert torch.allclose(seen_loss, loss) and torch.allclose(seen_mean, x.mean())
            assert torch.allclose(mean_of_all, torch.cat(xs).mean())
    assert lowered.cost_analysis().over("host") == 4, "bytes: the mean of means"


def test_a_leaf_that_all_replicas_share_takes_no_value_of_one():
    def step(state, x):
        return {"own": state["own"] * 2, "shared": state["shared"] + state["own"]}, x.mean()

    shard = zt.shard_params(
        HOSTS,
        axis=lambda path, leaf: "dp" if path == "own" else ("host", "dp"),
        independent_axis="host",
    )
    text = (
        r"(?s)a value of leaves that differ reaches state shared.*\n  at .*zt\.pmean\(x, 'host'\)"
    )
    with pytest.raises(ValueError, match=text):
        zt.Step.of(shard(step)).lower(
            {"own": torch.ones(4), "shared": torch.ones(4)}, torch.ones(2)
        )


def test_an_axis_is_not_both_shared_and_independent():
    for options in ({"axis": ("host", "dp")}, {"replicate_axis": "host"}):
        with pytest.raises(ValueError, match=r"'host' is an independent_axis(?s:.*)Name it once"):
            zt.shard_params(HOSTS, independent_axis="host", **options)


def test_a_leaf_of_replicas_is_saved_with_a_dim_of_them():
    def saved(mesh):
        step = zt.shard_params(mesh, independent_axis=("pod", "host"))(local_step)
        parts = step.shard(state())
        up = with_replicas(parts["params"]["up"])
        lr = with_replicas(parts["lr"])
        same_memory = up._local_tensor.data_ptr() == parts["params"]["up"]._local_tensor.data_ptr()
        return up.shape, up.placements, tuple(up._local_tensor.shape), lr.shape, same_memory

    for shape, placements, local, lr, same_memory in dtensors.on_ranks(
        [0, 7], saved, pod=2, dp=2, host=2
    ):
        assert shape == (4, 6, 5) and local == (1, 3, 5) and lr == (4,) and same_memory
        assert [p.dim for p in placements] == [0, 1, 0]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage"),
    [(2, 3), *(pytest.param(4, stage, marks=pytest.mark.exhaustive) for stage in (0, 3))],
)
def test_replicas_are_saved_and_resume_with_their_bits(ranks, stage):
    """Two hosts train apart, save, go on, and load."""
    rows = run_ranks(ranks, "replicas.py", str(stage))
    assert [row["rank"] for row in rows] == list(range(ranks))
    for row in rows:
        assert row["differ"] and row["shape"] == [2, 6, 5]
        assert row["resumed"] == row["went_on"], "bits of this rank's replica"
        assert row["eager"] < 1e-6
        assert row["synchronized"], "equal on all hosts after a pmean"
        assert row["together"] and row["again"], "shard for one model, and for replicas"
        assert row["exported"]
        assert len(row["apart"]) == 2
        for text in row["apart"]:
            assert " has other values on rank" in text and "Average them in a step first" in text
        assert row["from_plain"], "all replicas begin from a checkpoint without replicas"
        assert (
            "params.up has shape [2, 6, 5]" in row["other"]
            and "these are 2 replicas" in row["other"]
        )
    hosts = [{row["went_on"] for row in rows[k * ranks // 2 :][: ranks // 2]} for k in range(2)]
    assert len(hosts[0]) == len(hosts[1]) == 1 and hosts[0] != hosts[1]
