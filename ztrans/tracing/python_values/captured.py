"""Captured: the values that a program is specialised on besides the arguments of its step.

In a program, the numbers, strings and truth values that a step reads from its closure, from globals, from defaults,
and from attributes of modules and objects are constants. A program also depends on PyTorch's global state (see
`ambient`). The places of these values are determined once (see `reached`). At every call the values are read and
compared.
"""

from __future__ import annotations

import collections
import enum
import functools
import numbers
import operator
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.optim.lr_scheduler import LRScheduler

from ...calling.call import ExtraInputs
from ...ir.ambient import ambient
from .own import is_own
from .reached import CONTAINERS, LONGEST, Reach, reach

_CONSTANTS = frozenset(
    [int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
_DEEPEST = 100  # levels of nested containers that are read; a container may contain itself
_MOST_OBJECTS = 64
_OBJECTS: dict[int, Captured] = {}  # what is read in the last arguments that are functions or objects, by their ids
_LONGEST_TEXT = 80  # characters of a container in a message
_READ = (*CONTAINERS, collections.deque, Mapping)  # whose entries are compared
_CHANGING = (*_READ, numpy.ndarray)


@dataclass(frozen=True)
class Key:
    """The values that a program is specialised on besides its arguments: calls with equal keys share one program."""

    reach: int  # the number of the list of places that was read
    values: tuple  # the values at these places
    ambient: tuple  # PyTorch's global state
    settings: Any  # the settings of a lifted loop

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.reach, self.values, self.ambient, self.settings))

    def __hash__(self) -> int:
        return self._hash


class Captured:
    """The values that the step `fn` reads besides its arguments.

    A lifted loop adds `settings` of its module and its optimizers. When a function or an object is replaced by
    another one, the places that can be reached change. So there may be several lists of places.
    """

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        self._readings: list[_Readings] = []
        self._last: Key | None = None

    def key(self) -> Key:
        """The present values. While they stay the same, so does the key."""
        settings = self.fn.constants() if isinstance(self.fn, ExtraInputs) else None
        key = Key(*self.read(), tuple(ambient().items()), settings)
        if self._last is None or key != self._last:
            self._last = key
        return self._last

    def reach(self) -> Reach:
        """The places that the step reads at present."""
        return self._readings[self.read()[0]].reach

    def read(self) -> tuple[int, tuple]:
        """The number of the list of places that applies at present, and the values at these places."""
        for number, readings in reversed(list(enumerate(self._readings))):
            values = readings.read()
            if values is not None:
                return number, values
        self._readings.append(_Readings(reach(self.fn)))
        return len(self._readings) - 1, self._readings[-1].values

    def changes(self, before: Key, now: Key) -> list[str]:
        """The differences between two keys, each in words."""
        ambients = zip(before.ambient, now.ambient)
        changes = [f"{name} was {old} and is {new}" for (name, old), (_, new) in ambients if old != new]
        if before.settings != now.settings:
            changes.append("a setting of the module or of an optimizer has changed")
        readings = self._readings[before.reach]
        kept = {id(x) for x in readings.objects}
        for place, old in zip(readings.reach.places, before.values):
            (new, held), line = constants(place.read()), f" ({place.source})" if place.source else ""
            if old != new:
                changes.append(f"{place.name} was {_shown(old)} and is {_shown(new)}{line}")
            elif any(id(x) not in kept for x in held):
                changes.append(f"{place.name} is another object{line}")
        return changes


def read_in(x: Any) -> tuple | None:
    """The values that a step may read in an argument that is a function, a module or an object of the user."""
    if isinstance(x, torch.Tensor | type) or not (callable(x) or is_own(type(x))):
        return None
    if id(x) not in _OBJECTS:
        if len(_OBJECTS) == _MOST_OBJECTS:
            _OBJECTS.clear()
        _OBJECTS[id(x)] = Captured(x)
    return _OBJECTS[id(x)].read()


