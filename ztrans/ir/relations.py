"""relations: values by a key that they share, and everything that is reached from some values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

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
