"""The tensors of a module: its parameters, its buffers, and plain tensors in its attributes.

A plain tensor is not registered as a buffer: a mask, a rotary table, a noise schedule. It stands in an attribute, or in
a list, tuple or dict that is one. Nothing trains it, so a state has it among the buffers.

A tensor that autograd has computed, such as the last loss, is a result that a forward has stored. It is not a part of
the state. A tensor that a loop step uses and the module does not have is an error, which `explain_outside` words.
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
    """The buffers and plain tensors of a module by name. One that has several places is listed once.

    Those called `always` are listed even if autograd has computed them.
    """
    tensors = dict(model.named_buffers())
    ids = set(map(id, model.parameters()))
    ids.update(map(id, tensors.values()))
    for prefix, module in model.named_modules():
        for attribute, value in _attributes_with_tensors(module).items():
            for keys, x in _tensors_with_keys(value):
                name = ".".join(part for part in (prefix, attribute, *keys) if part)
                # What autograd has computed is the result of an earlier forward.
                is_state = x.grad_fn is None and x.layout is torch.strided
                if id(x) not in ids and (is_state or name in always):
                    ids.add(id(x))
                    tensors[name] = x
    return tensors


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a module by name."""
    return {**dict(model.named_parameters()), **buffers_of(model)}


def replace(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors of a module. `tensors` has the new ones by the ids of the old ones."""

    def replacement(x: torch.Tensor) -> torch.Tensor:
        return tensors.get(id(x), x)

    for module in model.modules():
        for attribute, value in _attributes_with_tensors(module).items():
            vars(module)[attribute] = pytree.tree_map_only(torch.Tensor, replacement, value)


@contextlib.contextmanager
def substituted(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let a module have other tensors inside. `tensors` has them by the ids of its own tensors.

    Afterwards it has its own again, in all attributes that had tensors before or have them then.
    """
    attributes_before = []
    for module in model.modules():
        attributes_before.append((module, dict(vars(module)), _attributes_with_tensors(module)))
    try:
        replace(model, tensors)
        yield
    finally:
        for module, attributes, with_tensors in attributes_before:
            for attribute in {**with_tensors, **_attributes_with_tensors(module)}:
                if attribute in attributes:
                    vars(module)[attribute] = attributes[attribute]
                else:
                    # It was assigned inside.
                    del vars(module)[attribute]


def _attributes_with_tensors(module: nn.Module) -> dict[str, Any]:
    """The attributes that have tensors. Parameters and buffers are entries of two dicts among them."""
    tensors = {}
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers") or _tensors_with_keys(value):
            tensors[attribute] = value
    return tensors


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
    """The error for a tensor that the lifted module does not have, or that was taken from it before.

    `module_tensors` has the tensors of the module.
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
