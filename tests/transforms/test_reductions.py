"""`zt.pmean`, `psum`, `pmax` and `pmin`: over every axis of the mesh, whether the step is sharded over it or not."""

import warnings

import pytest
import torch

import ztrans as zt
from tests.support.worlds import distance

MESH = zt.AbstractMesh(host=2, dp=2)
REDUCTIONS = {
    "pmean": lambda x, dims: x.mean(dims),
    "psum": lambda x, dims: x.sum(dims),
    "pmax": lambda x, dims: x.amax(dims),
    "pmin": lambda x, dims: x.amin(dims),
}
AXES = {"host": 0, "dp": 1, ("host", "dp"): (0, 1), None: 1}  # the step is sharded over dp


def lockstep(step, state, parts, **options):
    """The new state, and the output of each rank."""
    sharded = zt.shard_params(MESH, independent_axis="host", **options)(step)
    return sharded.lower(state, *parts[0]).lockstep(state, parts)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_over_each_axis_of_the_mesh(name, stage):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 5)  # by host and dp

    def step(state, x):
        return state, [getattr(zt, name)(x * state["w"], axis) for axis in AXES]

    state = {"w": torch.randn(5)}
    parts = [(x[host, rank],) for host in range(2) for rank in range(2)]
    _, outputs = lockstep(step, state, parts, stage=stage)
    for dims, *by_rank in zip(AXES.values(), *outputs):
        expected = REDUCTIONS[name](x.double() * state["w"].double(), dims)
        for rank, got in enumerate(by_rank):
            place = rank // 2 if dims == 1 else rank % 2
            assert distance(got, expected[place] if expected.ndim == 2 else expected) <= 1e-6


@pytest.mark.parametrize("stage", range(4))
def test_weights_that_are_averaged_over_an_axis_that_the_step_is_not_sharded_over(stage):
    """The update of the mean of both hosts is that of the whole batch, and no warning says that hosts train apart."""

    def step(state, x):
        w = state["w"].detach().requires_grad_()
        (grad,) = torch.autograd.grad((x @ w).square().mean(), w)
        new = {"w": zt.pmean(state["w"] - 0.1 * grad, "host")}
        return {
            **new,
            "sum": zt.psum(state["sum"], "host"),
            "most": zt.pmax(state["most"], "host"),
        }, x.sum()

    torch.manual_seed(0)
    state = {"w": torch.randn(6, 3), "sum": torch.randn(4), "most": torch.randn(4)}
    x = torch.randn(8, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = zt.shard_params(MESH, stage=stage)(step).lower(state, x[:2])
    got, _ = sharded.lockstep(state, [(part,) for part in x.chunk(4)])
    w = state["w"].clone().requires_grad_()
    (grad,) = torch.autograd.grad((x @ w).square().mean(), w)
    assert distance(got["w"], state["w"] - 0.1 * grad) <= 1e-6
    assert distance(got["sum"], 2 * state["sum"]) <= 1e-6 and torch.equal(
        got["most"], state["most"]
    )


def test_a_metric_that_is_averaged_over_hosts_leaves_the_warning():
    def step(state, x):
        w = state["w"].detach().requires_grad_()
        loss = (x @ w).square().mean()
        (grad,) = torch.autograd.grad(loss, w)
        return {"w": state["w"] - 0.1 * grad}, zt.pmean(loss.detach(), "host")

    with pytest.warns(UserWarning, match="reduces nothing over 'host'"):
        zt.shard_params(MESH)(step).lower({"w": torch.randn(6, 3)}, torch.randn(2, 6))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.bool, torch.bfloat16])
def test_extremes_of_other_dtypes(dtype):
    parts = [(torch.tensor([3.0, 0.0, -2.0][k:] + [0.0] * k).to(dtype),) for k in (0, 1, 2, 1)]
    step = lambda state, x: (state, (zt.pmax(x, "dp"), zt.pmin(x, ("host", "dp"))))
    _, outputs = lockstep(step, {"w": torch.ones(4)}, parts)
    values = torch.stack([part for (part,) in parts]).view(2, 2, 3)
    for rank, (most, least) in enumerate(outputs):
        assert most.dtype == least.dtype == dtype
        assert torch.equal(most.float(), values[rank // 2].float().amax(0))
        assert torch.equal(least.float(), values.float().amin((0, 1)))


def test_extremes_keep_a_nan_of_one_rank():
    parts = [(torch.tensor([float("nan") if rank == 1 else float(rank)]),) for rank in range(4)]
    step = lambda state, x: (state, (zt.pmax(x), zt.pmin(x)))
    _, outputs = lockstep(step, {"w": torch.ones(4)}, parts)
    for most, least in outputs[:2]:
        assert most.isnan() and least.isnan()
    assert tuple(v.item() for v in outputs[2]) == (3.0, 2.0)


def test_the_shift_of_a_softmax_over_all_ranks_has_a_gradient():
    """The maximum itself has none: it is detached, or an error says so."""

    def step(state, x, detached=True):
        w = state["w"].detach().requires_grad_()
        logits = x * w
        most = zt.pmax((logits.detach() if detached else logits).max())
        loss = zt.psum((logits - most).exp().sum()).log() + most
        (grad,) = torch.autograd.grad(loss, w)
        return {"w": state["w"] - grad}, loss

    state = {"w": torch.randn(5)}
    parts = [(x,) for x in torch.randn(2, 5)]
    sharded = zt.shard_params(zt.AbstractMesh(dp=2))(step).lower(state, *parts[0])
    _, outputs = sharded.lockstep(state, parts)
    expected = torch.cat([x * state["w"] for (x,) in parts]).logsumexp(0)
    assert all(distance(loss, expected) <= 1e-6 for loss in outputs)
    with pytest.raises(
        NotImplementedError, match=r"pmax: it has no derivative.*\nDetach the value first, zt.pmax"
    ):
        zt.Step.of(lambda state, x: step(state, x, False)).lower(state, *parts[0])
    with pytest.raises(TypeError, match="pmin: complex values have no order"):
        zt.pmin(torch.ones(2, dtype=torch.complex64))
