"""Captured: the values that a program is specialised on besides the arguments of its step.

In a program, the numbers, strings and truth values that a step reads from its closure, from globals, from defaults,
and from attributes of modules and objects are constants. A program also depends on PyTorch's global state (see
`ambient`). The places of these values are determined once (see `reached`). At every call the values are read and
compared.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from ..ir.ambient import ambient
from .reached import LONGEST, Reach, is_own, reach

_CONSTANTS = frozenset(
    [int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
_LEVEL = 10  # a container counts as so many entries itself, which bounds how deeply nested containers are read
_LONGEST_TEXT = 80  # characters of a container in a message
_CONTAINERS = (list, tuple, dict, set, frozenset)


class Key(NamedTuple):
    """The values that a program is specialised on besides its arguments: calls with equal keys share one program."""

    reach: int  # the number of the list of places that was read
    values: tuple  # the values at these places
    ambient: tuple  # PyTorch's global state
    settings: Any  # the settings of a lifted loop


@dataclass(frozen=True)
class Captured:
    """The values that the step `fn` reads besides its arguments.

    A lifted loop adds `settings` of its module and its optimizers. When a function or an object is replaced by
    another one, the places that can be reached change. So there may be several lists of places.
    """

    fn: Callable
    _reaches: list[tuple[Reach, list]] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def key(self) -> Key:
        """The present values."""
        settings = getattr(self.fn, "settings", None)
        return Key(*self._read(), tuple(ambient().items()), settings() if settings is not None else None)

    def reach(self) -> Reach:
        """The places that the step reads at present."""
        return self._reaches[self._read()[0]][0]

    def _read(self) -> tuple[int, tuple]:
        """The number of the list of places that applies at present, and the values at these places."""
        for number, (known, objects) in reversed(list(enumerate(self._reaches))):
            values, now = _values(known)
            if len(now) == len(objects) and all(map(operator.is_, now, objects)):
                return number, values
        reached = reach(self.fn)
        values, objects = _values(reached)
        self._reaches.append((reached, objects))
        return len(self._reaches) - 1, values

    def changes(self, before: Key, now: Key) -> list[str]:
        """The differences between two keys, each in words."""
        ambients = zip(before.ambient, now.ambient)
        changes = [f"{name} was {old} and is {new}" for (name, old), (_, new) in ambients if old != new]
        if before.settings != now.settings:
            changes.append("a setting of the module or of an optimizer has changed")
        known, objects = self._reaches[before.reach]
        kept = {id(x) for x in objects}
        for place, old in zip(known.places, before.values):
            (new, held), line = constants(place.read()), f" ({place.source})" if place.source else ""
            if old != new:
                changes.append(f"{place.name} was {_shown(old)} and is {_shown(new)}{line}")
            elif any(id(x) not in kept for x in held):
                changes.append(f"{place.name} is another object{line}")
        return changes


def _values(reached: Reach) -> tuple[tuple, list]:
    """The values at all places, and the functions and objects among them."""
    values, objects = [], []
    for place in reached.places:
        value, more = constants(place.read())
        values.append(value)
        objects += more
    return tuple(values), objects


def constants(value: Any) -> tuple[Any, list]:
    """The constants in a value, each with its type, and the functions and objects in the value."""
    reading = _Reading([])
    return _value(value, reading), reading.objects


@dataclass
class _Reading:
    """The functions and objects in a value, and how many entries may still be read: a large value is data."""

    objects: list
    left: int = LONGEST


def _value(value: Any, reading: _Reading) -> Any:
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, numpy.ndarray):
        return kind, (value.dtype.str, value.shape, value.tobytes() if value.size <= LONGEST else None)
    if isinstance(value, _CONTAINERS):
        reading.left -= len(value) + _LEVEL
        if reading.left < 0:
            return kind, len(value)
        if isinstance(value, dict):
            return kind, tuple([(k, _value(x, reading)) for k, x in value.items()])
        items = [_value(x, reading) for x in value]
        return kind, frozenset(items) if isinstance(value, set | frozenset) else tuple(items)
    if isinstance(value, numbers.Number | enum.Enum):
        return kind, value
    if (callable(value) or is_own(kind)) and not isinstance(value, weakref.ref):
        reading.objects.append(value)
    return None


def _shown(value: Any) -> str:
    """A value as error messages show it."""
    kind: Any
    content: Any
    kind, content = value or (object, None)
    if kind in _CONSTANTS or isinstance(content, numbers.Number | enum.Enum):
        return repr(content)
    if isinstance(content, tuple) and issubclass(kind, dict):
        text = "{" + ", ".join(f"{k!r}: {_shown(x)}" for k, x in content) + "}"
    elif issubclass(kind, numpy.ndarray):
        text = f"an array {list(content[1])}"
    elif isinstance(content, tuple | frozenset):
        text = f"[{', '.join(map(_shown, content))}]"
    else:
        text = "an object"
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
