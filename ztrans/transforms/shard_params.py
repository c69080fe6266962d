"""shard_params: turn a plain step into the program of one rank of many (ZeRO stages 0 to 3, HSDP).

State is sharded between steps. Forward and backward run on whole parameters, which are gathered where they are used.
Gradients are reduced where autograd returns them. The update runs on shards: DTensor's sharding rules tell, for each
equation, which layouts it can run on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import joint_axis, members, members_of, unflattened
from ..ir.graph import Graph, Layout, Split, dce
from ..ir.layout import AbstractMesh, is_worth_cutting, mesh_axes
from .base import Transform, constructor
from .psum_quotients import warn_of_psum_quotients
from .reduce_once import reduce_once
from .sharding.leaf_axes import LeafAxes
from .sharding.walk import Sharding, gathered_early

Axis = str | tuple[str, ...]
AxisOf = Callable[[str, torch.Tensor], Axis]
Where = Callable[[str, torch.Tensor], bool]
DimOf = Callable[[str, torch.Tensor], int | None]


@constructor
def shard_params(
    mesh: DeviceMesh | AbstractMesh,
    *,
    axis: Axis | AxisOf = "dp",
    stage: Literal[0, 1, 2, 3] = 3,
    reshard: Literal["auto", "always"] = "auto",
    where: Where | None = None,
    dim: DimOf | None = None,
    replicate_axis: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    outputs: Literal["mean", "local"] = "mean",
) -> Transform:
    """Shard the state of a train step over a mesh axis, and reduce its gradients there (ZeRO; FSDP).

    Rewrites:
        y = f(w)                     w_full = wait(all_gather(w)); y = f(w_full)
        g = gradient(g0, w)    -->   g = wait(reduce_scatter(g0, mean))
        w1 = update(w, g)            w1 = update(w, g), on shards

    Args:
        mesh: a DeviceMesh with named axes, or an AbstractMesh.
        axis: the mesh axis to shard over. Each of its ranks gets its own slice of the batch. Several axes, such as
            ("dp", "cp"), act as one; the name of a flattened mesh stands for its axes. `axis(path, leaf)` returns the
            axis of each state leaf: "dp" for experts, and ("dp", "ep") for all others. The batch differs over the axes
            of all leaves. Over those that a leaf does not have, each rank holds another leaf, such as its own experts.
        stage: 3 gathers a parameter for forward and again for backward. 2 keeps it from forward to backward. 1 also
            accumulates the gradients of micro-batches unsharded, and reduces them once. 0 replicates everything and
            all-reduces gradients (DDP).
        reshard: at stage 3, "always" drops every parameter between forward and backward. "auto" lets `prefetch` keep
            those whose second gather costs time, within its memory budget.
        where: `where(path, leaf)` says whether to shard a state leaf; by default all are. The others are replicated,
            and so is a leaf whose rows are fewer than half of the ranks.
        dim: `dim(path, leaf)` is the dim along which a state leaf is cut, or None for 0, as by default. It must be the
            same for a parameter and the state of its optimizer, or the update changes the layout of one of them.
        replicate_axis: a second axis over which shards are replicated and gradients all-reduced (HSDP).
        reduce_dtype: the dtype in which real gradients are sent, which changes results; by default their own. Complex
            gradients are sent in their own dtype. Between hosts, sums of half-precision gradients are sent in fp32,
            unless this is half precision.
        outputs: "mean" averages the float scalars that depend on the batch, such as a loss, over the axis. Each rank
            returns its own values of other outputs, such as logits. "local" averages none.

    The functions get the path of a leaf, and a meta tensor of its shape before the step itself divides it. Two
    `shard_params` with a `where` may differ in `axis` and `dim`; together they are one step.

    Raises: ValueError if the mesh has no such axis, or an option is unknown. When the step is lowered, ValueError if a
        leaf does not have the dim along which it is to be cut, if a value that depends on the batch enters the state
        unreduced, if an update cannot run on shards, or if an integer scalar that depends on the batch is an output.

    Source: Rajbhandari et al., ZeRO, 2020; PyTorch FSDP2; JAX's check_vma.

    >>> shard_params(AbstractMesh(dp=8), axis="dp")
    shard_params(axis='dp', stage=3)
    """
    if not callable(axis):
        axis = _checked(mesh, "axis", axis, replicate_axis)
    if replicate_axis is not None:
        _checked(mesh, "replicate_axis", replicate_axis)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"shard_params: stage={stage!r}; ZeRO stages are 0, 1, 2 and 3.")
    if reshard not in ("auto", "always"):
        raise ValueError(f"shard_params: reshard={reshard!r}; use 'auto' or 'always'.")
    if outputs not in ("mean", "local"):
        raise ValueError(f"shard_params: outputs={outputs!r}; use 'mean' or 'local'.")
    return ShardParams(
        mesh, axis, stage, reshard, where, dim, replicate_axis, reduce_dtype, outputs
    )


def _checked(
    mesh: DeviceMesh | AbstractMesh, name: str, value: Axis, replicate_axis: str | None = None
) -> Axis:
    """An option that names one axis of the mesh or several, these in the order of the mesh.

    Raises: ValueError if the mesh does not have one of them.
    """
    order = [axis for axis, _ in mesh_axes(mesh)]
    names = unflattened(mesh, value) if isinstance(value, str) else tuple(value)
    if not names or not set(names) <= set(order):
        raise ValueError(
            f"shard_params: {name}={value!r} is no axis of the mesh, which has {', '.join(map(repr, order))}."
        )
    if replicate_axis in names:
        raise ValueError(
            f"shard_params: replicate_axis is the sharded axis, {value!r}; name another one."
        )
    return names[0] if len(names) == 1 else tuple(axis for axis in order if axis in names)


@dataclass(frozen=True, repr=False)
class ShardParams(Transform):
    """The transform that `shard_params` returns. With `parts`, it stands for several, each for other leaves."""

    mesh: DeviceMesh | AbstractMesh = dataclasses.field(repr=False)
    axis: Axis | AxisOf
    stage: int
    reshard: Literal["auto", "always"] = "auto"
    where: Where | None = None
    dim: DimOf | None = None
    replicate_axis: str | None = None
    reduce_dtype: torch.dtype | None = None
    outputs: str = "mean"
    parts: tuple[ShardParams, ...] = dataclasses.field(default=(), repr=False)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are known without the leaves."""
        if self.parts:
            return members_of(axis for part in self.parts for axis in part.axes)
        return () if callable(self.axis) else self._with_replicas(self.axis)

    def _with_replicas(self, axis: Axis) -> tuple[str, ...]:
        names = (axis,) if isinstance(axis, str) else axis
        joint = joint_axis(names, [name for name, _ in mesh_axes(self.mesh)])
        return (joint, self.replicate_axis) if self.replicate_axis else (joint,)

    def leaf_axes(self, path: str, leaf: torch.Tensor) -> tuple[str, ...]:
        part = self._part(path, leaf)
        if part is None:
            return self._with_replicas(
                tuple(axis for axis in self.axes if axis != self.replicate_axis)
            )
        if not callable(part.axis):
            return part.axes
        axis = part.axis(path, leaf)
        return self._with_replicas(
            _checked(self.mesh, f"axis({path!r}, leaf)", axis, self.replicate_axis)
        )

    def layout(self, path: str, shape: tuple[int, ...], leaf: torch.Tensor) -> Layout:
        part = self._part(path, leaf)
        if (
            self.stage == 0
            or not shape
            or part is None
            or (part.where is not None and not part.where(path, leaf))
        ):
            return ()
        dim, axis = part._dim(path, leaf), self.leaf_axes(path, leaf)[0]
        ranks = math.prod(dict(mesh_axes(self.mesh))[member] for member in members(axis))
        return (Split(axis, dim),) if is_worth_cutting(shape[dim], ranks) else ()

    def _part(self, path: str, leaf: torch.Tensor) -> ShardParams | None:
        """The part that shards a leaf, or None if none of several does.

        Raises: ValueError if two of them would.
        """
        if not self.parts:
            return self
        parts = [part for part in self.parts if part.where is not None and part.where(path, leaf)]
        if len(parts) > 1:
            raise ValueError(
                f"shard_params: {path} is in the `where` of two, {parts[0]!r} and {parts[1]!r}.\n"
                f"Let a leaf be in one of them."
            )
        return parts[0] if parts else None

    def joined(self, other: Transform) -> Transform | None:
        """This transform and another `shard_params` for other leaves, as one; None if they do not fit together."""
        if not isinstance(other, ShardParams) or self.where is None or other.where is None:
            return None
        parts = self.parts or (self,)
        if (
            dataclasses.replace(
                other, axis=self.axis, where=self.where, dim=self.dim, parts=self.parts
            )
            != self
        ):
            return None
        return self if other in parts else dataclasses.replace(self, parts=(*parts, other))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts)) if self.parts else super().__repr__()

    def _dim(self, path: str, leaf: torch.Tensor) -> int:
        """The dim along which a leaf is cut, counted from the front.

        Raises: ValueError if the leaf does not have it.
        """
        dim = self.dim(path, leaf) if self.dim is not None else 0
        if dim is None:
            return 0
        if not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(
                f"shard_params: dim(...) is {dim} for {path}, which has the shape {list(leaf.shape)}.\n"
                f"Return one of its dims, or None for the first."
            )
        return dim % leaf.ndim

    def rewrite(self, graph: Graph) -> Graph:
        axes = LeafAxes.of_program(graph, self)
        joint = tuple(dict.fromkeys((*graph.joint, *axes.joint)))
        plain = graph.replace(
            mesh=mesh_axes(self.mesh), stage=self.stage, reshard=self.reshard, joint=joint
        )
        if self.stage <= 1:
            plain = reduce_once(plain)
        warn_of_psum_quotients(plain, axes.all)
        walk = Sharding(plain, self)
        graph = walk.run()
        on_every_rank = gathered_early(plain, walk.gathering, walk.layout_of)
        if on_every_rank:
            graph = Sharding(plain, self, on_every_rank).run()
        return dce(graph)
