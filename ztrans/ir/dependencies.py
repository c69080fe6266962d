"""What equations need, and what depends on values; and for any values a group-by, a search, and a sort by needs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .graph import Eqn, Var

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
    visited = set(stack)
    while stack:
        x = stack.pop()
        yield x
        for y in following(x):
            if y not in visited:
                visited.add(y)
                stack.append(y)


def needed(eqns: Iterable[Eqn], makers: Mapping[Var, Eqn]) -> set[Eqn]:
    """Some equations, and all that they need: `makers` has the equations that compute values."""
    return set(reachable(eqns, lambda e: [makers[v] for v in e.ins if v in makers]))


def depending(eqns: Iterable[Eqn], values: Iterable[Var]) -> set[Var]:
    """Some values, and all that is computed from them; `eqns` are in an order in which they can run."""
    depends = set(values)
    for e in eqns:
        if not depends.isdisjoint(e.ins):
            depends.update(e.results)
    return depends


def sorted_by(key: Callable[[T], Any], needs: Mapping[T, Iterable[T]]) -> list[T]:
    """The keys of `needs` sorted by `key`, as far as each can follow all that it needs.

    >>> sorted_by(lambda n: n, {1: [3], 2: [], 3: [4], 4: []})
    [2, 4, 3, 1]
    """
    sorter = TopologicalSorter(needs)
    sorter.prepare()
    available: list[tuple[Any, T]] = []
    order: list[T] = []
    while sorter.is_active():
        for x in sorter.get_ready():
            heapq.heappush(available, (key(x), x))
        _, first = heapq.heappop(available)
        sorter.done(first)
        order.append(first)
    return order
