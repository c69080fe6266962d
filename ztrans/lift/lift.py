"""lift: turn the body of an ordinary training loop, with its nn.Module and torch.optim, into a pure step and its state.

The loop body is not changed. While it is traced, tensors of the state replace the module's parameters and buffers and
the optimizer's state. Their values after the loop body are the new state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..tracing.dtensors import refuse_wrappers
from .lifted_state import State, check_apart, check_optimizers, several, state_of
from .lifted_step import LiftedStep
from .scaler import scale_of

P = ParamSpec("P")
T = TypeVar("T")


def lift(
    loop_step: Callable[P, T],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    carry_grads: bool = False,
    scaler: GradScaler | None = None,
) -> tuple[Callable[Concatenate[State, P], tuple[State, T]], State]:
    """Turn `loop_step(*batch)`, which does zero_grad, loss, backward and optimizer.step, into `(step, state)`.

    `step(state, *batch) -> (state, output)` is a pure train step for any transform. It takes the batch arguments of
    `loop_step`, by position or by name.

    Args:
        loop_step: the body of the loop. It returns the output.
        model: the module that the loop trains. Combine several modules in one `nn.ModuleDict`.
        optimizer: the optimizer that the loop steps, or a sequence of all of them. Every call reads its parameter
            groups, so a scheduler may step after the lifted step. Learning rates, and numbers that change, are inputs
            of the program. Other hyperparameters, `train()` and `eval()`, and `requires_grad` are constants: if one
            has changed, the next call of a `Step` is traced anew. A loop that evaluates needs none; its step takes the
            state of the step that trains the module, and returns it with its parameters unchanged.
        carry_grads: whether the gradients of earlier calls are part of the state, for a loop step that adds to them.
            It may step the optimizer in some calls only, as a bool says that it is given.
        scaler: the GradScaler of the loop, for training in fp16.

    Returns: the step, and the present state: `params`, `buffers` and `optimizer` by name, `grads` by name with
    `carry_grads`, and the scale of `scaler`.

    Raises: TypeError for a model that is no module. ValueError for an optimizer that needs a closure, that has a
    parameter which the module does not have or which another optimizer has too, or whose state before its first step
    is unknown. When the step is traced, ValueError for a loop step that steps another optimizer, or not all of these;
    that uses gradients of an earlier call which are not carried; that uses parameters which were taken from the module
    before; or that uses another GradScaler.

    >>> model = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def loop_step(x):
    ...     sgd.zero_grad()
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     sgd.step()
    ...     return loss
    >>> step, state = lift(loop_step, model, sgd)
    >>> sorted(state), sorted(state["params"])
    (['buffers', 'optimizer', 'params'], ['bias', 'weight'])
    """
    optimizers = several(optimizer)
    names = check_optimizers(model, optimizers)
    own = dict(model.named_parameters())
    refuse_wrappers(own.items(), "lift")
    today = state_of(model, optimizers, names, carry_grads)
    if scaler is not None:
        today["scaler"] = scale_of(scaler, next(iter(own.values())).device)
    check_apart(today)
    step = LiftedStep(loop_step, model, optimizers, carry_grads, scaler, names, today)
    return step, today
