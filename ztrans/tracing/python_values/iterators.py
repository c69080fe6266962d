"""Iterators: refuse that a step takes the next value of an iterator of its caller, which only its trace would do."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from ...ir.source import user_source
from ..errors import advances
from .own import is_own


class Stopped:
    """An iterator in the place of another one of the caller, which would advance only while a step is traced."""

    def __init__(self, iterator: Any, name: str, step: str) -> None:
        self._iterator, self._name, self._step = iterator, name, step

    def __iter__(self) -> Stopped:
        return self

    def __next__(self) -> Any:
        raise advances(self._name, user_source(2), self._step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator that does not show by an attribute that it advances, and no file."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_own(type(value))
