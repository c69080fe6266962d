"""The sharding that a user's step itself gives the leaves of its state, as by `parallelize_module`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .axes import members, members_of
from .layout import mesh_axes


@dataclass(frozen=True)
class UserSharding:
    """The step's own sharding of a leaf over some axes of the mesh, as by `parallelize_module`.

    A program holds the local part of such a leaf. Along the other axes of the mesh this part is split like any leaf.

    Attributes:
        axes: the names of these axes, in the order of the mesh.
        sizes: their sizes.
        placements: the placement of the leaf on each of them.
        shape: the shape of the whole leaf.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(leaf: Any, other_axes: Collection[str]) -> UserSharding | None:
        """The step's own sharding of a leaf over the axes of its mesh outside `other_axes`, or None."""
        excluded = set(members_of(other_axes))
        own = [x for x in _placements(leaf) if excluded.isdisjoint(members(x[0]))]
        if not own:
            return None
        axes, sizes, placements = zip(*own)
        return UserSharding(axes, sizes, placements, tuple(leaf.shape))

    @staticmethod
    def axes_of(leaf: Any, axes: Collection[str]) -> list[str]:
        """The axes of a leaf's mesh, among `axes`, over which the leaf is not whole."""
        members_of_axes = set(members_of(axes))
        split_axes = []
        for axis, size, placement in _placements(leaf):
            is_whole = size == 1 or isinstance(placement, Replicate)
            if not is_whole and members_of_axes.intersection(members(axis)):
                split_axes.append(axis)
        return split_axes

    @property
    def problem(self) -> str | None:
        """Why no program can hold the parts of the leaf, or None."""
        for axis, size, placement in zip(self.axes, self.sizes, self.placements):
            if not isinstance(placement, Shard | Replicate):
                return f"it is {placement} over {axis}"
            if isinstance(placement, Replicate):
                continue
            dim = placement.dim
            rows = self.shape[dim]
            if rows % size:
                return f"its dim {dim} has {rows} rows, which {axis}={size} does not divide"
        return None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of each rank's part."""
        return tuple(n // self.parts_along(dim) for dim, n in enumerate(self.shape))

    def parts_along(self, dim: int, axes: Collection[str] | None = None) -> int:
        """The number of parts that the step splits a dim of the leaf into, over all of its axes or only `axes`."""
        count = 1
        for axis, size, placement in zip(self.axes, self.sizes, self.placements):
            if axes is not None and axis not in axes:
                continue
            if isinstance(placement, Shard) and placement.dim % len(self.shape) == dim:
                count *= size
        return count


def _placements(leaf: Any) -> list[tuple[str, int, Placement]]:
    """Each axis of the mesh of a DTensor, with its size and the placement; empty for any other leaf."""
    if not isinstance(leaf, DTensor) or not leaf.device_mesh.mesh_dim_names:
        return []
    axes = mesh_axes(leaf.device_mesh)
    return [(axis, size, p) for (axis, size), p in zip(axes, leaf.placements)]
