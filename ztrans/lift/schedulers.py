"""Schedulers: the numbers that a loop step reads from schedulers of PyTorch, such as their last rates and their epoch.

Such a number is a constant of a program until two calls have different values of it. From then on it is an input, as a
number of a parameter group is (see `hyperparameters`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..calling.signature import is_number
from ..ir.ambient import having
from ..ir.source import user_source, where
from ..tracing.errors import TraceError
from .hyperparameters import Group


class Schedulers:
    """The schedulers that a loop step reads. It remembers which numbers have changed since they were read first."""

    def __init__(self) -> None:
        self._first: dict[tuple[LRScheduler, str], Any] = {}
        self._changing: dict[LRScheduler, list[str]] = {}

    def inputs(self) -> list[Group]:
        """For each scheduler the present values of its inputs, by attribute."""
        for (scheduler, name), first in self._first.items():
            changing = self._changing.get(scheduler, [])
            if name not in changing and getattr(scheduler, name) != first:
                self._changing[scheduler] = [*changing, name]
        return [
            {name: getattr(scheduler, name) for name in names}
            for scheduler, names in self._changing.items()
        ]

    @contextlib.contextmanager
    def reading(self, inputs: Sequence[Group]) -> Iterator[None]:
        """While this is active, the schedulers have these inputs, and each number that is read is remembered.

        Raises: ValueError if a scheduler changes, as it would do so once, while the loop step is traced.
        """

        def read(scheduler: LRScheduler, name: str) -> Any:
            value = object.__getattribute__(scheduler, name)
            for key, held in value.items() if name == "__dict__" else [(name, value)]:
                if _is_of_numbers(held):
                    self._first.setdefault(
                        (scheduler, key), copy.copy(held)
                    )  # a list may be changed in place
            return value

        def refuse(scheduler: LRScheduler, name: str, value: Any) -> None:
            raise TraceError(
                f"lift: the loop step steps a scheduler, {type(scheduler).__name__}, or changes its {name!r}, which "
                f"would happen once, while it is traced.\n"
                f"  at {where(user_source(2))}\n"
                f"Step the scheduler after the lifted step. The next call reads what it has set."
            )

        with contextlib.ExitStack() as stack:
            for scheduler, values in zip(self._changing, inputs):
                stack.enter_context(having(scheduler, **values))
            stack.enter_context(having(LRScheduler, __getattribute__=read, __setattr__=refuse))
            yield


def _is_of_numbers(value: Any) -> bool:
    """Whether a value is a number, or a list of numbers."""
    entries = value if isinstance(value, list | tuple) else [value]
    return bool(entries) and all(map(is_number, entries))
