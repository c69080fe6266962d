"""Turn the body of a training loop, with its nn.Module and torch.optim, into a pure step and its state.

The step runs the body as it is (see `lifted_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ..ir.source import user_source
from ..tracing.dtensors import refuse_wrappers
from .lifted_state import State, as_tuple, state_of
from .lifted_step import LiftedStep
from .optimizer_state import check_optimizers
from .scaler import scale_of
from .shared_memory import sharing_buffers

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

    While it is traced, Adam, AdamW and SGD of PyTorch run in their fused form, unless `fused=False` or
    `capturable=True` says otherwise, and its other optimizers in their capturable form. With fused optimizers the
    lifted step computes the bits of the untouched loop on one rank; with others it differs by rounding.

    Args:
        loop_step: the body of the loop. It calls `zero_grad`, and returns the output.
        model: the module that the loop trains. Combine several modules in one `nn.ModuleDict`. Its buffers, and plain
            tensors in its attributes, are part of the state; nothing trains them.
        optimizer: the optimizer that the loop steps, or a sequence of all of them. Every call reads its parameter
            groups, so a scheduler may step after the lifted step. Floats are inputs of the program. Whole numbers,
            bools, the signs of floats, `train()` and `eval()`, and `requires_grad` are constants: if one has changed,
            the next call of a `Step` is traced again. A loop that evaluates needs none; its step takes the state of
            the step that trains the module, and returns it with its parameters unchanged.
        carry_grads: whether the gradients of earlier calls are part of the state, for a loop step that adds to them.
            It may step the optimizer in only some calls, by a bool among its arguments.
        scaler: the GradScaler of the loop, for training in fp16.

    Returns: the step, and the present state: `params`, `buffers` and `optimizer` by name, `grads` by name with
    `carry_grads`, and the scale of `scaler`.

    Raises:
        TypeError: the model is not a module, or has a sparse buffer.
        ValueError: an optimizer needs a closure, or has a parameter that is not the module's or that another optimizer
            has too. The module contains an `AveragedModel`. When the step is traced: the loop step steps another
            optimizer, or not all of these. It uses gradients of an earlier call that are not carried, tensors from
            outside of the module, a scheduler, or another GradScaler. An optimizer that is not from torch.optim makes
            its state in its first step: take one step before `lift`.

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
    optimizers = as_tuple(optimizer)
    _check_model(model, optimizers)
    check_optimizers(model, optimizers)
    params = dict(model.named_parameters())
    refuse_wrappers(params.items(), "lift")
    _check_buffers(model)
    state = state_of(model, optimizers, carry_grads)
    if scaler is not None:
        if not params:
            raise ValueError(
                "lift: the model has no parameters, so there is no gradient for a scaler to scale."
            )
        state["scaler"] = scale_of(scaler, next(iter(params.values())).device)
    sharing = sharing_buffers(state)
    step = LiftedStep(
        loop_step, model, optimizers, carry_grads, scaler, sharing, lifted_at=user_source()
    )
    return step, state


def _check_buffers(model: nn.Module) -> None:
    for name, x in model.named_buffers():
        if x.layout is not torch.strided:
            raise TypeError(
                f"lift: the buffer {name} is a sparse tensor ({x.layout}), and a state has dense ones.\n"
                f"Register its indices and its values as two buffers, and compute with these: index_add for the "
                f"product of a sparse matrix."
            )


def _check_model(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if not isinstance(model, nn.Module):
        advice = "Combine several modules in one, nn.ModuleList([...])"
        if isinstance(model, Optimizer):
            advice = "Pass the module first"
        raise TypeError(
            f"lift: expected an nn.Module, got {type(model).__name__}.\n"
            f"{advice}: lift(loop_step, model, optimizer)."
        )
    for name, module in model.named_modules():
        if optimizers and isinstance(module, AveragedModel):
            raise ValueError(
                f"lift: {name or 'the model'} is an AveragedModel. It reads its count of updates to choose how it "
                f"updates.\n"
                f"Leave it out, and keep the averages in the state: step = zt.ema(0.9)(step). For another rule, keep "
                f"them in a second module of the loop:\n"
                f"  average = copy.deepcopy(model)                                       # before lift\n"
                f'  lift(loop_step, nn.ModuleDict({{"model": model, "average": average}}), optimizer)\n'
                f"  for a, p in zip(average.parameters(), model.parameters()): a.data.lerp_(p.data, 0.1)  # in the "
                f"loop step"
            )
