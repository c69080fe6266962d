"""The state of an optimizer before its first step: PyTorch's make theirs in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

# State that optimizers make at their first step, as it is before that step.
_FRESH = {"step": 0.0, "mu_product": 1.0} | dict.fromkeys(
    (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
    ),
    0.0,
)


def make(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Make the state that the optimizer would make at its first step, by a step that changes nothing.

    `names` are those of the parameters, by their ids, for messages.
    """
    params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    new = [p for p in params if not optimizer.state.get(p)]
    if not new:
        return
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        raise ValueError(
            f"lift: {type(optimizer).__name__} with dampening does not dampen its first gradient.\n"
            f"Take one ordinary step first, so that the optimizer's state exists."
        )
    held = [(p, p.grad, p.detach().clone()) for p in params]
    had = {
        p: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
        for p, s in optimizer.state.items()
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:
        with torch.no_grad():
            for p, g, value in held:
                p.grad = g
                p.copy_(value)
        for group, lr in zip(optimizer.param_groups, rates):
            group["lr"] = lr
        optimizer.state.update(had)
    for p in new:
        for key, value in optimizer.state.get(p, {}).items():
            if value is None:
                continue
            if key not in _FRESH:
                raise ValueError(
                    f"lift: {type(optimizer).__name__} keeps {key!r} for {names[id(p)]}, and lift does not know "
                    f"its first value.\nTake one ordinary step first, so that the optimizer's state exists."
                )
            optimizer.state[p][key] = (
                value.fill_(_FRESH[key]) if isinstance(value, torch.Tensor) else type(value)(_FRESH[key])
            )
