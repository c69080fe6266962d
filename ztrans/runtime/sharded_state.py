"""Sharded state: a train state as the ranks of a mesh hold it, each its parts, and back in full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.graph import Layout
from ..ir.layout import relaid, shard_leaf
from .meeting import Call, meet
from .mesh import check_runs
from .replicas import check_same

State = TypeVar("State")


def shard_state(
    state: State,
    mesh: DeviceMesh,
    paths: Sequence[str],
    layouts: Sequence[Layout],
    axes: Sequence[str],
    source: int | None,
    device: torch.device | None,
) -> State:
    """Copy a state into DTensors in these layouts. All ranks must call it.

    Args:
        state: the state, whose leaves have these `paths` and `layouts`, in the order of its tree.
        axes: the mesh axes along which the ranks must hold the same leaves.
        source: the rank whose tensors are used; None where all ranks have them.
        device: the device of the parts.

    Raises: ValueError if the ranks hold different leaves, or `source` is not 0 on a mesh of several axes.
    """
    leaves, tree = pytree.tree_flatten(state)
    if source and mesh.ndim > 1:
        raise ValueError(f"shard: source={source} on a mesh of {mesh.ndim} axes; only its first rank, 0, can be.")
    check_same(mesh, axes, paths, leaves, source)
    parts = [
        relaid(x, layout, mesh) if isinstance(x, DTensor) else shard_leaf(x, layout, mesh, source, device)
        for x, layout in zip(leaves, layouts)
    ]
    return pytree.tree_unflatten(parts, tree)


def unshard_state(state: State, mesh: DeviceMesh | None) -> State:
    """Gather a state of DTensors into full tensors on every rank. All ranks must call it."""
    if mesh is not None and mesh.size() > 1:
        check_runs(mesh)
        meet(mesh, Call("unshard"))
    return pytree.tree_map_only(DTensor, lambda x: x.full_tensor().clone(), state)
