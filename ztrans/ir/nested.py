"""Find objects in nested lists, tuples and dicts, such as the arguments of an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

V = TypeVar("V")
# The types of most constants among the arguments of operations. Their values contain no others.
ATOMS = frozenset(
    {int, float, complex, bool, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def instances(tree: Any, kind: type[V]) -> list[V]:
    """Every object of a class in nested lists, tuples and dicts, in order.

    >>> instances([1, {"a": (2, "b")}], int)
    [1, 2]
    """
    if isinstance(tree, kind):
        return [tree]
    objects: list[V] = []
    if isinstance(tree, (list, tuple, Mapping)):
        items = tree.values() if isinstance(tree, Mapping) else tree
        for item in items:
            if isinstance(item, kind):
                objects.append(item)
            elif type(item) not in ATOMS:  # this saves a call for most items
                objects += instances(item, kind)
    return objects


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts.

    >>> len(tensors_in(([torch.ones(2)], {"alpha": torch.ones(())}, 3)))
    2
    """
    return instances(tree, torch.Tensor)
