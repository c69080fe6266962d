"""`tile`: the loss and the MLPs of a step run in tiles of the tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from ztrans.ir.donation import donation, peaks
from ztrans.ir.interpreter import evaluate
from ztrans.planning.limit import DoesNotFit

WIDTH, VOCAB = 8, 96
aten = torch.ops.aten


def loss_of(params, ids, target):
    """A language model with an MLP, norms and a tied head."""
    x = F.embedding(ids, params["table"])
    x = x + F.gelu(F.layer_norm(x, (WIDTH,)) @ params["up"]) @ params["down"]
    logits = F.rms_norm(x, (WIDTH,)) @ params["table"].t()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=3)


def step_of(loss):
    def step(state, *batch):
        gradients, value = grad_and_value(loss)(state, *batch)
        return {k: p - 0.1 * gradients[k] for k, p in state.items()}, value

    return step


step = step_of(loss_of)


def state_of(dtype=torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"table": (VOCAB, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {k: torch.randn(shape).to(dtype) / 4 for k, shape in shapes.items()}


def tokens(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(VOCAB, (2, *shape)))


def lower(fn, state, batch, *transforms, **options):
    return zt.chain(*transforms)(fn).lower(state, *batch, **options)


def wide(lowered) -> int:
    """The most elements of a float that the program computes, but for the gradients of the table."""
    values = [v for e in lowered.graph.eqns for v in e.results if v.dtype.is_floating_point]
    return max(v.numel for v in values if v.shape not in ((VOCAB, WIDTH), (WIDTH, VOCAB)))


# ---- bits


@pytest.mark.parametrize("half", [False, True])
def test_it_has_the_bits_of_a_loop_over_chunks(half):
    """The gradient of the head is added up in fp32: by addmm, or from products in bf16."""
    chunks, rows = 4, 24

    def head_loss(state, x, target):
        x, w = (v.bfloat16() if half else v for v in (x + state["bias"], state["w"]))
        return F.cross_entropy((x @ w.t()).float(), target)

    torch.manual_seed(0)
    state = {"bias": torch.randn(rows, WIDTH), "w": torch.randn(VOCAB, WIDTH)}
    x, target = torch.randn(rows, WIDTH), torch.randint(VOCAB, (rows,))
    new, (loss,) = lower(step_of(head_loss), state, (x, target), zt.tile(parts=chunks)).lockstep(
        state, [(x, target)]
    )

    h, w = (v.bfloat16() if half else v for v in (x + state["bias"], state["w"]))
    total, dw, dx = torch.zeros(()), None, []
    for h_chunk, labels in zip(h.chunk(chunks), target.chunk(chunks)):
        logits = (h_chunk @ w.t()).requires_grad_()
        term = F.cross_entropy(logits.float(), labels, reduction="sum")
        (dy,) = torch.autograd.grad(term / rows, logits)
        total = term.detach() if dw is None else total + term.detach()
        if half or dw is None:
            product = (dy.t() @ h_chunk).float()
            dw = product if dw is None else dw + product
        else:
            dw = torch.addmm(dw, dy.t(), h_chunk)
        dx.append(dy @ w)
    assert torch.equal(loss, total / rows)
    assert torch.equal(new["w"], state["w"] - 0.1 * dw)
    assert torch.equal(new["bias"], state["bias"] - 0.1 * torch.cat(dx).float())


def test_the_laws_on_several_ranks():
    zt.testing.check_laws(
        zt.tile(parts=2),
        step,
        state_of(torch.float64),
        tokens(12, 4),
        stages=(0, 3),
        tolerance=1e-12,
    )


@pytest.mark.parametrize("shape", [(8, 3), (2, 12), (1, 24), (3, 8)])
@pytest.mark.parametrize("parts", [3, 4, 8])
def test_tokens_of_any_batch_and_sequence(shape, parts):
    state, batch = state_of(torch.float64), tokens(*shape)
    tiled = lower(step, state, batch, zt.tile(parts=parts))
    plain = lower(step, state, batch)
    # Backward reads the values of the MLP, so they stay whole.
    assert wide(tiled) == max(24 // parts * VOCAB, 24 * 4 * WIDTH) and wide(plain) == 24 * VOCAB
    for a, b in zip(
        evaluate(tiled.graph, *state.values(), *batch),
        evaluate(plain.graph, *state.values(), *batch),
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def per_token(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")


LOSSES = {
    "by_hand": lambda y, t: (y.logsumexp(-1) - y.gather(-1, t[..., None])[..., 0]).mean(),
    "one_hot": lambda y, t: -(y.log_softmax(-1) * F.one_hot(t, VOCAB)).sum(-1).mean(),
    "z_loss": lambda y, t: per_token(y, t).mean() + 0.01 * y.logsumexp(-1).square().mean(),
    "masked": lambda y, t: (per_token(y, t) * (t.flatten() != 3)).sum() / (t != 3).sum(),
    "soft_cap": lambda y, t: per_token(9 * torch.tanh(y / 9), t).mean(),
    "accuracy": lambda y, t: per_token(y, t).mean() + (y.argmax(-1) == t).double().mean(),
    "smoothed": lambda y, t: F.cross_entropy(
        y.flatten(0, 1), t.flatten(), ignore_index=3, label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_any_form(name):
    def loss(params, ids, target):
        x = F.embedding(ids, params["table"]) @ params["up"] @ params["down"]
        return LOSSES[name](F.linear(x, params["table"]), target)

    state, batch = state_of(torch.float64), tokens(2, 12)
    plain, tiled = (lower(step_of(loss), state, batch, *t) for t in ((), (zt.tile(parts=4),)))
    # What is left are the values of the product before the table.
    assert (wide(plain), wide(tiled)) == (24 * VOCAB, 24 * 4 * WIDTH)
    for a, b in zip(*(evaluate(each.graph, *state.values(), *batch) for each in (plain, tiled))):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


# ---- what is cut


def test_one_part_is_the_identity():
    state, batch = state_of(), tokens(4, 6)
    plain = lower(step, state, batch).graph.eqns
    for transform in (zt.tile(parts=1), zt.tile(), zt.tile(tokens=24), zt.tile(memory="auto")):
        assert list(map(zt.ir.equation, lower(step, state, batch, transform).graph.eqns)) == list(
            map(zt.ir.equation, plain)
        )


def test_the_peak_falls_and_the_sum_is_written_in_place():
    state, batch = state_of(), tokens(16, 12)
    plain, tiled = (lower(step, state, batch, *t) for t in ((), (zt.tile(tokens=24),)))
    assert tiled.memory_analysis().peak < 0.5 * plain.memory_analysis().peak
    # The head has 8 tiles, and backward of the MLP, which has two products with weights, 2 tiles.
    in_place = donation(tiled.graph).in_place_ops.values()
    assert list(in_place).count(aten.addmm_.default) == 7 + 2
    compiled = tiled.compile()(state, *batch)
    expected = plain.compile()(state_of(), *batch)
    torch.testing.assert_close(compiled, expected)


def test_a_product_does_not_write_over_a_factor():
    def twice(state, x):
        return torch.addmm(state @ x, state @ x, x), (y := state @ x).sum() + torch.addmm(
            y, y, x
        ).sum()

    graph = lower(twice, torch.randn(4, 4), (torch.randn(4, 4),)).graph
    same = [e for e in graph.eqns if e.op is aten.addmm.default and e.args[0] is e.args[1]]
    assert same and not any(e in donation(graph).in_place_ops for e in same)


def test_an_mlp_that_backward_recomputes_is_cut_where_at_says():
    def loss(params, x):
        mlp = lambda x: F.gelu(x @ params["up"]) @ params["down"]
        y = checkpoint(mlp, checkpoint(mlp, x, use_reentrant=False), use_reentrant=False)
        return y.square().mean()

    state, x = state_of(torch.float64), torch.randn(24, WIDTH, dtype=torch.float64)
    state.pop("table")
    line = f"test_tile.py:{loss.__code__.co_firstlineno + 1}"
    plain = lower(step_of(loss), state, (x,))
    tiled = lower(step_of(loss), state, (x,), zt.tile(parts=4, at=line))
    assert wide(plain) == 24 * 4 * WIDTH
    # Backward runs in 4 tiles. Forward has half as many wide values, so 2 tiles hold no more.
    assert wide(tiled) == 12 * 4 * WIDTH
    for a, b in zip(
        evaluate(tiled.graph, *state.values(), x), evaluate(plain.graph, *state.values(), x)
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    # What is kept for backward would be cut and joined again.
    kept = lambda params, x: (F.gelu(x @ params["up"]) @ params["down"]).square().mean()
    graph = lower(step_of(kept), state, (x,)).graph
    tiled = lower(step_of(kept), state, (x,), zt.tile(parts=4)).graph
    assert peaks(tiled).everything <= peaks(graph).everything


def test_logits_that_the_step_returns_are_joined():
    def with_logits(state, ids, target):
        def loss(params):
            logits = F.embedding(ids, params["table"]) @ params["table"].t()
            return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits

        gradients, (value, logits) = grad_and_value(loss, has_aux=True)(state)
        return {k: p - gradients[k] for k, p in state.items()}, (value, logits)

    state, batch = {"table": state_of(torch.float64)["table"]}, tokens(6, 4)
    graphs = [lower(with_logits, state, batch, *t).graph for t in ((), (zt.tile(parts=3),))]
    for a, b in zip(*(evaluate(graph, *state.values(), *batch) for graph in graphs)):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


# ---- limits, and other transforms


def test_the_plan_chooses_the_number_of_tiles():
    state, batch = state_of(), tokens(64, 24)
    least = {p: lower(step, state, batch, zt.tile(parts=p)) for p in (1, 4, 8)}
    peaks = {p: lowered.memory_analysis().peak for p, lowered in least.items()}
    assert peaks[8] < peaks[4] < peaks[1]
    for limit, parts in ((peaks[1], 1), (peaks[4], 4), (peaks[8], 8)):
        chosen = lower(step, state, batch, zt.tile(memory=int(limit * 1.01)))
        assert wide(chosen) == wide(least[parts])
        assert any(
            f"tile(parts={parts}" in note or f"parts={parts}" in note for note in chosen.plan.notes
        )


def test_a_plan_leaves_a_step_whole_that_cannot_be_cut(monkeypatch):
    """All numbers of tiles are then one program, which is planned once."""

    def loss(params, x, target):
        y = F.conv2d(x, params["conv"])
        y = F.batch_norm(y, None, None, training=True)
        return F.cross_entropy(y.mean((2, 3)), target)

    state = {"conv": torch.randn(16, 3, 3, 3)}
    batch = torch.randn(8, 3, 8, 8), torch.arange(8)
    with pytest.raises(ValueError, match="cannot be cut into tiles"):
        lower(step_of(loss), state, batch, zt.tile(parts=4))
    planned = []
    plan = zt.stages.Traced.planned
    monkeypatch.setattr(zt.stages.Traced, "planned", lambda *x: planned.append(x) or plan(*x))
    chosen = lower(step_of(loss), state, batch, zt.tile(memory="auto"))
    assert len(planned) == 1 and "parts=1" in chosen.plan.notes[0]
    assert str(chosen.graph.eqns) == str(lower(step_of(loss), state, batch).graph.eqns)


def deep_step(state, x, target):
    """A step with more parameters than activations: before it is sharded, its peak is in the update."""

    def loss(params):
        y = x
        for i in range(6):
            y = y + checkpoint(mlp, params[f"up{i}"], params[f"down{i}"], y, use_reentrant=False)
        return F.cross_entropy(y @ params["head"], target)

    mlp = lambda up, down, y: torch.tanh(y @ up) @ down
    gradients, value = grad_and_value(loss)(state)
    return {k: p - 0.1 * gradients[k] for k, p in state.items()}, value


def test_the_peak_after_sharding_decides():
    meta = lambda *shape, **options: torch.empty(*shape, device="meta", **options)
    state = {"head": meta(32, 512)}
    for i in range(6):
        state |= {f"up{i}": meta(32, 128), f"down{i}": meta(128, 32)}
    batch = meta(64, 32), meta(64, dtype=torch.int64)
    plain = zt.chain(zt.shard_params(zt.AbstractMesh(dp=8)), zt.overlap_grads())
    cluster = zt.cluster("h100", dp="nvlink4")

    def least(*transforms):
        limited = zt.chain(plain, zt.prefetch(memory=1), *transforms)(deep_step)
        with pytest.raises(DoesNotFit) as caught:
            limited.trace(state, *batch).planned(cluster)
        return caught.value.least.peak

    assert least(zt.tile(parts=4)) < 0.9 * least()


def test_it_commutes_with_schedules_and_remat():
    state, batch = state_of(), tokens(12, 4)
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    others = zt.tile(parts=2), zt.remat(at_least=0), zt.overlap_grads(), zt.prefetch()
    rows = tuple(x.chunk(2)[0] for x in batch)
    orders = others, others[::-1], (*others[2:], *others[:2])
    texts = {str(lower(step, state, rows, shard, *order)) for order in orders}
    assert len(texts) == 1


def test_twice_is_once():
    assert zt.tile(parts=2)(zt.tile(parts=2)(step)) == zt.tile(parts=2)(step)
    with pytest.raises(ValueError, match="tile: applied twice with different options"):
        zt.tile(parts=2)(zt.tile(parts=4)(step))


# ---- errors


def test_options():
    for options, text in [
        ({"tokens": 0}, "tokens=0; it is the number of tokens in a tile, at least 1"),
        ({"parts": 0}, "parts=0; it is a number of tiles, from 1 to 64"),
        ({"parts": 65}, "parts=65; it is a number of tiles, from 1 to 64"),
        ({"memory": 0}, "memory=0; it is a number of bytes, or 'auto'"),
        ({"at": 3}, "at=3; it is a line of the step, such as 'net.py:31'"),
        ({"tokens": 8, "parts": 2}, "each say how many tiles there are"),
    ]:
        with pytest.raises(ValueError, match=text):
            zt.tile(**options)


def test_as_many_tokens_as_the_model_is_wide():
    """Logits have the shape of the head then."""

    def loss(params, x, target):
        return F.cross_entropy(x @ params["bias"] @ params["head"], target)

    state = {"head": state_of()["table"].t().contiguous(), "bias": torch.eye(WIDTH)}
    batch = torch.randn(WIDTH, WIDTH), torch.randint(VOCAB, (WIDTH,))
    lowered = lower(step_of(loss), state, batch, zt.tile(parts=4))
    assert not lowered.graph.hints.notes
    assert (WIDTH // 4, VOCAB) in {v.shape for e in lowered.graph.eqns for v in e.results}


def test_more_tiles_than_tokens():
    """A plan that chooses does not try them."""

    def loss(params, x, target):
        return F.cross_entropy(x @ params["table"].t(), target)

    state = {"table": state_of()["table"]}
    batch = torch.randn(5, WIDTH), torch.randint(VOCAB, (5,))
    with pytest.raises(
        ValueError, match=r"tile: 5 tokens cannot be cut into 4 tiles\. Use parts=3 or fewer\."
    ):
        lower(step_of(loss), state, batch, zt.tile(parts=4))
    chosen = lower(step_of(loss), state, batch, zt.tile(memory="auto"))
    assert "parts=1" in chosen.plan.notes[0]


def test_a_step_that_stays_whole_says_why():
    def narrow(params, x):
        return (x @ params["w"]).square().mean()

    def update_is_largest(params, ids):
        return F.cross_entropy(F.embedding(ids, params["table"]) @ params["table"].t(), ids)

    small = {"table": state_of()["table"]}
    for loss, state, batch, options, reason in [
        (loss_of, state_of(), tokens(4, 4), {}, "one tile holds its 16 tokens"),
        (narrow, {"w": torch.ones(4, 4)}, (torch.ones(8, 4),), {"parts": 2}, "twice as wide"),
        (update_is_largest, small, (torch.arange(4),), {"parts": 2}, "not lower its peak"),
    ]:
        lowered = lower(step_of(loss), state, batch, zt.tile(**options))
        (note,) = lowered.graph.hints.notes
        assert reason in note and note in str(lowered.summary())
        assert str(lowered.graph.eqns) == str(lower(step_of(loss), state, batch).graph.eqns)


def test_an_unknown_line():
    with pytest.raises(
        ValueError, match=r"at names net.py:7, .*\nLines with them are .*test_tile.py:"
    ):
        lower(step, state_of(), tokens(4, 4), zt.tile(parts=2, at="net.py:7"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda y: torch.native_dropout(y, 0.5, True)[0], "native_dropout draws random numbers"),
        (lambda y: nn.functional.batch_norm(y, None, None, training=True), "all rows"),
        (lambda y: y - y.mean(0), "sub reads .*, a sum over all rows"),
    ],
)
def test_what_cannot_be_cut_is_an_error_with_its_line(change, reason):
    def loss(params, ids, target):
        x = F.embedding(ids, params["table"])
        return F.cross_entropy(change((x @ params["table"].t()).flatten(0, 1)), target.flatten())

    state = {"table": state_of()["table"]}
    with pytest.raises(
        ValueError, match=rf"(?s)cannot be cut into tiles: .*{reason}.*at .*test_tile.py:"
    ):
        lower(step_of(loss), state, tokens(4, 6), zt.tile(parts=2))
