"""A value that depends on no input of a step is computed while the step is traced; any other read is refused.

The tensors of a lifted module count as such values too, as long as they have the values that the trace has read.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ztrans as zt
from tests.support.lifted import loop_of
from tests.support.worlds import fake_mesh
from ztrans.calling.call import BoundCall

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


class KeptMask(nn.Module):
    """An encoder whose masks were made before the step, and are kept by the module as `keep` does."""

    def __init__(self, keep, mask, padding=None):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        keep(self, "mask", mask)
        keep(self, "padding", padding)

    def forward(self, x):
        length = x.shape[1]
        return self.layers(x, self.mask[:length, :length], self.padding)


def as_frozen_parameter(module, name, x):
    setattr(module, name, x if x is None else nn.Parameter(x, requires_grad=False))


def not_in_files(module, name, x):
    module.register_buffer(name, x, persistent=False)


KEEP = {
    "attribute": setattr,
    "buffer": nn.Module.register_buffer,
    "buffer in no file": not_in_files,
    "frozen parameter": as_frozen_parameter,
}
SENTENCES = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("mask", [CAUSAL, banded(7)], ids=["causal", "banded"])
def test_transformers_of_torch_with_masks_that_the_module_keeps(keep, mask):
    check_trained(lambda: KeptMask(keep, mask.clone()), SENTENCES)


@pytest.mark.parametrize("keep", [setattr, nn.Module.register_buffer])
def test_a_mask_of_padding_that_the_module_keeps(keep):
    padding = torch.arange(5).expand(2, 5) >= torch.tensor([[4], [5]])
    check_trained(lambda: KeptMask(keep, CAUSAL < 0, padding), SENTENCES)


def trained_with_kept_mask():
    """A lifted step of a model with a causal mask, its state, and its model."""
    torch.manual_seed(0)
    model = KeptMask(nn.Module.register_buffer, CAUSAL.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    return zt.Step.of(step), state, model


def test_the_shards_of_a_kept_mask():
    """The trace knows the whole mask, and each rank has a part of it."""
    step, state, _ = trained_with_kept_mask()
    rows = SENTENCES.repeat(2, 1, 1)
    wanted, _ = step.lower(state, rows).lockstep(state, [(rows,)])
    sharded = step.then(zt.shard_params(zt.AbstractMesh(dp=2)))
    new, _ = sharded.lower(state, SENTENCES).lockstep(state, [(SENTENCES,)] * 2)
    for name, p in wanted["params"].items():
        torch.testing.assert_close(new["params"][name], p)


def changed_in_place(state):
    state["buffers"]["mask"].fill_(0.0)
    return state


def replaced(state):
    return {**state, "buffers": {"mask": torch.zeros(7, 7)}}


@pytest.mark.parametrize("change", [changed_in_place, replaced])
def test_a_program_runs_only_with_the_values_that_its_trace_has_read(change):
    """They decide which kernel runs, so with other values the program would compute something else."""
    step, state, model = trained_with_kept_mask()
    for _ in range(2):
        state, _ = step(state, SENTENCES)
    state = change(state)
    with pytest.raises(ValueError, match=r"state\.buffers\.mask (?s:.)*retrace\(\)"):
        step(state, SENTENCES)
    with torch.no_grad():
        model.mask.zero_()
    step.retrace()
    step(state, SENTENCES)


def test_programs_for_other_batches_share_the_values_that_they_have_read():
    step, state, model = trained_with_kept_mask()
    recordings = [step.lower(state, SENTENCES[:, :n]).recording for n in (5, 4)]
    first, second = (of_one for recording in recordings for of_one in recording.known)
    assert first.value is second.value
    with torch.no_grad():
        model.mask.zero_()
    (third,) = step.lower(state, SENTENCES).recording.known
    assert torch.equal(first.value, CAUSAL) and not third.value.any()


def test_a_mask_with_equal_values_is_as_good():
    step, state, _ = trained_with_kept_mask()
    state, _ = step(state, SENTENCES)
    state["buffers"]["mask"] = state["buffers"]["mask"].clone()
    state, _ = step(state, SENTENCES)
    state["buffers"]["mask"].mul_(1.0)
    step(state, SENTENCES)


def test_a_rank_compares_its_part_of_a_kept_mask():
    plain, state, _ = trained_with_kept_mask()
    with fake_mesh() as mesh:
        step = plain.then(zt.shard_params(mesh))
        shards = step.shard(state)
        recording = step.lower(shards, SENTENCES).recording
        call = BoundCall.of(recording.function, (shards, SENTENCES), {})
        recording.local_inputs(call)
        # This rank has rows 2 and 3 of the mask.
        mask = shards["buffers"]["mask"].to_local()
        assert torch.equal(mask, CAUSAL[2:4])
        mask[0, 0] = -1.0
        with pytest.raises(ValueError, match=r"state\.buffers\.mask has other values"):
            recording.local_inputs(call)


def test_a_kept_mask_in_inference_mode():
    """PyTorch does not count the versions of such tensors."""
    model = KeptMask(nn.Module.register_buffer, CAUSAL.clone())
    with torch.inference_mode():
        step, state = zt.lift(lambda x: model(x), model)
        step = zt.Step.of(step)
        state = step.shard(state)
        for _ in range(2):
            state, _ = step(state, SENTENCES)
        state["buffers"]["mask"].zero_()
        with pytest.raises(ValueError, match="other values"):
            step(state, SENTENCES)


class Counting(nn.Module):
    """It reads a tensor that it then changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        scale = 2.0 if self.count.item() == 0 else 1.0
        self.count += 1
        return self.layer(x) * scale


def test_a_tensor_of_the_module_that_the_step_changes_is_refused():
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    with pytest.raises(ValueError, match=r"reads a tensor's value(?s:.)*test_known_values.py:\d+"):
        zt.Step.of(step).lower(state, X)


def of_state(state, x):
    return {"w": state["w"] * (2.0 if state["w"].sum().item() > 3 else 5.0)}, x


def test_a_value_of_a_plain_state_is_refused():
    """Nothing but a lifted module says which leaves stay as they are."""
    with pytest.raises(ValueError, match=r"reads a tensor's value(?s:.)*test_known_values.py:\d+"):
        zt.Step.of(of_state).lower({"w": torch.ones(3)}, X)
