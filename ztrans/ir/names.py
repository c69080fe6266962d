"""Names: what the leaves of a state are called in programs, errors and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree


def key_parts(keys: Sequence[Any]) -> list[str]:
    """The parts of a leaf's name: the keys, attributes and indices on the way to it.

    >>> [key_parts(keys) for keys, _ in pytree.tree_flatten_with_path({"params": [1, 2]})[0]]
    [['params', '0'], ['params', '1']]
    """
    return [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their names.

    Raises: ValueError if two leaves have the same name.

    >>> named_leaves({"params": {"up": 1}, "lr": [2]})
    {'params.up': 1, 'lr.0': 2}
    """
    named: dict[str, Any] = {}
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = ".".join(key_parts(keys))
        if name in named:
            raise ValueError(f"two leaves of the state are called {name!r}: rename a key that has a dot.")
        named[name] = leaf
    return named
