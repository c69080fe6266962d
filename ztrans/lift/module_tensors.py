"""The tensors of a module: its parameters, its buffers, and plain tensors in its attributes.

A plain tensor is not registered as a buffer: a mask, a rotary table, a noise schedule. It stands in an attribute, or in
a list, tuple or dict that is one. Nothing trains it, so a state has it among the buffers.

A tensor that autograd has computed, such as the last loss, is what a forward has left behind. It is not a part of the
state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_REGISTERED = ("_parameters", "_buffers", "_modules")


def buffers_of(model: nn.Module, always: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """The buffers and plain tensors of a module by name. One that has several places is listed once.

    Those called `always` are listed even if autograd has computed them.
    """
    found = dict(model.named_buffers())
    seen = {id(x) for x in (*model.parameters(), *found.values())}
    for prefix, module in model.named_modules():
        for attribute, value in _plain_attributes(module):
            for key, x in _entries(value):
                name = ".".join(part for part in (prefix, attribute, key) if part)
                is_kept = name in always or (x.grad_fn is None and x.layout is torch.strided)
                if id(x) not in seen and is_kept:
                    seen.add(id(x))
                    found[name] = x
    return found


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a module by name."""
    return {**dict(model.named_parameters()), **buffers_of(model)}


def replace(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> None:
    """Give a module other tensors, by the ids of those that it has."""
    for module in model.modules():
        for attribute, value in _attributes_with_tensors(module).items():
            vars(module)[attribute] = _with_others(value, tensors)


@contextlib.contextmanager
def substituted(model: nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let a module have other tensors inside, by the ids of those that it has.

    Afterwards it has its own again, in all attributes that have tensors.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        replace(model, tensors)
        yield
    finally:
        for module, attributes in before:
            for attribute in _attributes_with_tensors(module):
                if attribute in attributes:
                    vars(module)[attribute] = attributes[attribute]
                else:  # assigned inside
                    del vars(module)[attribute]


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(vars(module).items()):
        if attribute not in _REGISTERED and _entries(value):
            yield attribute, value


def _attributes_with_tensors(module: nn.Module) -> dict[str, Any]:
    """The attributes that have tensors; parameters and buffers are entries of two dicts among them."""
    registered = {name: vars(module)[name] for name in ("_parameters", "_buffers")}
    return {**registered, **dict(_plain_attributes(module))}


def _entries(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in the value of an attribute, each with its key or position."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return []
    return [(str(key), x) for key, x in items if isinstance(x, torch.Tensor)]


def _with_others(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """The value of an attribute with other tensors, in a container of its own."""

    def other(x: Any) -> Any:
        return tensors.get(id(x), x)

    if isinstance(value, dict | list):
        replaced = copy.copy(value)  # of the same class
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            replaced[key] = other(x)
        return replaced
    if isinstance(value, tuple):
        members = [other(x) for x in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    return other(value)
