"""Evaluation and metrics: which outputs are averaged, means over samples of all ranks, and steps without gradients."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt
from tests.support.worlds import ALL, distance

MESH = zt.AbstractMesh(dp=3)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(sizes):
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randint(4, (n,))) for n in sizes]


def whole(parts):
    return tuple(torch.cat(column) for column in zip(*parts))


def linear(state, x, y, mean):
    """A step whose loss is the mean over the samples of all ranks, as `mean` computes it."""
    w = state["w"].detach().requires_grad_()
    loss = mean(F.cross_entropy(x @ w, y, reduction="sum"), torch.tensor(len(y)))
    (grad,) = torch.autograd.grad(loss, w)
    return {"w": state["w"] - 0.1 * grad}, loss


def run(step, state, parts, *transforms, **options):
    """The new state, and the outputs of all ranks."""
    sharded = zt.chain(zt.shard_params(MESH, **options), *transforms)(step)
    return sharded.lower(state, *parts[0]).lockstep(state, parts)


def test_only_scalars_are_averaged():
    """The logits of two ranks are of different samples. So are predictions, which are whole numbers."""
    parts = batches((4, 4, 4))

    def step(state, x, y):
        logits = x @ state["w"]
        return state, {
            "loss": F.cross_entropy(logits, y),
            "logits": logits,
            "predicted": logits.argmax(-1),
            "right": zt.psum((logits.argmax(-1) == y).sum()),
        }

    state = {"w": torch.randn(6, 4)}
    _, outputs = run(step, state, parts)
    for output, part in zip(outputs, parts):
        _, own = step(state, *part)
        assert torch.equal(output["logits"], own["logits"]) and torch.equal(
            output["predicted"], own["predicted"]
        )
        _, all_of_them = step(state, *whole(parts))
        assert (
            distance(output["loss"], all_of_them["loss"]) <= 1e-6
            and output["right"] == all_of_them["right"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mean", [
    lambda s, n: zt.global_mean(s, n),
    lambda s, n: zt.global_mean(s, n, "dp"),
    lambda s, n: 3 * s / zt.psum(n.float()),
    lambda s, n: zt.psum(s) / zt.psum(n),
    lambda s, n: zt.psum(s / zt.psum(n)),
    lambda s, n: s / zt.pmean(n.float()),
])  # fmt: skip
def test_a_mean_over_the_samples_of_all_ranks(mean, stage):
    """Value and gradient, for numbers of samples that differ from rank to rank."""
    torch.manual_seed(2)
    masks = [torch.rand(6) < 0.5 for _ in range(3)]
    parts = [(*part, mask) for part, mask in zip(batches((6, 6, 6)), masks)]

    def step(state, x, y, mask, mean=mean):
        w = state["w"].detach().requires_grad_()
        loss = mean((F.cross_entropy(x @ w, y, reduction="none") * mask).sum(), mask.sum())
        (grad,) = torch.autograd.grad(loss, w)
        return {"w": state["w"] - 0.1 * grad}, loss

    state = {"w": torch.randn(6, 4)}
    wanted, loss = step(state, *whole(parts), mean=lambda s, n: s / n)
    got, outputs = run(step, state, parts, *ALL, stage=stage)
    assert distance(got, wanted) <= 1e-6 and all(distance(out, loss) <= 1e-6 for out in outputs)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_mean_over_numbers_of_samples_that_are_no_tensors(stage):
    """A number of the caller, and a constant of the program such as the size of the batch, differ from rank to rank."""
    parts = [(x, y, float(n)) for (x, y), n in zip(batches((4, 4, 4)), (4, 2, 1))]

    def step(state, x, y, n):
        return state, (
            zt.global_mean(F.cross_entropy(x @ state["w"], y, reduction="sum"), n),
            zt.psum(torch.ones(len(x)).sum()),
        )

    state = {"w": torch.randn(6, 4)}
    lowered = zt.shard_params(MESH, stage=stage)(step).lower(state, *parts[0])
    loss = sum(F.cross_entropy(x @ state["w"], y, reduction="sum") for x, y, _ in parts) / 7
    for mean, count in lowered.lockstep(state, parts)[1]:
        assert distance(mean, loss) <= 1e-6 and count == 12
    assert str(lowered).count("all_reduce") == 3, "a rank may have a batch of another size"


def test_a_sum_of_equal_bools_is_a_bool():
    """A multiple of it would be an integer, which the program calls a bool."""
    step = lambda state, x, y: (state, zt.psum((state["w"] > 0).any()))
    state = {"w": torch.ones(6, 4)}
    assert run(step, state, batches((2, 2, 2)))[1] == [torch.tensor(True)] * 3


def test_a_global_mean_over_both_axes_of_a_mesh():
    mesh = zt.AbstractMesh(host=2, dp=2)
    parts = batches((4, 4, 4, 4))
    step = lambda state, x, y: linear(state, x, y, lambda s, n: zt.global_mean(s, n))
    state = {"w": torch.randn(6, 4)}
    wanted, loss = step(state, *whole(parts))
    sharded = zt.shard_params(mesh, replicate_axis="host")(step)
    got, outputs = sharded.lower(state, *parts[0]).lockstep(state, parts)
    assert distance(got, wanted) <= 1e-6 and all(distance(out, loss) <= 1e-6 for out in outputs)


def test_a_sum_over_all_axes_of_what_varies_over_one():
    mesh = zt.AbstractMesh(host=2, dp=2)
    step = zt.shard_params(mesh, replicate_axis="host")(
        lambda state, x: (state, zt.psum(zt.pmean(x.sum(), "host")))
    )
    parts = [(torch.full((2,), float(k)),) for k in range(4)]
    _, outputs = step.lower({"w": torch.ones(4)}, *parts[0]).lockstep({"w": torch.ones(4)}, parts)
    assert [float(x) for x in outputs] == [12.0] * 4


@pytest.mark.parametrize(
    "options", [{"replicate_axis": "host"}, {"axis": ("host", "dp")}], ids=["hsdp", "joint"]
)
@pytest.mark.parametrize("axis", ["dp", "host"])
def test_a_running_mean_over_one_axis_becomes_that_over_both(axis, options):
    def step(state, x):
        w = state["w"].detach().requires_grad_()
        mean = zt.pmean((x * w).mean(0), axis)
        new = 0.9 * state["mean"] + 0.1 * mean.detach()
        (grad,) = torch.autograd.grad(mean.square().sum(), w)
        return {"w": state["w"] - 0 * grad, "mean": new}, x.sum()

    parts = [(x,) for x, _ in batches((4, 4, 4, 4))]
    state = {"w": torch.randn(6), "mean": torch.randn(6)}
    lowered = zt.shard_params(zt.AbstractMesh(host=2, dp=2), **options)(step).lower(
        state, *parts[0]
    )
    got, _ = lowered.lockstep(state, parts)
    wanted = 0.9 * state["mean"] + 0.1 * (whole(parts)[0] * state["w"]).mean(0)
    assert distance(got["mean"], wanted) <= 1e-6


def test_a_quotient_by_a_psum_is_told():
    """Its mean over the ranks is too small. A softmax over all ranks is no such quotient."""
    state = {"w": torch.randn(6, 4)}
    parts = batches((4, 4, 4))
    wrong = {
        "scalar": lambda s, n: s / zt.psum(n),
        "each": lambda s, n: (s * torch.ones(3) / zt.psum(n.float()).clamp(min=1)).sum() * 0.5,
        "mean": lambda s, n: zt.pmean(s / zt.psum(n, "dp"), "dp"),
    }
    for mean in wrong.values():
        with pytest.warns(
            UserWarning,
            match=r"is 1/3 of the mean over all samples(?s:.)*test_metrics.py:\d+(?s:.)*Use zt.global_mean",
        ):
            zt.shard_params(MESH)(lambda state, x, y: linear(state, x, y, mean)).lower(  # noqa: B023
                state, *parts[0]
            )
    softmax = lambda state, x, y: (state, (x.exp().sum() / zt.psum(x.exp().sum())).log())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zt.shard_params(MESH)(softmax).lower(state, *parts[0])
        zt.shard_params(zt.AbstractMesh(dp=1))(
            lambda state, x, y: linear(state, x, y, wrong["scalar"])
        ).lower(state, *parts[0])


def test_a_quotient_by_a_psum_and_a_number_of_the_state_is_told():
    def step(state, x, y):
        new, loss = linear(state, x, y, lambda s, n: s / (zt.psum(n) * state["size"]))
        return {**new, "size": state["size"]}, loss

    state = {"w": torch.randn(6, 4), "size": torch.ones(())}
    with pytest.warns(UserWarning, match="is 1/3 of the mean over all samples"):
        zt.shard_params(MESH)(step).lower(state, *batches((4, 4, 4))[0])


def lifted_pair():
    """A loop that trains and one that evaluates, on one module, and the untouched ones on another."""
    pairs = []
    for _ in range(2):
        model, optimizer = make()

        def train(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        @torch.no_grad()
        def evaluate(x, y, model=model):
            logits = model(x)
            return F.cross_entropy(logits, y), logits

        pairs.append((model, optimizer, train, evaluate))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_an_evaluation_takes_the_state_of_the_training_step(stage):
    """And the same transforms. `eval()` and `train()` choose between programs that are traced once each."""
    (model, _, train, evaluate), (lifted, optimizer, lifted_train, lifted_evaluate) = lifted_pair()
    chain = zt.chain(zt.shard_params(MESH, stage=stage), *ALL)
    (
        model[1].eval(),
        lifted[1].eval(),
        model[2].eval(),
        lifted[2].eval(),
    )  # no statistics of a batch, and no dropout
    step, state = zt.lift(lifted_train, lifted, optimizer)
    evaluation, same = zt.lift(lifted_evaluate, lifted)
    assert same["params"].keys() == state["params"].keys()
    parts = batches((4, 4, 4))
    training = chain(step).lower(state, *parts[0])
    testing = chain(evaluation).lower(state, *parts[0])
    assert [v.layout for v in training.graph.inputs if v.name.startswith("params")] == [
        v.layout for v in testing.graph.inputs if v.name.startswith("params")
    ]
    for _ in range(3):
        train(*whole(parts))
        state, _ = training.lockstep(state, parts)
        loss, logits = evaluate(*whole(parts))
        before = {**state["params"]}
        state, outputs = testing.lockstep(state, parts)
        assert distance(state["params"], before) == 0
        assert all(distance(own, loss) <= 1e-6 for own, _ in outputs)
        assert distance(torch.cat([own for _, own in outputs]), logits) <= 1e-5


def test_an_evaluation_between_steps_needs_no_new_trace():
    (model, optimizer, train, evaluate), _ = lifted_pair()
    step, state = zt.lift(train, model, optimizer)
    evaluation, _ = zt.lift(evaluate, model)
    training = zt.Step.of(step)
    testing = zt.Step.of(evaluation)
    state, (batch,) = training.shard(state), batches((4,))
    for _ in range(3):
        model.train()
        state, _ = training(state, *batch)
        model.eval()
        known = state["params"]["0.weight"]
        state, (_, logits) = testing(state, *batch)
        assert state["params"]["0.weight"] is known and not logits.requires_grad
    assert len(training._cache) == len(testing._cache) == 1
    zt.write_back(model, optimizer, state)
    assert torch.equal(model(batch[0]), logits)
