"""Steps that differentiate through inner steps of gradient descent: of a task, as MAML does, or of the whole batch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value

import ztrans as zt
from tests.support.programs import mlp, params_of
from tests.support.worlds import ALL, clone, default_dtype, distance, slices
from ztrans.tracing.eager_marks import EagerMarks

RANKS = 2
LOSS = r"step computes its loss from a gradient of .*\n  at .*test_inner_gradients.py:\d+ in .*\n.*zt.pvary\(params, x\)"


@pytest.fixture(autouse=True)
def _in_fp64():
    with default_dtype(torch.float64):
        yield


def model():
    return mlp(3, 5, 1)


def adapted(model, params, x, y):
    """The parameters after two inner steps on the samples."""
    for _ in range(2):
        error = F.mse_loss(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(error, [*params.values()], create_graph=True)
        params = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads)}
    return params


def maml(belongs):
    """A loop over tasks. `belongs(params, x)` says whether the parameters are those of a task."""
    net = model()

    def step(state, xs, ys):
        leaves = {k: p.detach().requires_grad_() for k, p in state.items()}
        losses = []
        for x, y in zip(xs, ys):
            params = adapted(net, belongs(leaves, x), x[:4], y[:4])
            losses.append(F.mse_loss(functional_call(net, params, (x[4:],)), y[4:]))
        loss = torch.stack(losses).mean()
        grads = torch.autograd.grad(loss, [*leaves.values()])
        return {k: p - 0.5 * g for (k, p), g in zip(state.items(), grads)}, loss.detach()

    return step, params_of(net)


def unrolled(average):
    """An inner step on the whole batch, as in unrolled optimisation."""
    net = model()

    def loss(params, x, y):
        return F.mse_loss(functional_call(net, params, (x,)), y)

    def step(state, x, y):
        def outer(params):
            inner = average(torch.func.grad(loss)(params, x, y))
            return loss({k: p - 0.1 * inner[k] for k, p in params.items()}, x, y)

        grads, value = grad_and_value(outer)(state)
        return {k: p - 0.5 * grads[k] for k, p in state.items()}, value

    return step, params_of(net)


def tasks():
    torch.manual_seed(1)
    return [(torch.randn(4, 6, 3), torch.randn(4, 6, 1)) for _ in range(3)]


def samples():
    return [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in tasks()]


def trained(step, state, data, *transforms):
    """The states of the plain step on the whole batch, and of the sharded one in lock-step."""
    wanted, mine = state, clone(state)
    lowered = zt.chain(*transforms)(step).lower(state, *slices(data[0], RANKS)[0])
    zt.ir.check(lowered.graph)
    for batch in data:
        wanted, loss = step(wanted, *batch)
        mine, losses = lowered.lockstep(mine, slices(batch, RANKS))
        assert distance(losses, [loss] * RANKS) <= 1e-12
    return mine, wanted


@pytest.mark.parametrize("stage", [0, 3])
def test_the_inner_gradients_of_a_task_are_not_averaged(stage):
    step, state = maml(zt.pvary)
    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS), stage=stage)
    mine, wanted = trained(step, state, tasks(), shard, *ALL)
    assert distance(mine, wanted) <= 1e-12


def test_a_lifted_loop_over_tasks():
    def make():
        torch.manual_seed(0)
        net = model()
        adam = torch.optim.Adam(net.parameters(), lr=0.1)

        def loop_step(xs, ys):
            adam.zero_grad()
            for x, y in zip(xs, ys):
                params = zt.pvary(dict(net.named_parameters()), x)
                params = adapted(net, params, x[:4], y[:4])
                loss = F.mse_loss(functional_call(net, params, (x[4:],)), y[4:]) / len(xs)
                loss.backward()
            adam.step()

        return net, adam, loop_step

    net, _, loop_step = make()
    lifted, adam, lifted_step = make()
    step, state = zt.lift(lifted_step, lifted, adam)
    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS))
    lowered = shard(step).lower(state, *slices(tasks()[0], RANKS)[0])
    for batch in tasks():
        loop_step(*batch)
        state, _ = lowered.lockstep(state, slices(batch, RANKS))
    assert distance(state["params"], dict(net.named_parameters())) <= 1e-12


def test_an_eager_step_does_not_reduce_the_gradient_of_a_varying_value():
    x, w, g = torch.ones(2), torch.ones(3), torch.ones(3)
    doubled = lambda x, op, axis=None: 2 * x
    with EagerMarks([x], doubled, lambda x: x):
        of_task, of_all = zt.ops.gradient(g, zt.pvary(w, x)), zt.ops.gradient(g, w)
    assert torch.equal(of_task, g) and torch.equal(of_all, 2 * g)


def test_micro_batches_of_tasks():
    step, state = maml(zt.pvary)
    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS))
    mine, wanted = trained(step, state, tasks(), shard, zt.accumulate(2))
    assert distance(mine, wanted) <= 1e-12


def test_an_averaged_inner_gradient_is_a_warning_that_says_what_to_write():
    step, state = maml(lambda params, x: params)
    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS))
    with pytest.warns(UserWarning, match=LOSS):
        shard(step).lower(state, *slices(tasks()[0], RANKS)[0])


def test_an_inner_gradient_of_the_whole_batch_is_averaged():
    """Without a pmean there is a warning, and the numbers are the same."""
    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS))
    mine, wanted = trained(*unrolled(zt.pmean), samples(), shard)
    assert distance(mine, wanted) <= 1e-12
    with pytest.warns(UserWarning, match=LOSS):
        mine, wanted = trained(*unrolled(lambda gradient: gradient), samples(), shard)
    assert distance(mine, wanted) <= 1e-12


def test_a_first_order_inner_step_is_no_warning():
    """As in SAM, whose inner gradient is that of the whole batch."""
    step, state = unrolled(lambda grads: {k: g.detach() for k, g in grads.items()})
    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine, wanted = trained(step, state, samples(), shard)
    assert distance(mine, wanted) <= 1e-12


def test_networks_trained_in_turns_over_micro_batches_are_no_warning():
    """The second loss depends on a sum of gradients of the first network, and nothing differentiates through them."""
    net = model()
    names = list(params_of(net))

    def loss(trained, others, x, y):
        return F.mse_loss(functional_call(net, {**trained, **others}, (x,)), y)

    def step(state, x, y):
        new = state
        for turn in (names[:2], names[2:]):
            others = {k: p for k, p in new.items() if k not in turn}
            for xs, ys in zip(x.chunk(2), y.chunk(2)):
                grads = torch.func.grad(loss)({k: state[k] for k in turn}, others, xs, ys)
                new = {**new, **{k: new[k] - 0.1 * grads[k] for k in turn}}
        return new, {}

    shard = zt.shard_params(zt.AbstractMesh(dp=RANKS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard(step).lower(params_of(net), *slices(samples()[0], RANKS)[0])


def test_a_plain_step_and_vmap_leave_values_as_they_are():
    params, x = {"w": torch.ones(3)}, torch.zeros(2)
    value, gradient = grad_and_value(lambda p: zt.pvary(p, x)["w"].square().sum())(params)[::-1]
    assert value == 3 and torch.equal(gradient["w"], 2 * params["w"])
    mapped = torch.func.vmap(lambda w, x: zt.pvary(w, x) * x, (None, 0))(params["w"], x)
    assert torch.equal(mapped, torch.zeros(2, 3))
