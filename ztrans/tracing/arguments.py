"""Arguments of a compiled step: flat, as this rank holds them, and fit to be written in place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.graph import Graph, Layout, Var
from ..ir.layout import AbstractMesh, placements
from .trace import Program


def traced_leaves(program: Program, name: str, state: Any, batch: tuple) -> list:
    """The leaves of a call that are inputs of the program.

    Raises: TypeError where the others are not what the program was traced for.
    """
    leaves, tree = pytree.tree_flatten((state, *batch))
    if tree != program.in_tree:
        raise TypeError(f"{name}: compiled for arguments {program.in_tree}, called with {tree}.")
    for i, value in program.static:
        if leaves[i] != value:
            raise TypeError(f"{name}: compiled for {program.paths[i]}={value!r}, called with {leaves[i]!r}.")
    static = {i for i, _ in program.static}
    return [x for i, x in enumerate(leaves) if i not in static]


def check_captured(program: Program, name: str) -> None:
    """Raises: TypeError where what the step reads besides its arguments is not what it was traced for."""
    now = program.captured.key()
    if now != program.made_for:
        changes = program.captured.changes(program.made_for, now)
        raise TypeError(
            f"{name}: what the step reads besides its arguments has changed since it was traced:\n"
            + "".join(f"  * {change}\n" for change in changes[:4])
            + "Lower it again, or call the step itself, which is then traced anew."
        )


def flat(
    program: Program, graph: Graph, mesh: DeviceMesh | AbstractMesh | None, state: Any, batch: tuple
) -> tuple[list, list[torch.Tensor]]:
    """The flat arguments of a call, and what they hold on this rank.

    Raises: TypeError where they are not what the program was compiled for.
    """
    found = traced_leaves(program, graph.name, state, batch)
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:  # one rank holds everything, however it is called
        layouts = [v.layout for v in graph.inputs[: graph.num_state]]
        check_laid_out(graph.name, mesh, program.paths, found, layouts, lowered=True)
    local = [local_part(x) for x in found]
    # A program reads memory, and a lazily conjugated or negated tensor is not what its memory holds.
    local[graph.num_state :] = [x.resolve_conj().resolve_neg() for x in local[graph.num_state :]]
    for v, x, y in zip(graph.inputs, found, local, strict=True):
        if v.shape != tuple(getattr(x, "shape", ())) or v.dtype != y.dtype:
            got = Var("", y.dtype, tuple(getattr(x, "shape", ()))).type
            raise TypeError(f"{graph.name}: compiled for {v}, called with {got}.")
    return found, local


def check_laid_out(
    name: str,
    mesh: DeviceMesh | AbstractMesh | None,
    paths: Sequence[str],
    leaves: Sequence[Any],
    layouts: Sequence[Layout],
    lowered: bool = False,
) -> None:
    """State must lie as shard_params wants it: on this mesh, cut in this way. Leaves beyond `layouts` are not state.

    Layouts of a lowered program say nothing about axes of size 1.
    """
    if not isinstance(mesh, DeviceMesh):
        return
    wanted = {layout: placements(layout, mesh) for layout in set(layouts)}
    wrong = []
    for path, leaf, layout in zip(paths, leaves, layouts):
        if isinstance(leaf, torch.Tensor) and (leaf.ndim or isinstance(leaf, DTensor)):
            want = wanted[layout]
            if not isinstance(leaf, DTensor):
                wrong.append(f"{path}: expected a DTensor {list(leaf.shape)} laid out {want}, got a full tensor")
            elif leaf.device_mesh != mesh:
                wrong.append(f"{path}: lies on another mesh, {leaf.device_mesh}")
            elif any(p != w and (n > 1 or not lowered) for n, p, w in zip(mesh.shape, leaf.placements, want)):
                wrong.append(f"{path}: expected the layout {want}, got {list(leaf.placements)}")
    if wrong:
        raise TypeError(
            f"shard_params: {name} was called with state that is not laid out "
            f"for it. {len(wrong)} of {len(layouts)} leaves, including:\n"
            + "".join(f"  * {line}\n" for line in wrong[:3])
            + "Call `state = train_step.shard(state)` once, before the loop."
        )


def local_part(x: Any) -> torch.Tensor:
    """What this rank holds of an argument, a number as a tensor."""
    if isinstance(x, DTensor):
        x = x.to_local()
    elif not isinstance(x, torch.Tensor):
        return torch.tensor(x, dtype=torch.int64 if isinstance(x, Integral) else torch.float64)
    return x.detach() if x.requires_grad else x


def check_donation(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """State is written in place, so each leaf of it needs memory of its own, contiguous as it was traced."""
    spans = []
    for i, (v, x) in enumerate(zip(graph.inputs, inputs)):
        size = x.numel()
        if i < graph.num_state and (x.is_conj() or x.is_neg()):
            raise TypeError(_donated(graph, f"{v.name} is conjugated or negated only when it is read"))
        if not x.is_contiguous():
            if i < graph.num_state:
                raise TypeError(_donated(graph, f"{v.name} is not contiguous"))
            size = size and 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
        if size:
            start = x.data_ptr()
            spans.append((start, start + size * x.itemsize, i))
    spans.sort()
    for (_, end, i), (start, _, j) in itertools.pairwise(spans):
        if start < end and min(i, j) < graph.num_state:
            raise TypeError(_donated(graph, f"{graph.inputs[i].name} and {graph.inputs[j].name} share memory"))


def _donated(graph: Graph, what: str) -> str:
    return (
        f"{graph.name}: {what}, and a step writes its state in place.\n"
        f"Call `state = step.shard(state)` once, before the loop: it copies."
    )
