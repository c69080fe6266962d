"""Containers: batches and outputs in containers that PyTorch's pytrees do not know.

A dataclass, and a mapping that is no dict (such as the BatchEncoding of transformers), count as leaves of a pytree.
`opened` wraps each in a node whose children are its fields. The node unflattens to a container of the same class, so a
step gets what it was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Opened:
    """A container whose fields are the children of a node."""

    container: Any


def opened(tree: Any) -> Any:
    """A tree in which every dataclass and mapping is a node. Other leaves stay as they are.

    >>> from collections import UserDict
    >>> pytree.tree_leaves(opened([UserDict(a=1, b=[2, 3]), 4]))
    [1, 2, 3, 4]
    """
    if isinstance(tree, torch.Tensor) or not any(map(_is_container, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda x: Opened(x) if _is_container(x) else x, tree)


def _is_container(x: Any) -> bool:
    if isinstance(x, torch.Tensor | float | int | str):
        return False
    return isinstance(x, Mapping) or (dataclasses.is_dataclass(x) and not isinstance(x, type | Opened))


def _fields(node: Opened) -> dict[str, Any]:
    container = node.container
    if isinstance(container, Mapping):
        return {k: opened(v) for k, v in container.items()}
    return {f.name: opened(getattr(container, f.name)) for f in dataclasses.fields(container)}


def _flatten(node: Opened) -> tuple[list[Any], tuple]:
    fields = _fields(node)
    return [*fields.values()], (type(node.container), tuple(fields))


def _flatten_with_keys(node: Opened) -> tuple[list[tuple[Any, Any]], tuple]:
    fields = _fields(node)
    return [(pytree.MappingKey(k), v) for k, v in fields.items()], (type(node.container), tuple(fields))


def _unflatten(values: Any, context: tuple) -> Any:
    kind, names = context
    if issubclass(kind, Mapping):
        return kind(dict(zip(names, values)))
    container = object.__new__(kind)  # without `__post_init__`, which has run before
    for name, value in zip(names, values):
        object.__setattr__(container, name, value)
    return container


pytree.register_pytree_node(
    Opened, _flatten, _unflatten, serialized_type_name="ztrans.Opened", flatten_with_keys_fn=_flatten_with_keys
)
