"""Meshes, and how values and leaves of a state are split over them. Only this module computes the parts of ranks.

A mesh is PyTorch's `DeviceMesh`, or an `AbstractMesh`, which has no devices.

A value is split over n ranks as `torch.chunk` and DTensor's `Shard` split it: rank r holds the rows
[r*c, (r+1)*c) with c = ceil(rows / n), so the last parts may be short or empty. Inside a collective every part is
padded to c rows; between steps nothing is padded. A leaf with fewer rows than half of the ranks is not split.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .graph import Eqn, Layout, MemoryKind, Placement, Split, Var

aten = torch.ops.aten
# The arguments that give the shape of the result, and those that say where it begins in the whole value.
_SHAPES = ("size", "shape", "input_sizes")
_OFFSETS = ("offsets",)


@dataclass(frozen=True)
class AbstractMesh:
    """A mesh without devices, only axes and their sizes, like `jax.sharding.AbstractMesh`.

    With it one machine can trace, lower and print a program for any number of ranks, and estimate its cost.

    >>> AbstractMesh(host=2, dp=4)
    AbstractMesh(host=2, dp=4)
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        for axis, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"AbstractMesh: axis {axis!r} has size {size!r}; a size is a positive integer."
                )
        object.__setattr__(self, "axes", tuple(sizes.items()))

    def __repr__(self) -> str:
        return f"AbstractMesh({', '.join(f'{axis}={size}' for axis, size in self.axes)})"


def mesh_axes(mesh: AbstractMesh | DeviceMesh) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh and their sizes."""
    if isinstance(mesh, AbstractMesh):
        return mesh.axes
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"the mesh is {mesh!r}, which is neither a DeviceMesh nor an AbstractMesh.\n"
            f"Make one: zt.make_mesh('cpu', dp=-1), or without devices zt.AbstractMesh(dp=8)."
        )
    if not mesh.mesh_dim_names:
        raise ValueError(
            "the mesh has no axis names.\nGive it some: init_device_mesh(device, (n,), mesh_dim_names=('dp',))."
        )
    return tuple(zip(mesh.mesh_dim_names, mesh.shape))


@dataclass(frozen=True)
class LeafSharding:
    """How a leaf of the state lies on the mesh between steps.

    Attributes:
        axes: the axes along which all ranks hold the same leaf, whole or in parts. Along other axes of the mesh, each
            rank holds a leaf of its own.
        independent: the axes among these others along which the ranks are replicas that train apart. The checkpoint of
            such a leaf has a value for each of them.
        layout: its layout over these axes. If the step itself divides the leaf over other axes, this is the layout of
            this rank's part.
        memory: the memory that holds it.
        dtype: its dtype between steps, if that is narrower than the fp32 in which the step computes it (see `store`).
        rows: the number of ranks that each have a row of it, a term of their sum (see `Kept`); 0 for other leaves.
    """

    axes: tuple[str, ...] = ()
    layout: Layout = ()
    memory: MemoryKind = "device"
    independent: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    rows: int = 0


def chunk(rows: int, size: int) -> int:
    """The number of rows of a full part: ceil(rows / size).

    >>> chunk(10, 4)
    3
    """
    return -(-rows // size)


def is_worth_splitting(rows: int, size: int) -> bool:
    """Whether a leaf with `rows` rows is split over `size` ranks.

    It is not if it has fewer rows than half of the ranks: each part is padded to a row, so a gather would need more
    than twice the bytes of the leaf.

    >>> is_worth_splitting(10, 4), is_worth_splitting(2, 4), is_worth_splitting(1, 4)
    (True, True, False)
    """
    return chunk(rows, size) * size <= 2 * rows


def part(rows: int, size: int, rank: int) -> tuple[int, int]:
    """The first row and the number of rows of `rank`'s part.

    >>> [part(10, 4, r) for r in range(4)]
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    """
    # Short and empty parts come last, so parts begin at multiples of the chunk.
    start = min(chunk(rows, size) * rank, rows)
    return start, min(chunk(rows, size), rows - start)


def on_axis(layout: Layout, axis: str) -> Placement:
    """The placement of a value over `axis`; None if every rank of the axis has the whole value."""
    return next((p for p in layout if p.axis == axis), None)


def without(layout: Layout, axis: str) -> Layout:
    """`layout` without its placement over `axis`."""
    return tuple(p for p in layout if p.axis != axis)


def split_over(var: Var, axis: str) -> Split:
    """The split of `var` over `axis`.

    Raises: ValueError if `var` is not split over it.
    """
    split = on_axis(var.layout, axis)
    if not isinstance(split, Split):
        raise ValueError(f"{var} is not cut over {axis!r}.")
    return split


def local_shape(
    var: Var, sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of `var` on the rank at these coordinates."""
    if not var.layout:
        return var.shape
    shape = list(var.shape)
    for split in var.layout:
        if isinstance(split, Split):
            shape[split.dim] = part(shape[split.dim], sizes[split.axis], coordinates[split.axis])[1]
    return tuple(shape)


