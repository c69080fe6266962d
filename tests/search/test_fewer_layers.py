"""Layers that are cut out of a step: what remains is the program of a step that has fewer layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from tests.support.traced import trace
from ztrans.ir.graph import Graph
from ztrans.ir.interpreter import evaluate
from ztrans.ir.verifier import check
from ztrans.search.fewer_layers import equal_layers, without_layers

WIDTH, VOCABULARY, LAYERS = 8, 32, 6
TOKENS = torch.arange(24).view(4, 6) % VOCABULARY


def mixing(w: dict, i: int, x: torch.Tensor) -> torch.Tensor:
    scores = torch.softmax(x @ x.transpose(1, 2), -1)
    return x + F.linear(scores @ x, w[f"mix{i}"])


def layer(w: dict, i: int, x: torch.Tensor) -> torch.Tensor:
    x = mixing(w, i, x)
    return x + F.linear(F.gelu(F.linear(x, w[f"up{i}"])), w[f"down{i}"])


def layer_in_a_checkpoint(*args) -> torch.Tensor:
    return checkpoint(layer, *args, use_reentrant=False)


def state_of(layers: int) -> dict:
    """Parameters and momentum. A layer has the same values whatever the number of layers is."""
    torch.manual_seed(0)
    p = {"embed": torch.randn(VOCABULARY, WIDTH), "head": torch.randn(VOCABULARY, WIDTH)}
    for i in range(layers):
        p[f"mix{i}"] = torch.randn(WIDTH, WIDTH) / 4
        p[f"up{i}"] = torch.randn(16, WIDTH) / 4
        p[f"down{i}"] = torch.randn(WIDTH, 16) / 4
    return {"p": p, "m": {k: torch.zeros_like(v) for k, v in p.items()}}


def step_of(layers: int, block: Callable = layer) -> Callable:
    """A step with clipping: a list has a norm of each gradient."""

    def loss_fn(p, tokens):
        w = {name: leaf.bfloat16() for name, leaf in p.items()}
        x = F.embedding(tokens, w["embed"])
        for i in range(layers):
            x = block(w, i, x)
        return F.cross_entropy(F.linear(x, w["head"]).flatten(0, 1).float(), tokens.flatten())

    def step(state, tokens):
        grads, loss = torch.func.grad_and_value(loss_fn)(state["p"], tokens)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()]))
        m = {k: 0.9 * v + grads[k] / norm for k, v in state["m"].items()}
        return {"p": {k: v - 0.1 * m[k] for k, v in state["p"].items()}, "m": m}, loss

    return step


def program(layers: int, block: Callable = layer) -> Graph:
    return trace(step_of(layers, block), state_of(layers), TOKENS).graph


def cut(graph: Graph, kept: int) -> Graph:
    """The program with `kept` layers of each class that has more."""
    small = without_layers(graph, [x for layers in equal_layers(graph) for x in layers[kept:]])
    check(small)
    return small


@pytest.mark.parametrize("block", [layer, layer_in_a_checkpoint])
def test_what_remains_computes_what_a_step_with_fewer_layers_computes(block):
    graph = program(LAYERS, block)
    small = cut(graph, 2)
    state = state_of(LAYERS)
    number: dict[
        str, str
    ] = {}  # the name of each leaf that remains, and its name in a step with so many layers
    for kind in ("mix", "up", "down"):
        kept = [name for name in state["p"] if f"p.{name}" in names(small) and kind in name]
        assert len(kept) in (3, 4)  # two, and the first or the last one, which are in no class
        number |= {name: f"{kind}{new}" for new, name in enumerate(kept)}
    number |= {"embed": "embed", "head": "head"}
    fewer_layers = program(len(kept), block)
    assert len(small.eqns) == len(fewer_layers.eqns)

    results = evaluate(
        small, *(leaf for part, name in paths(small) for leaf in [state[part][name]]), TOKENS
    )
    # In the order of the larger step, because norms are added in this order.
    fewer = {part: {number[k]: v for k, v in state[part].items() if k in number} for part in state}
    new_state, loss = step_of(len(kept))(fewer, TOKENS)  # a checkpoint changes no bit
    for (part, name), result in zip(paths(small), results):
        assert torch.equal(result, new_state[part][number[name]])
    assert torch.equal(results[len(small.state)], loss)


def test_what_a_transform_keeps_for_a_leaf_goes_with_it():
    averaged = zt.ema(0.9, where="p.*")
    step = averaged(step_of(LAYERS))
    small = cut(step.trace(step.init(state_of(LAYERS)), TOKENS).graph, 2)
    parameters = {name for name in names(small) if name.startswith("p.")}
    assert {v.name for v in small.kept_by("ema").values()} == {f"ema.{name}" for name in parameters}
    check(averaged.rewrite(small))


def names(graph: Graph) -> set[str]:
    return {v.name for v in graph.state}


def paths(graph: Graph) -> list[tuple[str, str]]:
    """The part of the state and the name of each leaf."""
    return [(v.name.partition(".")[0], v.name.partition(".")[2]) for v in graph.state]


def test_every_second_layer_is_a_class_of_its_own():
    def alternating(w, i, x):
        return layer(w, i, x) if i % 2 else mixing(w, i, x)

    graph = program(8, alternating)
    counts = sorted(len(layers) for layers in equal_layers(graph) if len(layers) > 2)
    assert counts == [
        3,
        7,
    ]  # of 4 MLPs and 8 mixings, the last and the first one differ where the gradient ends
    assert len(cut(graph, 2).eqns) < len(graph.eqns)


def test_an_optimizer_of_all_leaves_at_once_has_shorter_lists():
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Residual() for _ in range(LAYERS)), nn.Linear(WIDTH, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loop_step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    graph = zt.Step.of(step).trace(state, torch.ones(4, WIDTH)).graph
    (layers,) = [layers for layers in equal_layers(graph) if len(layers) > 2]
    small = without_layers(graph, layers[2:])
    check(small)
    weights = [v for v in small.state if v.name.startswith("params.")]
    assert len(weights) == 4 + 4 * (LAYERS - len(layers[2:]))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def test_a_step_without_narrow_points_has_no_layers():
    graph = trace(lambda w, x: (w * x.sum(), w.sum()), torch.ones(3), torch.ones(3)).graph
    assert equal_layers(graph) == []
