"""Values of forward that are on the host until backward reads them: no bit changes, and the device holds less."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ztrans as zt
from tests.support.races import Races
from tests.support.worlds import ALL
from ztrans.calling.call import BoundCall
from ztrans.ir.copies import is_copy
from ztrans.planning.cost import memory
from ztrans.rewrites.keep_on_host import keep_on_host, values_for_backward
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.executable import bind
from ztrans.runtime.transports import StreamTransports

pytestmark = pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch is older than the policy"
)

LAYERS, WIDTH = 3, 16
aten = torch.ops.aten
X = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0))


def block(x, w, scale):
    """Its product is transposed, so backward reads a view; its norm has three results; and it drops some values."""
    h = F.layer_norm(x, (WIDTH,), scale)
    y = torch.tanh((w @ h.t()).t())
    return x + F.dropout(y, 0.5) * h


def step_that_moves(*moved):
    def policy(ctx, op, *args, **kwargs):
        is_moved = op in moved
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_moved else CheckpointPolicy.PREFER_SAVE

    checkpointed = partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )

    def step(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        y = x
        for k in range(LAYERS):
            arguments = block, y, params[f"w{k}"], params[f"s{k}"]
            y = checkpointed(*arguments) if moved else block(*arguments[1:])
        loss = y.square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        return {k: p - 0.1 * g for (k, p), g in zip(state.items(), grads)}, loss

    return step


def state():
    torch.manual_seed(0)
    weights = {f"w{k}": torch.randn(WIDTH, WIDTH) / 4 for k in range(LAYERS)}
    return weights | {f"s{k}": torch.ones(WIDTH) for k in range(LAYERS)}


MOVED = {
    "products": [aten.mm.default],
    "norms": [aten.native_layer_norm.default],
    "all": [aten.mm.default, aten.native_layer_norm.default, aten.tanh.default, aten.add.Tensor],
}


def same(a, b) -> bool:
    return all(map(torch.equal, *map(pytree.tree_leaves, (a, b))))


@pytest.mark.slow
@pytest.mark.parametrize("moved", MOVED)
@pytest.mark.parametrize("transforms", [(), (zt.accumulate(2),), (zt.remat(at_least=0),)])
def test_the_bits_are_those_without_it(moved, transforms):
    results = []
    for ops in (MOVED[moved], []):
        step = zt.chain(*transforms)(step_that_moves(*ops))
        now = step.shard(state())
        torch.manual_seed(1)
        for _ in range(2):
            now, loss = step(now, X)
        results.append((now, loss))
    assert same(*results)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_have_the_bits_without_it(stage):
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    results = []
    for ops in (MOVED["all"], []):
        low = zt.chain(shard, *ALL)(step_that_moves(*ops)).lower(state(), X[:6])
        assert any(map(is_copy, low.graph.eqns)) == bool(ops)
        torch.manual_seed(1)
        results.append(low.lockstep(state(), [(X[:6],), (X[6:],)]))
    assert same(*results)


def test_the_device_holds_less_and_the_host_holds_it():
    plain = zt.Step(step_that_moves()).lower(state(), X)
    moved = zt.Step(step_that_moves(aten.tanh.default)).lower(state(), X)
    size = LAYERS * X.numel() * X.itemsize
    assert moved.memory_analysis().host_peak == size
    assert memory(moved.graph).peak < memory(plain.graph).peak


def test_without_streams_and_with_them_the_bits_are_the_same_and_there_is_no_race():
    step = zt.Step(step_that_moves(*MOVED["all"]))
    low = step.lower(state(), X)
    results = []
    for cuda in (None, Races()):
        local = low.recording.local_inputs(BoundCall(step.shard(state()), (X,))).tensors
        transports = None if cuda is None else StreamTransports(Streams(cuda))
        program = bind(low.graph, to_fx(low.graph, None, True, transports=transports))
        torch.manual_seed(1)
        if cuda is None:
            outputs = [program(local) for _ in range(3)][-1]
        else:
            with cuda:
                outputs = [program(local) for _ in range(3)][-1]
            assert not cuda.races
        results.append([x.clone() for x in outputs])
    assert same(*results)


def test_a_value_that_others_read_stays():
    """An output, and what the update reads, is on the device anyway."""

    def step(state, x):
        w = state["w"].detach().requires_grad_()
        y = torch.tanh(x @ w)
        z = torch.exp(y)
        (g,) = torch.autograd.grad(z.square().mean(), [w])
        return {"w": state["w"] - g}, y.detach()

    graph = zt.Step(step).lower({"w": torch.eye(WIDTH)}, X).graph
    names = {v.name for v in values_for_backward(graph)}
    assert "exp" in names and "tanh" not in names


def test_each_value_may_be_moved():
    graph = zt.Step(step_that_moves()).lower(state(), X).graph
    for v in sorted(values_for_backward(graph), key=lambda v: v.name):
        moved = zt.ir.check(zt.ir.dce(keep_on_host(graph, {v})))
        assert sum(map(is_copy, moved.eqns)) == 2
        inputs = [*state().values(), X]
        torch.manual_seed(1)
        expected = zt.ir.evaluate(graph, *inputs)
        torch.manual_seed(1)
        assert same(zt.ir.evaluate(moved, *inputs), expected)
