"""Leaves that transforms keep in the state: how they begin, lie on the ranks, and pass from step to step."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.func import grad_and_value

import ztrans as zt
from tests.support.kept import (
    PARAMS,
    Feedback,
    Lag,
    X,
    chain,
    coarse,
    equal,
    first_state,
    loss_fn,
    train_step,
)
from tests.support.lifted import loop_of
from tests.support.processes import run_ranks
from tests.support.worlds import ALL
from ztrans import ir


def in_lockstep(step, ranks, steps=3):
    batches = [(x,) for x in X.chunk(ranks)]
    whole = step.init(first_state())
    lowered = step.lower(whole, *batches[0])
    for _ in range(steps):
        whole, _ = lowered.lockstep(whole, batches)
    return whole


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_copy_of_a_leaf_is_cut_like_it_and_a_leaf_with_a_shape_is_whole(stage):
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    step = zt.chain(shard, Lag(), *ALL)(train_step)
    (own, kept) = in_lockstep(step, 2)

    before, after = first_state(), first_state()
    for _ in range(3):
        before, (after, _) = after, train_step(after, X)
    torch.testing.assert_close(own, after)
    torch.testing.assert_close(kept["lag"]["params.up"], before["params"]["up"])
    assert kept["lag"]["steps"] == 3

    graph = step.lower(step.init(first_state()), X[:3]).graph
    leaves = {v.name: v.type for v in graph.state}
    assert (
        leaves["lag.params.up"]
        == leaves["params.up"]
        == ("f32[3,4]" if not stage else "f32[3@dp,4]")
    )
    assert leaves["lag.steps"] == "i64[]"
    assert leaves["lag.first.params.up"] == "f64[3,4]"
    assert torch.equal(kept["lag"]["first.params.up"], PARAMS["up"].double())
    assert [*leaves][-4:] == [kept.name for kept in graph.kept]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_rank_keeps_a_row_of_its_own(stage):
    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), Feedback(), *ALL)(
        train_step
    )
    (own, kept) = in_lockstep(step, 2)

    params = PARAMS
    left = [{k: torch.zeros_like(p) for k, p in PARAMS.items()} for _ in range(2)]
    for _ in range(3):
        sent = []
        for rank, x in enumerate(X.chunk(2)):
            grads, _ = grad_and_value(loss_fn)(params, x)
            full = {k: g + left[rank][k] for k, g in grads.items()}
            sent.append({k: coarse(g) for k, g in full.items()})
            left[rank] = {k: g - sent[rank][k] for k, g in full.items()}
        params = {k: p - 0.1 * ((sent[0][k] + sent[1][k]) / 2) for k, p in params.items()}
    assert all(torch.equal(own["params"][k], p) for k, p in params.items())
    for k, leaf in PARAMS.items():
        rows = kept["feedback"][f"params.{k}"]
        assert rows.shape == (2, *leaf.shape)
        assert torch.equal(rows, torch.stack([left[0][k], left[1][k]]))


def test_rows_are_of_all_ranks_that_share_a_leaf():
    mesh = zt.AbstractMesh(host=2, dp=3)
    shard = zt.shard_params(mesh, axis="dp", replicate_axis="host")
    step = zt.chain(shard, Feedback())(train_step)
    assert step.init(first_state()).kept["feedback"]["params.up"].shape == (6, 3, 4)


def test_on_one_rank_in_place():
    step = Lag()(train_step)
    whole = step.init(first_state())
    for steps in range(1, 4):
        before = {k: p.clone() for k, p in whole.state["params"].items()}
        whole, _ = step(whole, X)
        own, kept = whole
        assert torch.equal(kept["lag"]["params.up"], before["up"])
        assert kept["lag"]["steps"] == steps
    # A pair that the caller has put together again.
    (own, kept), _ = step((own, kept), X)
    assert kept["lag"]["steps"] == 4
    assert step.init((own, kept)).kept["lag"]["steps"] == 0


def test_a_state_that_lacks_kept_leaves():
    step = Lag()(train_step)
    with pytest.raises(
        TypeError,
        match=r"train_step: the state lacks lag.params.up, lag.params.down, lag.first.params.up, and 1 more, which",
    ):
        step(first_state(), X)
    whole = step.init(first_state())
    message = r"has lag.params.up.* which none of its transforms keeps(?s:.)*`state.state`"
    with pytest.raises(TypeError, match=message):
        zt.Step.of(train_step)(whole, X)
    # `shard` starts what is missing, and drops what no transform keeps.
    both = zt.chain(Lag(), zt.ema(0.9))(train_step)
    whole.kept["lag"]["steps"].fill_(7)
    assert [*both.shard(whole).kept] == ["lag", "ema"] and both.shard(whole).kept["lag"][
        "steps"
    ] == 7
    assert [*zt.Step.of(train_step).shard(whole)] == ["params"]


def test_a_program_that_is_called_without_them():
    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), Lag())(train_step)
    lowered = step.lower(step.init(first_state()), X[:3])
    message = r"state lacks lag.params.up, .*, which transforms keep: step.init\(state\) adds it"
    with pytest.raises(TypeError, match=message):
        lowered.lockstep(first_state(), [(X[:3],), (X[3:],)])


def test_a_meta_state_gets_them_once_it_has_values():
    before = dist.is_initialized()
    mesh = zt.make_mesh("cpu", dp=1)
    step = zt.chain(zt.shard_params(mesh), zt.ema(0.9))(train_step)
    state = step.shard({"params": {k: p.to("meta") for k, p in PARAMS.items()}})
    for name, p in state.state["params"].items():
        p.to_local().copy_(PARAMS[name])
    with pytest.raises(
        ValueError, match=r"(?s)has written to state.ema.params.up, .* state = step.init\(state\)"
    ):
        step(state, X)
    state = step.init(state)
    state, _ = step(state, X)
    up = step.unshard(state).state["params"]["up"]
    assert torch.equal(
        step.unshard(state.state)["params"]["up"], up
    )  # without what transforms keep
    torch.testing.assert_close(
        state.kept["ema"]["params.up"].to_local(), torch.lerp(PARAMS["up"], up, 0.1)
    )
    if not before:
        dist.destroy_process_group()


def test_a_step_whose_transforms_keep_nothing_has_the_state_as_it_is():
    before = first_state()
    assert zt.remat()(train_step).init(before) is before


@dataclass(frozen=True)
class Keeps(zt.Transform):
    leaf: ir.Kept

    def keeps(self, leaves):
        return [self.leaf]


@pytest.mark.parametrize(
    "leaf, problem",
    [
        (
            ir.Kept("w", like="params.w"),
            r"is like 'params.w', and the state has params.up, params.down",
        ),
        (
            ir.Kept("w", like=(), start="copy"),
            "starts as a copy, but has a shape or rows of its own",
        ),
        (ir.Kept("w", like="keeps.w"), "has the name of another leaf of the state"),
    ],
)
def test_leaves_that_cannot_be_kept(leaf, problem):
    own = {**first_state(), **({"keeps": {"w": X}} if leaf.like == "keeps.w" else {})}
    with pytest.raises(ValueError, match=rf"the leaf keeps.w that it keeps {problem}"):
        Keeps(leaf)(train_step).init(own)


def test_a_lifted_loop_holds_them_itself():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    lifted, first = zt.lift(loop_of(model, sgd), model, sgd)
    step = Lag()(lifted)
    for steps in range(1, 3):
        before = first["params"]["weight"].clone()
        step(first, X)  # this loop ignores what the step returns
        assert first["lag"]["steps"] == steps
        assert torch.equal(first["lag"]["params.weight"], before)
    assert [*first] == ["params", "buffers", "optimizer", "lag"]
    zt.write_back(model, sgd, first)
    assert torch.equal(model.weight, first["params"]["weight"])


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_save_and_resume_and_so_do_other_worlds(tmp_path):
    one = chain()(train_step)
    whole = one.init(first_state())
    for leaf in whole.kept["feedback"].values():
        leaf.copy_(torch.linspace(0, 1, leaf.numel()).view(leaf.shape))
    whole, _ = one(whole, X)
    zt.save(tmp_path / "one", whole).result()
    torch.save({**whole.kept, "whole": tuple(whole)}, tmp_path / "one.pt")

    for figures in run_ranks(2, "kept.py", str(tmp_path)):
        assert all(
            figures[key] for key in ("lockstep", "loaded", "resumed", "ema", "rows", "spread")
        )
        assert abs(figures["evaluated"]) < 1e-5

    # One process goes on with the sum of the rows of two.
    loaded = zt.load(tmp_path / "two", first_state(), one)
    two = in_lockstep(chain(zt.shard_params(zt.AbstractMesh(dp=2)))(train_step), 2, steps=2)
    assert equal((loaded.state, loaded.kept["ema"]), (two.state, two.kept["ema"]))
    rows = {path: leaf.sum(0, keepdim=True) for path, leaf in two.kept["feedback"].items()}
    assert equal(loaded.kept["feedback"], rows)
    one(loaded, X)
