"""Print programs and equations as text.

`program` is for people: every printed line has at most `WIDTH` columns, and long lists fold. `equation` is for
fingerprints and differences: it is one line, and nothing folds. It omits overloads and memory formats, and prints a
large constant as a checksum, so it shows less than `structure` compares. A pass does not rename values, so two stages
of a program print differently only where a pass changed the program.
"""

from __future__ import annotations

import difflib
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch

from .collectives import is_placed
from .graph import DTYPES, Eqn, Graph, Var
from .higher_order import Function, functions
from .op_facts import op_facts
from .source import Source
from .structure import elements
from .wire_format import WireFormat, format_of

WIDTH = 119  # the columns of a printed line, 120 with the sign of a difference before it
_MARGIN = 90  # the column of the user's line, if every line of the program has room for it there
_LONGEST_SOURCE = 48  # the most columns of the user's line
_MANY = 8  # more numbers in a list, or more results of an operation, fold
_NAMES = {
    "_to_copy": "cast",
    "linalg_vector_norm": "norm",
    "lift_fresh_copy": "constant",
    "wait_for_copy": "wait",
    "triton_kernel_wrapper_functional": "triton",
    "auto_functionalized": "functional",
}
# Keyword arguments that do not print, because they are the same everywhere.
_UNPRINTED = ("layout", "device", "pin_memory", "non_blocking", "memory_format")


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things as text.

    >>> counted(1, "bucket"), counted(2000, "launch", "launches")
    ('1 bucket', '2,000 launches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Seconds as text.

    >>> format_seconds(0.0042), format_seconds(3.5e-6), format_seconds(0), format_seconds(999.996e-6)
    ('4.20 ms', '3.50 us', '0.00 us', '1.00 ms')
    """
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if abs(seconds) < 999.995 * scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds:.2f} s"


def format_bytes(count: float) -> str:
    """A number of bytes as text.

    >>> format_bytes(512), format_bytes(3 << 20)
    ('512 B', '3.00 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def fold(items: Sequence[str], size: str = "") -> str:
    """The first of several items and the number of the others, on one line.

    >>> fold(["up", "down", "out"]), fold(["up", "down"], ": 3.00 MiB"), fold(["up"], ": 3.00 MiB")
    ('up, ... 2 more', 'up, ... 1 more: 3.00 MiB', 'up')
    """
    if len(items) < 2:
        return "".join(items)
    return f"{items[0]}, ... {len(items) - 1} more{size}"


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a wrong name: the name that was probably meant, or nothing.

    >>> nearest("params.up.ful", ["params.up.full", "params.down.full"]), nearest("up", ["w", "b"])
    ("; the nearest is 'params.up.full'", '')
    """
    close = difflib.get_close_matches(name, names, n=1)
    return f"; the nearest is {close[0]!r}" if close else ""


def wrap(line: str, room: int = WIDTH) -> list[str]:
    """Wrap a line into lines of at most `room` columns; continuation lines are indented further."""
    if len(line) <= room:
        return [line]
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, room, subsequent_indent=margin, break_on_hyphens=False)


def op_name(op: Any) -> str:
    """The short name of an operation: `addmm`, `cast`, `all_gather`."""
    name = op_facts(op).name.split("::")[-1]
    return _NAMES.get(name, name)


def value(x: Any) -> str:
    """An argument as text."""
    if isinstance(x, Var):
        return x.name
    if isinstance(x, Function):
        return x.graph.name
    if isinstance(x, torch.dtype):
        return DTYPES.get(x, str(x))
    if isinstance(x, torch.Tensor):
        if x.numel() <= 8:
            return f"tensor({x.tolist()})"
        return f"tensor(<{tuple(x.shape)}>, {zlib.crc32(elements(x)):08x})"
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(value, x))}]"
    return str(x)


def equation(eqn: Eqn) -> str:
    """The whole equation on a single line, with the functions that it calls but without the user's line.

    >>> x, y = Var("x", torch.float32, (4,)), Var("y", torch.float32, (4,))
    >>> equation(Eqn(torch.ops.aten.relu.default, (x,), (y,)))
    'y: f32[4] = relu(x)'
    """
    bodies = "".join(map(one_line, functions(eqn)))
    return f"{', '.join(_results(eqn))} = {_call(eqn, value)}{bodies}"


def one_line(function: Function) -> str:
    """The whole text of a function on a single line."""
    body = "; ".join(map(equation, function.graph.eqns))
    return f" {{{_signature(function)} {body}; return {', '.join(map(value, function.graph.outputs))}}}"


def header(graph: Graph) -> str:
    """The first line of a program: its name, its mesh and its transforms. These are sorted, because they commute."""
    parts = [graph.name]
    if graph.mesh:
        axes = ", ".join(f"{axis}={size}" for axis, size in graph.mesh)
        parts.append(f"mesh: {axes}")
    if graph.transforms:
        transforms = sorted(graph.transforms, key=lambda x: (not x.startswith("shard_params"), x))
        parts.append(" > ".join(transforms))
    return "# " + "   ".join(filter(None, parts))


def program(graph: Graph, full: bool = False) -> str:
    """The whole program as text, in lines of at most `WIDTH` columns.

    A bucket that does not fit folds, as in `[up, ... 26 more: 12.40 MiB]`. With `full` each of its members has a line.

    >>> x, y = Var("x", torch.float32, (4,)), Var("y", torch.float32, (4,))
    >>> print(program(Graph("f", (x,), (Eqn(torch.ops.aten.relu.default, (x,), (y,)),), (y,), 0)))
    # f
    def f(
        x: f32[4],
    ):
      # forward
      y: f32[4] = relu(x)
      return y
    """
    return "\n".join(line for entry in entries(graph, full) for line in entry.lines)


class Entry(NamedTuple):
    """A part of a printed program: an equation, an input, a heading.

    Attributes:
        text: the whole entry on one line, for `diff` to compare.
        lines: the printed lines, where lists may be folded.
        eqn: the equation, if the entry is one.
    """

    text: str
    lines: tuple[str, ...]
    eqn: Eqn | None = None


def entries(graph: Graph, full: bool = False) -> Iterator[Entry]:
    """The entries of a program in order."""
    yield _entry(header(graph))
    yield _entry(f"def {graph.name}(")
    for var in (*graph.state, *graph.arguments):
        yield _entry(f"    {var.name}: {var.type},")
    if graph.carried:
        yield _entry("    # carried from the step before:")
    for var in graph.carried_inputs:
        yield _entry(f"    {var.name}: {var.type},")
    yield _entry("):")

    region = None
    column = min([_MARGIN, *(WIDTH - len(_comment(eqn.source)) for eqn in graph.eqns)])
    for eqn in graph.eqns:
        # A schedule moves collectives and copies into other regions, so they start no new heading.
        if eqn.region != region and (region is None or not is_placed(eqn)):
            region = eqn.region
            yield Entry(f"  # {region}", (f"  # {region}",))
        text = [*lines(eqn, full, column), *_nested_lines(eqn, full, column)]
        yield Entry(f"{equation(eqn)}  # {eqn.source}", tuple(text), eqn)
    yield Entry("  return " + ", ".join(map(value, graph.outputs)), _returned(graph, full))


def _entry(text: str) -> Entry:
    """An entry that is not an equation; a long one is wrapped."""
    first, *rest = wrap(text)
    if text.startswith("#"):
        rest = [f"#{line[1:]}" for line in rest]
    return Entry(text, (first, *rest))


def _returned(graph: Graph, full: bool) -> tuple[str, ...]:
    """The lines of the outputs. If they do not fit on one line, the state folds, and so do the outputs after it."""
    outputs = [value(x) for x in graph.outputs]
    line = "  return " + ", ".join(outputs)
    if len(line) <= WIDTH:
        return (line,)
    if full:
        lines = ["  return ("]
        for x in outputs:
            lines += wrap(f"    {x},")
        return (*lines, "  )")
    groups = (graph.new_state, (*graph.results, *graph.carried_outputs))
    folded = [fold([value(x) for x in group]) for group in groups if group]
    return tuple(wrap("  return " + ", ".join(folded)))


def _nested_lines(eqn: Eqn, full: bool, column: int) -> list[str]:
    """The functions that an equation calls, as the lines that print below it."""
    text: list[str] = []
    for function in functions(eqn):
        text += wrap(f"    {_signature(function)}")
        for e in function.graph.eqns:
            text += [f"    {line}" for line in lines(e, full, column - 4, WIDTH - 4)]
            text += [f"    {line}" for line in _nested_lines(e, full, column - 4)]
        text += wrap(f"      return {', '.join(map(value, function.graph.outputs))}")
    return text


def _signature(function: Function) -> str:
    return f"def {function.graph.name}({', '.join(map(repr, function.graph.inputs))}):"


def lines(eqn: Eqn, full: bool = False, column: int = _MARGIN, width: int = WIDTH) -> list[str]:
    """The equation in lines of at most `width` columns. The first ends with the user's line, at `column` or after it.

    An equation that fits prints on one line or on two. In a longer equation every list folds, as in
    `[w, ... 26 more: 3 MiB]`. With `full` each result and each member of a list has a line of its own instead.
    """
    comment = _comment(eqn.source)
    room = width - len(comment) - 2 if comment else width
    # The last way is used even if it does not fit. Its lines are wrapped.
    for printed in _ways_to_print(eqn, full):
        if len(printed[0]) <= room and max(map(len, printed)) <= width:
            break

    first, *rest = wrap(printed[0], room)
    for line in printed[1:]:
        rest += wrap(line, width)
    if comment:
        column = max(len(first) + 2, min(column, width - len(comment)))
        first = f"{first:<{column}}{comment}"
    return [first, *rest]


def _ways_to_print(eqn: Eqn, full: bool) -> Iterator[list[str]]:
    """The ways to print an equation in lines, the best first. The last is the shortest, or with `full` the longest."""
    results = _results(eqn)
    all_results = ", ".join(results)
    call = _call(eqn, value)
    yield [f"  {all_results} = {call}"]

    if full:
        *first, last = results
        members = f"    = {_call(eqn, _one_a_line)}".split("\n")
        yield [*(f"  {result}," for result in first), f"  {last}", *members]
        return

    yield [f"  {all_results}", f"    = {call}"]
    has_bucket = any(_is_bucket(x) for _, x in _arguments(eqn))
    folded_results = fold(results) if has_bucket or len(results) > _MANY else all_results
    call = _call(eqn, partial(_folded, wire=eqn.kwargs.get("dtype")))
    yield [f"  {folded_results}", f"    = {call}"]


def _results(eqn: Eqn) -> list[str]:
    return ["_" if out is None else f"{out.name}: {out.type}" for out in eqn.outs]


def _call(eqn: Eqn, show: Callable[[Any], str]) -> str:
    return f"{op_name(eqn.op)}({', '.join(key + show(x) for key, x in _arguments(eqn))})"


def _arguments(eqn: Eqn) -> list[tuple[str, Any]]:
    """The arguments that print, each with the text before it, such as `alpha=`."""
    arguments = [("", x) for x in eqn.args]
    for name, x in eqn.kwargs.items():
        if x is None or name in _UNPRINTED:
            continue
        key = "" if name in ("dtype", "op") else f"{name}="
        arguments.append((key, x))
    return arguments


def _is_bucket(x: Any) -> bool:
    """Whether an argument is a list of values, such as the members of a bucket."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(v, Var) for v in x)


def _folded(x: Any, wire: WireFormat | None) -> str:
    """An argument in its shortest form. A list of values folds, with the bytes of all of them."""
    if _is_bucket(x):
        size = sum(format_of(wire or v.dtype).nbytes(v.numel) for v in x)
        return f"[{fold([v.name for v in x], f': {format_bytes(size)}')}]"
    if isinstance(x, Mapping):
        return f"{{... {counted(len(x), 'option')}}}"
    if isinstance(x, (list, tuple)) and len(x) > _MANY:
        return f"[{fold([value(item) for item in x])}]"
    return value(x)


def _one_a_line(x: Any) -> str:
    """An argument in its longest form, with a line for each value of a list of several."""
    if not _is_bucket(x) or len(x) == 1:
        return value(x)
    return "[\n" + "".join(f"        {v.name},\n" for v in x) + "    ]"


def _comment(source: Source | None) -> str:
    """The user's line as a comment; of a long one, the start and the end."""
    if source is None:
        return ""
    text = str(source)
    if len(text) > _LONGEST_SOURCE:
        half = _LONGEST_SOURCE // 2
        text = f"{text[:half]}...{text[3 - half :]}"
    return f"# {text}"


class HasGraph(Protocol):
    """A stage of a step: `Traced`, `Lowered` or `Compiled`."""

    @property
    def graph(self) -> Graph: ...


def first_names(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list, and how many more there are.

    >>> first_names(["a", "b", "c", "d", "e"]), first_names(["a"])
    ('a, b, c, and 2 more', 'a')
    """
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


class Printed:
    """The base of all stages: a stage prints as its program. It is frozen, so a copy is the stage itself."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self: HasGraph) -> str:
        """Raises: TypeError, because a stage refers to the function of its step and to values in this process."""
        kind = type(self).__name__
        raise TypeError(
            f"{self.graph.name}: a {kind} cannot be pickled, because it knows what its step reads in this process.\n"
            f"Pickle the step, and save the plan: lowered.plan.save(path). There, lower it with that plan: "
            f"step.with_plan(zt.Plan.load(path)).lower(state, ...) makes the same program."
        )

    def as_text(self: HasGraph, *, full: bool = False) -> str:
        """The program as text. A long bucket folds; with `full` it has a line for each member."""
        return program(self.graph, full)

    def __str__(self: HasGraph) -> str:
        return program(self.graph)
