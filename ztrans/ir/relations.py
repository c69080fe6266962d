"""relations: values by a key that they share, leaves by their names, and all that is reached from some values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils import _pytree as pytree

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T", bound=Hashable)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Values by their key, in order.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def reachable(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`starts` and everything that follows, each once.

    >>> list(reachable([12], lambda n: [n // 2, n // 3] if n > 3 else []))
    [12, 4, 1, 2, 6, 3]
    """
    stack = list(dict.fromkeys(starts))
    seen = set(stack)
    while stack:
        x = stack.pop()
        yield x
        for y in following(x):
            if y not in seen:
                seen.add(y)
                stack.append(y)


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


def instances(tree: Any, kind: type[V]) -> Iterator[V]:
    """Every object of a class in nested lists, tuples and dicts, in order.

    >>> list(instances([1, {"a": (2, "b")}], int))
    [1, 2]
    """
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (list, tuple, Mapping)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from instances(item, kind)
