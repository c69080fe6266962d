"""The trees of a step's arguments and outputs, and the names of their leaves.

These are PyTorch's pytrees, with one difference. In a batch or an output, dataclasses and mappings that are not dicts,
such as the BatchEncoding of transformers, are containers too. Each is wrapped in a node type of our own, `Opened`,
which unflattens to the container.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .kept import WithKept
from .reads import is_constant


@dataclass(frozen=True)
class Opened:
    """A node whose children are the fields of a container."""

    container: Any


def opened(tree: Any) -> Any:
    """A tree with every dataclass and mapping as a node. Other leaves stay as they are.

    >>> from collections import UserDict
    >>> pytree.tree_leaves(opened([UserDict(a=1, b=[2, 3]), 4]))
    [1, 2, 3, 4]
    """
    if isinstance(tree, torch.Tensor) or not any(map(_is_container, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda x: Opened(x) if _is_container(x) else x, tree)


def named_outputs(output: Any) -> list[tuple[str, Any]]:
    """The leaves of an output, each with its name.

    Raises: TypeError for an object that is neither a tensor nor a constant, because it may hold tensors.
    """
    leaves_by_name = []
    for path, x in pytree.tree_leaves_with_path(opened(output)):
        name = f"the output{pytree.keystr(path)}"
        if not isinstance(x, torch.Tensor) and not is_constant(x):
            kind = type(x).__qualname__
            raise TypeError(
                f"trace: {name} is a {kind}, an object that is neither a tensor nor a constant.\n"
                f"Return its tensors in a dict or in a tuple, or make {kind} a dataclass."
            )
        leaves_by_name.append((name, x))
    return leaves_by_name


def _is_container(x: Any) -> bool:
    if isinstance(x, torch.Tensor | float | int | str):
        return False
    return isinstance(x, Mapping) or (
        dataclasses.is_dataclass(x) and not isinstance(x, type | Opened)
    )


def _fields(node: Opened) -> dict[str, Any]:
    container = node.container
    if isinstance(container, Mapping):
        return {key: opened(value) for key, value in container.items()}
    return {f.name: opened(getattr(container, f.name)) for f in dataclasses.fields(container)}


def _flatten(node: Opened) -> tuple[list[Any], tuple]:
    fields = _fields(node)
    return [*fields.values()], (type(node.container), tuple(fields))


def _flatten_with_keys(node: Opened) -> tuple[list[tuple[Any, Any]], tuple]:
    values, context = _flatten(node)
    return list(zip(map(pytree.MappingKey, context[1]), values)), context


def _unflatten(values: Any, context: tuple) -> Any:
    kind, names = context
    if issubclass(kind, Mapping):
        return kind(dict(zip(names, values)))
    # Not by the constructor: `__post_init__` has run before.
    container = object.__new__(kind)
    for name, value in zip(names, values):
        object.__setattr__(container, name, value)
    return container


def key_parts(keys: Sequence[Any]) -> list[str]:
    """The parts of a leaf's name: the keys, attributes and indices on its path.

    >>> [key_parts(keys) for keys, _ in pytree.tree_flatten_with_path({"params": [1, 2]})[0]]
    [['params', '0'], ['params', '1']]
    """
    return [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]


def _leaves_with_keys(tree: Any) -> list[tuple[Any, Any]]:
    """The leaves of a tree, each with the keys on its path. Those that transforms keep follow the user's state."""
    if isinstance(tree, WithKept):
        return [leaf for part in tree for leaf in _leaves_with_keys(part)]
    return pytree.tree_flatten_with_path(tree)[0]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their names.

    Raises: ValueError if two leaves have the same name.

    >>> named_leaves({"params": {"up": 1}, "lr": [2]})
    {'params.up': 1, 'lr.0': 2}
    """
    leaves_by_name: dict[str, Any] = {}
    for keys, leaf in _leaves_with_keys(tree):
        name = ".".join(key_parts(keys))
        if name in leaves_by_name:
            raise ValueError(
                f"two leaves of the state are called {name!r}: rename a key that has a dot."
            )
        leaves_by_name[name] = leaf
    return leaves_by_name


def leaf_names(parameters: Sequence[str], args: Sequence[Any]) -> tuple[list[str], list[str]]:
    """For each leaf, a short name, such as `params.weight`, and its path, `state.params.weight`.

    Programs use the names, and messages the paths. `parameters` are the names of the arguments. The first argument is
    the state.
    """
    short_names: list[str] = []
    paths: list[str] = []
    used_names: set[str] = set()
    for i, (parameter, arg) in enumerate(zip(parameters, args, strict=True)):
        for keys, _ in _leaves_with_keys(arg):
            parts = key_parts(keys)
            path = ".".join([parameter, *parts])
            paths.append(path)
            # A leaf of the state goes by its keys alone, if they make a name that no other leaf has.
            short = path
            if i == 0 and parts and parts[0] and not parts[0][0].isdigit():
                short = ".".join(parts)
            if short in used_names:
                short = path
            # An argument may have the same name as a leaf of the state, which transforms find by that name.
            while short in used_names:
                short = f"argument.{short}"
            short_names.append(short)
            used_names.add(short)
    return short_names, paths


pytree.register_pytree_node(
    Opened,
    _flatten,
    _unflatten,
    serialized_type_name="ztrans.Opened",
    flatten_with_keys_fn=_flatten_with_keys,
)
