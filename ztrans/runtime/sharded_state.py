"""Sharded state: a train state as the ranks of a mesh hold it, each its parts, and back in full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ..calling.trees import none_as_empty
from ..ir.graph import Layout
from ..ir.layout import AbstractMesh, Own, mesh_axes
from .leaves import full_tensor, leaf_mesh, relaid, shard_leaf
from .meeting import Call, meet
from .mesh import check_runs
from .replicas import check_same

State = TypeVar("State")
_meshes = WeakIdKeyDictionary()  # a leaf -> the mesh of the step that it was sharded for


def mesh_of_state(leaves: Iterable[Any]) -> DeviceMesh | None:
    """The mesh on which a state is kept, or None if it has no DTensor.

    It is that of its step, also if no leaf lives on all of its axes. If that is not known, as for copies of the leaves,
    it is the largest mesh of a leaf.
    """
    meshes = [_meshes.get(x, x.device_mesh) for x in leaves if isinstance(x, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def shard_state(
    state: State,
    mesh: DeviceMesh,
    paths: Sequence[str],
    layouts: Sequence[Layout],
    axes: Sequence[Sequence[str]],
    source: int | None,
    device: torch.device | str | None,
) -> State:
    """Copy a state into DTensors in these layouts. All ranks must call it.

    Args:
        state: the state, whose leaves have these `paths` and `layouts`, in the order of its tree.
        axes: for each leaf, the mesh axes along which the ranks must hold the same.
        source: the rank whose tensors are used; None where all ranks have them.
        device: the device of the parts.

    Raises: ValueError if the ranks hold different leaves, or `source` is not 0 on a mesh of several axes.
    """
    leaves, tree = pytree.tree_flatten(none_as_empty(state))
    if source and mesh.ndim > 1:
        raise ValueError(
            f"shard: source={source} on a mesh of {mesh.ndim} axes; only its first rank, 0, can be."
        )
    check_same(mesh, axes, paths, leaves, source)
    device = torch.device(device) if device is not None else None
    parts = [
        _part(x, layout, mesh, over, source, device)
        for x, layout, over in zip(leaves, layouts, axes)
    ]
    for part in parts:
        _meshes[part] = mesh
    return pytree.tree_unflatten(parts, tree)


def _part(
    leaf: Any,
    layout: Layout,
    mesh: DeviceMesh,
    axes: Sequence[str],
    source: int | None,
    device: torch.device | None,
) -> torch.Tensor:
    """A leaf as a DTensor in its layout."""
    own = Own.of(leaf, axes)
    if own is not None and not set(zip(own.axes, own.sizes)) <= set(mesh_axes(mesh)):
        own = None  # it comes from another mesh
    on = leaf_mesh(mesh, axes, own)
    if isinstance(leaf, DTensor):
        return relaid(leaf, layout, on, own, device)
    return shard_leaf(leaf, layout, on, source, device)


def unshard_state(
    state: State, mesh: DeviceMesh | AbstractMesh | None, axes: Sequence[Sequence[str]]
) -> State:
    """Gather a state of DTensors into full tensors on every rank. All ranks must call it.

    `axes` are, for each leaf, the mesh axes over which transforms shard or replicate it.
    """
    if isinstance(mesh, DeviceMesh) and mesh.size() > 1:
        check_runs(mesh)
        meet(mesh, Call("unshard"))
    leaves, tree = pytree.tree_flatten(none_as_empty(state))
    whole = [
        full_tensor(x, over).clone() if isinstance(x, DTensor) else x
        for x, over in zip(leaves, axes)
    ]
    return pytree.tree_unflatten(whole, tree)
