"""Dependencies of equations and values, and general functions: group by key, search, and sort by dependencies."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .graph import Eqn, Var

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T", bound=Hashable)


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in order.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def reachable(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`starts` and everything reachable from them by `following`, each once.

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
    """The equations and all equations that they need; `makers` has the equation that computes each value."""
    return set(reachable(eqns, lambda e: [makers[v] for v in e.ins if v in makers]))


def components(pairs: Iterable[tuple[T, T]]) -> dict[T, T]:
    """For each member of the pairs, a member that stands for all that the pairs connect (union-find).

    >>> of = components([(1, 2), (3, 3), (4, 5), (5, 2)])
    >>> of[1] == of[4], of[1] == of[3]
    (True, False)
    """
    parents: dict[T, T] = {}

    def root(x: T) -> T:
        while parents[x] != x:
            parents[x] = x = parents[parents[x]]
        return x

    for x, y in pairs:
        parents.setdefault(x, x)
        parents.setdefault(y, y)
        parents[root(x)] = root(y)
    return {x: root(x) for x in parents}


def read_from_outside(eqns: Iterable[Eqn]) -> list[Var]:
    """The values that equations read and do not compute, in the order of their first readers."""
    eqns = list(eqns)
    computed = {v for e in eqns for v in e.results}
    read = dict.fromkeys(v for e in eqns for v in e.ins)
    return [v for v in read if v not in computed]


def depending(eqns: Iterable[Eqn], values: Iterable[Var]) -> set[Var]:
    """The values and all values computed from them. `eqns` are in an executable order."""
    dependent = set(values)
    for e in eqns:
        if any(v in dependent for v in e.ins):
            dependent.update(e.results)
    return dependent


def sorted_by(key: Callable[[T], Any], needs: Mapping[T, Iterable[T]]) -> list[T]:
    """The keys of `needs` sorted by `key`, as far as each can follow everything that it needs.

    >>> sorted_by(lambda n: n, {1: [3], 2: [], 3: [4], 4: []})
    [2, 4, 3, 1]
    """
    missing: dict[T, int] = {}  # how many of its needs are not in the order yet
    followers: dict[T, list[T]] = {}
    for x, needed_before in needs.items():
        distinct = set(needed_before)
        missing[x] = len(distinct)
        for y in distinct:
            followers.setdefault(y, []).append(x)
    available = [(key(x), x) for x, count in missing.items() if count == 0]
    heapq.heapify(available)
    order: list[T] = []
    while available:
        _, first = heapq.heappop(available)
        order.append(first)
        for x in followers.get(first, ()):
            missing[x] -= 1
            if missing[x] == 0:
                heapq.heappush(available, (key(x), x))
    if len(order) < len(needs):
        raise ValueError("sorted_by: some keys need each other in a circle.")
    return order
