"""Snapshot: the Python values that a step reaches, before it is traced, to compare them with those after, and restore.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...ir.source import Source
from ..errors import advances
from .captured import constants, same_objects
from .iterators import Stopped, is_iterator
from .reached import ABSENT, CONTAINERS, Reach, is_internal


@dataclass(frozen=True)
class Change:
    """A Python value that the trace has changed."""

    name: str
    source: Source | None
    old: Any
    new: Any

    @property
    def is_leak(self) -> bool:
        return holds_tensor_of_trace(self.new)


class Snapshot:
    """The present Python values that a step reaches: variables, attributes, and the entries of containers."""

    def __init__(self, reach: Reach) -> None:
        self._variables = [(place, place.read()) for place in reach.places if place.write is not None]
        self._holders = [(name, holder, _contents(holder)) for name, holder in reach.holders]
        self._lines = {place.name: place.source for place in reach.places}
        self._lines |= {f".{attribute}": line for attribute, line in reach.attributes.items()}

    def changes(self) -> list[Change]:
        """The values that have changed since the snapshot was taken."""
        pairs = [(place.name, old, place.read()) for place, old in self._variables]
        for name, holder, before in self._holders:
            now, show = _contents(holder), "{}[{!r}]" if isinstance(holder, CONTAINERS) else "{}.{}"
            keys = [k for k in {**before, **now} if not (isinstance(k, str) and is_internal(holder, k))]
            pairs += [(show.format(name, k), before.get(k, ABSENT), now.get(k, ABSENT)) for k in keys]
        return [Change(name, self._line(name), old, new) for name, old, new in pairs if not _same(old, new)]

    def stop_iterators(self, step: str) -> None:
        """Put others in the place of iterators, which raise an error where the step advances them.

        Raises: ValueError for one in a tuple, as the defaults of a function and the arguments of a partial are.
        """
        for place, value in self._variables:
            if place.write is not None and is_iterator(value):
                place.write(Stopped(value, place.name, step))
        for name, holder, before in self._holders:
            stopped = {k: Stopped(v, name, step) for k, v in before.items() if is_iterator(v)}
            if stopped and isinstance(holder, tuple | frozenset):
                raise advances(name, self._line(name), step)
            if stopped:
                _restore(holder, before | stopped)

    def restore(self) -> None:
        """Set every value back to that of the snapshot."""
        for place, old in self._variables:
            if place.write is not None and place.read() is not old:
                place.write(old)
        for _, holder, before in self._holders:
            _restore(holder, before)

    def _line(self, name: str) -> Source | None:
        """The line that writes the value called `name`, or that reads its container."""
        attribute = f".{name.rpartition('.')[2]}"
        return self._lines.get(name) or self._lines.get(attribute) or self._lines.get(name.partition("[")[0])


def holds_tensor_of_trace(value: Any) -> bool:
    """Whether a tensor of the trace is a value, or is among its attributes and entries, or theirs."""
    seen, values = set[int](), [value]
    while values:
        x = values.pop()
        if isinstance(x, FakeTensor):
            return True
        if id(x) in seen or isinstance(x, torch.Tensor | type | ModuleType):
            continue
        seen.add(id(x))
        held: Iterable[Any] = x if isinstance(x, list | tuple | set) else getattr(x, "__dict__", {}).values()
        values += x.values() if isinstance(x, Mapping) else held
    return False


def _same(old: Any, new: Any) -> bool:
    """Whether a value is unchanged, as far as the code of a step could tell."""
    if old is new:
        return True
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or holds_tensor_of_trace(new):
        return False
    (before, held), (now, holds) = constants(old), constants(new)
    return before == now and same_objects(held, holds)


def _contents(holder: Any) -> dict:
    """The entries of a container or the attributes of an object, by index, key or name."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, set | frozenset):
        return dict.fromkeys(holder)
    if isinstance(holder, list | tuple):
        return dict(enumerate(holder))
    own = getattr(holder, "__dict__", {})
    if isinstance(holder, torch.optim.Optimizer):
        return {name: value for name, value in own.items() if not is_internal(holder, name)}
    return {**own, **holder._buffers} if isinstance(holder, nn.Module) else dict(own)


def _restore(holder: Any, before: dict) -> None:
    now = _contents(holder)
    if now.keys() == before.keys() and all(now[k] is before[k] for k in before):
        return
    if isinstance(holder, list):
        holder[:] = before.values()
    elif isinstance(holder, dict | set):
        holder.clear()
        holder.update(before)
    else:
        for name in {**before, **now}:
            if name not in before:
                delattr(holder, name)
            elif now.get(name, ABSENT) is not before[name]:
                setattr(holder, name, before[name])
