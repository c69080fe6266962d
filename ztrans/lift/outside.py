"""Outside: tensors that a loop step uses and the lifted module does not have, and where the loop step finds them."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..tracing.errors import OutsideTensorError, TraceError
from .module_tensors import tensors_of

AVERAGE = (
    "It reads its count of updates to choose how it updates. Keep the average as a second module of the loop:\n"
    "  average = copy.deepcopy(model)                                       # before lift\n"
    '  lift(loop_step, nn.ModuleDict({"model": model, "average": average}), optimizer)\n'
    "  for a, p in zip(average.parameters(), model.parameters()): a.data.lerp_(p.data, 0.1)  # in the loop step"
)
_MOST_VALUES = 10_000  # that are searched for a message


class _Found(NamedTuple):
    """Where a tensor was found: the name of a variable or attribute, and the module there that has it."""

    name: str
    module: nn.Module | None = None


def explained(
    error: OutsideTensorError, loop_step: Callable, module_tensors: Mapping[str, torch.Tensor]
) -> TraceError:
    """The error for a tensor that the lifted module does not have, or that was taken from it before.

    `module_tensors` has the tensors of the module.
    """
    line = "\n".join(text for text in str(error).splitlines() if text.startswith("  "))
    for name, x in module_tensors.items():
        if x is error.tensor:
            return TraceError(
                f"lift: the loop step uses {name} as it was taken from the module before. While the loop runs another "
                f"tensor stands in for it, and this one has no effect.\n{line}\n"
                f"Take tensors from the module inside the loop step: model.parameters()."
            )
    found = _find(loop_step, error.tensor)
    if found is None:
        return error
    if isinstance(found.module, AveragedModel):
        return TraceError(
            f"lift: the loop step updates {found.name}, an AveragedModel.\n{line}\n{AVERAGE}"
        )
    if found.module is not None:
        key = found.name.rpartition(".")[2]
        return TraceError(
            f"lift: the loop step uses {found.name}, a module that is not a part of the lifted one.\n{line}\n"
            f'Lift both in one: lift(loop_step, nn.ModuleDict({{"model": model, "{key}": {found.name}}}), optimizer). '
            f"The optimizer decides what is trained."
        )
    return TraceError(
        f"lift: the loop step reads {found.name}, a tensor {list(error.tensor.shape)} that the lifted module does not "
        f"have.\n{line}\n"
        f"Make a table or a mask an attribute of the module before lift, and read it there, or pass it with the batch."
    )


def _find(loop_step: Callable, tensor: torch.Tensor) -> _Found | None:
    """Search the variables of a function, and what they refer to, for a tensor."""
    waiting: list[tuple[str, Any]] = [("", loop_step)]
    seen = set[int]()
    for name, value in waiting:  # which grows meanwhile
        if id(value) in seen or len(seen) > _MOST_VALUES:
            continue
        seen.add(id(value))
        if value is tensor:
            return _Found(name)
        if isinstance(value, nn.Module) and any(x is tensor for x in tensors_of(value).values()):
            return _Found(name, value)
        waiting += _parts(name, value)
    return None


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a value refers to, with names as in the code of the user."""
    if isinstance(value, types.FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            try:
                yield variable, cell.cell_contents
            except ValueError:  # nothing has been assigned yet
                continue
        for variable in value.__code__.co_names:
            if variable in value.__globals__:
                yield variable, value.__globals__[variable]
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield name, value.__func__
    elif isinstance(value, Mapping):
        for key, x in list(value.items()):
            yield f"{name}[{key!r}]", x
    elif isinstance(value, list | tuple):
        for position, x in enumerate(value):
            yield f"{name}[{position}]", x
    elif not isinstance(value, type | types.ModuleType | torch.Tensor | str | int | float | bool):
        for attribute, x in list(getattr(value, "__dict__", {}).items()):
            yield f"{name}.{attribute}" if name else attribute, x
