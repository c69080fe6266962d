"""shard_params: turn a plain step into the program of one rank of many (ZeRO stages 0 to 3, HSDP).

State is sharded between steps. Forward and backward run on whole parameters, which are gathered where they are used.
Gradients are reduced where autograd returns them. The update runs on shards: DTensor's sharding rules tell, for each
equation, which layouts it can run on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..ir.graph import Graph, Layout, Split, dce
from ..ir.layout import AbstractMesh, is_worth_cutting, mesh_axes
from .base import Transform, constructor
from .matrix_chains import matrix_chains, note
from .psum_quotients import warn_of_psum_quotients
from .reduce_once import reduce_once
from .sharding import Sharding

Where = Callable[[str, torch.Tensor], bool]
DimOf = Callable[[str, torch.Tensor], int | None]


@constructor
def shard_params(
    mesh: DeviceMesh | AbstractMesh,
    *,
    axis: str = "dp",
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
        axis: the mesh axis to shard over. Each of its ranks gets its own slice of the batch.
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
            gradients are sent in their own dtype.
        outputs: "mean" averages the float scalars that depend on the batch, such as a loss, over the axis. Each rank
            returns its own values of other outputs, such as logits. "local" averages none.

    Raises: ValueError if the mesh has no such axis, or an option is unknown. When the step is lowered, ValueError if a
        leaf does not have the dim along which it is to be cut, if a value that depends on the batch enters the state
        unreduced, if an update cannot run on shards, or if an integer scalar that depends on the batch is an output.

    Source: Rajbhandari et al., ZeRO, 2020; PyTorch FSDP2; JAX's check_vma.

    >>> shard_params(AbstractMesh(dp=8), axis="dp")
    shard_params(axis='dp', stage=3)
    """
    axes = dict(mesh_axes(mesh))
    for name, value in (("axis", axis), ("replicate_axis", replicate_axis)):
        if value is not None and value not in axes:
            raise ValueError(
                f"shard_params: {name}={value!r} is no axis of the mesh, which has {', '.join(map(repr, axes))}."
            )
    if axis == replicate_axis:
        raise ValueError(f"shard_params: replicate_axis is the sharded axis, {axis!r}; name another one.")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"shard_params: stage={stage!r}; ZeRO stages are 0, 1, 2 and 3.")
    if reshard not in ("auto", "always"):
        raise ValueError(f"shard_params: reshard={reshard!r}; use 'auto' or 'always'.")
    if outputs not in ("mean", "local"):
        raise ValueError(f"shard_params: outputs={outputs!r}; use 'mean' or 'local'.")
    return ShardParams(mesh, axis, stage, reshard, where, dim, replicate_axis, reduce_dtype, outputs)


@dataclass(frozen=True, repr=False)
class ShardParams(Transform):
    """The transform that `shard_params` returns."""

    mesh: DeviceMesh | AbstractMesh = dataclasses.field(repr=False)
    axis: str
    stage: int
    reshard: Literal["auto", "always"] = "auto"
    where: Where | None = None
    dim: DimOf | None = None
    replicate_axis: str | None = None
    reduce_dtype: torch.dtype | None = None
    outputs: str = "mean"

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis, self.replicate_axis) if self.replicate_axis else (self.axis,)

    def layout(self, path: str, shape: tuple[int, ...], leaf: torch.Tensor) -> Layout:
        if self.stage == 0 or not shape or (self.where is not None and not self.where(path, leaf)):
            return ()
        dim = self._dim(path, leaf)
        ranks = dict(mesh_axes(self.mesh))[self.axis]
        return (Split(self.axis, dim),) if is_worth_cutting(shape[dim], ranks) else ()

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
        plain = graph.replace(mesh=mesh_axes(self.mesh), stage=self.stage)
        warn_of_psum_quotients(plain, self.axes)
        walk = Sharding(plain, self)
        graph = walk.run()
        whole, leaves = matrix_chains(plain, walk.layout_of)
        if whole:
            graph = Sharding(plain, self, whole).run()
            graph = graph.replace(notes=(*graph.notes, note(leaves)))
        return dce(reduce_once(graph) if self.stage <= 1 else graph)