class _Readings:
    """The places of one list, with what was read there last.

    A value is examined again only if it is another object, or a container whose entries are other objects.
    """

    def __init__(self, reached: Reach) -> None:
        self.reach = reached
        self._reads = [place.read for place in reached.places]
        self._raw: list[Any] = [read() for read in self._reads]
        self._containers = _containers(self._raw)
        examined = list(map(constants, self._raw))
        self.values = tuple(value for value, _ in examined)
        self._objects = [objects for _, objects in examined]

    @property
    def objects(self) -> list:
        """The functions and objects at all places."""
        return [x for objects in self._objects for x in objects]

    def read(self) -> tuple | None:
        """The present values; None where a function or an object is another one, so that other places apply."""
        raw = [read() for read in self._reads]
        suspects = set()
        for k, entries in self._containers.items():
            if same_objects(_entries(raw[k]), entries) and type(raw[k]) is type(self._raw[k]):
                raw[k] = self._raw[k]  # another container of the same entries is as good
            else:
                suspects.add(k)
        if not same_objects(raw, self._raw):
            suspects.update(k for k, (new, old) in enumerate(zip(raw, self._raw)) if new is not old)
        if not suspects:
            return self.values
        examined = {k: constants(raw[k]) for k in suspects}
        if not all(same_objects(objects, self._objects[k]) for k, (_, objects) in examined.items()):
            return None
        self.values = tuple(examined[k][0] if k in examined else value for k, value in enumerate(self.values))
        self._raw, self._containers = raw, _containers(raw)
        return self.values


def _containers(values: Sequence[Any]) -> dict[int, list | None]:
    """By position, the entries of the values that can change; None for those in which that is not seen by identity."""
    entries = {k: _entries(value) for k, value in enumerate(values) if isinstance(value, _CHANGING)}
    nested = {k for k, held in entries.items() if held is None or any(isinstance(x, _CHANGING) for x in held)}
    fixed = {k for k in entries if k not in nested and isinstance(values[k], (tuple, frozenset))}
    return {k: None if k in nested else held for k, held in entries.items() if k not in fixed}


def _entries(value: Any) -> list | None:
    """The keys and entries of a container; None for other values."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, CONTAINERS) else None


def same_objects(a: list | None, b: list | None) -> bool:
    """Whether two lists hold the same objects."""
    return a is not None and b is not None and len(a) == len(b) and all(map(operator.is_, a, b))


def constants(value: Any) -> tuple[Any, list]:
    """The constants in a value, each with its type, and the functions and objects in the value."""
    reading = _Reading([])
    return _value(value, reading), reading.objects


@dataclass
class _Reading:
    """The functions and objects in a value, and how many entries may still be read: a large value is data."""

    objects: list
    left: int = LONGEST
    depth: int = 0


def _value(value: Any, reading: _Reading) -> Any:
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, numpy.ndarray):
        return kind, (value.dtype.str, value.shape, value.tobytes() if value.size <= LONGEST else None)
    if isinstance(value, slice | range):
        return kind, (value.start, value.stop, value.step)
    if isinstance(value, _READ) and (isinstance(value, CONTAINERS) or not is_own(kind)):
        reading.left -= len(value)
        return kind, _of_entries(value, reading) if reading.left >= 0 and reading.depth < _DEEPEST else len(value)
    if isinstance(value, numbers.Number | enum.Enum | numpy.generic | str | bytes):
        return kind, value
    if _is_compared(value):
        reading.objects.append(value)
    return None


def _is_compared(value: Any) -> bool:
    """Whether another object in the place of a value means another program."""
    if isinstance(value, weakref.ref):
        return False
    return callable(value) or is_own(type(value)) or isinstance(value, LRScheduler | types.CodeType)


def _of_entries(values: Any, reading: _Reading) -> Any:
    """The constants in the entries of a container."""
    reading.depth += 1
    items = [_value(x, reading) for x in (values.values() if isinstance(values, Mapping) else values)]
    reading.depth -= 1
    if isinstance(values, Mapping):
        return tuple(zip(values, items))
    return frozenset(items) if isinstance(values, set | frozenset) else tuple(items)


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
