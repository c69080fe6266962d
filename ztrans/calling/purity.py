"""Trace a step, and refuse it if its Python code would have to run again in each call.

Python runs only while a step is traced, and a program repeats none of its side effects. So the values that the step
reads (see `reads`) and the states of the random generators are compared before and after the trace. If

- nothing has changed, the program is valid;
- PyTorch's generator has changed, the step seeds it or sets its state, and is refused;
- a value that the step reads has changed, it is traced again. A step that only initializes itself in its first run
  changes nothing in the second, and has the same program. Any other step is refused;
- the step has drawn in Python or NumPy, it is traced twice more, with the lowest draws and with the highest. It is
  refused if its programs differ. Two traces with other draws may take the same branch by chance, above all if the step
  compares a draw with a small probability.

The values that a trace has changed are not restored.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy
import torch

from ..ir.graph import Graph
from ..ir.printer import HasGraph, program
from ..ir.structure import structures
from .reads import Reads

# The most changes that a message lists.
_MOST_CHANGES = 4
_TORCH = "torch's default generator"
_SEEDING = ("manual_seed", "seed", "set_rng_state")
_KEEP = (
    "Keep what lives from step to step in the state, as a tensor or a number; return what you want to "
    "see as output; count and collect outside of the step. If only the first run changes it, run that "
    "code once before the step."
)
_DRAW = (
    "Draw with torch inside the step, torch.rand(()), or outside of it, and pass the number in as an "
    "argument."
)

# The first words of the generators' state for the lowest draws: `random.random()` gives 1.5e-8, and `random.choice`
# takes the first entry. Python and NumPy have Mersenne Twisters, which make 32 bits of a draw from each word: here 64.
_LOWEST = [0x00000040] * 400
# For the highest draws, 0xFFFFFFBF and 0x7FFFFF01: `random.random()` gives 1 - 1.5e-8. `random.choice` rejects the
# first 300, which are larger than any position. With the other words it takes an entry other than the first, if there
# is one.
_HIGHEST = [0x12DD9BF3] * 300 + [0x07B140D6] * 100


class ImpureStepError(ValueError):
    """A step changes Python values that it reads, or its program depends on a number drawn in Python."""


T = TypeVar("T", bound=HasGraph)


def trace_without_side_effects(record: Callable[[], T], reads: Reads, step_name: str) -> T:
    """Call `record`, once or more, and return its last trace.

    The program is also valid for the values before the first trace, which gave the same program.

    Raises: ImpureStepError that names the changes, with the user's lines.
    """
    reads_before = reads.values()
    states_before = _generator_states()
    first = record()
    reads_after = reads.values()
    generators_drawn = []
    for name, state in _generator_states().items():
        if state != states_before[name]:
            generators_drawn.append(name)
    # Draws of a traced step do not move PyTorch's generator, so the step has seeded it or set its state.
    if _TORCH in generators_drawn:
        raise _seeding_error(reads, step_name)
    if reads_after == reads_before and not generators_drawn:
        return first

    # A step that only initializes itself in its first run changes nothing in a second trace, and has the same program.
    words_to_try = [_LOWEST, _HIGHEST] if generators_drawn else [()]
    for words in words_to_try:
        with _next_words(words):
            latest = record()
        changes = reads_after.changes(reads.values())
        if changes:
            raise ImpureStepError(
                f"trace: {step_name} changes what it reads, and its program will not do so again:\n"
                f"{_listed(changes)}{_KEEP}"
            )
        difference = first_difference(first.graph, latest.graph)
        if difference:
            draws = [f"it draws from {name}" for name in generators_drawn]
            raise ImpureStepError(
                f"trace: {step_name} was traced twice, and its programs differ, because of what the first "
                f"trace changed:\n{_listed(reads_before.changes(reads_after) + draws)}{difference}\n"
                f"{_DRAW if draws else _KEEP}"
            )
    return latest


@contextlib.contextmanager
def _next_words(words: Sequence[int]) -> Iterator[None]:
    """Make the generators of Python and NumPy draw from these words first, inside the context.

    Afterwards they continue as before it. Without words, the context does nothing.
    """
    if not words:
        yield
        return
    python_state = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    count = len(words)
    try:
        version, (*old_words, _), _ = python_state
        random.setstate((version, (*words, *old_words[count:], 0), None))
        # A caller may have set another kind of generator.
        if numpy_state["bit_generator"] == "MT19937":
            numpy_words = numpy_state["state"]["key"]
            key = numpy.array([*words, *numpy_words[count:]], numpy.uint32)
            numpy.random.set_state(("MT19937", key, 0, 0, 0.0))
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _seeding_error(reads: Reads, step_name: str) -> ImpureStepError:
    lines = [reads.attributes[name].where for name in _SEEDING if name in reads.attributes]
    return ImpureStepError(
        f"trace: {step_name} seeds {_TORCH} or sets its state, and its program will not do so.\n"
        f"  at {', '.join(lines) or 'an unknown line'}\n"
        f"Seed it outside of the step, with another seed on each rank."
    )


def first_difference(first: Graph, second: Graph) -> str:
    """The first line that differs between two programs, from both of them; empty if they are equal.

    >>> from ztrans.ir.graph import Eqn, Var
    >>> x = Var("x", torch.float32, (2, 2))
    >>> formats = torch.contiguous_format, torch.preserve_format
    >>> y = Var("y", torch.float32, (2, 2))
    >>> clones = [Eqn(torch.ops.aten.clone.default, (x,), (y,), {"memory_format": f}) for f in formats]
    >>> first_difference(*(Graph("step", (x,), (e,), (y,), 1) for e in clones))
    '  in an overload, or in an argument that the text leaves out, such as a memory format'
    """
    first_lines = program(first, full=True).splitlines()
    second_lines = program(second, full=True).splitlines()
    for first_line, second_line in zip_longest(first_lines, second_lines):
        if first_line != second_line:
            return f"  first:  {_line(first_line)}\n  second: {_line(second_line)}"
    if _structure(first) != _structure(second):
        return (
            "  in an overload, or in an argument that the text leaves out, such as a memory format"
        )
    return ""


def _structure(graph: Graph) -> Hashable:
    return structures(graph.eqns, graph.inputs, graph.outputs, lambda v: v.type)


def _line(text: str | None) -> str:
    return "nothing" if text is None else " ".join(text.split())


def _listed(changes: list[str]) -> str:
    return "".join(f"  * {change}\n" for change in changes[:_MOST_CHANGES])


def _generator_states() -> dict[str, object]:
    """The states of the global generators, by name."""
    return {
        "Python's random": random.getstate(),
        # As bytes, because `==` compares arrays and tensors element by element.
        "numpy.random": pickle.dumps(numpy.random.get_state()),
        _TORCH: bytes(torch.random.get_rng_state().numpy()),
    }
