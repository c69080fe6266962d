"""Sums of reduced gradients: at stages 0 and 1, `RS(a) + RS(b)` becomes `RS(a + b)` where that is legal.

RS is a reduce_scatter. The functions below add the gradients of three micro-batches in different ways.
"""

import pytest
import torch
from torch.func import grad
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import parameters_of
from ztrans.ir.collectives import ALL_REDUCE, REDUCE_SCATTER

MICRO = 3
REDUCTIONS = ((0, 1), (1, 1), (2, MICRO), (3, MICRO))  # stages, and how often each leaf is reduced


def loss(params, x, y):
    return (torch.relu(x @ params["up"].T) @ params["down"].T - y).square().mean()


def added(grads, state):
    return {k: grads[0][k] + grads[1][k] + grads[2][k] for k in grads[0]}


def added_from_the_right(grads, state):
    return {k: grads[0][k] + (grads[1][k] + grads[2][k]) for k in grads[0]}


def averaged_one_by_one(grads, state):
    return {k: grads[0][k] / 3 + grads[1][k] / 3 + grads[2][k] / 3 for k in grads[0]}


def summed(grads, state):
    return {k: sum(g[k] for g in grads) for k in grads[0]}


def into_momentum(grads, state):
    total = {k: 0.9 * m for k, m in state["m"].items()}
    for g in grads:
        total = {k: total[k] + g[k] / 3 for k in g}
    return total


def in_place(grads, state):
    total = {k: torch.zeros_like(p) for k, p in state["params"].items()}
    for g in grads:
        for k in g:
            total[k] += g[k]
    return total


def foreach(grads, state):
    total = list(grads[0].values())
    for g in grads[1:]:
        total = torch._foreach_add(total, list(g.values()))
    return dict(zip(grads[0], total))


def newest_first(grads, state):
    return {k: grads[2][k] + grads[1][k] + grads[0][k] for k in grads[0]}


def newest_first_into_momentum(grads, state):
    total = {k: 0.9 * m for k, m in state["m"].items()}
    for g in reversed(grads):
        total = {k: total[k] + g[k] / 3 for k in g}
    return total


MERGED = [added, added_from_the_right, averaged_one_by_one, summed, into_momentum, in_place, foreach,
          newest_first, newest_first_into_momentum]  # fmt: skip


def also_looked_at(grads, state):
    """The norm of the first gradient is used too, so that gradient must be reduced alone."""
    scale = {k: torch.rsqrt(1 + g.square().sum()) for k, g in grads[0].items()}
    return {k: grads[0][k] + (grads[1][k] + grads[2][k]) * scale[k] for k in grads[0]}


def multiplied(grads, state):
    return {k: grads[0][k] * grads[1][k] + grads[2][k] for k in grads[0]}


def crossed(grads, state):
    """Sums of gradients of different values."""
    up = grads[0]["up"]
    down = grads[1]["down"]
    return {"up": up + (up + down.sum()), "down": down * grads[2]["down"] + grads[2]["up"].sum()}


def doubled(grads, state):
    """A gradient added to itself in one equation."""
    return {k: g + g for k, g in grads[0].items()}


def doubled_and_added(grads, state):
    """The gradient that is added to itself is later than the one that is added to it, and is reduced alone."""
    return {k: (grads[2][k] + grads[2][k]) + grads[0][k] for k in grads[0]}


def step_with(total_of):
    def step(state, batch):
        parts = zip(*(t.chunk(MICRO) for t in batch))
        total = total_of([grad(loss)(state["params"], *part) for part in parts], state)
        return {
            **state,
            "m": total,
            "params": {k: p - 0.1 * total[k] for k, p in state["params"].items()},
        }, 0.0

    return step


def lower(total_of, stage, mesh=None, **options):
    mesh = mesh or zt.AbstractMesh(dp=2)
    params = {"up": torch.randn(16, 8), "down": torch.randn(6, 16)}
    state = {"params": params, "m": {k: torch.ones_like(p) for k, p in params.items()}}
    batch = torch.randn(12, 8), torch.randn(12, 6)
    step = zt.chain(zt.shard_params(mesh, stage=stage, **options), zt.overlap_grads())(
        step_with(total_of)
    )
    return step.lower(state, tuple(t.chunk(2)[0] for t in batch)), state, batch


def reductions(lowered, axis="dp"):
    """How many reductions each leaf of the state has."""
    counts: dict[str, int] = {}
    for e in lowered.history[-2][1].eqns:  # the program before its reductions are put into buckets
        if (
            e.op in (REDUCE_SCATTER, ALL_REDUCE)
            and e.provenance.role == "grad"
            and e.provenance.axis == axis
        ):
            counts[e.provenance.paths[0]] = counts.get(e.provenance.paths[0], 0) + 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("total_of", "stage", "each"),
    parameters_of(
        [(f, *stage) for stage in REDUCTIONS for f in MERGED],
        # Stages 0 and 1 merge the same sums, and stages 2 and 3 merge none.
        [*((f, 1, 1) for f in MERGED), *((foreach, *stage) for stage in REDUCTIONS)],
    ),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_micro_batches_reduce_once_at_stage_1_and_each_at_stage_2(total_of, stage, each):
    lowered, _, _ = lower(total_of, stage)
    assert reductions(lowered) == {"params.up": each, "params.down": each}
    whole = (16 * 8 + 6 * 16) * 4
    ranks = 2
    wire = whole * (ranks - 1) // ranks * (2 if stage == 0 else 1)
    assert lowered.cost_analysis().over("dp", "grad") == each * wire


