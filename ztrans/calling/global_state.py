"""Change global state inside a context: attributes of a library's objects, and garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` inside the context. Attributes that it inherited are inherited again afterwards.

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
        # A property stores its value elsewhere, so `vars(owner)` may not have the name.
        for name in inherited & vars(owner).keys():
            delattr(owner, name)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection inside the context.

    Each collection would walk the growing graph, so the time of a trace would be quadratic in its length.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
