"""A value that depends on no input of a step is computed while the step is traced; any other read is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ztrans as zt
from tests.support.lifted import loop_of

X = torch.arange(6.0).view(2, 3)


def branch_of(make):
    """A step that branches on the number which `make(x)` returns as a tensor."""

    def step(state, x):
        value = make(x)
        factor = 2.0 if value.item() > 3 else 5.0
        return {"w": state["w"] * factor}, value

    return step


def literal(x):
    return torch.tensor([1.0, 7.0])[1]


def written_through_a_view(x):
    """Neither the literal nor the view that is read has computed the written element."""
    values = torch.zeros(2, 2)
    row = values[1]
    values.t()[0, 1].add_(9.0)
    return row[0]


def copied_before_the_write(x):
    values = torch.zeros(3)
    before = values.clone()
    values.fill_(9.0)
    return before[0]


def of_shapes(x):
    return torch.full((), len(x)).mul(4).sum()


@pytest.mark.parametrize(
    "make", [literal, written_through_a_view, copied_before_the_write, of_shapes]
)
def test_a_value_of_literals_and_shapes_is_known(make):
    state = {"w": torch.ones(3)}
    wanted, output = branch_of(make)(state, X)
    lowered = zt.Step.of(branch_of(make)).lower(state, X)
    got, outputs = lowered.lockstep(state, [(X,)])
    assert torch.equal(got["w"], wanted["w"]) and torch.equal(outputs[0], output)


def test_comparisons_of_known_tensors_are_known():
    def step(state, x):
        index = torch.tensor([0, 2])
        if torch.equal(index, torch.arange(0, 3, 2)) and not bool((index > 2).any()):
            return {"w": state["w"][index].repeat(2)[:3]}, index.tolist()
        return state, []

    state = {"w": torch.arange(3.0)}
    got, outputs = zt.Step.of(step).lower(state, X).lockstep(state, [(X,)])
    assert got["w"].tolist() == [0.0, 2.0, 0.0] and outputs == [[0, 2]]


def of_batch(x):
    return x.sum()


def written_with_the_batch(x):
    values = torch.zeros(3)
    values[1:].copy_(x[0, 1:])
    return values[0]


def drawn(x):
    return torch.rand(()) * 8


@pytest.mark.parametrize("make", [of_batch, written_with_the_batch, drawn])
def test_a_value_of_the_batch_or_of_a_draw_is_refused(make):
    """So is one in whose memory a value of the batch has been written, even beside it."""
    with pytest.raises(ValueError, match=r"reads a tensor's value(?s:.)*test_known_values.py:\d+"):
        zt.Step.of(branch_of(make)).lower({"w": torch.ones(3)}, X)


class Encoder(nn.Module):
    def __init__(self, make_mask):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.make_mask = make_mask

    def forward(self, x):
        return self.layers(x, mask=self.make_mask(x.shape[1]))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, x.flip(0), tgt_mask=mask)


class WaveNet(nn.Module):
    """A gated layer as in VITS, which slices by an element of a tensor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(5, 16, 1)

    def forward(self, x):
        channels = torch.IntTensor([8])
        y = self.conv(x.transpose(1, 2))
        return torch.tanh(y[:, : channels[0]]) * torch.sigmoid(y[:, channels[0] :])


def banded(length):
    return torch.ones(length, length, dtype=torch.bool).triu(2)


MODELS = {
    "causal": lambda: Encoder(nn.Transformer.generate_square_subsequent_mask),
    "banded": lambda: Encoder(banded),
    "encoder and decoder": Both,
}


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_transformers_of_torch_with_masks_that_forward_makes(make_model):
    """They ask whether a mask is causal, and choose a kernel."""
    check_trained(make_model, torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)))


def test_a_model_that_slices_by_an_element_of_a_literal():
    check_trained(WaveNet, torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1)))


def check_trained(make_model, x):
    """Train one step by hand and lifted, from the same parameters."""

    def lifted():
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = loop_of(model, optimizer)
        return model, loop, zt.lift(loop, model, optimizer)

    model, loop, _ = lifted()
    loss = loop(x)
    _, _, (step, state) = lifted()
    new, outputs = zt.Step.of(step).lower(state, x).lockstep(state, [(x,)])
    assert torch.equal(outputs[0], loss)
    for name, p in model.named_parameters():
        assert torch.equal(new["params"][name], p), name
