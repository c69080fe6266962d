"""Shard a train state: each leaf becomes a DTensor on the ranks of a mesh; and gather the state into full tensors.

A leaf lives on the axes over which its transform shards or replicates it, and on the axes over which the step itself
divides it (see `user_sharding`). If both cut the same dim, the step's cut comes first, as with FSDP2 and tensor
parallelism; DTensor calls the placement of the second cut `_StridedShard`.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from ..calling.host_memory import copied_to
from ..calling.leaf_records import RECORDS
from ..calling.meta_leaves import Number, ValuesOfMeta, fill_of, mark_unwritten, mark_unwritten_copy
from ..ir.axes import members, submesh
from ..ir.graph import Kept, Layout, MemoryKind, Split
from ..ir.layout import AbstractMesh, LeafSharding, as_tensor, cut, mesh_axes
from ..ir.printer import first_names
from ..ir.user_sharding import UserSharding
from ..ops import MOMENTS, narrowed, widened
from .agreement import agree_on_call
from .mesh import check_runs
from .replicas import agree_on_state

State = TypeVar("State")


def mesh_of_state(leaves: Iterable[Any]) -> DeviceMesh | None:
    """The mesh on which a state lives; None for a state without DTensors.

    This is the mesh of its step, even if no leaf lives on all of its axes. Where the step is not known, as for copies
    of the leaves, it is the largest mesh of a leaf.
    """
    meshes = [RECORDS.of(x).mesh or x.device_mesh for x in leaves if isinstance(x, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def shard_state(
    state: State,
    mesh: DeviceMesh,
    paths: Sequence[str],
    shardings: Sequence[LeafSharding],
    source: int | None,
    device: torch.device | str | None,
) -> State:
    """Copy a state into DTensors. All ranks must call it.

    Args:
        state: the state.
        mesh: the mesh of the step.
        paths: the path of each leaf, in the order of the state's tree.
        shardings: the sharding of each leaf. Along its axes the ranks must hold the same.
        source: the rank whose tensors are used; None if all ranks have them.
        device: the device of the parts.

    Raises: RuntimeError if the ranks hold different leaves; ValueError if `source` is not 0 on a mesh of several axes.
    """
    leaves, tree = pytree.tree_flatten(state)
    if source and mesh.ndim > 1:
        raise ValueError(
            f"shard: source={source} on a mesh of {mesh.ndim} axes; only its first rank, 0, can be the source."
        )
    compared_axes = []
    for leaf, sharding in zip(leaves, shardings):
        compared_axes.append(_joined_axes(leaf, sharding) or sharding.axes)
    agree_on_state(mesh, compared_axes, paths, leaves, source)
    device = torch.device(device) if device is not None else None
    parts = []
    for leaf, sharding in zip(leaves, shardings):
        leaf = _in_rows(_on_device(leaf), sharding.rows)
        part = _part(leaf, sharding, mesh, source, device)
        part = _stored(part, sharding.dtype)
        part = _copied_to(sharding.memory, part) if sharding.memory != "device" else part
        _record(part, mesh, sharding)
        # Integers that a source has sent may all be 0, and then they look like an unwritten leaf.
        if source is None or part.is_floating_point():
            mark_unwritten(part, leaf)
        parts.append(part)
    return pytree.tree_unflatten(parts, tree)


def _joined_axes(leaf: Any, sharding: LeafSharding) -> tuple[str, ...]:
    """The axes along which a leaf was that of replicas that train apart, and is one leaf from now on."""
    if not isinstance(leaf, DTensor):
        return ()
    own_axes = RECORDS.of(leaf).independent
    return tuple(axis for axis in own_axes if axis not in sharding.independent)


def with_replicas(leaf: DTensor) -> DTensor:
    """A leaf on the mesh of its step, in the same memory. If replicas train apart, it begins with a dim of them.

    All ranks must call it. A leaf [4, 2] of the replicas of host=3 is [3, 4, 2], whose first dim is cut over `host`.
    """
    record = RECORDS.of(leaf)
    if record.mesh is None or not record.independent:
        return leaf
    own_axes = [axis for axis, _ in mesh_axes(leaf.device_mesh)]
    mesh = submesh(record.mesh, (*own_axes, *record.independent))
    by_axis: dict[str, Placement] = dict.fromkeys(record.independent, Shard(0))
    for axis, placement in zip(own_axes, leaf.placements):
        if isinstance(placement, _StridedShard):
            placement = _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
        elif isinstance(placement, Shard):
            placement = Shard(placement.dim + 1)
        by_axis[axis] = placement
    sizes = dict(mesh_axes(mesh))
    replicas = math.prod(sizes[axis] for axis in record.independent)
    local = leaf._local_tensor.detach().unsqueeze(0)
    return _dtensor(local, mesh, [by_axis[axis] for axis in sizes], (replicas, *leaf.shape))


def unshard_state(
    state: State, mesh: DeviceMesh | AbstractMesh | None, shardings: Sequence[LeafSharding]
) -> State:
    """Gather a state of DTensors into full tensors, which are copies, on every rank. All ranks must call it.

    Of replicas that train apart, each rank gets its own. `shardings` has the sharding of each leaf by transforms.
    Moments in 8 bits become fp32.
    """
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:
        check_runs(mesh)
        agree_on_call(mesh, "unshard")
    leaves, tree = pytree.tree_flatten(state)
    full = []
    for x, sharding in zip(leaves, shardings):
        if isinstance(x, DTensor):
            # The groups of a mesh of GPUs gather only what is on GPUs, so a leaf on the host is copied there and back.
            device = x.to_local().device
            x = full_tensor(_on_device(x), sharding.axes).to(device, copy=True)
        elif isinstance(x, torch.Tensor):
            x = copied(x)  # the next step would write into it
        full.append(widened(x) if sharding.dtype in MOMENTS else x)
    return pytree.tree_unflatten(full, tree)


def copied_state(state: State, shardings: Sequence[LeafSharding]) -> State:
    """A copy of a state of one process, with each tensor in its memory."""
    leaves, tree = pytree.tree_flatten(state)
    copies = []
    for leaf, sharding in zip(leaves, shardings):
        if isinstance(leaf, torch.Tensor):
            memory = sharding.memory
            leaf = _in_rows(leaf, sharding.rows)
            copy = copied_to(memory, leaf) if memory != "device" else copied(leaf)
            stored = _stored(copy, sharding.dtype)
            # A cast leaves pinned memory.
            is_cast = memory != "device" and stored is not copy
            copy = copied_to(memory, stored) if is_cast else stored
            _record(copy, None, sharding)
            if not copy.is_meta:
                mark_unwritten(copy, leaf)
            leaf = copy
        copies.append(leaf)
    return pytree.tree_unflatten(copies, tree)


def _record(leaf: torch.Tensor, mesh: DeviceMesh | None, sharding: LeafSharding) -> None:
    record = RECORDS.of(leaf)
    record.mesh = mesh
    record.independent = sharding.independent
    record.rows = sharding.rows


def _in_rows(leaf: Any, count: int) -> Any:
    """A leaf with a row for each of `count` ranks. With another number of rows, these become equal parts of their sum.

    A count of 0 means that the leaf has no rows of ranks.
    """
    if not count or leaf.shape[0] == count:
        return leaf
    with torch.no_grad():
        if leaf.is_meta:
            return torch.empty(count, *leaf.shape[1:], dtype=leaf.dtype, device="meta")
        return equal_rows(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, count)


def equal_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`count` equal rows with the sum of these. Rows in int8 or uint8 are floats of 8 bits (see `ops.moments`).

    >>> equal_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [4.0, 0.0]]), 2)
    tensor([[4., 3.],
            [4., 3.]])
    """
    values = widened(rows) if rows.dtype in MOMENTS else rows
    row = narrowed(values.sum(0) / count, rows.dtype)
    return row.expand(count, *row.shape)


