"""Captured: what a program is made for besides the arguments of its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..calling.call import ExtraInputs
from ..calling.reads import Reads, ReadValues
from ..ir.ambient import ambient


@dataclass(frozen=True)
class Key:
    """What a program is made for besides its arguments: calls with equal keys share one program."""

    reads: ReadValues
    ambient: tuple  # PyTorch's global state
    settings: Any  # the settings of a lifted loop


class Captured:
    """What a program of the step `fn` depends on besides its arguments."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        self.reads = Reads(fn)

    def key(self) -> Key:
        """The present values."""
        settings = self.fn.constants() if isinstance(self.fn, ExtraInputs) else None
        return Key(self.reads.values(), tuple(ambient().items()), settings)


def changes(before: Key, now: Key) -> list[str]:
    """The differences between two keys, each in words."""
    ambients = zip(before.ambient, now.ambient)
    words = [f"{name} was {old} and is {new}" for (name, old), (_, new) in ambients if old != new]
    if before.settings != now.settings:
        words.append("a setting of the module or of an optimizer has changed")
    return words + before.reads.changes(now.reads)
