"""Repeated updates: a second program of a loop has the update of the first, without tracing it again."""

import pytest
import torch
from test_lift import loop, make_model, of
from torch import nn

import ztrans as zt
from ztrans.tracing.lifting import repeated_updates

OPTIMIZERS = {
    "sgd": of("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "adamw": of("AdamW", lr=0.01, amsgrad=True),
    "adamw_fused": of("AdamW", lr=0.01, fused=True),
    "radam": of("RAdam", lr=0.01),
    "rprop": of("Rprop", lr=0.01),
    "adagrad": of("Adagrad", lr=torch.tensor(0.01)),
}
BATCHES = [(torch.randn(n, 6), torch.randn(n, 4)) for n in (12, 8)]


def traced_in_full(monkeypatch, make_optimizer, body=loop):
    """The programs for both batches, without repeated updates."""
    with monkeypatch.context() as patch:
        patch.setattr(repeated_updates, "_is_known", lambda *_: False)
        step, state, _ = lifted(make_optimizer, body)
        return [str(step.trace(state, *batch)) for batch in BATCHES]


def lifted(make_optimizer, body=loop):
    model = make_model()
    optimizer = make_optimizer(model)
    step, state = zt.lift(body(model, optimizer), model, optimizer)
    return zt.Step(step), state, optimizer


def steps_of_optimizers(monkeypatch):
    """The parameters, by their shapes, on which an optimizer of PyTorch steps while a loop is traced."""
    calls = []
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Rprop, torch.optim.Adagrad):
        own = kind._init_group

        def init_group(self, group, *args, own=own):
            calls.extend(p.shape for p in group["params"])
            return own(self, group, *args)

        monkeypatch.setattr(kind, "_init_group", init_group)
    return calls


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_program_for_another_batch_has_the_update_of_the_first(name, monkeypatch):
    full = traced_in_full(monkeypatch, OPTIMIZERS[name])
    step, state, _ = lifted(OPTIMIZERS[name])
    assert str(step.trace(state, *BATCHES[0])) == full[0]
    stepped = steps_of_optimizers(monkeypatch)
    assert str(step.trace(state, *BATCHES[1])) == full[1]
    assert stepped == []


def changes_a_constant(optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.375


def adds_a_hook(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [changes_a_constant, adds_a_hook])
def test_an_update_that_may_differ_is_traced_again(change, monkeypatch):
    step, state, optimizer = lifted(OPTIMIZERS["adamw"])
    step.trace(state, *BATCHES[0])
    change(optimizer)
    stepped = steps_of_optimizers(monkeypatch)
    program = str(step.trace(state, *BATCHES[1]))
    assert len(stepped) == len(state["params"])
    assert ("groups.0.weight_decay" in program) == (change is changes_a_constant)


def test_two_steps_of_a_loop_and_what_follows_them_are_the_same(monkeypatch):
    """The loop reads the parameters after its second step."""

    def twice(model, optimizer):
        def loop_step(x, y):
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            return sum(p.square().sum() for p in model.parameters())

        return loop_step

    full = traced_in_full(monkeypatch, OPTIMIZERS["adamw"], twice)
    step, state, _ = lifted(OPTIMIZERS["adamw"], twice)
    stepped = steps_of_optimizers(monkeypatch)
    assert [str(step.trace(state, *batch)) for batch in BATCHES] == full
    assert len(stepped) == 2 * len(state["params"]), "both steps of the second trace are repeated"
