"""Run the loss and the MLPs of a step in tiles of the tokens, so that their wide values never exist as a whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..analyses.merged_rows import merged_rows
from ..analyses.segments import CannotCut, Segment, in_parts, segment, with_sums_of_losses
from ..analyses.wide_values import WidePart, wide_parts
from ..ir.donation import peaks
from ..ir.graph import Eqn, Graph, Var, producers
from ..ir.layout import chunk
from ..ir.printer import counted, op_name
from ..ir.source import where
from .base import Transform, byte_count, check_number, constructor, is_from

# The numbers of tiles that a plan chooses from: 1 where the step fits, more where recomputation would take longer.
_CHOICES = (1, 4, 8)
# Each tile adds its equations to the program: some 13 for a loss, 30 for an MLP.
_MOST_PARTS = 64


@constructor
def tile(
    tokens: int | None = None,
    *,
    parts: int | None = None,
    memory: int | float | Literal["auto"] | None = None,
    at: str | None = None,
) -> Transform:
    """Run the loss and the MLPs of a step in tiles of its tokens, one after the other.

    A tile runs the product with the head, the loss, and their backward, before the next tile begins, so the logits of
    all tokens never exist at once. The gradients of weights are summed over the tiles, in fp32. What is cut is found by
    its size: equations around values that are at least twice as wide as the residual stream, and that nothing else
    reads. An MLP is cut only where backward recomputes it, as in a checkpoint of its block, and into as many tiles as
    make its values no larger than a tile of the loss. A tile costs an addition to the gradient of the head, 2 ms on an
    H100 for a vocabulary of 128,256 and a width of 4,096.

    Rewrites:
        y = mm(x, w); l = loss(y, t)              y0 = mm(x0, w); l0 = loss(y0, t0); dy0 = ...; dw0 = mm(x0, dy0)
        dy = ...; dw = mm(x, dy)           -->    y1 = mm(x1, w); l1 = loss(y1, t1); dy1 = ...
                                                  dw = addmm(dw0, x1, dy1); l = add(l0, l1)

    Args:
        tokens: the most tokens in a tile of the widest values; by default 4,096.
        parts: the number of tiles instead.
        memory: let the plan choose 1, 4 or 8 tiles: the fastest within this number of bytes, a hard limit on the whole
            step. "auto" is the limit that the step already has (see `remat`). A step without anything that can be cut
            stays as it is.
        at: cut only what has an equation from this line of the step, such as "net.py:31".

    Raises: ValueError if an option is unknown, or several of `tokens`, `parts` and `memory` are set. When the step is
        lowered, ValueError with the line if the widest values cannot be cut, because of random draws or statistics of
        all tokens, unless `memory` is set; or if there would be more than 64 tiles.

    Source: Hsu et al., "Liger Kernel", 2024; ALST (Arctic Long Sequence Training), 2025.

    >>> tile(), tile(parts=8, at="net.py:31")
    (tile(tokens=4096), tile(parts=8, at='net.py:31'))
    """
    options = [option for option in (tokens, parts, memory) if option is not None]
    if len(options) > 1:
        raise ValueError(
            "tile: tokens, parts and memory each say how many tiles there are. Keep one of them."
        )
    if parts is None and memory is None:
        tokens = 4096 if tokens is None else tokens
        check_number("tile: tokens", tokens, "the number of tokens in a tile, at least 1", 1)
    check_number("tile: parts", parts, f"a number of tiles, from 1 to {_MOST_PARTS}", 1, None)
    if parts is not None and parts > _MOST_PARTS:
        raise ValueError(f"tile: {parts=}; it is a number of tiles, from 1 to {_MOST_PARTS}.")
    if at is not None and not isinstance(at, str):
        raise ValueError(f"tile: {at=}; it is a line of the step, such as 'net.py:31'.")
    return _Tile(tokens, parts, byte_count("tile: memory", memory, 1, "auto", None), at)


@dataclass(frozen=True)
class _Tile(Transform):
    tokens: int | None = None
    parts: int | None = None
    memory: int | str | None = None
    at: str | None = None

    # Before `remat`, which then sees the values of one tile.
    phase: ClassVar[float] = -1

    @property
    def memory_limit(self) -> int | None:
        return self.memory if isinstance(self.memory, int) else None

    def within(self, limit: int) -> Transform:
        return self if self.memory is None else dataclasses.replace(self, memory=limit)

    @property
    def variants(self) -> tuple[Transform, ...]:
        if self.memory is None or self.parts is not None:
            return (self,)
        return tuple(dataclasses.replace(self, parts=parts) for parts in _CHOICES)

    def rewrite(self, graph: Graph) -> Graph:
        if self.parts == 1:
            return graph
        program = with_sums_of_losses(graph)
        found = [part for part in wide_parts(program) if self.at is None or _is_at(part, self.at)]
        if not found:
            if self.at is not None:
                raise _nothing_at(self.at, graph, wide_parts(program))
            return self._uncut(graph, "no values are twice as wide as what they are computed from")
        largest = found[0]
        parts = self.parts or -(-largest.rows // (self.tokens or largest.rows))
        if parts == 1:
            return self._uncut(graph, f"one tile holds its {counted(largest.rows, 'token')}")
        if parts > _MOST_PARTS:
            raise ValueError(
                f"tile: {largest.rows} tokens in tiles of {self.tokens} are {parts} tiles, more than {_MOST_PARTS}.\n"
                f"Use tokens={-(-largest.rows // _MOST_PARTS)} or more."
            )
        most = -(-largest.rows // chunk(largest.rows, parts))
        if most < parts:
            if self.memory is not None:
                return graph
            raise ValueError(
                f"tile: {counted(largest.rows, 'token')} cannot be cut into {parts} tiles. Use parts={most} or fewer."
            )
        tiled = program
        for part in found:
            # No part holds more at once than a tile of the largest does.
            count = -(-part.inner_bytes * parts // largest.inner_bytes)
            if count == 1:
                continue
            try:
                tiled = _tiled(tiled, part, count)
            except CannotCut as error:
                if part is largest and self.memory is None:
                    raise _refused(part, error) from None
        before, after = peaks(graph), peaks(tiled)
        # Gradients and the state will be sharded, or updated during backward; values of samples stay as they are.
        if after.of_samples < before.of_samples and after.everything <= before.everything:
            return tiled
        return self._uncut(graph, "tiles would not lower its peak of memory")

    def _uncut(self, graph: Graph, reason: str) -> Graph:
        """The step as it is, with a note that says why, unless a plan chooses the number of tiles."""
        if self.memory is not None:
            return graph
        note = f"tile: nothing of {graph.name} is cut: {reason}"
        return graph.with_hints(notes=(*graph.hints.notes, note))


def _tiled(graph: Graph, part: WidePart, count: int) -> Graph:
    """The program in which a part runs in a number of tiles.

    Raises: CannotCut if it cannot.
    """
    # An earlier part may have changed what its equations repeat.
    makers = producers(graph.eqns)
    eqns = tuple(makers[e.out] for e in part.eqns)
    try:
        return in_parts(graph, _along_a_dim(graph, eqns, part.entry, count))
    except CannotCut:
        merged = merged_rows(graph, eqns)
        if merged is None:
            raise
    entry = merged.rows_of.get(part.entry, part.entry)
    return in_parts(merged.graph, _along_a_dim(merged.graph, merged.eqns, entry, count))


def _along_a_dim(graph: Graph, eqns: Sequence[Eqn], entry: Var, count: int) -> Segment:
    """The segment of equations that are cut along the first dim of their entry that can be cut.

    Raises: CannotCut if none can.
    """
    first_error: CannotCut | None = None
    for dim, rows in enumerate(entry.shape):
        if chunk(rows, count) * (count - 1) >= rows:  # a part would be empty
            continue
        try:
            cut = segment(graph, eqns, {entry: dim}, count)
        except CannotCut as error:
            first_error = first_error or error
            continue
        # Along another dim than that of rows, few equations are cut, or none.
        if len(cut.eqns) * 2 > len(eqns):
            return cut
    raise first_error or CannotCut(eqns[0], f"has no {count} parts")


# ---- lines of the user


def _is_at(part: WidePart, line: str) -> bool:
    return any(is_from(e, line) for e in part.eqns)


def _refused(part: WidePart, error: CannotCut) -> ValueError:
    v = part.inner[0]
    return ValueError(
        f"tile: {v} and the values around it cannot be cut into tiles: {op_name(error.eqn.op)} {error.why}.\n"
        f"  at {where(error.eqn.source)}\n"
        f"Compute it before the widest values or after the loss, or name another line: tile(at='net.py:31')."
    )


def _nothing_at(line: str, graph: Graph, parts: Sequence[WidePart]) -> ValueError:
    """The error for a line that has no wide values."""
    lines: dict[str, None] = {}
    for part in parts:
        for e in part.eqns:
            if e.source is not None:
                lines[f"{os.path.basename(e.source.file)}:{e.source.line}"] = None
    known = f"Lines with them are {', '.join(lines)}." if lines else "The step has none."
    return ValueError(
        f"tile: at names {line}, and no equation from there in {graph.name} makes or reads a value that is at least "
        f"twice as wide as what enters it and that is needed nowhere else.\n{known}"
    )
