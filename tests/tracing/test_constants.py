"""Constants: what a step reads from tensors that depend on no argument is known while it is traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ztrans as zt
from tests.support.worlds import clone, distance

STATE, X = {"w": torch.ones(2)}, torch.linspace(-1, 1, 9).view(3, 3)
causal = nn.Transformer.generate_square_subsequent_mask


def of_two_masks(x):
    mask = torch.full((3, 3), float("-inf")).triu(1)
    return x + 1 if (mask == causal(3)).all() else x


def of_a_literal(x):
    return x * torch.tensor([3.0, 5.0]).max().item()


def of_a_tensor_that_changes(x):
    counts = torch.zeros(4)
    counts[1:].add_(2)
    return x * counts.sum().item() if not torch.equal(counts, torch.zeros(4)) else x


@pytest.mark.parametrize("read", [of_two_masks, of_a_literal, of_a_tensor_that_changes])
def test_a_constant_is_read(read):
    step = lambda state, x: (state, read(x))
    assert torch.equal(zt.Step.of(step)(clone(STATE), X)[1], read(X))


def written_by_an_argument(x):
    total = torch.zeros(3)
    total.view(3)[0] = x[0, 0]
    return total.sum().item()


def written_by_a_draw(x):
    return torch.zeros(3).uniform_().sum().item()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: torch.rand(2).sum().item(),
        written_by_an_argument,
        written_by_a_draw,
    ],
)
def test_what_depends_on_an_argument_or_on_a_draw_cannot_be_read(read):
    with pytest.raises(ValueError, match="reads a tensor's value"):
        zt.Step.of(lambda state, x: (state, x * read(x))).trace(STATE, X)


def test_a_transformer_looks_whether_its_mask_is_causal():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def step(state, x, y):
        mask = model.generate_square_subsequent_mask(y.size(1))
        return state, torch.func.functional_call(model, state, (x, y), {"tgt_mask": mask})

    state, batch = dict(model.named_parameters()), (torch.randn(3, 5, 8), torch.randn(3, 4, 8))
    want = step(state, *batch)[1]
    run = zt.Step.of(step)
    assert distance(run(run.shard(state), *batch)[1], want) == 0
