"""Express a `GradScaler`, with its scale of the loss and its skipped steps, in a program.

The scale, and the count of steps since it last changed, are part of the state. A GradScaler reads whether all gradients
are finite, and skips the step if not. A program takes every step, and then selects the old values if a gradient was not
finite. Fused optimizers do so themselves.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp import GradScaler, grad_scaler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..calling.global_state import patched
from ..ir.source import user_source, where
from ..tracing.errors import TraceError
from .optimizer_state import copied, params_of

# The state of a scaler: its scale, and the count of steps since the scale last changed.
Scale = dict[str, torch.Tensor]


def scale_of(scaler: GradScaler, device: torch.device) -> Scale:
    """The state of a scaler, which it creates on `device` if it has none; empty if the scaler is disabled."""
    if not scaler.is_enabled():
        return {}
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    state = {}
    if scaler._scale is not None and scaler._growth_tracker is not None:
        state["scale"] = scaler._scale.detach()
        state["growth"] = scaler._growth_tracker.detach()
    return state


def settings_of(scaler: GradScaler | None) -> tuple:
    """The settings of a scaler that are constants of a program: how the scale grows and backs off."""
    if scaler is None or not scaler.is_enabled():
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


@contextlib.contextmanager
def scaling(scaler: GradScaler | None, state: Scale | None) -> Iterator[None]:
    """Make `scaler` use and change the tensors of `state`, inside the context. Any other scaler is refused."""
    scale_outputs = GradScaler.scale

    def scale(called: GradScaler, outputs: Any) -> Any:
        # A disabled scaler has no state, and does nothing.
        if called.is_enabled() and not (called is scaler and state):
            raise _other_scaler()
        return scale_outputs(called, outputs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(GradScaler, scale=scale))
        if scaler is not None and state:
            per_optimizer: dict[int, Any] = defaultdict(grad_scaler._refresh_per_optimizer_state)
            with_state = patched(
                scaler,
                _scale=state["scale"],
                _growth_tracker=state["growth"],
                _per_optimizer_states=per_optimizer,
                _maybe_opt_step=_step,
            )
            stack.enter_context(with_state)
        yield


def _other_scaler() -> TraceError:
    return TraceError(
        f"lift: the loop step uses a GradScaler whose scale is not part of the state.\n"
        f"  at {where(user_source())}\n"
        f"Give it to lift: lift(loop_step, model, optimizer, scaler=scaler), and to write_back. Training in bfloat16 "
        f"needs no scaler."
    )


def _step(optimizer: Optimizer, record: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Step, and select the old values of parameters and state if a gradient was not finite.

    `record` is the scaler's record of this optimizer, from when it divided the gradients by the scale.
    """
    is_skipped: Any = sum(record["found_inf_per_device"].values()) > 0
    params = params_of(optimizer)
    old_values = []
    for p in params:
        old_values.append((p.detach().clone(), copied(dict(optimizer.state.get(p, {})))))
    result = optimizer.step(*args, **kwargs)

    def select(old: Any, new: Any) -> Any:
        return torch.where(is_skipped, old, new) if isinstance(new, torch.Tensor) else new

    with torch.no_grad():
        for p, (value, state) in zip(params, old_values):
            p.copy_(select(value, p))
            for key, old in state.items():
                optimizer.state[p][key] = pytree.tree_map(select, old, optimizer.state[p][key])
    return result
