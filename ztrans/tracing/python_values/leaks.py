"""Leaks: changes that a step makes to Python values while it is traced, which its program does not repeat.

A step runs as Python code once, while it is traced. If it counts, appends to a list, writes an attribute, draws a
number or prints, this happens once, and not in later steps. So the Python values that the step reaches are compared
before and after the trace, and restored.

Some code writes an attribute in every step before it reads it, as a module does that stores a term of the loss for
later. To allow this, a step that has changed a value is traced a second time from the changed values. If the second
program is the same, the changes do not matter to the program.
"""

from __future__ import annotations

import contextlib
import gc
import io
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

import torch
from torch.utils import _pytree as pytree

from ...calling.trees import opened
from ...ir.graph import Graph
from ...ir.printer import program
from ...ir.source import Source, user_source, where
from ..errors import changes_python, draws_in_python, leaks_tensor, reads_system_random, warn_of_trace
from .generators import Generators
from .reached import ABSENT, Reach
from .snapshot import Change, Snapshot, holds_tensor_of_trace


class Imported(NamedTuple):
    """A run of a step as a program."""

    graph: Graph
    out_tree: pytree.TreeSpec  # the tree of the result
    tensors: list[tuple[weakref.ref, Source | None]]  # every tensor of the run, with the user's line that created it


def settled(record: Callable[[], Imported], reach: Reach, step: str) -> Imported:
    """The program that `record()` traces, if the trace changes no Python value that a program would have to change.

    Warns of lines that print, and of tensors of the trace that an object outside of the step still holds.

    Raises: ValueError for draws from Python's generators, for counts, and for tensors that one trace leaves behind and
    the next one reads.
    """
    before, generators = Snapshot(reach), Generators(place.read() for place in reach.places)
    for place in reach.places:
        if isinstance(place.read(), random.SystemRandom):
            warn_of_trace(reads_system_random(place.name, step), place.source)
    try:
        before.stop_iterators(step)
        with _heard(step):
            first = record()
        if generators.have_moved():
            _raise_draw(record, generators, before, step)
        leaks = _leaks(record, first, before.changes(), Snapshot(reach), step)
    finally:
        generators.restore()
        before.restore()
    for name, line in leaks:
        warn_of_trace(leaks_tensor(name, line, step), line)
    for tensor, line in _alive(first):
        warn_of_trace(leaks_tensor(_holder(tensor), line, step), line)
    return first


def _raise_draw(record: Callable, generators: Generators, before: Snapshot, step: str) -> None:
    """Trace the step once more, line by line, and raise an error with the line that draws."""
    generators.restore()
    before.restore()
    with contextlib.redirect_stdout(io.StringIO()):
        line = generators.line_of_draw(record)
    if line is not None:  # otherwise other code drew at the same time, such as a thread that loads data
        raise draws_in_python(line, step)


def _leaks(
    record: Callable[[], Imported], first: Imported, changes: list[Change], between: Snapshot, step: str
) -> list[tuple[str, Source | None]]:
    """The names that hold tensors of the first trace, with their lines.

    Raises: ValueError if a second trace, from the values that the first one left, gives another program.
    """
    if not changes:
        return []
    refusal = changes_python(changes[0].name, changes[0].source, step)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second = record()
    except Exception as error:
        raise refusal from error
    for change in between.changes():
        if not (change.is_leak and holds_tensor_of_trace(change.old)):
            grows = change.old is ABSENT  # a container that gets a new entry in every trace
            raise changes_python(change.name.partition("[")[0] if grows else change.name, change.source, step)
    if program(second.graph, full=True) != program(first.graph, full=True):
        raise refusal
    return [(change.name, change.source) for change in changes if change.is_leak]


class _Heard:
    """Standard output that remembers which of the user's lines write to it."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.lines = out, dict[Source | None, None]()

    def write(self, text: str) -> int:
        self.lines[user_source(2)] = None
        return self.out.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)


@contextlib.contextmanager
def _heard(step: str) -> Iterator[None]:
    """Warn of lines that print, because they print only while the step is traced, and not in every step."""
    heard = _Heard(sys.stdout)
    with contextlib.redirect_stdout(heard):
        yield
    for line in heard.lines:
        warn_of_trace(
            f"trace: {step} prints while it is traced, and its program will not.\n  at {where(line)}\n"
            f"Return what you want to see as output, and print it after the step.",
            line,
        )


def _alive(recorded: Imported) -> list[tuple[torch.Tensor, Source | None]]:
    """A tensor of the trace that is still alive, with its line, if there is one."""
    if any(ref() is not None for ref, _ in recorded.tensors):
        gc.collect()  # some are only alive because of reference cycles
    return [(x, line) for ref, line in recorded.tensors if (x := ref()) is not None][:1]


def _holder(tensor: torch.Tensor) -> str:
    """The kind of object that holds a tensor, as far as Python's garbage collector knows."""
    kinds = [type(x) for x in gc.get_referrers(tensor) if not isinstance(x, tuple | types.FrameType)]
    return f"a {kinds[0].__qualname__}" if kinds else "a cache"


def named_outputs(output: Any) -> list[tuple[str, Any]]:
    """The leaves of an output, each with its name.

    Raises: TypeError for an object that holds tensors, because its tensors would be those of the trace.
    """
    named = [(f"the output{pytree.keystr(k)}", x) for k, x in pytree.tree_leaves_with_path(opened(output))]
    for name, x in named:
        if not isinstance(x, torch.Tensor) and holds_tensor_of_trace(x):
            kind = type(x).__qualname__
            raise TypeError(
                f"trace: {name} is a {kind}, an object that holds tensors.\n"
                f"Return its tensors in a dict or in a tuple, or make {kind} a dataclass."
            )
    return named
