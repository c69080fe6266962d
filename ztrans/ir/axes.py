"""Axes derived from the axes of a mesh: joint axes, and the neighbours of an axis.

A joint axis is several axes that act as one: all of their ranks exchange one message. Its name lists its members in the
order of the mesh. On a mesh of dp=2 and cp=4, `dp*cp` has 8 ranks, and the rank at dp=1, cp=2 has index 6 along it. On
a DeviceMesh it is the flattened mesh of its members.

Neighbours are consecutive ranks of an axis, such as the ranks of one host. `dp/4` stands for each 4 neighbours of dp.
On a mesh of dp=8, rank 6 has index 2 along it.

Private torch APIs live here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_JOINT = (
    "*"  # between the members of a joint axis; alone it is `ops.EVERY_AXIS`, which is not an axis
)
_NEIGHBOURS = "/"  # between an axis and the number of neighbours


def joint_axis(axes: Collection[str], order: Iterable[str]) -> str:
    """The name of several axes of a mesh as one; `order` has all axes of the mesh.

    >>> joint_axis(("cp", "dp"), ("dp", "tp", "cp")), joint_axis(("dp",), ("dp",))
    ('dp*cp', 'dp')
    """
    return _JOINT.join(axis for axis in order if axis in axes)


def members(axis: str) -> tuple[str, ...]:
    """The axes of the mesh that make up an axis; a joint axis has several.

    >>> members("dp*cp"), members("dp"), members("dp/4")
    (('dp', 'cp'), ('dp',), ('dp',))
    """
    return tuple(axis.partition(_NEIGHBOURS)[0].split(_JOINT))


def neighbours(axis: str, count: int) -> str:
    """The name of each `count` neighbours of an axis; `count` divides its ranks.

    >>> neighbours("dp", 4)
    'dp/4'
    """
    return f"{axis}{_NEIGHBOURS}{count}"


def neighbour_count(axis: str) -> int | None:
    """The number of neighbours that an axis stands for, or None for all ranks.

    >>> neighbour_count("dp/4"), neighbour_count("dp")
    (4, None)
    """
    _, _, count = axis.partition(_NEIGHBOURS)
    return int(count) if count.isdecimal() else None


def whole_axis(axis: str) -> str:
    """The axis whose neighbours `axis` stands for, with all of its ranks.

    >>> whole_axis("dp/4"), whole_axis("dp")
    ('dp', 'dp')
    """
    return axis.partition(_NEIGHBOURS)[0]


def members_of(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes of the mesh that make up several axes, each once."""
    return tuple(dict.fromkeys(member for axis in axes for member in members(axis)))


def with_joint_sizes(sizes: Mapping[str, int], joint: Iterable[str]) -> dict[str, int]:
    """The sizes of the axes of a mesh, and of joint axes and neighbours.

    >>> with_joint_sizes({"dp": 2, "cp": 4}, ["dp*cp", "cp/2"])
    {'dp': 2, 'cp': 4, 'dp*cp': 8, 'cp/2': 2}
    """
    all_sizes = dict(sizes)
    for axis in joint:
        all_ranks = math.prod(sizes[member] for member in members(axis))
        all_sizes[axis] = neighbour_count(axis) or all_ranks
    return all_sizes


def with_joint_indices(
    coordinates: Mapping[str, int], sizes: Mapping[str, int], joint: Iterable[str]
) -> dict[str, int]:
    """The index of a rank along the axes of a mesh, along joint axes, and among neighbours.

    >>> with_joint_indices({"dp": 1, "cp": 3}, {"dp": 2, "cp": 4}, ["dp*cp", "cp/2"])
    {'dp': 1, 'cp': 3, 'dp*cp': 7, 'cp/2': 1}
    """
    indices = dict(coordinates)
    for axis in joint:
        index = 0
        for member in members(axis):
            index = index * sizes[member] + coordinates[member]
        count = neighbour_count(axis)
        indices[axis] = index if count is None else index % count
    return indices


