"""Hyperparameters of optimizers: which of them are inputs of a lifted program, and which are constants of it.

The parameter groups are read at every call, so what a scheduler has set is what the next step uses. Learning rates and
tensors are inputs. So is a number that a scheduler of PyTorch cycles. Any other number is a constant until two calls
have different values of it. From then on it is an input, so a number that changes in every step costs one more trace.

If a loop step changed a hyperparameter, it would do so once, while it is traced, and not in later steps. The checks
here refuse such a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..trace import is_number

_SCHEDULERS = ("_step_count",)  # attributes that schedulers set on an optimizer, to check the order of calls
_CYCLES = "max_momentum"  # a key of groups whose momentum, or whose betas, OneCycleLR or CyclicLR changes

Group = dict[str, Any]


def groups_of(optimizers: Sequence[Optimizer]) -> list[Group]:
    """The parameter groups of all optimizers, one after another."""
    return [group for o in optimizers for group in o.param_groups]


class Hyperparameters:
    """The hyperparameters of optimizers. It remembers which numbers have changed between two calls."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._last: list[Group] = []  # the groups at the last call
        self._changing = set[tuple[int, str]]()  # the numbers of groups, each with a key

    def inputs(self) -> list[Group]:
        """For each group the present values of its inputs, by key. Numbers are floats."""
        groups = groups_of(self._optimizers)
        for i, (group, last) in enumerate(zip(groups, self._last)):
            keys = [k for k, v in group.items() if v is not last.get(k) and _has_changed(last.get(k), v)]
            self._changing.update((i, k) for k in keys)
        self._last = [{**group} for group in groups]
        return [
            {k: _as_inputs(v) for k, v in group.items() if self._is_input(i, group, k)}
            for i, group in enumerate(groups)
        ]

    def constants(self) -> list[Group]:
        """The constants of every group, and the numbers among the attributes of every optimizer.

        Optimizers often leave out a term whose factor is zero. So a program is made for the sign of an input, unless
        it is a learning rate.
        """
        groups = [
            {
                k: [*map(_sign, _entries(v))] if self._is_input(i, group, k) else v
                for k, v in group.items()
                if k not in ("params", "lr")
            }
            for i, group in enumerate(groups_of(self._optimizers))
        ]
        attributes = (vars(o).items() for o in self._optimizers)
        numbers = [{k: v for k, v in each if type(v) in (int, float) and k not in _SCHEDULERS} for each in attributes]
        return [*groups, *numbers]

    def numbers(self, given: Sequence[Group]) -> list[tuple[Any, int | None]]:
        """What is given in place of each number among the inputs, with its present sign. That of a rate is None."""
        pairs = [(k, given[k], group[k]) for group, given in zip(groups_of(self._optimizers), given) for k in given]
        return [
            (x, None if key == "lr" else _sign(own))
            for key, values, present in pairs
            for x, own in zip(_entries(values), _entries(present))
            if is_number(own)
        ]

    def _is_input(self, i: int, group: Group, key: str) -> bool:
        value = group[key]
        if key == "lr":
            return isinstance(value, torch.Tensor) or is_number(value)
        is_cycled = _CYCLES in group and key == ("betas" if "betas" in group else "momentum")
        return is_cycled or (i, key) in self._changing or any(isinstance(x, torch.Tensor) for x in _entries(value))


def _entries(value: Any) -> Sequence[Any]:
    """The numbers or tensors in a hyperparameter, such as both of the betas."""
    return value if isinstance(value, tuple) else (value,)


def _has_changed(old: Any, new: Any) -> bool:
    """Whether a hyperparameter had other numbers before. A whole number counts as one of the settings."""
    before, now = _entries(old), _entries(new)
    return all(map(is_number, before)) and all(isinstance(x, float) for x in now) and [*before] != [*now]


def _as_inputs(value: Any) -> Any:
    """A hyperparameter with floats for its numbers, so that a rate of 1 has the program of a rate of 0.5."""
    if isinstance(value, tuple):
        return tuple(map(_as_inputs, value))
    return float(value) if is_number(value) else value


def _sign(value: Any) -> int | None:
    """The sign of a number; None for a tensor."""
    return (value > 0) - (value < 0) if is_number(value) else None


def versions(groups: Sequence[Group]) -> list[int]:
    """The version counters of the tensors in the inputs of groups, for `check_inputs`."""
    return [x._version for group in groups for v in group.values() for x in _entries(v) if isinstance(x, torch.Tensor)]


def check_inputs(groups: Sequence[Group], inputs: Sequence[Group], before: Sequence[int]) -> None:
    """Raises: ValueError for an input that has changed, as a rate does if a scheduler steps inside the loop step."""
    replaced = [k for group, given in zip(groups, inputs) for k, v in given.items() if group[k] is not v]
    if replaced or versions(inputs) != before:
        raise ValueError(
            f"lift: the loop step changes {replaced[0] if replaced else 'lr'!r} of a parameter group, as a scheduler "
            f"does. This would happen once, while it is traced.\n"
            f"Step the scheduler after the lifted step. The next call reads what it has set."
        )


def check_unchanged(before: list[Group], after: list[Group]) -> None:
    """Raises: ValueError for a hyperparameter that the loop step or an optimizer has changed, such as a step count."""
    changed = [k for old, new in zip(before, after) for k in new if k not in old or repr(old[k]) != repr(new[k])]
    if changed:
        raise ValueError(
            f"lift: the loop step, or its optimizer, changes {changed[0]!r} of a parameter group, or of itself, "
            f"which would happen once, while it is traced.\n"
            f"Change it between steps, which are then traced anew; what is counted in every step must be in the "
            f"optimizer's state of a parameter."
        )
