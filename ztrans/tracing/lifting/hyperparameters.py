"""Hyperparameters of optimizers: constants of a lifted program, except for learning rates.

If a loop step changed a hyperparameter, it would do so once, while it is traced, and not in later steps. The checks
here refuse such a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

_SCHEDULERS = ("_step_count",)  # attributes that schedulers set on an optimizer, to check the order of calls


def groups_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers, one after another."""
    return [group for o in optimizers for group in o.param_groups]


def hyperparameters(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The hyperparameters of every group except its learning rate, and the numbers among an optimizer's attributes.

    A tensor is represented by its identity.
    """
    groups = ({k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups_of(optimizers))
    held = [{k: id(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()} for group in groups]
    numbers = (
        {k: v for k, v in vars(o).items() if type(v) in (int, float) and k not in _SCHEDULERS} for o in optimizers
    )
    return [*held, *numbers]


def check_unchanged(before: list[dict], after: list[dict]) -> None:
    """Raises: ValueError for a hyperparameter that the loop step or an optimizer has changed, such as a step count."""
    changed = [k for old, new in zip(before, after) for k in new if k not in old or repr(old[k]) != repr(new[k])]
    if changed:
        raise ValueError(
            f"lift: the loop step, or its optimizer, changes {changed[0]!r} of a parameter group, or of itself, "
            f"which would happen once, while it is traced.\n"
            f"Change it between steps, which are then traced anew; what is counted in every step must be in the "
            f"optimizer's state of a parameter."
        )


def versions(rates: Sequence[Any]) -> list[int]:
    """The version counters of the learning rates that are tensors, for `check_rates`."""
    return [getattr(lr, "_version", 0) for lr in rates]


def check_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any], before: Sequence[int]) -> None:
    """Raises: ValueError for a learning rate that has changed, as it does if a scheduler steps inside the loop step."""
    for group, lr, version, written in zip(groups, rates, before, versions(rates)):
        if group["lr"] is not lr or written != version:
            raise ValueError(
                "lift: the loop step changes a learning rate, which would happen once, while it is traced.\n"
                "Step the scheduler after the lifted step, and pass its rates on: "
                'state["lr"] = [group["lr"] for group in optimizer.param_groups].'
            )
