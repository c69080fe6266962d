"""`remat(memory=...)`: the plan chooses what backward recomputes, within a limit; no bit changes."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ztrans as zt
from tests.support.cover import COVER, parameters_of
from tests.support.parallel import copied, summed
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, on_ranks, sharded, slices
from ztrans import stages
from ztrans.ir.collectives import rules
from ztrans.ir.liveness import liveness
from ztrans.ir.op_facts import is_matmul, is_random
from ztrans.ir.user_collectives import is_user_collective
from ztrans.planning.limit import DoesNotFit

pytestmark = pytest.mark.slow  # each test plans several steps


@pytest.fixture(autouse=True)
def _no_ways_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests read what an error says is needed, and not what would fit, which takes many plans to find."""
    monkeypatch.setattr(stages, "ways_to_fit", lambda *_: [])


aten = torch.ops.aten
WIDTH = 16
X = torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH).sin()
PRODUCTS = [aten.mm.default, aten.addmm.default]


def least(lower) -> int:
    """The least limit that fits, as the error of a smaller one says."""
    with pytest.raises(DoesNotFit) as caught:
        lower(1)
    return caught.value.least.peak


def again(graph) -> list:
    """The equations that backward runs again."""
    return [e for e in graph.eqns if any(".again" in v.name for v in e.results)]


def equal(a, b) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    )


RECOMPUTING = {"gpt_adam", "batch_norm_mean", "autocast"}
# Every program at stage 3. At the other stages, one step of each kind that recomputation treats by rules of its own: a
# mean over ranks inside forward, one gather with a cast, and neither.
PROGRAMS = [(name, 3) for name in sorted(CASES)] + [
    *(("batch_norm_mean", stage) for stage in (0, 1, 2)),
    *(("autocast", stage) for stage in (0, 2)),
    ("gpt_adam", 1),
]
# The two with casts of a GPT take seconds each: one of them, with gathers that are cast once.
TESTED = [(name, 3) for name in {*COVER, "per_sample"} - {"cast_inside"}] + [
    ("batch_norm_mean", 0),
    ("autocast", 2),
]


@pytest.mark.parametrize(("name", "stage"), parameters_of(PROGRAMS, TESTED))
def test_no_bit_changes_within_the_least_limit_that_fits(name, stage):
    """Second derivatives, recurrent nets, per-sample gradients and updates that read forward are among them."""
    case = CASES[name]
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)

    def lower(memory: int):
        return on_ranks(case, 2, shard, *ALL, zt.remat(memory=memory, at_least=0))

    limit = least(lower)
    limited = (*ALL, zt.remat(memory=limit, at_least=0))
    *after, lowered = sharded(case, 2, stage=stage, steps=2, transforms=limited)
    *before, kept = sharded(case, 2, stage=stage, steps=2)
    assert equal(before, after)
    assert lowered.memory_analysis().peak <= limit
    if name in RECOMPUTING:
        assert again(lowered.graph) and lowered.plan.recomputed
        assert lowered.memory_analysis().peak < kept.memory_analysis().peak
    draws = Counter(e.op for e in kept.graph.eqns if is_random(e))
    assert Counter(e.op for e in lowered.graph.eqns if is_random(e)) == draws


# A step with everything that may go wrong.