def first_value(
    kept: Kept,
    like: torch.Tensor,
    sharding: LeafSharding,
    mesh: DeviceMesh | None,
    device: torch.device | None,
) -> torch.Tensor:
    """The first value of a leaf that a transform keeps: a copy of the leaf `like`, or zeros of its shape.

    With a mesh it is laid out there; all ranks must call it. Without one it is whole, on `device`.
    """
    dtype = kept.dtype or like.dtype
    if mesh is None and kept.start == "copy":
        value = copied(like).to(dtype)
    elif mesh is None:
        with ValuesOfMeta():
            value = torch.zeros(like.shape, dtype=dtype, device=device)
    elif kept.start == "copy":
        value = _part(_on_device(like), sharding, mesh, None, None).to(dtype)
    else:
        user_sharding = UserSharding.of(like, sharding.axes)
        shape = user_sharding.local_shape if user_sharding else like.shape
        blank = torch.empty(shape, dtype=dtype, device="meta")
        leaf_mesh = _leaf_mesh(mesh, sharding.axes, user_sharding)
        value = _own_part(blank, sharding.layout, leaf_mesh, user_sharding, None, 0)
    value = value.detach()
    if sharding.memory != "device":
        value = _copied_to(sharding.memory, value)
    _record(value, mesh, sharding)
    if kept.start == "copy":
        mark_unwritten_copy(value, like)
    return value


