"""Selective checkpoints: backward computes the values again that they drop. The bits are equal, and memory is saved."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ztrans as zt
from tests.support.worlds import ALL, clone, distance, lower_traced, slices
from ztrans.ir.op_facts import is_random
from ztrans.rewrites.recompute import originals, without_repeats

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.bmm.default, aten.addmm.default]


WIDTH, LAYERS = 16, 4


def block(x, scale, up, down, dropout):
    h = F.layer_norm(x, (WIDTH,), scale)
    return x + F.dropout(F.gelu(h @ up) @ down, dropout)


def selective(policy):
    return partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )


def by_policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.MUST_RECOMPUTE


KINDS = {
    "none": lambda f, *args: f(*args),
    "whole": partial(checkpoint, use_reentrant=False),
    "products": selective(PRODUCTS),
    "by policy": selective(by_policy),
    "nothing saved": selective([]),
    "all saved": selective(lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_SAVE),
}
MOVED = selective(
    lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD if op in PRODUCTS else True
)


def make(kind, dropout=0.0):
    """A step with `LAYERS` blocks, each inside a checkpoint of the given kind, and the state of that step."""
    torch.manual_seed(0)
    shapes = {"scale": (WIDTH,), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    state = {
        f"{k}.{name}": torch.randn(shape) / 4
        for k in range(LAYERS)
        for name, shape in shapes.items()
    }

    def step(state, x, y):
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        for k in range(LAYERS):
            x = KINDS.get(kind, MOVED)(
                block, x, *(params[f"{k}.{name}"] for name in shapes), dropout
            )
        loss = F.mse_loss(x, y)
        grads = torch.autograd.grad(loss, list(params.values()))
        return {k: p.detach() - 0.1 * g for (k, p), g in zip(params.items(), grads)}, loss.detach()

    return step, state


X, Y = (
    torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH).sin(),
    torch.linspace(0, 1, 64 * WIDTH).view(64, WIDTH),
)


def products(lowered, region):
    return sum(e.op in PRODUCTS and e.region == region for e in lowered.graph.eqns)


@cache
def traced(kind):
    step, state = make(kind)
    return zt.Step.of(step).trace(state, *slices((X, Y), 2)[0])


@cache
def trained(kind, stage):
    """The state and the losses after a step of two ranks."""
    step, state = make(kind)
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    lowered = lower_traced(traced(kind), zt.chain(shard, *ALL, zt.remat(at_least=0))(step))
    zt.ir.check(lowered.graph)
    return lowered.lockstep(state, slices((X, Y), 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_changes_no_bit(kind, stage):
    results = [trained(variant, stage) for variant in ("none", kind)]
    assert distance(*results) == 0
    step, state = make("none")
    assert distance(results[0][0], step(state, X, Y)[0]) < 1e-6


@pytest.mark.slow
def test_dropped_values_take_no_memory_until_backward():
    """Where no product is saved, one of the two products of each block is repeated; nothing reads the other's result."""
    lowered = {kind: zt.Step.of(make(kind)[0]).lower(make(kind)[1], X, Y) for kind in KINDS}
    repeated = {
        kind: products(low, "backward") - products(lowered["none"], "backward")
        for kind, low in lowered.items()
    }
    assert repeated == {
        "none": 0,
        "whole": 4,
        "products": 0,
        "by policy": 0,
        "nothing saved": 4,
        "all saved": 0,
    }
    # The bytes above the state: activations, and the values that backward computes.
    peaks = {
        kind: low.memory_analysis().peak - low.memory_analysis().state
        for kind, low in lowered.items()
    }
    assert peaks["nothing saved"] <= peaks["whole"] < 0.8 * peaks["products"]
    assert (
        peaks["products"] == peaks["by policy"] < 0.8 * peaks["none"]
        and peaks["all saved"] == peaks["none"]
    )


def test_the_result_of_each_checkpoint_is_kept():
    """So backward recomputes one block at a time, and does not start again from the first block."""
    lowered = zt.Step.of(make("nothing saved")[0]).lower(make("nothing saved")[1], X, Y)
    computed = [e for e in lowered.graph.eqns if any(v and ".again" in v.name for v in e.outs)]
    recomputed = {v for e in computed for v in e.outs}
    additions = [e for e in computed if e.op is aten.add.Tensor]
    norms = [e for e in computed if e.op is aten.native_layer_norm.default]
    assert not additions and len(norms) == 4 and not any(e.args[0] in recomputed for e in norms)


def test_random_draws_are_kept():
    (plain, _), (step, state) = make("none", dropout=0.5), make("nothing saved", dropout=0.5)
    lowered = zt.Step.of(step).lower(state, X, Y)
    assert [e.region for e in lowered.graph.eqns if is_random(e)] == ["forward"] * 4
    torch.manual_seed(3)
    new, loss = lowered.compile()({k: p.clone() for k, p in state.items()}, X, Y)
    torch.manual_seed(3)
    want, value = plain(state, X, Y)
    assert torch.equal(loss, value) and distance(new, want) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "products", "by policy", "nothing saved"])
