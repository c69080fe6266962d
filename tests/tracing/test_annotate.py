"""What a step reads from a tensor of its inputs while it is traced: nothing, and the error says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ztrans as zt

STATE, X = {"w": torch.ones(2)}, torch.linspace(-1, 1, 9).view(3, 3)


def of_a_literal_written_through_a_view(x):
    counts = torch.tensor([1.0, 1.0])
    counts.view(2)[0] = x[0, 0]
    return counts.sum().item()


READS = {
    "an argument": lambda x: x.sum().item(),
    "a draw": lambda x: torch.rand(2).sum().item(),
    "a literal in which an argument is written": of_a_literal_written_through_a_view,
    "a comparison": lambda x: float(torch.equal(torch.ones(3, 3), x)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_value_of_a_tensor_cannot_be_read(read):
    with pytest.raises(ValueError, match="reads a tensor's value"):
        zt.Step.of(lambda state, x: (state, x * read(x))).trace(STATE, X)


def test_an_operation_on_a_storage_is_refused():
    step = zt.Step.of(lambda state, x: (state, x.clone().set_(x.untyped_storage())))
    with pytest.raises(
        ValueError, match=r"does not run on tensors without values: (.*)UntypedStorage"
    ):
        step.trace(STATE, X)


def transformed(**how):
    """A step of a transformer with a mask, and its arguments."""
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def step(state, x, y):
        mask = model.generate_square_subsequent_mask(y.size(1))
        return state, torch.func.functional_call(model, state, (x, y), {"tgt_mask": mask, **how})

    return step, (dict(model.named_parameters()), torch.randn(3, 5, 8), torch.randn(3, 4, 8))


@pytest.mark.parametrize("how", [{}, {"tgt_is_causal": True}], ids=["asks", "is told"])
def test_a_transformer_knows_whether_its_mask_is_causal(how):
    step, (state, *batch) = transformed(**how)
    run = zt.Step.of(step)
    assert torch.equal(run(run.shard(state), *batch)[1], step(state, *batch)[1])


RUNS: list[int] = []


@torch.library.custom_op("ztrans_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(1)
    return x.clone()


@counted.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operation_of_a_literal_does_not_run_in_a_trace():
    """PyTorch would run it on the value of the literal. A collective would then wait for other ranks."""
    step = zt.Step.of(lambda state, x: (state, x * counted(torch.tensor(2.0))))
    step.trace(STATE, X)
    assert not RUNS
    assert torch.equal(step(STATE, X)[1], 2 * X) and len(RUNS) == 1


def test_a_branch_may_make_a_literal_and_then_read_what_is_not_its_argument():
    """The tensors that a branch reads are found by running it once, without a record."""

    def step(state, x):
        scaled = lambda w: w * torch.tensor(2.0) + x.mean()
        return state, torch.cond(x.sum() > 1e9, torch.sin, scaled, (state["w"],))

    assert torch.equal(zt.Step.of(step)(STATE, X + 1)[1], step(STATE, X + 1)[1])


def test_a_function_that_fails_names_the_inputs_that_it_got():
    """Of a tensor that the step has computed, the error shows the type alone."""
    step = zt.Step.of(lambda state, x: (state, torch.mv(x.sin(), state["w"])))
    with pytest.raises(RuntimeError, match=r"f32\[3,3\], w: f32\[2\]") as caught:
        step.trace(STATE, X)
    assert "x: f32[3,3]" not in str(caught.value)