def _stored(leaf: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A leaf in its dtype between steps, rounded to nearest."""
    if dtype is None or leaf.dtype == dtype:
        return leaf
    if dtype not in MOMENTS:
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
    if not isinstance(leaf, DTensor):
        return narrowed(leaf.detach(), dtype)
    codes = narrowed(leaf._local_tensor.detach(), dtype)
    return _dtensor(codes, leaf.device_mesh, leaf.placements, leaf.shape)


def _copied_to(kind: MemoryKind, part: torch.Tensor) -> torch.Tensor:
    """A copy of a part in a memory, still on the mesh of the devices."""
    if not isinstance(part, DTensor):
        return copied_to(kind, part)
    local = copied_to(kind, part._local_tensor.detach())
    return DTensor(local, part._spec, requires_grad=part.requires_grad)


def in_memory(kind: MemoryKind, before: MemoryKind, leaf: torch.Tensor) -> torch.Tensor:
    """A leaf that is in the memory `before`: itself, or a copy in another memory."""
    if kind == before:
        return leaf
    return _on_device(leaf) if kind == "device" else _copied_to(kind, leaf)


def _on_device(leaf: Any) -> Any:
    """A leaf of a state; a DTensor in another memory is copied to the device of its mesh."""
    if not isinstance(leaf, DTensor) or leaf.is_meta:
        return leaf
    device = leaf.device_mesh.device_type
    local = leaf._local_tensor.detach()
    if local.device.type == device:
        return leaf
    return DTensor(local.to(device), leaf._spec, requires_grad=leaf.requires_grad)


def copied(leaf: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor."""
    copy = leaf.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(leaf.requires_grad)


def full_tensor(leaf: DTensor, axes: Sequence[str]) -> torch.Tensor:
    """A whole leaf on every rank. `axes` are the axes of its transform. Every rank must call this."""
    user_sharding = UserSharding.of(leaf, axes)
    if user_sharding is None:
        return leaf.full_tensor()
    mesh = leaf.device_mesh
    if mesh.ndim != len(user_sharding.axes):
        mesh = mesh[user_sharding.axes]
    local = _gathered(leaf, user_sharding)
    whole = _dtensor(local, mesh, user_sharding.placements, user_sharding.shape)
    return whole.full_tensor()


def _part(
    leaf: Any,
    sharding: LeafSharding,
    mesh: DeviceMesh,
    source: int | None,
    device: torch.device | None,
) -> torch.Tensor:
    """A leaf as a DTensor in its layout.

    A full tensor may be equal on all ranks, or valid only on rank `source`, which sends it, or on meta. For a meta
    tensor, memory is allocated and filled (see `meta_leaves`).
    """
    layout = sharding.layout
    user_sharding = UserSharding.of(leaf, sharding.axes)
    if user_sharding is not None:
        user_axes = set(zip(user_sharding.axes, user_sharding.sizes))
        if not user_axes <= set(mesh_axes(mesh)):
            user_sharding = None  # the leaf comes from another mesh
    mesh = _leaf_mesh(mesh, sharding.axes, user_sharding)
    if isinstance(leaf, DTensor):
        return _in_layout(leaf, layout, mesh, user_sharding, device)
    leaf = as_tensor(leaf)
    fill = fill_of(leaf)
    requires_grad = leaf.requires_grad
    leaf = leaf.detach()
    part: torch.Tensor
    if source is None:
        part = _own_part(leaf, layout, mesh, None, device, fill)
    else:
        full = _own_memory(leaf, mesh, device, fill)
        part = distribute_tensor(full, mesh, _placements(layout, mesh), src_data_rank=source)
    return part.requires_grad_(requires_grad)


def _in_layout(
    leaf: DTensor,
    layout: Layout,
    mesh: DeviceMesh,
    user_sharding: UserSharding | None,
    device: torch.device | None,
) -> torch.Tensor:
    """A copy of a DTensor of this or another mesh, in `layout` on `mesh`.

    This communicates if mesh or layout differ, so every rank must call it. The parts of a meta leaf are on `device`.
    """
    placements = _placements(layout, mesh, user_sharding)
    is_same_mesh = leaf.device_mesh == mesh
    part: torch.Tensor
    with torch.no_grad():
        if leaf.is_meta:
            shape = user_sharding.local_shape if user_sharding else leaf.shape
            full = torch.empty(shape, dtype=leaf.dtype, device="meta")
            part = _own_part(full, layout, mesh, user_sharding, device, fill_of(leaf))
        elif is_same_mesh and list(leaf.placements) == placements:
            return copied(leaf)
        elif is_same_mesh and user_sharding is None:
            part = copied(leaf.redistribute(mesh, placements))
        else:
            full = leaf.full_tensor() if user_sharding is None else _gathered(leaf, user_sharding)
            part = _own_part(full, layout, mesh, user_sharding)
    return part.requires_grad_(leaf.requires_grad)


def _leaf_mesh(
    mesh: DeviceMesh, axes: Sequence[str], user_sharding: UserSharding | None
) -> DeviceMesh:
    """The part of a mesh on which a leaf lives: the axes of its transform, and the step's own."""
    mesh_names = {axis for axis, _ in mesh_axes(mesh)}
    names = {*axes, *(user_sharding.axes if user_sharding else ())}
    leaf_names = {axis for axis in names if mesh_names.issuperset(members(axis))}
    return submesh(mesh, leaf_names) if leaf_names else mesh


def _placements(
    layout: Layout, mesh: DeviceMesh, user_sharding: UserSharding | None = None
) -> list[Placement]:
    """The placements of a leaf on the mesh on which it lives, from its layout and the step's own division."""
    names = [axis for axis, _ in mesh_axes(mesh)]
    by_axis: dict[str, Placement] = dict.fromkeys(names, Replicate())
    if user_sharding is not None:
        by_axis.update(zip(user_sharding.axes, user_sharding.placements))
    for split in layout:
        if not isinstance(split, Split):
            continue
        # The step cuts first, even along later axes of the mesh: a strided shard says so.
        parts = 1
        if user_sharding is not None:
            parts = user_sharding.parts_along(split.dim, names[names.index(split.axis) :])
        if parts == 1:
            by_axis[split.axis] = Shard(split.dim)
        else:
            by_axis[split.axis] = _StridedShard(split.dim, split_factor=parts)
    return [by_axis[axis] for axis in names]


def _own_memory(
    x: torch.Tensor, mesh: DeviceMesh, device: torch.device | None, fill: Number
) -> torch.Tensor:
    """A contiguous copy of a tensor; for a meta tensor, new memory filled with `fill`.

    The step overwrites its state, and must not overwrite the caller's tensors.
    """
    if x.is_meta:
        return torch.full(x.shape, fill, dtype=x.dtype, device=device or mesh.device_type)
    return x.to(device or x.device, copy=True, memory_format=torch.contiguous_format)


def _own_part(
    full: torch.Tensor,
    layout: Layout,
    mesh: DeviceMesh,
    user_sharding: UserSharding | None,
    device: torch.device | None = None,
    fill: Number = math.nan,
) -> DTensor:
    """A copy of this rank's part of a tensor that is the same on all ranks, up to the step's own division.

    The part of a meta tensor is filled with `fill`.
    """
    names = [axis for axis, _ in mesh_axes(mesh)]
    local = full
    for split in layout:
        if isinstance(split, Split):
            axis = names.index(split.axis)
            local = cut(local, split, mesh.size(axis), mesh.get_local_rank(axis))
    local = _own_memory(local, mesh, device, fill)
    placements = _placements(layout, mesh, user_sharding)
    shape = user_sharding.shape if user_sharding else full.shape
    return _dtensor(local, mesh, placements, shape)


def _gathered(leaf: DTensor, user_sharding: UserSharding) -> torch.Tensor:
    """The part of a leaf that the step itself sees on this rank, gathered over all other axes of its mesh."""
    mesh = leaf.device_mesh
    other_axes: dict[str, Placement] = {}
    for (axis, _), placement in zip(mesh_axes(mesh), leaf.placements):
        if axis in user_sharding.axes:
            continue
        # The step's own cut came first, so along the other axes its part is cut as any tensor is.
        if isinstance(placement, _StridedShard):
            placement = Shard(placement.dim)
        other_axes[axis] = placement
    local = leaf.to_local()
    if not other_axes:
        return local
    placements = list(other_axes.values())
    whole = _dtensor(local, mesh[tuple(other_axes)], placements, user_sharding.local_shape)
    return whole.full_tensor()


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    # Without a shape, `from_local` would assume that all parts are equally large.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def check_stored(
    name: str, paths: Sequence[str], leaves: Sequence[Any], shardings: Sequence[LeafSharding]
) -> None:
    """Check that each leaf of the state has its dtype between steps.

    Raises: TypeError that names the first leaves with another one.
    """
    wide = []
    for path, leaf, sharding in zip(paths, leaves, shardings):
        if sharding.dtype is not None and leaf.dtype != sharding.dtype:
            wide.append(f"{path} ({leaf.dtype})")
    if wide:
        raise TypeError(
            f"{name} keeps leaves of its state in fewer bits between steps, and was called with "
            f"{first_names(wide)}.\nCall `state = step.shard(state)` once, before the loop, also on one rank."
        )


