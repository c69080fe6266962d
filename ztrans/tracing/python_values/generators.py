"""Generators: detect that a step draws from a random generator of Python or NumPy, which its program would not do.

Calls that seed PyTorch's generators, or set their state, are no operations of a program either.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import numpy
import torch

from ...ir.ambient import having
from ...ir.source import Source, is_users, user_source
from ..errors import seeds

# The kinds of generators. One of NumPy's `Generator`s has its state in a BitGenerator.
_KINDS = (random.Random, numpy.random.RandomState, numpy.random.BitGenerator)

_SEEDING = ("manual_seed", "seed", "fork_rng", "set_rng_state", "manual_seed_all", "seed_all", "set_rng_state_all")


class Generators:
    """The generators of `random` and `numpy.random`, and those among `values`, with their states at this moment."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        held = (x.bit_generator if isinstance(x, numpy.random.Generator) else x for x in values)
        # A SystemRandom has no state; `leaks` warns of it.
        own = [x for x in held if isinstance(x, _KINDS) and not isinstance(x, random.SystemRandom)]
        shared: list[Any] = [random.getstate, numpy.random.get_state]  # methods of the generators that all code shares
        self._generators: list[Any] = [*(method.__self__ for method in shared), *own]
        self._before = self._states()

    def have_moved(self) -> bool:
        """Whether the state of any generator has changed since this object was created."""
        return self._states() != self._before

    def restore(self) -> None:
        """Put every generator back into the state in which this object found it."""
        for generator, state in zip(self._generators, self._before):
            generator.__setstate__(pickle.loads(state))

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
        return [pickle.dumps(x.__getstate__()) for x in self._generators]


@contextlib.contextmanager
def unseeded(step: str) -> Iterator[None]:
    """Refuse calls of the user that seed PyTorch's generators or set their state. Checkpoints of PyTorch may do so."""

    def refused(own: Callable) -> Callable:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_users(sys._getframe(1)):
                raise seeds(f"{own.__module__}.{own.__name__}", user_source(2), step)
            return own(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random, torch.cuda, torch.cuda.random):
            calls = {name: refused(vars(module)[name]) for name in _SEEDING if name in vars(module)}
            stack.enter_context(having(module, **calls))
        yield
