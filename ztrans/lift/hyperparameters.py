"""Hyperparameters of optimizers: which of them are inputs of a lifted program, and which are constants of it.

The parameter groups are read at every call, so what a scheduler has set is what the next step uses. Learning rates and
tensors are inputs. So is a number that a scheduler of PyTorch cycles. Any other number is a constant until two calls
have different values of it. From then on it is an input, so a number that changes in every step costs one more trace.

If a loop step changed a hyperparameter, it would do so once, while it is traced, and not in later steps. `unchanged`
refuses such a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from ..calling.signature import is_number
from ..tracing.errors import TraceError

_CYCLES = (
    "max_momentum"  # a key of groups whose momentum, or whose betas, OneCycleLR or CyclicLR changes
)

Group = dict[str, Any]


def groups_of(optimizers: Sequence[Optimizer]) -> list[Group]:
    """The parameter groups of all optimizers, one after another."""
    return [group for o in optimizers for group in o.param_groups]


class Hyperparameters:
    """The hyperparameters of optimizers. It remembers which numbers have changed between two calls."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._last: list[_Read] = []

    def _read(self) -> list[_Read]:
        before = itertools.chain(self._last, itertools.repeat(_Read({}, frozenset(), {}, "")))
        self._last = [last.then(group) for last, group in zip(before, groups_of(self._optimizers))]
        return self._last

    def inputs(self) -> list[Group]:
        """For each group the present values of its inputs, by key. Their numbers are floats."""
        return [read.inputs for read in self._read()]

    def constants(self) -> tuple:
        """The constants and parameters of every group, and the numbers among the attributes of every optimizer."""
        members = [tuple(map(id, group["params"])) for group in groups_of(self._optimizers)]
        return (
            *(read.constants for read in self._read()),
            *members,
            *(repr(_numbers_of(o)) for o in self._optimizers),
        )

    def numbers(self, given: Sequence[Group]) -> list[tuple[Any, int | None]]:
        """What is given in place of each number among the inputs, with its present sign. That of a rate is None."""
        return [
            (x, None if key == "lr" else _sign(own))
            for group, inputs in zip(self.inputs(), given)
            for key, values in inputs.items()
            for x, own in zip(_entries(values), _entries(group[key]))
            if is_number(own)
        ]


@dataclass(frozen=True)
class _Read:
    """A parameter group as it was read at a call, with the keys of the numbers that have changed until then.

    Optimizers often leave out a term whose factor is zero. So a program is made for the sign of an input, unless it is
    a learning rate: the sign is one of the constants.
    """

    group: Group
    changing: frozenset[str]
    inputs: Group
    constants: str

    def then(self, group: Group) -> _Read:
        """The group as it is read at the next call."""
        others = [k for k, v in group.items() if v is not self.group.get(k, self)]
        if not others and len(group) == len(self.group):
            return self
        if others == ["lr"] and "lr" in self.inputs and _is_input(group, "lr", self.changing):
            rate = _as_inputs(group["lr"])
            return replace(
                self, group={**self.group, "lr": group["lr"]}, inputs={**self.inputs, "lr": rate}
            )
        return _Read.of(
            group, self.changing | {k for k in others if _has_changed(self.group.get(k), group[k])}
        )

    @staticmethod
    def of(group: Group, changing: frozenset[str]) -> _Read:
        inputs = {k: _as_inputs(v) for k, v in group.items() if _is_input(group, k, changing)}
        constants = {k: v for k, v in group.items() if k not in inputs and k != "params"}
        signs = {k: [*map(_sign, _entries(v))] for k, v in inputs.items() if k != "lr"}
        return _Read(_copied(group), changing, inputs, f"{constants} {signs}")


def _copied(group: Group) -> Group:
    """A copy of a group. A list of settings, which may be changed in place, is read again at every call."""
    return {k: [*v] if isinstance(v, list) and k != "params" else v for k, v in group.items()}


def _is_input(group: Group, key: str, changing: Collection[str]) -> bool:
    value = group[key]
    if key == "lr":
        return isinstance(value, torch.Tensor) or is_number(value)
    is_cycled = _CYCLES in group and key == ("betas" if "betas" in group else "momentum")
    return is_cycled or key in changing or any(isinstance(x, torch.Tensor) for x in _entries(value))


def _numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """The numbers among the attributes of an optimizer."""
    return {k: v for k, v in vars(optimizer).items() if type(v) in (int, float)}


def _entries(value: Any) -> Sequence[Any]:
    """The numbers or tensors in a hyperparameter, such as both of the betas."""
    return value if isinstance(value, tuple) else (value,)


def _has_changed(old: Any, new: Any) -> bool:
    """Whether a hyperparameter had other numbers before. A whole number counts as one of the settings."""
    before, now = _entries(old), _entries(new)
    return (
        all(map(is_number, before))
        and all(isinstance(x, float) for x in now)
        and [*before] != [*now]
    )


def _as_inputs(value: Any) -> Any:
    """A hyperparameter with floats for its numbers, so that a rate of 1 has the program of a rate of 0.5."""
    if isinstance(value, tuple):
        return tuple(map(_as_inputs, value))
    return float(value) if is_number(value) else value


def _sign(value: Any) -> int | None:
    """The sign of a number; None for a tensor."""
    return (value > 0) - (value < 0) if is_number(value) else None


@contextlib.contextmanager
def unchanged(optimizers: Sequence[Optimizer], inputs: Sequence[Group]) -> Iterator[None]:
    """Refuse changes of hyperparameters inside, as a step would make them once, while it is traced.

    Raises: ValueError for an input that has changed, as a rate does if a scheduler steps, and for a constant, such as a
        count that the optimizer keeps.
    """
    before = _snapshot(optimizers, inputs)
    yield
    changed = [
        k
        for old, new in zip(before, _snapshot(optimizers, inputs))
        for k in new
        if new[k] != old.get(k)
    ]
    if changed and any(changed[0] in given for given in inputs):
        raise TraceError(
            f"lift: the loop step changes {changed[0]!r} of a parameter group, as a scheduler does. This would happen "
            f"once, while it is traced.\n"
            f"Set it before the lifted step, or step the scheduler after the lifted step: each call reads the groups."
        )
    if changed:
        raise TraceError(
            f"lift: the loop step, or its optimizer, changes {changed[0]!r} of a parameter group, or of itself, "
            f"which would happen once, while it is traced.\n"
            f"Change it between steps, which are then traced anew. What changes in every step must be a tensor in the "
            f"optimizer's state of a parameter."
        )


def _snapshot(optimizers: Sequence[Optimizer], inputs: Sequence[Group]) -> list[dict[str, Any]]:
    """What a step must leave as it is: the inputs by their identity and version, and all else as text."""
    version = lambda value: (
        id(value),
        [x._version for x in _entries(value) if isinstance(x, torch.Tensor)],
    )
    held = [
        {k: version(v) if k in given else repr(v) for k, v in group.items() if k != "params"}
        for group, given in zip(groups_of(optimizers), inputs)
    ]
    return [*held, *({k: repr(v) for k, v in _numbers_of(o).items()} for o in optimizers)]
