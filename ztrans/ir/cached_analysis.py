"""A decorator that caches the results of an analysis on the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

G = TypeVar("G")
P = ParamSpec("P")
V = TypeVar("V")


def cached_on_graph(analysis: Callable[Concatenate[G, P], V]) -> Callable[Concatenate[G, P], V]:
    """Cache the results of an analysis on the object that it analyses, such as a program.

    The object must be frozen. A later call with the same arguments returns the same result, so callers must not change
    it. The results are freed with the object.

    >>> from types import SimpleNamespace
    >>> total = cached_on_graph(lambda subject: print("adds") or sum(subject.numbers))
    >>> subject = SimpleNamespace(numbers=(1, 2, 3))
    >>> total(subject), total(subject)
    adds
    (6, 6)
    """

    @functools.wraps(analysis)
    def cached(subject: G, *args: P.args, **kwargs: P.kwargs) -> V:
        results = vars(subject).setdefault("_results", {})
        key = analysis, args, tuple(kwargs.items())
        if key not in results:
            results[key] = analysis(subject, *args, **kwargs)
        return results[key]

    return cached
