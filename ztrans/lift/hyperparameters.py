"""Divide the values in the parameter groups of optimizers into inputs and constants of a program.

Every call reads the groups, so the next step uses the values that a scheduler has set. Floats, tuples of floats, and
tensors are inputs. Whole numbers, bools, None and text are constants. So is the sign of each float, because an
optimizer leaves out a term whose factor is zero. A learning rate is an input even if it is a whole number, and its sign
is not a constant: no optimizer leaves out the step.

If a loop step changed a hyperparameter, or stepped a scheduler, that would happen once, while it is traced. `unchanged`
and `schedulers_refused` refuse it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..calling.global_state import patched
from ..calling.signature import is_number
from ..ir.source import user_source, where
from ..tracing.errors import TraceError

ParamGroup = dict[str, Any]

# The coefficients of Muon's polynomial: `torch.addmm` takes them by value, so they are constants.
_KEYS_BY_VALUE = ("ns_coefficients",)
_PLAIN = (bool, int, str, type(None))


def groups_of(optimizers: Sequence[Optimizer]) -> list[ParamGroup]:
    """The parameter groups of all optimizers, one after another."""
    groups: list[ParamGroup] = []
    for optimizer in optimizers:
        groups += optimizer.param_groups
    return groups


def inputs_of(optimizers: Sequence[Optimizer]) -> list[ParamGroup]:
    """For each group, the present values of its inputs, by key."""
    inputs = []
    for group in groups_of(optimizers):
        values = {}
        for key, value in group.items():
            # Every step asks for every value, so floats, bools and None take no call.
            kind = type(value)
            if kind is float:
                values[key] = value
            elif key == "params" or (kind in _PLAIN and key != "lr"):
                continue
            elif _is_input(key, value):
                values[key] = _as_input(value)
        inputs.append(values)
    return inputs


def constants_of(optimizers: Sequence[Optimizer]) -> Hashable:
    """For each group, its parameters, its constants, and the signs of its floats."""
    constants: list[Hashable] = []
    for group in groups_of(optimizers):
        for key, value in group.items():
            kind = type(value)
            constant: Hashable
            if key == "params":
                # By identity: with another parameter in a group, the step has another program.
                constant = tuple(map(id, value))
            elif key == "lr":
                # A schedule may begin or end at zero, so the sign of a rate is not a constant.
                constant = kind is float or _is_input(key, value) or repr(value)
            elif kind in _PLAIN:
                constant = kind, value
            elif kind is float:
                constant = ((value > 0) - (value < 0),)
            elif _is_input(key, value):
                constant = tuple(map(_sign, _entries(value)))
            else:
                constant = repr(value)
            constants.append((key, constant))
    return tuple(constants)


def numbers_of_groups(
    groups: Sequence[ParamGroup], inputs: Sequence[ParamGroup]
) -> Iterator[tuple[Any, int | None]]:
    """Each input that stands for a number of a group, with the sign of the number. For a learning rate it is None."""
    for group, stand_ins in zip(groups, inputs):
        for key, stand_in in stand_ins.items():
            for x, number in zip(_entries(stand_in), _entries(group[key])):
                if is_number(number):
                    yield x, None if key == "lr" else _sign(number)


def _is_input(key: str, value: Any) -> bool:
    if type(value) in _PLAIN:
        return key == "lr" and type(value) is int
    if key in _KEYS_BY_VALUE:
        return False
    entries = _entries(value)
    if {*map(type, entries)} == {float}:  # such as betas
        return True
    if any(isinstance(x, torch.Tensor) for x in entries):
        return True
    # A tuple of whole numbers is a constant, like a whole number.
    return any(map(_is_float, entries)) and all(map(is_number, entries))


def _as_input(value: Any) -> Any:
    """A hyperparameter with its numbers as floats, so that a rate of 1 has the same program as a rate of 0.5."""
    if type(value) is float:
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_as_input, value))
    return float(value) if is_number(value) else value


def _entries(value: Any) -> Sequence[Any]:
    """The numbers or tensors in a hyperparameter, such as both of the betas."""
    return value if isinstance(value, tuple | list) else (value,)


def _is_float(value: Any) -> bool:
    return type(value) is float or (is_number(value) and not isinstance(value, Integral))


def _sign(value: Any) -> int | None:
    """The sign of a number; None for a tensor."""
    if type(value) is float or is_number(value):
        return (value > 0) - (value < 0)
    return None


@contextlib.contextmanager
def unchanged(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Refuse changes of parameter groups inside the context.

    Raises: TraceError that names a changed hyperparameter, such as the rate if a scheduler has stepped.
    """
    names = [type(optimizer).__name__ for optimizer in optimizers for _ in optimizer.param_groups]
    snapshot = _snapshot(optimizers)
    yield
    for name, old, new in zip(names, snapshot, _snapshot(optimizers)):
        for key in new:
            if new[key] != old.get(key):
                raise TraceError(
                    f"lift: the loop step, or its optimizer {name}, changes {key!r} of a parameter group, which would "
                    f"happen once, while it is traced.\n"
                    f"Set it between steps: each call reads the groups. A scheduler steps after the lifted step. What "
                    f"an optimizer changes in every step must be a tensor in its state of a parameter."
                )


def _snapshot(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The values of the groups for a comparison: tensors by identity and version, all other values as text."""
    snapshot = []
    for group in groups_of(optimizers):
        values = {}
        for key, value in group.items():
            if key == "params":
                continue
            tensors = [x for x in _entries(value) if isinstance(x, torch.Tensor)]
            values[key] = [(id(x), x._version) for x in tensors] if tensors else repr(value)
        snapshot.append(values)
    return snapshot


@contextlib.contextmanager
def schedulers_refused() -> Iterator[None]:
    """Refuse every use of a scheduler inside the context: a program would always have the rate of its trace."""

    def refuse(scheduler: LRScheduler, name: str) -> Any:
        if name.startswith("__") and name != "__dict__":
            return object.__getattribute__(scheduler, name)
        raise TraceError(
            f"lift: the loop step uses a scheduler, {type(scheduler).__name__} ({name}), and what it reads there would "
            f"be a constant of its program.\n"
            f"  at {where(user_source())}\n"
            f"Step the scheduler after the lifted step, and read the rate of the call in the loop step: "
            f"optimizer.param_groups[0]['lr']."
        )

    with patched(LRScheduler, __getattribute__=refuse):
        yield
