"""Arguments of a compiled step: flat, as this rank holds them, and fit to be written in place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .graph import Graph, Var
from .trace import Program


def flat(program: Program, graph: Graph, state: Any, batch: tuple) -> tuple[list, list[torch.Tensor]]:
    """The flat arguments of a call, and what they hold on this rank.

    Raises: TypeError where they are not what the program was compiled for.
    """
    leaves, tree = pytree.tree_flatten((state, *batch))
    if tree != program.in_tree:
        raise TypeError(f"{graph.name}: compiled for arguments {program.in_tree}, called with {tree}.")
    for i, value in program.static:
        if leaves[i] != value:
            raise TypeError(f"{graph.name}: compiled for {program.paths[i]}={value!r}, called with {leaves[i]!r}.")
    static = {i for i, _ in program.static}
    found = [x for i, x in enumerate(leaves) if i not in static]
    local = [local_part(x) for x in found]
    for v, x, y in zip(graph.inputs, found, local, strict=True):
        if v.shape != tuple(getattr(x, "shape", ())) or v.dtype != y.dtype:
            got = Var("", y.dtype, tuple(getattr(x, "shape", ()))).type
            raise TypeError(f"{graph.name}: compiled for {v}, called with {got}.")
    return found, local


def local_part(x: Any) -> torch.Tensor:
    """What this rank holds of an argument, a number as a tensor."""
    if isinstance(x, DTensor):
        return x.to_local()
    if not isinstance(x, torch.Tensor):
        return torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64)
    return x.detach()


def check_donation(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """State is written in place, so each leaf of it needs memory of its own, contiguous as it was traced."""
    spans = []
    for i, (v, x) in enumerate(zip(graph.inputs, inputs)):
        if i < graph.num_state and not x.is_contiguous():
            raise TypeError(_donated(graph, f"{v.name} is not contiguous"))
        if x.numel():
            size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
            spans.append((x.data_ptr(), x.data_ptr() + size * x.itemsize, i))
    spans.sort()
    for (_, end, i), (start, _, j) in itertools.pairwise(spans):
        if start < end and min(i, j) < graph.num_state:
            raise TypeError(_donated(graph, f"{graph.inputs[i].name} and {graph.inputs[j].name} share memory"))


def _donated(graph: Graph, what: str) -> str:
    return (
        f"{graph.name}: {what}, and a step writes its state in place.\n"
        f"Call `state = step.shard(state)` once, before the loop: it copies."
    )