def block(x, w, scale, down, dropout):
    h = F.layer_norm(x, (WIDTH,), scale)
    heads = (h @ w).view(2, 32, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
    seen = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
    first, second = (seen.transpose(1, 2).reshape(64, WIDTH) @ down).split(2 * WIDTH, 1)
    return x + F.dropout((F.gelu(first) * second) @ down.T[: 2 * WIDTH], dropout)


def without(f, *args):
    """No checkpoint around a block."""
    return f(*args)


def made(around=without, dropout=0.2, layers=4):
    """A step with views, results of several values, dropout and a batch norm whose statistics are state."""
    torch.manual_seed(0)
    shapes = {"w": (WIDTH, 3 * WIDTH), "scale": (WIDTH,), "down": (WIDTH, 4 * WIDTH)}
    params = {f"{k}.{n}": torch.randn(s) / 4 for k in range(layers) for n, s in shapes.items()}
    state = {"params": params, "mean": torch.zeros(WIDTH), "var": torch.ones(WIDTH)}

    def step(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        mean = state["mean"]
        var = state["var"]
        y = F.batch_norm(x * params["0.scale"], mean, var, training=True)
        for k in range(layers):
            y = around(block, y, *(params[f"{k}.{name}"] for name in shapes), dropout)
        loss = y.square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        new = {k: p.detach() - 0.1 * g for (k, p), g in zip(params.items(), grads)}
        return {"params": new, "mean": mean, "var": var}, (loss.detach(), y.detach().amax())

    return step, state


@functools.cache
def traced(around):
    step, state = made(around)
    return zt.Step.of(step).trace(state, X)


def lowered(memory, *, around=without, save=None):
    remat = zt.remat(memory=memory, save=save, at_least=0)
    return dataclasses.replace(traced(around), transforms=(remat,)).lower()


def run(compiled, state):
    torch.manual_seed(3)
    return compiled(pytree.tree_map(torch.clone, state), X)


def test_draws_collective_results_and_the_new_state_are_kept():
    limit = least(lowered)
    low = lowered(limit)
    plain = traced(without).lower()
    assert low.memory_analysis().peak <= limit < plain.memory_analysis().peak
    repeated = Counter(e.op for e in again(low.graph))
    assert repeated[aten.gelu.default] and repeated[aten.mm.default]
    assert not any(is_random(e) for e in again(low.graph))
    assert equal(run(low.compile(), made()[1]), run(plain.compile(), made()[1]))


def test_a_batch_norm_that_runs_again_binds_no_new_statistics():
    """It reads the old ones, which are written over in the update only after that."""
    norm = aten._native_batch_norm_legit_functional.default
    low = lowered(None, save={line_of(norm): "recompute"})
    (copy,) = [e for e in again(low.graph) if e.op is norm]
    assert copy.outs[0] and copy.outs[3:] == (None, None)
    assert set(copy.args[3:5]) <= set(low.graph.inputs)
    plain = traced(without).lower()
    assert equal(run(low.compile(), made()[1]), run(plain.compile(), made()[1]))


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_recomputation_stands_right_before_its_first_reader(share):
    """Value by value: between a copy and the equation that first needs it are other copies for that equation only."""
    plain = traced(without).lower().memory_analysis()
    low = lowered(int(plain.state + share * (plain.peak - plain.state)))
    copies = set(again(low.graph))
    assert copies
    root = liveness(low.graph).root
    needed = set()
    for e in reversed(low.graph.eqns):
        if e in copies:
            assert not needed.isdisjoint(root[v] for v in e.results), e
            needed.update(root[v] for v in e.ins)
        else:
            needed = {root[v] for v in e.ins}


def selective(policy):
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def test_demands_of_selective_checkpoints_survive_every_limit():
    """MUST_SAVE pins the products, MUST_RECOMPUTE is never given back, whatever the policy of the transform says."""

    def policy(ctx, op, *args, **kwargs):
        if op in PRODUCTS:
            return CheckpointPolicy.MUST_SAVE
        is_gelu = op is aten.gelu.default
        return CheckpointPolicy.MUST_RECOMPUTE if is_gelu else CheckpointPolicy.PREFER_SAVE

    around = selective(policy)
    lower = partial(lowered, around=around)
    for limit in (least(lower), 1 << 30):
        repeated = Counter(e.op for e in again(lower(limit).graph))
        assert repeated[aten.gelu.default] == 4 and not repeated[aten.mm.default]
    for save in ("save_everything", "save_nothing"):
        for limit in (None, 1 << 30):
            repeated = Counter(e.op for e in again(lower(limit, save=save).graph))
            assert repeated[aten.gelu.default] == 4 and not repeated[aten.mm.default]


def test_a_plain_checkpoint_is_a_wish_that_a_limit_may_refuse():
    around = partial(checkpoint, use_reentrant=False)
    assert again(traced(around).lower().graph)
    assert not again(lowered(1 << 30, around=around).graph)
    assert again(lowered(least(partial(lowered, around=around)), around=around).graph)


def test_policies_say_what_is_kept():
    def products(**options):
        graph = lowered(None, **options).graph
        return sum(is_matmul(e) for e in again(graph)), len(again(graph))

    assert products(save="save_everything") == (0, 0)
    matmuls, others = products(save="save_matmuls")
    assert matmuls == 0 and others > 8
    assert products(save=is_matmul) == (matmuls, others)
    assert products(save="save_nothing")[0] > 8
    pinned = lowered(least(partial(lowered, save="save_matmuls")), save="save_matmuls").graph
    assert again(pinned) and not any(is_matmul(e) for e in again(pinned))


def line_of(op) -> str:
    eqns = traced(without).graph.eqns
    source = next(e.source for e in eqns if e.op is op and e.region == "forward")
    return f"test_remat_memory.py:{source.line}"


def test_lines_are_kept_or_recomputed():
    gelu = line_of(aten.gelu.default)
    by_line = lowered(None, save={gelu: "recompute"}).graph
    assert {e.op for e in again(by_line)} >= {aten.gelu.default}
    assert all(e.source is not None and str(e.source.line) in gelu for e in again(by_line))
    pinned = partial(lowered, save={gelu: "save"})
    assert not any(e.op is aten.gelu.default for e in again(pinned(least(pinned)).graph))


def test_a_line_waits_on_the_host():
    low = lowered(None, save={line_of(aten.gelu.default): "host"})
    plain = traced(without).lower()
    assert low.memory_analysis().host_peak > 0 == plain.memory_analysis().host_peak
    assert not any(e.op is aten.gelu.default for e in again(low.graph))
    assert equal(run(low.compile(), made()[1]), run(plain.compile(), made()[1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "remat: memory=0; it is a number of bytes, or 'auto', or None."),
        ({"memory": "8G"}, "remat: memory='8G'; it is a number of bytes, or 'auto', or None."),
        (
            {"save": "dots_saveable"},
            "remat: save='dots_saveable'; there are 'save_matmuls', 'save_nothing', 'save_everything', a function of "
            "an equation, and a dict of lines.",
        ),
        (
            {"save": {"net.py:3": "drop"}},
            "remat: save={'net.py:3': 'drop'}; a line is 'save', 'recompute' or 'host'.",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError) as caught:
        zt.remat(**options)
    assert str(caught.value) == message


def test_a_line_that_names_nothing_is_refused():
    with pytest.raises(ValueError) as caught:
        lowered(None, save={"net.py:14": "save"})
    text = str(caught.value)
    assert (
        "remat: save names net.py:14, and no equation of forward in step comes from there." in text
    )
    assert line_of(aten.gelu.default) in text


# With other transforms.


def test_prefetch_and_remat_name_one_limit():
    case = CASES["batch_norm_mean"]
    shard = zt.shard_params(zt.AbstractMesh(dp=2))

    def both(a, b):
        limits = zt.prefetch(memory=a), zt.remat(memory=b, at_least=0)
        plan = on_ranks(case, 2, shard, zt.overlap_grads(), *limits).plan
        return plan.gathers, plan.reductions, plan.dropped, plan.recomputed

    limit = least(lambda n: both(n, n))
    assert both(limit, limit) == both("auto", limit) == both(limit, "auto")
    assert both(limit, limit)[-1]
    with pytest.raises(ValueError, match=r"remat.*and.*prefetch|prefetch.*and.*remat"):
        both(limit, limit + 1)


def parallel_loss(params, x):
    for i in range(3):
        h = F.gelu(copied(x) @ params[f"up{i}"])
        x = x + torch.tanh(summed(h @ params[f"down{i}"])).square()
    return x.square().mean()


def parallel_step(state, x):
    grads, value = grad_and_value(parallel_loss)(state, x)
    return {k: p - 0.1 * grads[k] for k, p in state.items()}, value


def test_a_collective_of_the_step_is_not_sent_again():
    """Tensor parallelism: the result of the step's own all_reduce is kept, also with delayed weight gradients."""
    torch.manual_seed(0)
    state = {}
    for i in range(3):
        state[f"up{i}"] = torch.randn(4, 24) / 4
        state[f"down{i}"] = torch.randn(24, 4) / 4
    rows = [(part,) for part in torch.randn(64, 4).chunk(2) for _ in range(2)]
    shard = zt.shard_params(zt.AbstractMesh(dp=2, tp=2), axis="dp")

    def lower(*more):
        chain = zt.chain(shard, *ALL, zt.delay_weight_grads(), *more)
        return chain(parallel_step).lower(state, *rows[0])

    limit = least(lambda memory: lower(zt.remat(memory=memory, at_least=0)))
    low = lower(zt.remat(memory=limit, at_least=0))
    collectives = [sum(is_user_collective(e) for e in each.graph.eqns) for each in (low, lower())]
    assert again(low.graph) and collectives[0] == collectives[1]
    assert equal(low.lockstep(state, rows), lower().lockstep(state, rows))


def test_micro_batches_recompute_too():
    case = CASES["batch_norm_mean"]
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    parts = slices(batches(case, 1)[0], 2)

    def lower(*more):
        return zt.chain(shard, *ALL, zt.accumulate(2), *more)(case.step).lower(
            case.state(), *parts[0]
        )

    limit = least(lambda memory: lower(zt.remat(memory=memory, at_least=0)))
    low = lower(zt.remat(memory=limit, at_least=0))
    assert again(low.graph) and low.memory_analysis().peak <= limit
    assert limit < lower().memory_analysis().peak
    assert equal(low.lockstep(case.state(), parts), lower().lockstep(case.state(), parts))


# Checkpoints, policies and means over ranks.

WHOLE = partial(checkpoint, use_reentrant=False)


def test_auto_without_a_limit_keeps_the_checkpoints():
    plain = traced(WHOLE).lower()
    assert plain.graph.hints.memory_limit is None
    names = {e.out.name for e in again(plain.graph)}
    assert names and names <= {e.out.name for e in again(lowered("auto", around=WHOLE).graph)}


@pytest.mark.parametrize("policy", ["save_matmuls", "save_everything"])
def test_what_a_policy_saves_is_not_recomputed_within_a_checkpoint(policy):
    assert any(is_matmul(e) for e in again(traced(WHOLE).lower().graph))
    saved = lowered(None, around=WHOLE, save=policy).graph
    assert not any(is_matmul(e) for e in again(saved))


def test_what_a_mean_over_ranks_reads_is_not_recomputed():
    """The mean would be sent twice."""

    def step(state, x):
        w = state["w"].detach().requires_grad_()
        h = zt.pmean(torch.tanh(x @ w), "dp")
        loss = (h * h).sum()
        (grad,) = torch.autograd.grad(loss, w)
        return {"w": state["w"] - 0.1 * grad}, loss.detach()

    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    args = {"w": torch.eye(8)}, torch.ones(4, 8)
    kept = shard(step).lower(*args).graph
    recomputing = zt.chain(shard, zt.remat(save="save_nothing", at_least=0))(step)
    assert sends(recomputing.lower(*args).graph) == sends(kept)


def sends(graph) -> Counter:
    return Counter(e.op for e in graph.eqns if rules(e).starts)


def test_a_line_none_of_whose_values_can_wait_on_the_host_is_an_error():
    def step(state, x):
        w = state["w"].detach().requires_grad_()
        y = torch.tanh(x @ w)  # returned
        (g,) = torch.autograd.grad(y.square().mean(), [w])
        return {"w": state["w"] - g}, y.detach()

    line = f"{Path(__file__).name}:{step.__code__.co_firstlineno + 2}"
    with pytest.raises(ValueError, match=f"save moves the values of {line} to the host, and none"):
        zt.remat(save={line: "host"})(step).lower({"w": torch.ones(4, 4)}, torch.ones(2, 4))
