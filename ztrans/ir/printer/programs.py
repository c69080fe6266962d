"""programs: print a whole program, one equation after the other, each value with its type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..graph import Eqn, Graph, Region
from .equations import WIDTH, equation, fold, lines, margin, nested_lines, op_name, value, wrap


class Entry(NamedTuple):
    """A part of a printed program: an equation, an input, a heading."""

    text: str  # equal for two entries if and only if they mean the same
    lines: tuple[str, ...]  # the lines that print, in which lists may be folded
    region: Region | None = (
        None  # of the last heading; None before the first equation and after the last
    )
    eqn: Eqn | None = None


def header(graph: Graph) -> str:
    """The first line of a program: its name, its mesh and its transforms, sorted, because they commute."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in graph.mesh)
    done = sorted(graph.history, key=lambda name: (not name.startswith("shard_params"), name))
    parts = [graph.name, f"mesh: {mesh}" if mesh else "", " > ".join(done)]
    return "# " + "   ".join(filter(None, parts))


def program(graph: Graph, full: bool = False) -> str:
    """The whole program as text, in lines of at most `WIDTH` columns.

    A bucket that does not fit folds: `[up, ... 26 more: 12.40 MiB]`. With `full` each of its members has a line.

    >>> import torch
    >>> from ztrans.ir.graph import Var
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


def entries(graph: Graph, full: bool = False) -> Iterator[Entry]:
    """The entries of a program in order."""
    yield _entry(header(graph))
    for note in graph.notes:
        yield _entry(f"# note: {note}")
    yield _entry(f"def {graph.name}(")
    for var in graph.inputs:
        yield _entry(f"    {var.name}: {var.type},")
    yield _entry("):")
    region, column = None, margin(graph.eqns)
    for eqn in graph.eqns:
        moves = (
            eqn.provenance is not None or op_name(eqn.op) == "wait"
        )  # a schedule moves these into other regions
        if eqn.region != region and (region is None or not moves):
            region = eqn.region
            yield Entry(f"  # {region}", (f"  # {region}",), region)
        text = f"{equation(eqn)}  # {eqn.source}"
        yield Entry(
            text, (*lines(eqn, full, column), *nested_lines(eqn, full, column)), region, eqn
        )
    yield Entry("  return " + ", ".join(map(value, graph.outputs)), _returned(graph, full))


def _entry(text: str) -> Entry:
    """An entry that is no equation; a long one is wrapped."""
    comment = text.startswith("#")
    first, *rest = wrap(text)
    return Entry(text, (first, *(f"#{line[1:]}" if comment else line for line in rest)))


def _returned(graph: Graph, full: bool) -> tuple[str, ...]:
    """The lines of the outputs. If they need more than one line, the state folds, and so do the outputs behind it."""
    outputs = [value(x) for x in graph.outputs]
    line = "  return " + ", ".join(outputs)
    if len(line) <= WIDTH:
        return (line,)
    if full:
        return ("  return (", *(part for x in outputs for part in wrap(f"    {x},")), "  )")
    parts = outputs[: graph.num_state], outputs[graph.num_state :]
    return tuple(wrap("  return " + ", ".join(fold(part) for part in parts if part)))