def check_laid_out(
    name: str,
    mesh: DeviceMesh,
    paths: Sequence[str],
    leaves: Sequence[Any],
    shardings: Sequence[LeafSharding],
    lowered: bool = False,
) -> None:
    """Check that each leaf of the state is on this mesh and sharded as its layout says.

    Args:
        name: the name of the step, for the error.
        mesh: the mesh of the step.
        paths, leaves: the leaves of all arguments and their paths, first the leaves of the state.
        shardings: the shardings of the leaves of the state by transforms.
        lowered: whether the program is lowered. Then its layouts omit the axes of size 1, which are not compared.

    Raises: TypeError that names the first leaves that are laid out differently.
    """
    expected: dict[tuple, tuple[DeviceMesh, list[Placement]]] = {}  # many have equal shardings
    problems = []
    for path, leaf, sharding in zip(paths, leaves, shardings):
        if not isinstance(leaf, torch.Tensor) or not (leaf.ndim or isinstance(leaf, DTensor)):
            continue
        user_sharding = UserSharding.of(leaf, sharding.axes)
        key = sharding, user_sharding
        if key not in expected:
            leaf_mesh = _leaf_mesh(mesh, sharding.axes, user_sharding)
            expected[key] = leaf_mesh, _placements(sharding.layout, leaf_mesh, user_sharding)
        problem = _layout_problem(leaf, *expected[key], lowered)
        if problem:
            problems.append(f"  * {path}: {problem}\n")
    if problems:
        raise TypeError(
            f"{name} was called with state that is not laid out for it. "
            f"{len(problems)} of {len(shardings)} leaves, including:\n{''.join(problems[:3])}"
            f"Call `state = step.shard(state)` once, before the loop. A step takes its state first; zt.lift "
            f"makes such a step of the body of an ordinary loop."
        )


def _layout_problem(
    leaf: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], lowered: bool
) -> str:
    """How a leaf differs from its expected mesh and placements; empty if it does not."""
    if not isinstance(leaf, DTensor):
        return f"expected a DTensor {list(leaf.shape)} laid out {placements}, got a full tensor"
    if leaf.device_mesh != mesh:
        return f"is on another mesh, {leaf.device_mesh}"
    for size, placement, expected_placement in zip(mesh.shape, leaf.placements, placements):
        if placement != expected_placement and (size > 1 or not lowered):
            return f"expected the layout {placements}, got {list(leaf.placements)}"
    return ""
