"""Leaves: a leaf of the state as the ranks of a mesh hold it between steps, a DTensor.

A leaf lives on the axes over which its transform shards or replicates it, and on those over which the step itself
divides it (see `layout.Own`). If both cut the same dim, the step's cut comes first, as with FSDP2 and tensor
parallelism: DTensor calls the placement of the second cut `_StridedShard`.

Private torch APIs live here; checked on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ..ir.axes import members, submesh
from ..ir.graph import Layout, Split
from ..ir.layout import Own, as_tensor, cut, mesh_axes


def leaf_mesh(mesh: DeviceMesh, axes: Sequence[str], own: Own | None) -> DeviceMesh:
    """The part of a mesh that a leaf lives on: the axes of its transform, and the step's own."""
    order = {axis for axis, _ in mesh_axes(mesh)}
    wanted = {
        axis for axis in (*axes, *(own.axes if own else ())) if order.issuperset(members(axis))
    }
    return submesh(mesh, wanted) if wanted else mesh


def placements(layout: Layout, mesh: DeviceMesh, own: Own | None = None) -> list[Placement]:
    """The placements of a leaf on the mesh that it lives on, from its layout and the step's own division."""
    by_axis: dict[str, Placement] = dict(zip(own.axes, own.placements)) if own else {}
    names = [axis for axis, _ in mesh_axes(mesh)]
    for part in layout:
        if isinstance(part, Split):
            inner = own.cuts(part.dim, names[names.index(part.axis) :]) if own else 1
            by_axis[part.axis] = (
                Shard(part.dim) if inner == 1 else _StridedShard(part.dim, split_factor=inner)
            )
    return [by_axis.get(axis, Replicate()) for axis in names]


def shard_leaf(
    leaf: Any, layout: Layout, mesh: DeviceMesh, source: int | None, device: torch.device | None
) -> torch.Tensor:
    """A full tensor as a DTensor.

    The full tensor may be the same on every rank, or valid only on rank `source`, which sends it, or a meta tensor,
    for which uninitialised memory is allocated.
    """
    leaf = as_tensor(leaf)
    leaf, trained = leaf.detach(), leaf.requires_grad
    if source is None:
        return _cut(leaf, layout, mesh, None, device).requires_grad_(trained)
    whole = _own_memory(leaf, mesh, device)
    return distribute_tensor(
        whole, mesh, placements(layout, mesh), src_data_rank=source
    ).requires_grad_(trained)


def _own_memory(x: torch.Tensor, mesh: DeviceMesh, device: torch.device | None) -> torch.Tensor:
    """A contiguous copy, or uninitialised memory for a meta tensor.

    The step overwrites its state, and must not overwrite the caller's tensors.
    """
    if x.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device=device or mesh.device_type)
    return x.to(device or x.device, copy=True, memory_format=torch.contiguous_format)


def _cut(
    whole: torch.Tensor,
    layout: Layout,
    mesh: DeviceMesh,
    own: Own | None,
    device: torch.device | None = None,
) -> DTensor:
    """A copy of this rank's part of a tensor that is the same on all ranks, up to the step's own division."""
    local = whole
    for split in layout:
        if isinstance(split, Split):
            axis = [name for name, _ in mesh_axes(mesh)].index(split.axis)
            local = cut(local, split, mesh.size(axis), mesh.get_local_rank(axis))
    shape = own.shape if own else whole.shape
    return _dtensor(_own_memory(local, mesh, device), mesh, placements(layout, mesh, own), shape)


