"""Generators: detect that a step draws from a random generator of Python or NumPy, which its program would not do."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import numpy

from ..ir.source import Source, is_users


class Generators:
    """The generators of `random` and `numpy.random`, and those among `values`, with their states at this moment."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._pairs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
            (random.getstate, random.setstate),
            (numpy.random.get_state, numpy.random.set_state),
        ]
        for value in values:
            if isinstance(value, random.SystemRandom):
                continue  # it has no state; `leaks` warns of it
            if isinstance(value, random.Random):
                self._pairs.append((value.getstate, value.setstate))
            elif isinstance(value, numpy.random.RandomState):
                self._pairs.append((value.get_state, value.set_state))
            elif isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
                bits = getattr(value, "bit_generator", value)
                self._pairs.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
        self._before = self._states()

    def have_moved(self) -> bool:
        """Whether the state of any generator has changed since this object was created."""
        return self._states() != self._before

    def restore(self) -> None:
        """Put every generator back into the state in which this object found it."""
        for (_, write), state in zip(self._pairs, self._before):
            write(pickle.loads(state))

    def line_of_draw(self, run: Callable[[], object]) -> Source | None:
        """The user's first line that draws while `run()` runs line by line, or None if no line draws."""
        lines: list[Source] = []
        last: dict[FrameType | None, Source] = {}

        def watch(frame: FrameType, event: str, _: Any) -> Callable | None:
            code = frame.f_code
            if lines or not is_users(frame):
                return None
            here = Source(code.co_filename, frame.f_lineno, code.co_qualname)
            if self.have_moved():
                lines.append(last.get(frame) or last.get(None) or here)
            last[frame] = last[None] = here
            return watch

        before = sys.gettrace()
        sys.settrace(watch)
        try:
            run()
        finally:
            sys.settrace(before)
        return lines[0] if lines else None

    def _states(self) -> list[bytes]:
        """The states as bytes, which can be compared; NumPy's states contain arrays, which cannot."""
        return [pickle.dumps(read()) for read, _ in self._pairs]