def bytes_on_first_rank(var: Var, sizes: Mapping[str, int]) -> int:
    """The bytes of `var` on the first rank, whose part is the largest."""
    shape = local_shape(var, sizes, dict.fromkeys(sizes, 0))
    return math.prod(shape) * var.dtype.itemsize


def cut(x: torch.Tensor, split: Split, size: int, rank: int) -> torch.Tensor:
    """The part of `rank` of a whole tensor, as a view."""
    return x.narrow(split.dim, *part(x.shape[split.dim], size, rank))


def localize(eqn: Eqn, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Eqn:
    """`eqn` with this rank's local sizes as arguments, instead of the global sizes in the program.

    An operation with `offsets` gets the index in the whole value at which this rank's part begins. `squeeze` gets the
    dims that it removes from the whole value, because a part may have one row of a longer dim.
    """
    out = eqn.outs[0]
    if out is None or not out.layout or not isinstance(eqn.op, torch._ops.OpOverload):
        return eqn
    if eqn.op.overloadpacket is aten.squeeze:
        return eqn.replace(op=aten.squeeze.dims, args=(eqn.args[0], _squeezed_dims(*eqn.args)))
    # Only a size among the arguments is global. Other operations infer their sizes from local arguments.
    if _arguments(eqn.op, _SHAPES):
        eqn = with_size(eqn, local_shape(out, sizes, coordinates))
    args = list(eqn.args)
    for k in _arguments(eqn.op, _OFFSETS):
        if k < len(args):
            args[k] = list(_local_offsets(out, sizes, coordinates))
    return eqn.replace(args=tuple(args))


def with_size(eqn: Eqn, shape: Sequence[int]) -> Eqn:
    """`eqn` with another shape of its result, if that is among its arguments."""
    args = list(eqn.args)
    for k in _arguments(eqn.op, _SHAPES):
        if k < len(args) and isinstance(args[k], (list, tuple)):
            args[k] = list(shape)
    return eqn.replace(args=tuple(args))


@functools.cache
def _arguments(op: torch._ops.OpOverload, names: tuple[str, ...]) -> tuple[int, ...]:
    """The positions of the arguments with these names."""
    declared = [argument.name for argument in op._schema.arguments]
    return tuple(k for k, name in enumerate(declared) if name in names)


def _local_offsets(var: Var, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> list[int]:
    """The index in the whole value at which the part of the rank at these coordinates begins, along each dim."""
    offsets = [0] * len(var.shape)
    for split in var.layout:
        if isinstance(split, Split):
            rows = var.shape[split.dim]
            offsets[split.dim] = part(rows, sizes[split.axis], coordinates[split.axis])[0]
    return offsets


def _squeezed_dims(x: Var, dims: int | Sequence[int] | None = None) -> list[int]:
    """The dims that `squeeze(x, dims)` removes.

    >>> x = Var("x", torch.float32, (1, 3, 1))
    >>> _squeezed_dims(x), _squeezed_dims(x, [0, 1])
    ([0, 2], [0])
    """
    rank = len(x.shape)
    if dims is None:
        dims = range(rank)
    elif isinstance(dims, int):
        dims = [dims]
    # PyTorch also squeezes a scalar along dim 0 or -1, which it does not have.
    dims = [d % max(rank, 1) for d in dims]
    return [d for d in dims if d < rank and x.shape[d] == 1]


def as_tensor(leaf: Any) -> torch.Tensor:
    """A leaf of a state as a tensor; a number becomes fp64 or int64.

    Raises: OverflowError for an integer of more than 64 bits.

    >>> as_tensor(0.1)
    tensor(0.1000, dtype=torch.float64)
    """
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(leaf, Integral):
        return torch.tensor(leaf, dtype=torch.float64)
    if not -(2**63) <= int(leaf) < 2**63:
        raise OverflowError(
            f"the number {leaf} does not fit into 64 bits, the size of integers in programs and checkpoints.\n"
            f"Pass a float, or the number in several parts."
        )
    return torch.tensor(leaf, dtype=torch.int64)