def cut_as(whole: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds of `leaf`, as a view."""
    if not isinstance(leaf, DTensor):
        return whole
    mesh, is_strided = leaf.device_mesh, lambda placed: isinstance(placed[1], _StridedShard)
    cuts: Any = [
        (axis, p) for axis, p in enumerate(leaf.placements) if isinstance(p, Shard | _StridedShard)
    ]
    for axis, placement in sorted(cuts, key=is_strided):
        whole = cut(whole, Split("", placement.dim), mesh.size(axis), mesh.get_local_rank(axis))
    return whole


def copied(leaf: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor."""
    return (
        leaf.detach()
        .clone(memory_format=torch.contiguous_format)
        .requires_grad_(leaf.requires_grad)
    )


def relaid(
    leaf: DTensor,
    layout: Layout,
    mesh: DeviceMesh,
    own: Own | None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A copy of a DTensor of this or another mesh, in the given layout on `mesh`.

    If mesh or layout differ it communicates, so every rank must call it. The parts of a meta leaf are
    uninitialised, on `device`.
    """
    if leaf.is_meta:
        whole = torch.empty(own.local_shape if own else leaf.shape, dtype=leaf.dtype, device="meta")
        return _cut(whole, layout, mesh, own, device).requires_grad_(leaf.requires_grad)
    held, wanted = leaf.device_mesh, placements(layout, mesh, own)
    if held == mesh and list(leaf.placements) == wanted:
        return copied(leaf)
    with torch.no_grad():
        if held == mesh and own is None:
            return copied(leaf.redistribute(mesh, wanted)).requires_grad_(leaf.requires_grad)
        whole = leaf.full_tensor() if own is None else _gathered(leaf, own)
        return _cut(whole, layout, mesh, own).requires_grad_(leaf.requires_grad)


def full_tensor(leaf: DTensor, axes: Sequence[str]) -> torch.Tensor:
    """A leaf whole on every rank; `axes` are those of its transform. Every rank must call it."""
    own, mesh = Own.of(leaf, axes), leaf.device_mesh
    if own is None:
        return leaf.full_tensor()
    over = mesh if mesh.ndim == len(own.axes) else mesh[own.axes]
    return _dtensor(_gathered(leaf, own), over, own.placements, own.shape).full_tensor()


def _gathered(leaf: DTensor, own: Own) -> torch.Tensor:
    """The part of a leaf that the step itself sees on this rank, gathered over all other axes of its mesh."""
    mesh = leaf.device_mesh
    others = {
        axis: p for (axis, _), p in zip(mesh_axes(mesh), leaf.placements) if axis not in own.axes
    }
    if not others:
        return leaf.to_local()
    # The step's own cut came first, so along the other axes its part is cut as any tensor is.
    cuts = [Shard(p.dim) if isinstance(p, Shard | _StridedShard) else p for p in others.values()]
    return _dtensor(leaf.to_local(), mesh[tuple(others)], cuts, own.local_shape).full_tensor()


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placed: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placed, run_check=False, shape=torch.Size(shape), stride=stride
    )


def check_laid_out(
    name: str,
    mesh: DeviceMesh,
    axes: Sequence[Sequence[str]],
    paths: Sequence[str],
    leaves: Sequence[Any],
    layouts: Sequence[Layout],
    lowered: bool = False,
) -> None:
    """Check that each leaf of the state is on this mesh and sharded as its layout says.

    Args:
        name: the name of the step, for the error.
        mesh: the mesh of the step; without devices there is nothing to check.
        axes: for each leaf of the state, the axes of the mesh over which transforms shard or replicate it.
        paths, leaves: the leaves of the arguments and their paths, those of the state first.
        layouts: the layouts of the leaves of the state.
        lowered: whether the program is lowered. Its layouts omit the axes of size 1, so these are not compared.

    Raises: TypeError that names the first leaves that are not laid out so.
    """
    wanted: dict[tuple, tuple[DeviceMesh, list[Placement]]] = {}
    wrong = []
    for path, leaf, layout, over in zip(paths, leaves, layouts, axes):
        if isinstance(leaf, torch.Tensor) and (leaf.ndim or isinstance(leaf, DTensor)):
            own = Own.of(leaf, over)
            if (layout, own, over) not in wanted:
                on = leaf_mesh(mesh, over, own)
                wanted[layout, own, over] = on, placements(layout, on, own)
            on, want = wanted[layout, own, over]
            if not isinstance(leaf, DTensor):
                wrong.append(
                    f"{path}: expected a DTensor {list(leaf.shape)} laid out {want}, got a full tensor"
                )
            elif leaf.device_mesh != on:
                wrong.append(f"{path}: is on another mesh, {leaf.device_mesh}")
            elif any(
                p != w and (n > 1 or not lowered)
                for n, p, w in zip(on.shape, leaf.placements, want)
            ):
                wrong.append(f"{path}: expected the layout {want}, got {list(leaf.placements)}")
    if wrong:
        raise TypeError(
            f"{name} was called with state that is not laid out for it. "
            f"{len(wrong)} of {len(layouts)} leaves, including:\n"
            + "".join(f"  * {line}\n" for line in wrong[:3])
            + "Call `state = train_step.shard(state)` once, before the loop. A step takes its state first; zt.lift "
            + "makes such a step of the body of an ordinary loop."
        )
