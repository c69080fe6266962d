"""Python's global state inside a context: attributes of the objects of a library, and garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Let attributes of `owner` have other values inside. What it inherited before, it inherits afterwards.

    >>> with patched(owner := type("Owner", (), {"size": 1})(), size=2):
    ...     owner.size
    2
    >>> owner.size, vars(owner)
    (1, {})
    """
    before = {name: getattr(owner, name) for name in values}
    inherited = values.keys() - vars(owner).keys()
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
        # A property keeps its value elsewhere.
        for name in inherited & vars(owner).keys():
            delattr(owner, name)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage inside the context.

    Each collection would walk the growing graph, and the time of a trace would be quadratic in its length.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
