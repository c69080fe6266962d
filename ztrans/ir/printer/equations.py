"""equations: print one equation, on a single line or in lines that fit a screen.

`equation` is the complete text on a single line; fingerprints and comparisons use it. `lines` is for people to read.
"""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..graph import DTYPES, Eqn, Var
from ..nested.functions import Function, functions
from ..source import Source
from .units import format_bytes

WIDTH = 119  # the columns of a printed line; with the sign of a difference before it they are 120
_MARGIN = (
    90  # the column at which the user's line prints, if every line of the program has room for that
)
_LONGEST_SOURCE = 48  # the most columns of the user's line
_MANY = 8  # a list of more numbers, or more results of an operation, folds
_NAMES = {"_to_copy": "cast", "linalg_vector_norm": "norm", "lift_fresh_copy": "constant",
          "triton_kernel_wrapper_functional": "triton", "auto_functionalized": "functional"}  # fmt: skip
_DEFAULTS = {
    "layout",
    "device",
    "pin_memory",
    "non_blocking",
    "memory_format",
}  # not printed: the same everywhere


def op_name(op: Any) -> str:
    """The short name of an operation: `addmm`, `cast`, `all_gather`."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return _NAMES.get(op.name(), op.name())
    if isinstance(op, torch._ops.OpOverload):
        short = op._schema.name.split("::")[-1]
        return _NAMES.get(short, short)
    return str(op)


def equation(eqn: Eqn) -> str:
    """The whole equation on a single line, without the user's line.

    This text is canonical: it never folds, so fingerprints and differences use it. The functions that the operation
    calls are a part of it.

    >>> x, y = Var("x", torch.float32, (4,)), Var("y", torch.float32, (4,))
    >>> equation(Eqn(torch.ops.aten.relu.default, (x,), (y,)))
    'y: f32[4] = relu(x)'
    """
    return (
        f"{', '.join(_results(eqn))} = {_call(eqn, value)}{''.join(map(one_line, functions(eqn)))}"
    )


def one_line(function: Function) -> str:
    """The whole text of a function on a single line."""
    body = "; ".join(map(equation, function.graph.eqns))
    return f" {{{_signature(function)} {body}; return {', '.join(map(value, function.graph.outputs))}}}"


def nested_lines(eqn: Eqn, full: bool, column: int) -> list[str]:
    """The functions that an equation calls, in lines that print beneath it."""
    text: list[str] = []
    for function in functions(eqn):
        text += wrap(f"    {_signature(function)}")
        for e in function.graph.eqns:
            inner = [*lines(e, full, column - 4, WIDTH - 4), *nested_lines(e, full, column - 4)]
            text += [f"    {line}" for line in inner]
        text += wrap(f"      return {', '.join(map(value, function.graph.outputs))}")
    return text


def _signature(function: Function) -> str:
    return f"def {function.graph.name}({', '.join(map(repr, function.graph.inputs))}):"


def margin(eqns: Iterable[Eqn]) -> int:
    """The column at which the user's lines of a program print: one at which even the longest of them fits."""
    return min([_MARGIN, *(WIDTH - len(_comment(eqn.source)) for eqn in eqns)])


def lines(eqn: Eqn, full: bool = False, column: int = _MARGIN, width: int = WIDTH) -> list[str]:
    """The equation in lines of at most `width` columns. The first ends with the user's line, at `column` or behind it.

    An equation that fits is printed on one line or on two. In a longer one every list folds, as
    `[w, ... 26 more: 3 MiB]`. With `full` each result and each member of a list has a line of its own instead.
    """
    comment = _comment(eqn.source)
    room = width - (len(comment) + 2 if comment else 0)
    for layout in _layouts(eqn, full):
        if len(layout[0]) <= room and max(map(len, layout)) <= width:
            break
    first, *rest = [
        *wrap(layout[0], room),
        *(part for line in layout[1:] for part in wrap(line, width)),
    ]
    column = max(len(first) + 2, min(column, width - len(comment)))
    return [f"{first:<{column}}{comment}" if comment else first, *rest]


