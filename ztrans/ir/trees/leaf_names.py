"""Leaf names: the leaves of a state, and of a batch, by the keys on the way to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from .empty_subtrees import none_as_empty


def key_parts(keys: Sequence[Any]) -> list[str]:
    """The parts of a leaf's name: the keys, attributes and indices on the way to it.

    >>> [key_parts(keys) for keys, _ in pytree.tree_flatten_with_path({"params": [1, 2]})[0]]
    [['params', '0'], ['params', '1']]
    """
    return [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their names. None has no leaf, and so no name.

    Raises: ValueError if two leaves have the same name.

    >>> named_leaves({"params": {"up": 1}, "lr": [2]})
    {'params.up': 1, 'lr.0': 2}
    """
    named: dict[str, Any] = {}
    for keys, leaf in pytree.tree_flatten_with_path(none_as_empty(tree))[0]:
        name = ".".join(key_parts(keys))
        if name in named:
            raise ValueError(f"two leaves of the state are called {name!r}: rename a key that has a dot.")
        named[name] = leaf
    return named


def leaf_names(fn: Callable, args: tuple, names: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """For each leaf, a short name (`params.fc1.weight`, `batch.x`) and its path in messages (`state.params...`).

    `names` are the names of the last arguments, which are passed by name.
    """
    short_names: list[str] = []
    paths: list[str] = []
    taken: set[str] = set()
    for i, (parameter, arg) in enumerate(zip([*_parameters(fn, len(args) - len(names)), *names], args)):
        for keys, _ in pytree.tree_flatten_with_path(none_as_empty(arg) if i == 0 else arg)[0]:
            parts = key_parts(keys)
            path = ".".join([parameter, *parts])
            paths.append(path)
            short = ".".join(parts) if i == 0 and parts and not parts[0][0].isdigit() else path
            short_names.append(short if short not in taken else path)
            taken.add(short_names[-1])
    return short_names, paths


def _parameters(fn: Callable, count: int) -> list[str]:
    """The names of the parameters that the first `count` positional arguments belong to."""
    try:
        declared = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        declared = []
    named = [p.name for p in declared if p.kind is not inspect.Parameter.KEYWORD_ONLY][:count]
    return named + [f"arg{i}" for i in range(len(named), count)]
