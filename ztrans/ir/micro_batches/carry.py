"""Carry: what one micro-batch takes and returns, and what it passes to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..graph import Graph, Var
from .programs import Parts


def is_cut(graph: Graph, v: Var) -> bool:
    """Whether an input is cut along dim 0 into micro-batches. A number, and a scalar, are passed to each of them."""
    return graph.micro > 1 and v in graph.batch and bool(v.shape)


def full_shape(graph: Graph, v: Var) -> tuple[int, ...]:
    """The shape of an argument of the whole step that has the shape of input `v` in each micro-batch."""
    return (v.shape[0] * graph.micro, *v.shape[1:]) if is_cut(graph, v) else v.shape


def first_part(x: torch.Tensor, micro: int, path: str) -> torch.Tensor:
    """The first of `micro` equal parts of a leaf of the batch; a scalar belongs to all of them.

    Raises: ValueError that names the leaf if it cannot be cut.
    """
    if not x.ndim:
        return x
    if isinstance(x, DTensor) or x.shape[0] % micro:
        why = "is a DTensor" if isinstance(x, DTensor) else f"has {x.shape[0]} rows"
        raise ValueError(
            f"accumulate: {path} {why}, which cannot be cut into {micro} equal parts.\n"
            f"Pad the batch or drop its last rows, or take a number of micro-batches that divides it."
        )
    return x[: x.shape[0] // micro]


def check_rows(leaves: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that all leaves of a batch, given with their paths, can have the rows of the same samples.

    Raises: ValueError that names a leaf, such as a table, whose rows are no multiple of those of the smallest leaf.
    """
    rows = {path: x.shape[0] for path, x in leaves if x.ndim and x.shape[0]}
    smallest = min(rows, key=rows.__getitem__, default="")
    for path, count in rows.items():
        if count % rows[smallest]:
            raise ValueError(
                f"accumulate: {path} has {count} rows and {smallest} has {rows[smallest]}, and every leaf of the batch "
                f"is cut along dim 0.\n"
                f"If one of them belongs to all samples, as a table does, make it a leaf of the state. In a lifted "
                f"loop that is a buffer of the module: model.register_buffer(name, tensor)."
            )


class Carry:
    """The inputs of the micro-batches of one rank, in order: `inputs` of each, then `take` its outputs.

    Raises: ValueError if an argument does not have the rows of all micro-batches.
    """

    def __init__(self, graph: Graph, parts: Parts, inputs: Sequence[torch.Tensor]) -> None:
        self.parts, n = parts, graph.num_state
        self.state, self.taken = list(inputs[:n]), 0
        self.batches = [
            self._cut(graph, v, x) for v, x in zip(graph.inputs[n:], inputs[n:], strict=True)
        ]
        self.sums: list[torch.Tensor] = []
        self.joins: list[list[torch.Tensor]] = []
        self.kept: list[torch.Tensor] = []

    def _cut(self, graph: Graph, v: Var, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if not is_cut(graph, v):
            return [x] * graph.micro
        if x.shape[0] != v.shape[0] * graph.micro:
            rows = f"{graph.micro} micro-batches of {v.shape[0]} rows"
            raise ValueError(
                f"{graph.name}: {v.name} has {x.shape[0]} rows, and the program is for {rows}."
            )
        return [x.narrow(0, k * v.shape[0], v.shape[0]) for k in range(graph.micro)]

    def inputs(self) -> list[torch.Tensor]:
        """The inputs of the next micro-batch."""
        joined: list[torch.Tensor] = []
        if self.taken == self.parts.micro - 1:
            joined, self.joins = [torch.cat(before) for before in self.joins], []
        return [
            *self.state,
            *(cut[self.taken] for cut in self.batches),
            *self.sums,
            *joined,
            *self.kept,
        ]

    def take(self, outputs: Sequence[Any]) -> None:
        """Note the outputs of a micro-batch that is not the last."""
        n, sums, joins = len(self.state), self.parts.sums, self.parts.joins
        self.state, self.sums = list(outputs[:n]), list(outputs[n : n + sums])
        parts, kept = outputs[n + sums : n + sums + joins], outputs[n + sums + joins :]
        if not self.taken:
            self.joins, self.kept = [[] for _ in parts], list(kept)
        for before, part in zip(self.joins, parts):
            before.append(part)
        self.taken += 1
