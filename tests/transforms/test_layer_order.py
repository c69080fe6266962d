"""accumulate(order="layers"): each layer runs for all micro-batches, and is gathered and reduced once."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import slices
from ztrans.ir.collectives import is_start, role

MICRO, LAYERS, WIDTH, TOKENS = 4, 3, 8, 6
SCHEDULES = (zt.fuse_cast_gather(), zt.overlap_grads(), zt.prefetch())


def layer(w, i, x):
    scores = torch.softmax(x @ x.transpose(1, 2), -1)
    x = x + F.linear(scores @ x, w[f"mix{i}"])
    return x + F.linear(F.gelu(F.linear(x, w[f"up{i}"])), w[f"down{i}"])


def loss_fn(params, tokens):
    w = {name: p.bfloat16() for name, p in params.items()}
    x = F.embedding(tokens, w["embed"])
    for i in range(LAYERS):
        x = checkpoint(layer, w, i, x, use_reentrant=False)
    logits = F.linear(x, w["head"]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits.argmax(-1)


def gradients(params, tokens):
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    loss, best = loss_fn(leaves, tokens)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, grads)), (loss.detach(), best)


def train(state, tokens):
    grads, output = gradients(state["params"], tokens)
    return updated(state, grads), output


def updated(state, grads):
    m = {k: 0.9 * m + grads[k] for k, m in state["m"].items()}
    return {"params": {k: p - 0.1 * m[k] for k, p in state["params"].items()}, "m": m}


def loop(state, tokens):
    """What a user writes without ztrans, one micro-batch after the other."""
    total = None
    outputs = []
    for part in tokens.chunk(MICRO):
        grads, output = gradients(state["params"], part)
        total = grads if total is None else {k: t + grads[k] for k, t in total.items()}
        outputs.append(output)
    losses, bests = zip(*outputs)
    new = updated(state, {k: t / MICRO for k, t in total.items()})
    return new, (sum(losses) / MICRO, torch.cat(bests))


def new_state():
    torch.manual_seed(0)
    shapes = {"embed": (32, WIDTH), "head": (32, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"mix{i}": (WIDTH, WIDTH), f"up{i}": (16, WIDTH), f"down{i}": (WIDTH, 16)}
    params = {name: torch.randn(shape) / 3 for name, shape in shapes.items()}
    return {"params": params, "m": {name: torch.zeros_like(p) for name, p in params.items()}}


def batch(rows=8):
    torch.manual_seed(1)
    return torch.randint(0, 32, (rows, TOKENS))


@functools.cache
def traced():
    return zt.accumulate(MICRO)(train).trace(new_state(), batch())


def lower(order="layers", stage=None, *transforms):
    micro = zt.accumulate(MICRO, keep="whole", order=order)
    sharded = () if stage is None else (zt.shard_params(zt.AbstractMesh(dp=2), stage=stage),)
    chain = zt.chain(micro, *sharded, *transforms)
    return dataclasses.replace(traced(), transforms=chain(train).transforms).lower()


def assert_same(a, b):
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        assert torch.equal(x, y)


def test_on_one_rank_it_has_the_bits_of_a_loop():
    new, output = lower().compile()(new_state(), batch())
    expected, outputs = loop(new_state(), batch())
    assert_same(new, expected)
    assert_same(output, outputs)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_on_two_ranks_it_has_the_bits_of_the_other_order(stage):
    data = [(batch(16)[rows],) for rows in (slice(8), slice(8, 16))]
    programs = [lower(order, stage, *SCHEDULES) for order in ("batches", "layers")]
    others, layers = (each.lockstep(new_state(), data) for each in programs)
    assert_same(layers, others)
    assert_same(lower("layers", stage).lockstep(new_state(), data), others)


def messages(lowered):
    """The gathers and reductions of a program, with the leaves that they are for."""
    starts = filter(is_start, lowered.unordered.eqns)
    return sorted((role(e), e.provenance.paths, e.region) for e in starts if role(e) != "output")


def test_a_step_sends_what_it_sends_without_micro_batches():
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    plain = zt.chain(shard, *SCHEDULES)(train).lower(new_state(), batch())
    by_layer = messages(lower("layers", 3, *SCHEDULES))
    # Beside the loss, whose head is gathered once here: its forward and backward follow each other.
    head = ("param", ("params.head",), "forward")
    assert by_layer == [message for message in messages(plain) if message != head]
    sizes = [dict(each.cost_analysis().wire) for each in (lower("batches", 3), lower("layers", 3))]
    assert sizes[1]["dp", "param"] * 3 < sizes[0]["dp", "param"]


def micro_batches_that_read(lowered, name):
    """The micro-batches whose equations of forward read a weight, in the order of the program."""
    found = []
    for e in lowered.graph.eqns:
        numbers = {int(n) for v in e.results for n in re.findall(r"\.m(\d)", v.name)}
        if numbers and any(name in v.name for v in e.ins):
            found.append((e.region, *numbers))
    return found


def test_a_layer_runs_for_all_micro_batches_before_the_next():
    lowered = lower()
    place = {e.out.name: i for i, e in enumerate(lowered.graph.eqns)}
    residual = [name for name in place if re.fullmatch(r"add(_\d)?\.m\d", name)]
    points = [(name.partition(".")[0], name[-1]) for name in sorted(residual, key=place.get)]
    names = list(dict.fromkeys(name for name, _ in points))
    assert len(names) >= 2 * LAYERS
    assert points[: 8 * LAYERS] == list(itertools.product(names[: 2 * LAYERS], "0123"))


def test_the_logits_of_one_micro_batch_live_at_a_time():
    eqns = lower().graph.eqns
    born = {e.out.name: i for i, e in enumerate(eqns)}
    for before, after in itertools.pairwise(range(MICRO)):
        reads = [
            i for i, e in enumerate(eqns) if any(v.name == f"_log_softmax.m{before}" for v in e.ins)
        ]
        assert max(reads) < born[f"_log_softmax.m{after}"]


def test_a_loss_in_tiles_stays_together():
    tile = zt.tile(parts=2)
    tiled = [lower(order, 3, tile, *SCHEDULES) for order in ("batches", "layers")]
    data = [(batch(16)[rows],) for rows in (slice(8), slice(8, 16))]
    assert_same(*(each.lockstep(new_state(), data) for each in tiled))
    heads = [paths for _, paths, _ in messages(tiled[1]) if paths == ("params.head",)]
    assert len(heads) == 2  # a gather and a reduction


@pytest.mark.parametrize("name", ["batch_norm_mean", "sam", "weight_penalty", "accumulation"])
def test_other_steps_have_the_bits_of_the_other_order(name):
    """With statistics that change with every micro-batch, two backwards, a derivative of one, and a loop of their own."""
    case = CASES[name]
    torch.manual_seed(0)
    batches = slices(case.batch(case.samples), 2)
    rank = dataclasses.replace(case, samples=case.samples // 2)
    results = []
    trace = zt.accumulate(2)(rank.step).trace(rank.state(), *batches[0])
    for order in ("batches", "layers"):
        micro = zt.accumulate(2, keep="whole", order=order)
        chain = zt.chain(micro, zt.shard_params(zt.AbstractMesh(dp=2)), *SCHEDULES)
        lowered = dataclasses.replace(trace, transforms=chain(rank.step).transforms).lower()
        results.append(lowered.lockstep(case.state(), batches))
    assert_same(*results)


def test_a_limit_holds_and_remat_sees_what_passes_from_layer_to_layer():
    def step(state, tokens):
        def loss(params):
            x = F.embedding(tokens, params["embed"])
            for i in range(LAYERS):
                x = layer(params, i, x)
            return F.cross_entropy(F.linear(x, params["head"]).flatten(0, 1), tokens.flatten())

        grads, value = grad_and_value(loss)(state["params"])
        return updated(state, grads), value

    micro = zt.accumulate(MICRO, order="layers")
    kept = micro(step).lower(new_state(), batch(64))
    state = kept.memory_analysis().state
    limit = int(state + 0.75 * (kept.memory_analysis().peak - state))
    lowered = zt.chain(micro, zt.remat(memory=limit, at_least=1))(step).lower(
        new_state(), batch(64)
    )
    assert lowered.memory_analysis().peak <= limit
    assert_same(*(each.compile()(new_state(), batch(64)) for each in (lowered, kept)))


def test_a_random_draw_is_an_error_with_its_line():
    def step(w, x):
        return w - torch.func.grad(lambda w: F.dropout(x @ w, 0.5).square().mean())(w), ()

    expected = (
        r"order='layers' runs each layer for all micro-batches, and step draws random numbers in forward.*"
        r"test_layer_order.py:\d+ .*Use order='batches'; or turn dropout off"
    )
    with pytest.raises(ValueError, match=re.compile(expected, re.DOTALL)):
        zt.accumulate(2, order="layers")(step).lower(torch.ones(3, 3), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"micro": 9, "order": "layers"},
            "at most 8.\nUse larger micro-batches, or order='batches'",
        ),
        (
            {"micro": 2, "order": "layers", "keep": "shard"},
            "keep='shard' reduces the gradients of each",
        ),
        ({"micro": 2, "order": "rows"}, "order='rows'; use 'batches' or 'layers'"),
    ],
)
def test_options(options, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        zt.accumulate(**options)


def test_the_summary_counts_all_micro_batches():
    summaries = [lower(order, 3).summary() for order in ("batches", "layers")]
    assert summaries[0].items == summaries[1].items == 2 * 8 * TOKENS
    assert summaries[0].written_seconds == summaries[1].written_seconds


def test_one_micro_batch_is_the_step_itself():
    micro = zt.accumulate(1, order="layers")(train).lower(new_state(), batch())
    assert len(micro.graph.eqns) == len(zt.Step.of(train).lower(new_state(), batch()).graph.eqns)


def test_a_step_that_has_hardly_any_layers_says_so():
    def every_layer_reads_all_before_it(params, x):
        values = [x]
        for w in params:
            values.append(torch.tanh(sum(values) @ w))
        return torch.cat(values).square().mean()

    def dense(params, x):
        grads = torch.func.grad(every_layer_reads_all_before_it)(params, x)
        return [w - g for w, g in zip(params, grads)], ()

    state = [torch.ones(8, 8) for _ in range(4)]
    lowered = zt.accumulate(2, order="layers")(dense).lower(state, torch.ones(16, 8))
    (note,) = lowered.graph.hints.notes
    assert "finds 1 layer in dense beside the loss" in note and note in str(lowered.summary())
    assert not lower().graph.hints.notes
