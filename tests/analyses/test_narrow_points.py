"""Narrow points: where layers end in forward and backward, and which layers are equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.traced import trace
from ztrans.analyses.narrow_points import Stretch, stretches
from ztrans.ir.dependencies import depending, grouped
from ztrans.ir.graph import Graph
from ztrans.ir.marks import GRADIENT

WIDTH, LAYERS = 8, 3


def loss_of_a_transformer(
    p: dict, tokens: torch.Tensor, block: Callable, tied: bool
) -> torch.Tensor:
    """Residual layers that are cast to bf16 before forward, and a mask that passes through all of them."""
    w = {name: leaf.bfloat16() for name, leaf in p.items()}
    x = F.embedding(tokens, w["embed"])
    mask = (tokens[:, :, None] == tokens[:, None, :]).to(x.dtype)
    for i in range(LAYERS):
        x = block(w, i, x, mask)
    x = F.layer_norm(x.float(), (WIDTH,), p["norm"]).bfloat16()
    logits = F.linear(x, w["embed" if tied else "head"])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def layer(w: dict, i: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = torch.softmax(x @ x.transpose(1, 2) * mask, -1)
    x = x + F.linear(scores @ x, w[f"mix{i}"])
    return x + F.linear(F.gelu(F.linear(x, w[f"up{i}"])), w[f"down{i}"])


def layer_in_a_checkpoint(*args) -> torch.Tensor:
    return checkpoint(layer, *args, use_reentrant=False)


def program(block: Callable = layer, tied: bool = False) -> Graph:
    def step(p, tokens):
        return torch.func.grad(loss_of_a_transformer)(p, tokens, block, tied), ()

    shapes = {"embed": (32, WIDTH), "norm": (WIDTH,)}
    if not tied:
        shapes["head"] = (32, WIDTH)
    for i in range(LAYERS):
        shapes |= {f"mix{i}": (WIDTH, WIDTH), f"up{i}": (16, WIDTH), f"down{i}": (WIDTH, 16)}
    state = {name: torch.empty(shape) for name, shape in shapes.items()}
    return trace(step, state, torch.zeros(4, 6, dtype=torch.int64)).graph


def sizes(parts: tuple[Stretch, ...]) -> list[int]:
    """The numbers of stretches with equal operations and types."""
    groups = grouped(
        (tuple((e.op, *(v.type for v in e.results)) for e in part.eqns), part) for part in parts
    )
    return list(map(len, groups.values()))


def test_a_transformer_has_two_narrow_points_in_each_layer():
    graph = program()
    forward = stretches(graph, "forward")
    # The embedding, attention and MLP of each layer, the last norm, the head with the loss.
    assert sizes(forward) == [1, LAYERS, LAYERS, 1, 1]
    for part in forward[1:-1]:
        assert part.entry.shape == part.exit.shape == (4, 6, WIDTH)
        assert part.exit.dtype is torch.bfloat16
    for before, after in itertools.pairwise(forward):
        assert before.exit is after.entry
    backward = stretches(graph, "backward")
    assert sizes(backward) == [1, 1, LAYERS, LAYERS, 1]


def test_a_layer_in_a_checkpoint_is_one_stretch_of_backward():
    graph = program(layer_in_a_checkpoint)
    assert sizes(stretches(graph, "forward")) == [1, LAYERS, LAYERS, 1, 1]
    assert sizes(stretches(graph, "backward")) == [1, 1, LAYERS, 1]


def test_the_gradient_of_a_shared_weight_passes_and_does_not_count():
    graph = program(tied=True)
    # The embedding is read by the head, so its gradient does not begin a stretch.
    assert sizes(stretches(graph, "backward")) == [1, 1, LAYERS, LAYERS - 1, 1]


@pytest.mark.parametrize("region", ["forward", "backward"])
def test_the_stretches_have_all_equations_that_depend_on_the_batch_and_the_state(region):
    graph = program()
    eqns = [e for part in stretches(graph, region) for e in part.eqns]
    assert len(eqns) == len(set(eqns))
    bound = {v for e in graph.eqns if e not in set(eqns) for v in e.results} | {*graph.inputs}
    for e in eqns:  # in an executable order
        assert bound.issuperset(e.ins)
        bound.update(e.results)
    # The others make casts and views of weights, the mask and the labels, and mark gradients.
    state, batch = depending(graph.eqns, graph.state), depending(graph.eqns, graph.batch)
    for e in set(graph.eqns) - set(eqns):
        assert e.region != region or e.op is GRADIENT or e.out not in state or e.out not in batch


def test_the_cast_of_a_gradient_is_where_the_gradient_is():
    graph = program()
    first, *_, last = stretches(graph, "backward")
    casts = lambda part: [
        e for e in part.eqns if e.out.dtype is torch.float32 and e.out.shape == (32, WIDTH)
    ]
    assert len(casts(first)) == len(casts(last)) == 1


def test_a_chain_of_layers_without_residuals_has_a_point_behind_each():
    def step(p, x):
        def loss(p):
            y = x
            for i in range(LAYERS):
                y = torch.tanh(y @ p[f"w{i}"])
            return y.square().mean()

        return torch.func.grad(loss)(p), ()

    state = {f"w{i}": torch.empty(WIDTH, WIDTH) for i in range(LAYERS)}
    graph = trace(step, state, torch.empty(4, WIDTH)).graph
    forward = stretches(graph, "forward")
    assert sizes(forward) == [LAYERS - 1, 1]
    assert [str(e.op) for e in forward[0].eqns] == ["aten.mm.default", "aten.tanh.default"]


def test_a_step_without_layers_is_one_stretch():
    graph = trace(
        lambda p, x: (torch.func.grad(lambda p: (p * x).sum())(p), ()), torch.ones(3), torch.ones(3)
    ).graph
    assert [part.entry for part in stretches(graph, "forward")] == [None]