def submesh(mesh: DeviceMesh, axes: Iterable[str]) -> DeviceMesh:
    """The part of a mesh along some axes, joint or not. All ranks of the mesh must call this together.

    Raises: ValueError if another axis is between the members of a joint axis, because DTensor fails on such meshes.
    """
    order = mesh.mesh_dim_names or ()
    names = tuple(sorted(set(axes), key=lambda axis: order.index(members(axis)[0])))
    if set(names) <= set(order):
        return mesh if names == order else mesh[names]

    meshes = []
    for axis in names:
        # A second `_flatten` under the same name returns the same mesh.
        meshes.append(mesh[axis] if axis in order else mesh[members(axis)]._flatten(axis))
    if len(meshes) == 1:
        return meshes[0]
    for axis in names:
        names_in_axis = members(axis)
        first = order.index(names_in_axis[0])
        if order[first : first + len(names_in_axis)] != names_in_axis:
            raise ValueError(
                f"shard_params: DTensor cannot divide a leaf over {' and '.join(map(repr, names))} of a mesh of the "
                f"axes {', '.join(order)}.\nPut {' and '.join(members(axis))} next to each other in the mesh."
            )
    return DeviceMesh._concatenate(meshes)


def members_of_flat(mesh: Any, name: str) -> tuple[str, ...]:
    """The axes that make up the flattened mesh of `mesh._flatten(name)`, or `name` itself if there is none."""
    flat = getattr(mesh, "_flatten_mapping", {}).get(name)
    if flat is None:
        return (name,)
    axis = axis_of_ranks(mesh, flat.mesh.flatten().tolist())
    return members(axis) if axis is not None else (name,)


def axis_of_group(mesh: DeviceMesh, name: Any) -> str | None:
    """The axis along which the ranks of the process group `name` lie, or None."""
    try:
        group = dist.distributed_c10d._resolve_process_group(name)
    except RuntimeError:  # no group of this process has that name
        return None
    return axis_of_ranks(mesh, dist.get_process_group_ranks(group))


def axis_of_ranks(mesh: DeviceMesh, ranks: Sequence[int]) -> str | None:
    """The axis, joint or not, along which the ranks of a group lie in this order, or None.

    >>> import torch
    >>> mesh = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=("dp", "tp", "cp"), _init_backend=False,
    ...                   _rank=0)
    >>> axis_of_ranks(mesh, [2, 3]), axis_of_ranks(mesh, [0, 1, 4, 5]), axis_of_ranks(mesh, [1, 2])
    ('cp', 'dp*cp', None)
    """
    order = mesh.mesh_dim_names or ()
    places = []
    for rank in ranks:
        place = (mesh.mesh == rank).nonzero().flatten().tolist()
        if not place:
            return None  # a rank of another mesh
        places.append(place)
    if len(ranks) < 2 or places != sorted(places):
        return None
    dims = []  # along which the ranks differ
    for k in range(mesh.ndim):
        if len({place[k] for place in places}) > 1:
            dims.append(k)
    # A group of only some ranks of these dims is not an axis.
    if len(ranks) != math.prod(mesh.size(k) for k in dims):
        return None
    return joint_axis([order[k] for k in dims], order)


def groups_along(
    ranks: torch.Tensor, order: Sequence[str], axes: Collection[str]
) -> list[list[int]]:
    """The ranks of each group of a mesh along some axes.

    Args:
        ranks: the ranks of the mesh, i64 with a dim for each axis.
        order: the names of its axes.
        axes: the axes along which the ranks of a group differ, joint or not, or neighbours.

    >>> import torch
    >>> groups_along(torch.arange(8).view(2, 2, 2), ("dp", "tp", "cp"), ["dp*cp"])
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    >>> groups_along(torch.arange(8), ("dp",), ["dp/4"])
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    group_dims = [k for k, axis in enumerate(order) if axis in members_of(axes)]
    other_dims = [k for k in range(ranks.ndim) if k not in group_dims]
    size = math.prod(ranks.shape[k] for k in group_dims)
    for axis in axes:
        size = min(size, neighbour_count(axis) or size)
    return ranks.permute(*other_dims, *group_dims).reshape(-1, size).tolist()
