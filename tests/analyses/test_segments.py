"""Segments of a program that run in parts, beside the interpreter of the whole program."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

from tests.support.traced import trace
from ztrans.analyses.segments import CannotCut, in_parts, segment, with_sums_of_losses
from ztrans.ir.graph import Graph
from ztrans.ir.interpreter import evaluate
from ztrans.ir.varying import varying
from ztrans.ir.verifier import check

ROWS, WIDTH, VOCAB = 6, 8, 12


def step_of(loss):
    """A step whose new state is the gradient of a loss."""

    def step(state, *batch):
        gradients, value = grad_and_value(loss)(state, *batch)
        return gradients, value

    return step


def before_update(graph: Graph) -> list:
    """The equations of forward and backward that depend on the batch."""
    from_batch = varying(graph, ("batch",))
    eqns = [e for e in graph.eqns if e.region != "update"]
    return [e for e in eqns if any(v in from_batch for v in e.results)]


def tiled(loss, state, *batch, parts=3) -> tuple[Graph, Graph]:
    """The program of a step, and with all of forward and backward in parts along dim 0 of the batch."""
    graph = with_sums_of_losses(trace(step_of(loss), state, *batch).graph)
    cuts = dict.fromkeys(graph.batch, 0)
    new = in_parts(graph, segment(graph, before_update(graph), cuts, parts))
    check(new)
    return graph, new


def same(graph: Graph, new: Graph, *inputs, tolerance=2e-6) -> None:
    for a, b in zip(evaluate(graph, *inputs), evaluate(new, *inputs), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def weights(*shapes) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) / 4 for shape in shapes]


def test_forward_and_backward_of_an_mlp_run_in_parts():
    def loss(state, x, y):
        up, down, bias = state
        return (F.gelu(x @ up + bias) @ down - y).square().sum()

    state = weights((WIDTH, VOCAB), (VOCAB, WIDTH), (VOCAB,))
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    graph, new = tiled(loss, state, *batch)
    same(graph, new, *state, *batch)
    products = [
        e.op for e in new.eqns if e.op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    ]
    # The gradients of both weights are added up by the products of the second and third part.
    assert products.count(torch.ops.aten.addmm.default) == 4


@pytest.mark.parametrize("parts", [2, 4, 5, 9])
def test_parts_may_be_uneven_and_there_are_no_empty_ones(parts):
    loss = lambda w, x: torch.log_softmax(x @ w, -1).square().sum()
    state, x = torch.randn(WIDTH, 4), torch.randn(7, WIDTH)
    graph, new = tiled(loss, state, x, parts=parts)
    same(graph, new, state, x)
    assert all(0 not in v.shape for e in new.eqns for v in e.results)


def test_a_transformer_is_cut_along_the_batch():
    """Attention, layer norms, embeddings, views, rotations of halves, a loss that ignores some labels."""

    def loss(state, ids, target):
        table, qkv, out, scale, head = state
        x = F.embedding(ids, table)
        y = F.layer_norm(x, (WIDTH,), scale)
        q, k, v = (y @ qkv).view(*ids.shape, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        a, b = q.chunk(2, -1)
        q = torch.cat([-b, a], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(x.shape) @ out
        logits = F.rms_norm(x, (WIDTH,), scale) @ head
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=1)

    shapes = (VOCAB, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH, VOCAB)
    state = weights(*shapes)
    ids, target = torch.randint(VOCAB, (2, ROWS, 4))
    graph, new = tiled(loss, state, ids, target)
    same(graph, new, *state, ids, target)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dims", [(), (2,)])
def test_cross_entropies(reduction, smoothing, is_weighted, dims):
    torch.manual_seed(0)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3}

    def loss(state, x, target):
        w, weight = state
        logits = (x @ w).movedim(-1, 1)
        return F.cross_entropy(logits, target, weight.detach() if is_weighted else None, **options)

    state = [torch.randn(WIDTH, VOCAB), torch.rand(VOCAB)]
    x, target = torch.randn(ROWS, *dims, WIDTH), torch.randint(VOCAB, (ROWS, *dims))
    graph, new = tiled(loss, state, x, target)
    same(graph, new, *state, x, target)


def test_gathers_of_the_label_and_a_mean_of_equal_parts():
    def loss(w, x, target):
        logits = x @ w
        picked = logits.gather(-1, target[:, None])[:, 0]
        return (logits.logsumexp(-1) - picked).mean()

    w, x, target = torch.randn(WIDTH, VOCAB), torch.randn(10, WIDTH), torch.randint(VOCAB, (10,))
    graph, new = tiled(loss, w, x, target, parts=5)
    same(graph, new, w, x, target)
    with pytest.raises(CannotCut, match="all rows"):  # its terms would have unequal weights
        tiled(loss, w, x, target, parts=4)


def test_terms_in_half_precision_are_added_up_in_fp32():
    def loss(state, x):
        return (x.bfloat16() @ state.bfloat16()).float().square().sum()

    w, x = torch.randn(WIDTH, 3), torch.randn(ROWS, WIDTH)
    _, new = tiled(loss, w, x, parts=3)
    gradient = evaluate(new, w, x)[0]
    expected = torch.zeros_like(w)
    for rows in x.chunk(3):
        h = rows.bfloat16()
        expected += h.t() @ (2 * (h @ w.bfloat16()).float()).bfloat16()
    assert torch.equal(gradient, expected)


def test_a_sum_over_all_rows_is_not_read_beside_rows():
    loss = lambda w, x: ((y := x @ w) - y.sum(0)).square().sum()
    with pytest.raises(CannotCut, match="a sum over all rows") as error:
        tiled(loss, torch.randn(2, WIDTH), torch.randn(ROWS, 2))
    assert error.value.eqn.op is torch.ops.aten.sub.Tensor


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: (x * w).softmax(0).square().sum(),
        lambda w, x: ((x * w) @ x.t()).sum(),
        lambda w, x: torch.native_dropout(x * w, 0.5, True)[0].sum(),
        lambda w, x: (
            F.batch_norm(x.repeat(1, 2)[:, :WIDTH] * w, None, None, training=True).square().sum()
        ),
    ],
)
def test_what_needs_all_rows_is_not_cut(loss):
    with pytest.raises(CannotCut):
        tiled(loss, torch.randn(WIDTH), torch.randn(ROWS, WIDTH))


def test_what_depends_on_a_result_of_all_rows_follows_the_segment():
    def loss(w, x):
        h = (x @ w).square()
        return (h * h.sum().detach()).sum()

    w, x = torch.randn(WIDTH, 3), torch.randn(ROWS, WIDTH)
    graph = trace(step_of(loss), w, x).graph
    eqns = [e for e in before_update(graph) if e.op is not torch.ops.aten.sum.default]
    with pytest.raises(CannotCut, match="depends on all rows"):
        segment(graph, eqns, {graph.inputs[1]: 0}, 2)
