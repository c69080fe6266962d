"""A model of a library that cannot be traced: the error shows the library's line, and says what the user can do.

The library here does what those do whose builds are refused in benchmarks/results/models.md.
"""

import copy
import importlib
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt

LIBRARY = """
import torch
from torch import nn

class Hearing(nn.Module):  # as Wav2Vec2ForCTC and HubertForCTC of transformers
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 8)
    def forward(self, x, labels=None):
        logits = self.head(x)
        if labels is not None and labels.max() >= 8:
            raise ValueError("labels")
        return logits

class Adapted(nn.Module):  # as LoHa and LoKr of peft
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 8)
    def forward(self, x):
        if not self.training or torch.rand(1) > 0.0:
            return self.head(x)
        return x

class Prompted(nn.Module):  # as prompt tuning and prefix tuning of peft
    def __init__(self):
        super().__init__()
        self.prompts = nn.Embedding(4, 6)
        self.tokens = {"default": torch.arange(4)}
    def forward(self, x):
        return self.prompts(self.tokens["default"]).sum(0) + x
"""
AVOID = "To avoid that line of a library, choose an option, or eval"


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "heard"
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(textwrap.dedent(LIBRARY))
    monkeypatch.syspath_prepend(folder.parent)
    importlib.invalidate_caches()
    yield importlib.import_module("heard.models")
    for name in ("heard", "heard.models"):
        sys.modules.pop(name, None)


def trained(model, loss_of):
    """A lifted loop and its state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop_step(*batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    return zt.Step.of(step), state


X, LABELS = torch.randn(4, 20, 6), torch.randint(1, 8, (4, 5))


def test_a_check_of_values_is_shown_and_computing_the_loss_from_the_logits_avoids_it(library):
    step, state = trained(
        library.Hearing(), lambda model, x, labels: model(x, labels).square().mean()
    )
    with pytest.raises(ValueError, match="reads a tensor's value") as e:
        step.trace(state, X, LABELS)
    line = r"which leads to heard/models.py:11 in Hearing.forward: if labels is not None and labels.max() >= 8:"
    assert line in str(e.value) and f"A traced step runs on tensors without values. {AVOID}" in str(
        e.value
    )
    assert "test_libraries.py" in str(e.value).splitlines()[1], "the user's line is still the first"


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_ctc_loss_with_lengths_as_numbers_has_the_bits_of_the_loop(library, reduction):
    def loss_of(model, x, labels):
        log_probs, rows = model(x).log_softmax(-1).transpose(0, 1), len(labels)
        sizes = [log_probs.shape[0]] * rows, [labels.shape[1]] * rows
        return F.ctc_loss(log_probs, labels, *sizes, reduction=reduction).mean()

    model = library.Hearing()
    untouched = copy.deepcopy(model)
    step, state = trained(model, loss_of)
    state = step.shard(state)
    for _ in range(3):
        state, loss = step(state, X, LABELS)
    wanted = [loop_of(untouched, loss_of, X, LABELS) for _ in range(3)][-1]
    assert torch.equal(loss, wanted) and torch.equal(
        state["params"]["head.weight"], untouched.head.weight
    )


def loop_of(model, loss_of, *batch):
    """A step of the untouched loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = loss_of(model, *batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("as_tensors", [True, False])
def test_other_forms_of_ctc_loss_say_which_one_can_be_traced(library, as_tensors):
    def loss_of(model, x, labels):
        sizes = [torch.full((4,), size) if as_tensors else [size] * 4 for size in (20, 5)]
        return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), labels, *sizes)

    step, state = trained(library.Hearing(), loss_of)
    with pytest.raises(
        Exception, match=r"(?s)trace: loop_step.*Give ctc_loss its lengths as lists of numbers"
    ):
        step.trace(state, X, LABELS)


def test_a_draw_that_decides_is_shown_and_eval_avoids_it(library):
    model = library.Adapted()
    step, state = trained(model, lambda model, x: model(x).square().mean())
    with pytest.raises(ValueError, match="reads a tensor's value") as e:
        step.trace(state, X)
    assert (
        "heard/models.py:20 in Adapted.forward: if not self.training or torch.rand(1) > 0.0:"
        in str(e.value)
    )
    model.eval()
    step.trace(state, X)


def test_a_tensor_that_is_no_buffer_of_a_library_is_part_of_the_state(library):
    model = library.Prompted()
    step, state = trained(model, lambda model, x: model(x).square().mean())
    step.trace(state, X)
    assert list(state["buffers"]) == ["tokens.default"]


def test_the_users_own_code_has_no_line_of_a_library():
    step, state = trained(
        nn.Linear(6, 8), lambda model, x: model(x).sum() * (2 if x.sum() > 0 else 1)
    )
    with pytest.raises(ValueError, match="reads a tensor's value") as e:
        step.trace(state, X)
    assert "which leads to" not in str(e.value) and AVOID not in str(e.value)
