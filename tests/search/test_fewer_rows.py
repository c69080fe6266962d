"""A batch that is cut without a trace: the program is that of a trace for fewer rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt
from tests.search.test_fewer_layers import TOKENS, layer, layer_in_a_checkpoint, state_of, step_of
from tests.support.traced import trace
from ztrans.ir.graph import Graph
from ztrans.ir.verifier import check
from ztrans.rewrites.recompute import originals
from ztrans.search.fewer_rows import with_fewer_rows


def text(graph: Graph) -> list[str]:
    return [f"{e.outs} = {e.op}({e.args}, {e.kwargs})" for e in graph.eqns]


@pytest.mark.parametrize("block", [layer, layer_in_a_checkpoint])
@pytest.mark.parametrize("parts", [2, 4])
def test_fewer_rows_have_the_program_of_a_trace(block, parts):
    whole, part = (
        trace(step_of(2, block), state_of(2), tokens).graph
        for tokens in (TOKENS, TOKENS[: len(TOKENS) // parts])
    )
    cut = with_fewer_rows(whole, parts)
    assert text(cut) == text(part)
    assert str(originals(cut)) == str(originals(part))
    for of_graph in (lambda g: g.inputs, lambda g: g.outputs, lambda g: g.batch):
        assert str(of_graph(cut)) == str(of_graph(part))
    check(cut)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_attention_in_a_lifted_loop_is_cut_too():
    model = nn.Sequential(Attention(), nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loop_step(x):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    whole, part = (zt.Step.of(step).trace(state, torch.ones(rows, 6, 8)).graph for rows in (4, 2))
    assert text(with_fewer_rows(whole, 2)) == text(part)


def test_what_only_a_trace_can_tell():
    def sorted_rows(w, x):  # no sharding rule says which dim of the result has the rows
        grad = torch.func.grad(lambda w: (torch.linalg.svdvals(x @ w)).sum())(w)
        return w - grad, ()

    def with_rows_in_the_state(w, x):
        return w + x, ()

    square = torch.ones(4, 4)
    for step in (sorted_rows, with_rows_in_the_state):
        assert with_fewer_rows(trace(step, square, square).graph, 2) is None
    assert with_fewer_rows(trace(sorted_rows, square, torch.ones(3, 4)).graph, 2) is None