def value(x: Any) -> str:
    """An argument as text."""
    if isinstance(x, Var):
        return x.name
    if isinstance(x, Function):
        return x.graph.name
    if isinstance(x, torch.dtype):
        return DTYPES.get(x, str(x))
    if isinstance(x, torch.Tensor):
        return (
            f"tensor({x.tolist()})"
            if x.numel() <= 8
            else f"tensor(<{tuple(x.shape)}>, {checksum(x):08x})"
        )
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(value, x)) + "]"
    return str(x)


def checksum(x: torch.Tensor) -> int:
    """The CRC-32 of the elements of a tensor."""
    return zlib.crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def fold(items: Sequence[str], size: str = "") -> str:
    """The first of several items, and the number of the others.

    >>> fold(["up", "down", "out"]), fold(["up", "down"], ": 3.00 MiB"), fold(["up"], ": 3.00 MiB")
    ('up, ... 2 more', 'up, ... 1 more: 3.00 MiB', 'up')
    """
    return f"{items[0]}, ... {len(items) - 1} more{size}" if len(items) > 1 else "".join(items)


def wrap(line: str, room: int = WIDTH) -> list[str]:
    """Wrap a line into lines of at most `room` columns; those after the first are indented further."""
    if len(line) <= room:
        return [line]
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, room, subsequent_indent=margin, break_on_hyphens=False)


def _layouts(eqn: Eqn, full: bool) -> Iterator[list[str]]:
    """The ways to print an equation in lines, the preferred one first; the last is the shortest, or the `full` one."""
    results, call = _results(eqn), _call(eqn, value)
    whole = ", ".join(results)
    yield [f"  {whole} = {call}"]
    if full:
        *first, last = (f"  {result}" for result in results)
        yield [
            *(f"{line}," for line in first),
            last,
            *f"    = {_call(eqn, _one_a_line)}".split("\n"),
        ]
        return
    yield [f"  {whole}", f"    = {call}"]
    in_lists = any(_is_bucket(x) for _, x in _arguments(eqn))
    few = fold(results) if in_lists or len(results) > _MANY else whole
    call = _call(eqn, partial(_folded, wire=eqn.kwargs.get("dtype")))
    yield [f"  {few} = {call}"]
    yield [f"  {few}", f"    = {call}"]


def _results(eqn: Eqn) -> list[str]:
    return ["_" if out is None else f"{out.name}: {out.type}" for out in eqn.outs]


def _call(eqn: Eqn, show: Callable[[Any], str]) -> str:
    return f"{op_name(eqn.op)}({', '.join(key + show(x) for key, x in _arguments(eqn))})"


def _arguments(eqn: Eqn) -> list[tuple[str, Any]]:
    """The arguments that print, each with the key that prints before it."""
    named = [(key, x) for key, x in eqn.kwargs.items() if key not in _DEFAULTS and x is not None]
    return [
        *(("", x) for x in eqn.args),
        *(("" if key in ("dtype", "op") else f"{key}=", x) for key, x in named),
    ]


def _is_bucket(x: Any) -> bool:
    """Whether an argument is a list of values, as the members of a bucket are."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(v, Var) for v in x)


def _folded(x: Any, wire: torch.dtype | None) -> str:
    """An argument in its shortest form. A list of values is its first, the number of the others, and their bytes."""
    if _is_bucket(x):
        size = sum(v.numel * (wire or v.dtype).itemsize for v in x)
        return "[" + fold([v.name for v in x], f": {format_bytes(size)}") + "]"
    if isinstance(x, Mapping):
        return f"{{... {len(x)} options}}"
    if isinstance(x, (list, tuple)) and len(x) > _MANY:
        return "[" + fold([value(item) for item in x]) + "]"
    return value(x)


def _one_a_line(x: Any) -> str:
    """An argument in its longest form. A list of several values has a line for each."""
    several = _is_bucket(x) and len(x) > 1
    return "[\n" + "".join(f"        {v.name},\n" for v in x) + "    ]" if several else value(x)


def _comment(source: Source | None) -> str:
    """The user's line as a comment; of a long one, the start and the end."""
    text = str(source) if source else ""
    if len(text) > _LONGEST_SOURCE:
        text = f"{text[: _LONGEST_SOURCE // 2]}...{text[3 - _LONGEST_SOURCE // 2 :]}"
    return f"# {text}" if text else ""