@pytest.mark.parametrize(
    "total_of", [added, averaged_one_by_one, into_momentum], ids=lambda f: f.__name__
)
def test_micro_batches_reduce_once_over_hosts_too(total_of):
    lowered, _, _ = lower(total_of, 1, zt.AbstractMesh(host=2, dp=2), replicate_axis="host")
    assert reductions(lowered) == reductions(lowered, "host") == {"params.up": 1, "params.down": 1}


@pytest.mark.parametrize(
    "total_of, most",
    [(also_looked_at, 2), (multiplied, 3), (crossed, 2)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_gradient_with_another_use_is_reduced_alone(total_of, most):
    lowered, _, _ = lower(total_of, 1)
    assert reductions(lowered) == {"params.up": most, "params.down": most}


@pytest.mark.slow
@pytest.mark.parametrize(
    "total_of",
    [*MERGED, also_looked_at, multiplied, crossed, doubled, doubled_and_added],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_merged_reductions_compute_what_the_plain_step_computes(total_of, stage):
    """All micro-batches have the same data, as ranks split the batch into other micro-batches than one device does."""
    lowered, state, _ = lower(total_of, stage)
    batch = torch.randn(4, 8), torch.randn(4, 6)
    repeated = tuple(t.repeat(MICRO, 1) for t in batch)
    ranks = [(tuple(t.chunk(2)[r].repeat(MICRO, 1) for t in batch),) for r in range(2)]
    new, _ = lowered.lockstep(state, ranks)
    wanted, _ = step_with(total_of)(state, repeated)
    for a, b in zip(pytree.tree_leaves(new), pytree.tree_leaves(wanted)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_scale_moves_before_the_reduction_only_if_reductions_are_merged():
    """Without a merge, it is cheaper to scale the shard than the whole gradient."""

    def alone(grads, state):
        return {k: 0.9 * state["m"][k] + 0.1 * g for k, g in grads[0].items()}

    for stage in (0, 1):
        assert "scaled" not in str(lower(alone, stage)[0])
        assert "scaled" in str(lower(averaged_one_by_one, stage)[0])


@pytest.mark.parametrize("stage", [0, 1])
def test_the_sum_of_gradients_is_rounded_for_the_wire_and_not_the_terms(stage):
    """The step casts gradients to fp32 and adds them. Only their sum is cast to bf16 for the message."""

    def half(state, batch):
        def loss(params, x, y):
            low = {k: p.bfloat16() for k, p in params.items()}
            return (
                ((x.bfloat16() @ low["up"].T) @ low["down"].T - y.bfloat16())
                .float()
                .square()
                .mean()
            )

        parts = zip(*(t.chunk(MICRO) for t in batch))
        g = [grad(loss)(state["params"], *part) for part in parts]
        return {
            "params": {k: p - (g[0][k] + g[1][k] + g[2][k]) for k, p in state["params"].items()}
        }, 0.0

    state = {"params": {"up": torch.randn(16, 8), "down": torch.randn(6, 16)}}
    batch = torch.randn(6, 8), torch.randn(6, 6)
    step = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage, reduce_dtype=torch.bfloat16)(half)
    graph = step.lower(state, batch).graph
    sums = [
        e
        for e in graph.eqns
        if e.op is torch.ops.aten.add.Tensor and e.outs[0].shape in ((16, 8), (6, 16))
    ]
    assert len(sums) == 4 and all(e.outs[0].dtype == torch.float32 for e in sums)
    (wire,) = {e.kwargs["dtype"] for e in graph.eqns if e.op in (REDUCE_SCATTER, ALL_REDUCE)}
    assert wire == torch.bfloat16


def test_a_gradient_that_two_leaves_share_is_merged_for_each_of_them():
    """The values that the rewrite adds have names of their own."""

    def loss(params, x):
        return (x @ (params["a"] + params["b"])).square().mean()

    def step(params, x):
        grads = [grad(loss)(params, part) for part in x.chunk(2)]
        return {k: p - 0.1 * (grads[0][k] + grads[1][k]) for k, p in params.items()}, 0.0

    params = {"a": torch.randn(8, 4), "b": torch.randn(8, 4)}
    lowered = zt.shard_params(zt.AbstractMesh(dp=2), stage=1)(step).lower(params, torch.randn(4, 8))
    zt.ir.check(lowered.graph)


def test_gradients_of_two_leaves_in_one_sum_are_merged_for_each_of_them():
    def loss(params, x):
        return ((x @ params["a"]).relu() @ params["b"]).square().mean()

    def step(params, x):
        grads = [grad(loss)(params, part) for part in x.chunk(2)]
        total = grads[0]["a"] + grads[0]["b"] + grads[1]["a"] + grads[1]["b"]
        return {k: p - 0.1 * total for k, p in params.items()}, 0.0

    params = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=1), zt.overlap_grads())(
        step
    ).lower(params, torch.randn(4, 4))
    assert reductions(lowered) == {"a": 1, "b": 1}
