"""Leaves that transforms keep in the state: how they begin, lie on the ranks, and pass from step to step."""

from dataclasses import dataclass

import pytest
import torch
from torch.func import grad_and_value

import ztrans as zt
from tests.support.worlds import ALL
from ztrans import ir

PARAMS = {"up": torch.linspace(-1, 1, 12).view(3, 4), "down": torch.linspace(1, -1, 4)}
X = torch.linspace(-1, 2, 18).view(6, 3)


def loss_fn(params, x):
    return (torch.tanh(x @ params["up"]) @ params["down"]).square().mean()


def train_step(state, x):
    grads, loss = grad_and_value(loss_fn)(state["params"], x)
    return {"params": {k: p - 0.1 * grads[k] for k, p in state["params"].items()}}, loss


def state():
    return {"params": {k: p.clone() for k, p in PARAMS.items()}}


def coarse(x):
    return (x * 8).round() / 8


@dataclass(frozen=True)
class Lag(zt.Transform):
    """Keep the parameters of the step before, and count the steps."""

    phase = 1

    def keeps(self, leaves):
        copies = [ir.Kept(path, like=path, start="copy") for path in leaves]
        return [*copies, ir.Kept("steps", like=(), dtype=torch.int64)]

    def rewrite(self, graph):
        new = ir.Rewriter(graph)
        kept = graph.kept_by(self.name)
        for leaf in graph.state:
            if leaf.name in kept:
                new.set_leaf(kept[leaf.name], leaf)
        new.set_leaf(kept["steps"], new.emit(torch.add, kept["steps"], 1, region="update"))
        return new.applied()


@dataclass(frozen=True)
class Feedback(zt.Transform):
    """Send coarse gradients. Each rank keeps what is left of its own, and adds it in the next step."""

    def keeps(self, leaves):
        return [ir.Kept(path, like=path, layout="rows") for path in leaves]

    def rewrite(self, graph):
        new = ir.Rewriter(graph)
        kept = graph.kept_by(self.name)
        for e in graph.eqns:
            if not ir.is_start(e) or ir.role(e) != "grad":
                continue
            leaf = kept[e.provenance.paths[0]]
            axis = leaf.split.axis
            own = ir.row(leaf, new.fresh_name(f"{leaf.name}.own"), axis).like(e)
            new.insert_before(e, own)
            full = new.emit(torch.add, e.ins[0], own.out)
            sent = new.emit(coarse, full)
            left = new.emit(torch.sub, full, sent)
            rows = ir.rows(left, new.fresh_name(f"{leaf.name}.new"), axis, graph.axes[axis])
            new.insert_before(e, rows.like(e))
            new.set_leaf(leaf, rows.out)
            new.replace(e, e.with_inputs(lambda v, sent=sent: sent))
        return new.applied()


def in_lockstep(step, ranks, steps=3):
    batches = [(x,) for x in X.chunk(ranks)]
    whole = step.init(state())
    lowered = step.lower(whole, *batches[0])
    for _ in range(steps):
        whole, _ = lowered.lockstep(whole, batches)
    return whole


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_copy_of_a_leaf_is_cut_like_it_and_a_leaf_with_a_shape_is_whole(stage):
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    step = zt.chain(shard, Lag(), *ALL)(train_step)
    (own, kept) = in_lockstep(step, 2)

    before, after = state(), state()
    for _ in range(3):
        before, (after, _) = after, train_step(after, X)
    torch.testing.assert_close(own, after)
    torch.testing.assert_close(kept["lag"]["params.up"], before["params"]["up"])
    assert kept["lag"]["steps"] == 3

    graph = step.lower(step.init(state()), X[:3]).graph
    leaves = {v.name: v.type for v in graph.state}
    assert (
        leaves["lag.params.up"]
        == leaves["params.up"]
        == ("f32[3,4]" if not stage else "f32[3@dp,4]")
    )
    assert leaves["lag.steps"] == "i64[]"
    assert [*leaves][-3:] == [kept.name for kept in graph.kept]


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
    assert step.init(state()).kept["feedback"]["params.up"].shape == (6, 3, 4)


def test_on_one_rank_in_place():
    step = Lag()(train_step)
    whole = step.init(state())
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
        match=r"train_step: the state lacks lag.params.up, lag.params.down, lag.steps, which",
    ):
        step(state(), X)
    whole = step.init(state())
    with pytest.raises(
        TypeError, match=r"train_step: the state has lag.params.up.* which none of its transforms"
    ):
        zt.Step.of(train_step)(whole, X)


def test_a_step_whose_transforms_keep_nothing_has_the_state_as_it_is():
    before = state()
    assert zt.remat()(train_step).init(before) is before


def test_a_leaf_like_one_that_is_not_there():
    @dataclass(frozen=True)
    class Lost(zt.Transform):
        def keeps(self, leaves):
            return [ir.Kept("w", like="params.w")]

    with pytest.raises(
        ValueError,
        match=r"lost\(\): it keeps a leaf like 'params.w', and the state has params.up, ",
    ):
        Lost()(train_step).init(state())


def test_a_lifted_loop_holds_them_itself():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop_step(x):
        sgd.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        sgd.step()
        return loss

    lifted, first = zt.lift(loop_step, model, sgd)
    step = Lag()(lifted)
    for steps in range(1, 3):
        before = first["params"]["weight"].clone()
        step(first, X)  # this loop ignores what the step returns
        assert first["lag"]["steps"] == steps
        assert torch.equal(first["lag"]["params.weight"], before)
    assert [*first] == ["params", "buffers", "optimizer", "lag"]
    zt.write_back(model, sgd, first)
    assert torch.equal(model.weight, first["params"]["weight"])
