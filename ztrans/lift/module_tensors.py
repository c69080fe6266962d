"""The tensors of a module: its parameters, its buffers, and plain tensors in its attributes.

A plain tensor is not registered as a buffer: a mask, a rotary table, a noise schedule. It is an attribute, or an entry
of an attribute that is a list, tuple or dict. Nothing trains it, so it is among the buffers of a state.

A tensor that autograd has computed, such as the last loss, is a stored result of a forward, and is not part of the
state. If a loop step uses a tensor that the module does not have, `explain_outside` writes the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..calling.reads import Reads
from ..calling.trees import key_parts
from ..tracing.errors import OutsideTensorError, TraceError


def buffers_of(model: nn.Module, always: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """The buffers and plain tensors of a module by name. A tensor in several places is listed once.

    Tensors with names in `always` are listed even if autograd has computed them.
    """
    tensors = dict(model.named_buffers())
    ids = set(map(id, model.parameters()))
    ids.update(map(id, tensors.values()))
    for prefix, module in model.named_modules():
        for attribute, value in _attributes_with_tensors(module).items():
            for keys, x in _tensors_with_keys(value):
                name = ".".join(part for part in (prefix, attribute, *keys) if part)
                # A tensor with a grad_fn is the result of an earlier forward.
                is_state = x.grad_fn is None and x.layout is torch.strided
                if id(x) not in ids and (is_state or name in always):
                    ids.add(id(x))
                    tensors[name] = x
    return tensors


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a module by name."""
    return {**dict(model.named_parameters()), **buffers_of(model)}


def replace(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors of a module. `tensors` has the new tensors by the ids of the old ones."""

    def replacement(x: torch.Tensor) -> torch.Tensor:
        return tensors.get(id(x), x)

    for module in model.modules():
        for attribute, value in _attributes_with_tensors(module).items():
            vars(module)[attribute] = pytree.tree_map_only(torch.Tensor, replacement, value)


@contextlib.contextmanager
def substituted(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace tensors of a module inside the context. `tensors` has the new tensors by the ids of the old ones.

    Afterwards all attributes that had tensors before, or have tensors then, are restored.
    """
    snapshots = []
    for module in model.modules():
        snapshots.append((module, dict(vars(module)), _attributes_with_tensors(module)))
    try:
        replace(model, tensors)
        yield
    finally:
        for module, old_attributes, old_tensors in snapshots:
            for attribute in {**old_tensors, **_attributes_with_tensors(module)}:
                if attribute in old_attributes:
                    vars(module)[attribute] = old_attributes[attribute]
                else:
                    # It was assigned inside the context.
                    del vars(module)[attribute]


def _attributes_with_tensors(module: nn.Module) -> dict[str, Any]:
    """The attributes that hold tensors. Two of them are the dicts of the parameters and of the buffers."""
    attributes = {}
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers") or _tensors_with_keys(value):
            attributes[attribute] = value
    return attributes


def _tensors_with_keys(value: Any) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors in the value of an attribute, each with the keys that lead to it."""
    tensors = []
    for keys, x in pytree.tree_leaves_with_path(value):
        if isinstance(x, torch.Tensor):
            tensors.append((key_parts(keys), x))
    return tensors


def explain_outside(
    error: OutsideTensorError, loop_step: Callable, module_tensors: Mapping[str, torch.Tensor]
) -> TraceError:
    """The error for a tensor that the lifted module does not have, or that was read from it before the loop step.

    Args:
        error: the error of the trace.
        loop_step: the body of the loop.
        module_tensors: the module's own tensors, by name.
    """
    # The lines of the trace's error that say where the tensor is used.
    line = "\n".join(text for text in str(error).splitlines() if text.startswith("  "))
    for name, x in module_tensors.items():
        if x is error.tensor:
            return TraceError(
                f"lift: the loop step uses {name} as it was taken from the module before. While the loop runs another "
                f"tensor stands in for it, and this one has no effect.\n{line}\n"
                f"Take tensors from the module inside the loop step: model.parameters()."
            )
    for name, value in Reads(loop_step).present():
        if isinstance(value, nn.Module) and _has(value, error.tensor):
            key = name.rpartition(".")[2]
            return TraceError(
                f"lift: the loop step uses {name}, a module that is not a part of the lifted one.\n{line}\n"
                f'Lift both in one: lift(loop_step, nn.ModuleDict({{"model": model, "{key}": {name}}}), optimizer). '
                f"The optimizer decides what is trained."
            )
        if any(x is error.tensor for _, x in _tensors_with_keys(value)):
            return TraceError(
                f"lift: the loop step reads {name}, a tensor {list(error.tensor.shape)} that the lifted module does "
                f"not have.\n{line}\n"
                f"Make a table or a mask an attribute of the module before lift, and read it there, or pass it with "
                f"the batch."
            )
    return error


def _has(module: nn.Module, tensor: torch.Tensor) -> bool:
    return any(x is tensor for x in tensors_of(module).values())
