"""Copies: check that ranks with copies of a leaf have the same values, as a checkpoint has only one of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...ir.axes import members_of
from ...ir.layout import mesh_axes
from ..replicas import digest


def check_copies(
    tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, group: dist.ProcessGroup
) -> None:
    """Compare the copies of each leaf. All ranks of the group, which are those of the mesh, must call it.

    Raises: ValueError on every rank, naming the first leaf whose copies differ.
    """
    split = {name: _split_axes(x, mesh) for name, x in tensors.items()}
    copied = [
        name
        for name, axes in split.items()
        if any(mesh.size(k) > 1 for k in range(mesh.ndim) if k not in axes)
    ]
    digests = {name: tuple(digest(_local(tensors[name])).tolist()) for name in copied}
    everyone: list = [None] * mesh.size()
    dist.all_gather_object(everyone, (mesh.get_coordinate(), dist.get_rank(), digests), group=group)
    for name in copied:
        seen: dict[
            tuple, tuple
        ] = {}  # for each part of the leaf, the digest and the first rank that has it
        for place, rank, theirs in everyone:
            known, first = seen.setdefault(
                tuple(place[k] for k in split[name]), (theirs[name], rank)
            )
            if known != theirs[name]:
                raise ValueError(
                    f"{name} has other values on rank {rank} than on rank {first}, although the layout says that they "
                    f"have copies. With tensor or expert parallelism, cut the leaf over its axis as a DTensor"
                )


def _split_axes(x: torch.Tensor, mesh: DeviceMesh) -> list[int]:
    """The axes of the mesh over which a leaf is cut. It may live on some of them only."""
    if not isinstance(x, DTensor):
        return []
    cut = [
        axis
        for (axis, _), p in zip(mesh_axes(x.device_mesh), x.placements)
        if not isinstance(p, Replicate)
    ]
    return [k for k, (axis, _) in enumerate(mesh_axes(mesh)) if axis in members_of(cut)]


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