def test_a_program_knows_what_its_checkpoints_recompute(kind):
    step, state = make(kind)
    graph = zt.Step.of(step).trace(state, X, Y).graph
    copies = originals(graph)
    assert copies and all(copy.is_like(v) for copy, v in copies.items())
    plain, state = make("none")
    expected = [(e.op, e.region) for e in zt.Step.of(plain).trace(state, X, Y).graph.eqns]
    computed_once = without_repeats(graph)
    zt.ir.check(computed_once)
    assert [(e.op, e.region) for e in computed_once.eqns] == expected and not originals(
        computed_once
    )


@pytest.mark.slow
def test_equations_have_the_demands_of_selective_checkpoints_and_not_their_preferences():
    def demands(kind):
        step, state = make(kind)
        eqns = zt.Step.of(step).trace(state, X, Y).graph.eqns
        return {(e.op in PRODUCTS, e.demand) for e in eqns if e.region == "forward" and e.demand}

    assert demands("by policy") == {(True, "save"), (False, "recompute")}
    assert demands("products") == {(True, "save")}
    assert not demands("whole") and not demands("nothing saved") and not demands("all saved")


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_without_dropout_is_recomputed(dropout):
    """PyTorch's tag of random draws is on every fused attention."""

    def step(state, x):
        w = state.detach().requires_grad_()
        q = (x @ w).view(2, 8, 4, WIDTH).transpose(1, 2)
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, is_causal=True)
        y = checkpoint(lambda q: attend(q, q, q).square(), q, use_reentrant=False)
        (g,) = torch.autograd.grad(y.sin().mean(), [w])
        return state - g, y.detach().mean()

    w = torch.eye(WIDTH) / 2
    lowered = zt.Step.of(step).lower(w, X)
    torch.manual_seed(0)
    new, value = lowered.compile()(w.clone(), X)
    torch.manual_seed(0)
    want, plain = step(w, X)
    assert torch.equal(value, plain) and torch.equal(new, want)
    lines = [line for line in str(lowered.graph).splitlines() if "attention" in line]
    again = [line for line in lines if ".again" in line]
    assert bool(again) == (dropout == 0.0)


class Blocks(nn.Module):
    """An ordinary module: layers inside checkpoints, and a head."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.head = kind, nn.Linear(WIDTH, WIDTH)
        layer = lambda: nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = x + KINDS[self.kind](layer, x)
        return self.head(x)


def lifted(kind):
    model = Blocks(kind)
    adam = optim.AdamW(model.parameters(), lr=0.01)

    def loop_step(x, y):
        adam.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        adam.step()
        return loss

    return zt.lift(loop_step, model, adam)


@pytest.mark.slow
def test_a_lifted_loop_may_use_selective_checkpoints():
    states, peaks = [], []
    for kind in ("none", "products"):
        step, state = lifted(kind)
        run = zt.Step.of(step)
        state = run.shard(state)
        for _ in range(3):
            state, _ = run(state, X, Y)
        states.append(state["params"])
        peaks.append(run.lower(state, X, Y).memory_analysis().peak)
    assert distance(*states) == 0 and peaks[1] < peaks[0]


@pytest.mark.slow
def test_a_checkpoint_may_hold_a_thousand_operations():
    def step(state, x):
        w = state.detach().requires_grad_()

        def deep(x):
            x = x * w
            for _ in range(1000):
                x = torch.sin(x)
            return x

        y = checkpoint(
            deep,
            x,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, []),
        )
        return state - torch.autograd.grad(y.square().mean(), [w])[0], y.detach().mean()

    lowered = zt.Step.of(step).lower(torch.ones(1), X)
    assert sum(e.op is aten.sin.default for e in lowered.graph.eqns) == 1999, (
        "the last one is not repeated: its derivative reads its argument"
    )
    assert distance(lowered.lockstep(torch.ones(1), [(X,)])[0], step(torch.ones(1), X)[0]) == 0


def test_operations_after_a_checkpoint_are_not_dropped():
    """PyTorch does not remove its mark on the last operation inside, so the operation after it looks marked too."""

    def step(state, x):
        w = state.detach().requires_grad_()
        y = checkpoint(
            torch.tanh,
            x @ w,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, []),
        )
        z = torch.sigmoid(torch.exp(y))
        (g,) = torch.autograd.grad(z.square().mean(), [w])
        return state - g, z.detach().mean()

    graph = zt.Step.of(step).lower(torch.eye(16), X).graph
    assert not any(v and ".again" in v.name for e in graph.eqns for v in e.outs), (
        "only tanh was dropped, and exp keeps its result alive"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch is older than the policy"
)
def test_values_are_moved_to_the_host():
    step, state = make("moved")
    plain = zt.Step.of(make("none")[0])
    lowered = zt.Step.of(step).lower(state, X, Y)
    copies = [e.op.name for e in lowered.graph.eqns if zt.ir.is_copy(e)]
    # The last product of a block is read outside of its checkpoint, and by nothing in backward.
    assert copies == ["to_host"] * LAYERS + ["to_device"] * LAYERS
    before, after = plain.lower(state, X, Y).memory_analysis(), lowered.memory_analysis()
    assert after.host_peak == LAYERS * len(X) * 4 * WIDTH * X.itemsize
    assert after.peak < before.peak
    new, loss = lowered.compile()(clone(state), X, Y)
    want, expected = plain(clone(state), X, Y)
    assert torch.equal(loss, expected) and distance(new, want) == 0
