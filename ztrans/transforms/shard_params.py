"""Turn a plain step into the program of one rank of many (ZeRO stages 0 to 3, HSDP).

State is sharded between steps. Forward and backward gather parameters where they use them. Gradients are reduced where
autograd returns them. The update runs on shards wherever a table of rules knows how, and elsewhere on whole values (see
`ir.sharding_rules`). A loss that is divided by a `psum` causes a warning, and so does one that is computed from a
gradient (see `inner_gradients`).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..ir.axes import joint_axis, members, members_of, members_of_flat
from ..ir.collectives import rules
from ..ir.dependencies import depending, needed, reachable
from ..ir.graph import Eqn, Graph, Split, Var, dce, producers, users
from ..ir.layout import AbstractMesh, LeafSharding, is_worth_splitting, mesh_axes
from ..ir.marks import REDUCTIONS
from ..ir.op_facts import is_view_or_cast, op_facts
from ..ir.source import where
from ..ir.user_collectives import is_user_start
from ..ir.varying import varying
from ..ops import EVERY_AXIS
from .base import Transform, check_number, constructor
from .inner_gradients import warn_of_inner_gradients
from .reduce_once import reduce_once
from .sharding.leaf_axes import LeafAxes
from .sharding.walk import shard_program

Axis = str | tuple[str, ...]
AxisOf = Callable[[str, torch.Tensor], Axis]
Where = Callable[[str, torch.Tensor], bool]
DimOf = Callable[[str, torch.Tensor], int | None]


@constructor
def shard_params(
    mesh: DeviceMesh | AbstractMesh,
    *,
    axis: Axis | AxisOf = "dp",
    stage: Literal[0, 1, 2, 3, "auto"] = 3,
    reshard: Literal["auto", "always"] | int = "auto",
    where: Where | None = None,
    dim: DimOf | None = None,
    replicate_axis: str | None = None,
    independent_axis: Axis | None = None,
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
            of all leaves. Over an axis that a leaf does not have, each rank holds a leaf of its own, such as an expert.
        stage: 3 gathers a parameter for forward and again for backward. 2 keeps it from forward to backward. 1 also
            accumulates the gradients of micro-batches unsharded, and reduces them once. 0 replicates everything and
            all-reduces gradients (DDP). "auto" is 1, 2 or 3, which store the same state: the fastest that fits the
            memory, and the lowest of equally fast ones. `Step.lower` chooses it for a cluster; the notes of the plan
            list the time and the peak of each.
        reshard: at stage 3, "always" drops every parameter between forward and backward. With a number n, each n
            neighbours on the axis keep a parameter in n parts, and backward gathers it among them: with the ranks of a
            host, it sends nothing to other hosts. "auto" lets `prefetch` keep the parameters whose second gather costs
            time, whole or in parts, within its memory budget.
        where: `where(path, leaf)` says whether to shard a state leaf; by default all are sharded. Other leaves are
            replicated, and so is a leaf with fewer rows than half of the ranks.
        dim: `dim(path, leaf)` is the dim along which a state leaf is cut, or None for 0, the default. It must be the
            same for a parameter and the state of its optimizer, or the update changes the layout of one of them.
        replicate_axis: a second axis over which shards are replicated and gradients all-reduced (HSDP).
        independent_axis: an axis of the mesh, or several, along which the ranks are replicas that train apart, as in
            local SGD. Each leaf that `axis` does not spread over it has a value for each replica, and a gradient that
            is the mean over `axis` alone. Only a `pmean` or `psum` that names the axis crosses it. Any other axis over
            which a step reduces nothing causes a warning. `unshard` and `eval` give each rank its own replica, and
            `zt.save` and `lockstep` have them all, as the first dim of a leaf.
        reduce_dtype: the dtype of real gradients in messages, by default their own. It changes results. Complex
            gradients are sent in their own dtype. Between hosts, sums of half-precision gradients are sent in fp32,
            unless this is half precision.
        outputs: "mean" averages the float scalars that depend on the batch, such as a loss, over the axis. Each rank
            returns its own values of other outputs, such as logits. "local" averages nothing.

    The functions get the path of a leaf, and a meta tensor with its shape before the step itself divides it.

    Raises: ValueError if the mesh has no such axis, or an option is unknown. When the step is lowered, ValueError if a
        leaf lacks the dim to cut, if the number `reshard` does not divide the ranks of an axis, if a value that depends
        on the batch enters the state unreduced, if an update cannot run on shards, or if an integer scalar that depends
        on the batch is an output.

    Source: Rajbhandari et al., ZeRO, 2020; Wang et al., ZeRO++, 2023 (hpZ); PyTorch FSDP2; JAX's check_vma.

    >>> shard_params(AbstractMesh(dp=8), axis="dp")
    shard_params(axis='dp', stage=3)
    """
    if replicate_axis is not None:
        replicate_axis = _one_axis(mesh, "replicate_axis", replicate_axis)
    if not callable(axis):
        axis = _checked(mesh, "axis", axis, replicate_axis)
    if independent_axis is not None:
        independent_axis = _checked(mesh, "independent_axis", independent_axis)
        shared = members_of(_as_tuple(() if callable(axis) else axis))
        for name in (*shared, replicate_axis):
            if name in _as_tuple(independent_axis):
                raise ValueError(
                    f"shard_params: {name!r} is an independent_axis, over which nothing is reduced, and it is also the "
                    f"axis or the replicate_axis, over which gradients are.\nName it once. Leaves of both kinds: "
                    f"axis=lambda path, leaf: ..."
                )
    if stage not in (0, 1, 2, 3, "auto"):
        raise ValueError(
            f"shard_params: stage={stage!r}; ZeRO stages are 0, 1, 2 and 3, or 'auto'."
        )
    check_number(
        "shard_params: reshard", reshard, "a number of neighbours, at least 2", 2, "auto", "always"
    )
    if outputs not in ("mean", "local"):
        raise ValueError(f"shard_params: outputs={outputs!r}; use 'mean' or 'local'.")
    return ShardParams(
        mesh,
        axis,
        stage,
        reshard,
        where,
        dim,
        replicate_axis,
        independent_axis,
        reduce_dtype,
        outputs,
    )


def _checked(
    mesh: DeviceMesh | AbstractMesh, name: str, value: Axis, replicate_axis: str | None = None
) -> Axis:
    """The value of an option that names one axis of the mesh or several. Several are put in the order of the mesh.

    Raises: ValueError if the mesh lacks one of them.
    """
    order = [axis for axis, _ in mesh_axes(mesh)]
    names = members_of_flat(mesh, value) if isinstance(value, str) else tuple(value)
    if not names or not set(names) <= set(order):
        raise ValueError(
            f"shard_params: {name}={value!r} is not an axis of the mesh, which has {', '.join(map(repr, order))}."
        )
    if replicate_axis in names:
        raise ValueError(
            f"shard_params: replicate_axis is the sharded axis, {value!r}; name another one."
        )
    return names[0] if len(names) == 1 else tuple(axis for axis in order if axis in names)


def _one_axis(mesh: DeviceMesh | AbstractMesh, name: str, value: str) -> str:
    """The value of an option that names one axis of the mesh.

    Raises: ValueError if the mesh lacks it, or if it names a flattened mesh of several axes.
    """
    axis = _checked(mesh, name, value)
    if isinstance(axis, str):
        return axis
    raise ValueError(
        f"shard_params: {name}={value!r} stands for {' and '.join(map(repr, axis))}, and replicas are made over one "
        f"axis.\nMake a mesh in which these are one axis, or name one of them."
    )


@dataclass(frozen=True)
class ShardParams(Transform):
    """The transform that `shard_params` returns."""

    mesh: DeviceMesh | AbstractMesh = dataclasses.field(repr=False)
    axis: Axis | AxisOf
    stage: int | Literal["auto"]
    reshard: Literal["auto", "always"] | int = "auto"
    where: Where | None = None
    dim: DimOf | None = None
    replicate_axis: str | None = None
    independent_axis: Axis | None = None
    reduce_dtype: torch.dtype | None = None
    outputs: str = "mean"

    @property
    def variants(self) -> tuple[ShardParams, ...]:
        if self.stage != "auto":
            return (self,)
        return tuple(dataclasses.replace(self, stage=stage) for stage in (1, 2, 3))

    @property
    def zero_stage(self) -> int | None:
        return self.stage if isinstance(self.stage, int) else None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are known without the leaves."""
        if callable(self.axis):
            return ()
        return self._with_replicas(self.axis)

    def _with_replicas(self, axis: Axis) -> tuple[str, ...]:
        """The axis over which a leaf is sharded, several as one joint axis, and the axis of its replicas."""
        joint = joint_axis(_as_tuple(axis), [name for name, _ in mesh_axes(self.mesh)])
        return (joint, self.replicate_axis) if self.replicate_axis else (joint,)

    def leaf_sharding(self, path: str, leaf: torch.Tensor, shape: tuple[int, ...]) -> LeafSharding:
        axes = self.axes
        if callable(self.axis):
            axis, option = self.axis(path, leaf), f"axis({path!r}, leaf)"
            axes = self._with_replicas(_checked(self.mesh, option, axis, self.replicate_axis))
        independent = []
        for name in _as_tuple(self.independent_axis or ()):
            if name not in members_of(axes):
                independent.append(name)
        whole = LeafSharding(axes, independent=tuple(independent))
        is_replicated = self.where is not None and not self.where(path, leaf)
        if self.stage == 0 or not shape or is_replicated:
            return whole
        dim = self._dim(path, leaf)
        main_axis = axes[0]  # a second one is the axis of replicas
        if not is_worth_splitting(shape[dim], self._ranks(main_axis)):
            return whole
        return dataclasses.replace(whole, layout=(Split(main_axis, dim),))

    def _ranks(self, axis: str) -> int:
        """The number of ranks of an axis or a joint axis."""
        sizes = dict(mesh_axes(self.mesh))
        return math.prod(sizes[member] for member in members(axis))

    def _dim(self, path: str, leaf: torch.Tensor) -> int:
        """The dim along which a leaf is cut, counted from the front.

        Raises: ValueError if the leaf lacks it.
        """
        dim = self.dim(path, leaf) if self.dim is not None else None
        if dim is None:
            return 0
        if not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(
                f"shard_params: dim(...) is {dim} for {path}, which has the shape {list(leaf.shape)}.\n"
                f"Return one of its dims, or None for the first."
            )
        return dim % leaf.ndim

    def rewrite(self, graph: Graph) -> Graph:
        if not isinstance(self.stage, int):
            raise ValueError(
                f"{self!r}: the stage is chosen by Step.lower. Name one to rewrite a program with it."
            )
        axes = LeafAxes.of_program(graph, self)
        self._check_neighbours(axes)
        if axes.independent:
            graph = _reducing_over(
                graph, joint_axis(axes.joined, [name for name, _ in mesh_axes(self.mesh)])
            )
        joint = tuple(dict.fromkeys((*graph.joint, *axes.joint)))
        plain = graph.replace(mesh=mesh_axes(self.mesh), zero_stage=self.stage, joint=joint)
        plain = plain.with_hints(regather=self.reshard)
        # From stage 2 on, each micro-batch reduces its own gradients, so that only their shards take memory.
        if self.stage <= 1:
            plain = reduce_once(plain)
        self._warn_of_unreduced_axes(plain, axes)
        _warn_of_psum_quotients(plain, axes.joined)
        warn_of_inner_gradients(plain, axes.joined)
        return dce(shard_program(plain, self))

    def _check_neighbours(self, axes: LeafAxes) -> None:
        """Raises: ValueError if the neighbours that keep parameters do not divide the ranks of an axis."""
        if not isinstance(self.reshard, int) or self.stage != 3:
            return
        for axis in dict.fromkeys(leaf_axes[0] for leaf_axes in axes.by_leaf.values()):
            ranks = self._ranks(axis)
            if ranks > self.reshard and ranks % self.reshard:
                raise ValueError(
                    f"shard_params: reshard={self.reshard}, which does not divide the {ranks} ranks of {axis!r}.\n"
                    f"Use the number of ranks that a host has on this axis, or 'auto'."
                )

    def _warn_of_unreduced_axes(self, graph: Graph, axes: LeafAxes) -> None:
        """Warn of an axis of the mesh over which nothing is reduced: the ranks along it train separate models.

        The user's own reduction of a value that the new state depends on counts, but not that of a metric.
        """
        unreduced = {axis for axis, size in graph.mesh if size > 1} - {*axes.all}
        for e in graph.eqns:
            axis = rules(e).axis(e) if is_user_start(e) else None  # of tensor or expert parallelism
            if axis is None:
                continue
            if axis in graph.axes:
                unreduced -= {*members(axis)}
            else:  # a group that is not an axis of the mesh may join ranks along any axis
                unreduced.clear()
        makers = producers(graph.eqns)
        for e in needed((makers[v] for v in graph.new_state if v in makers), makers):
            if e.op in REDUCTIONS:
                unreduced -= {*members(e.args[1])}
        depends_on_batch = depending(graph.eqns, graph.batch)
        is_trained = any(v in depends_on_batch for v in graph.new_state)
        if unreduced and is_trained:
            names = " and ".join(repr(axis) for axis, _ in graph.mesh if axis in unreduced)
            warnings.warn(
                f"shard_params: {graph.name} reduces nothing over {names}, so the ranks along it train apart, and "
                f"their states differ after the first step.\n"
                f"To train one model, replicate it: replicate_axis={min(unreduced)!r}; or shard over more axes: "
                f"axis=(...). If several models are meant: independent_axis={min(unreduced)!r}.",
                stacklevel=2,
            )


def _reducing_over(graph: Graph, axis: str) -> Graph:
    """A plain program whose reductions without an axis have this one."""
    eqns = []
    for e in graph.eqns:
        if e.op in REDUCTIONS and e.args[1] == EVERY_AXIS:
            e = e.replace(args=(e.args[0], axis))
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))


def _as_tuple(axis: Axis) -> tuple[str, ...]:
    """One axis or several as a tuple."""
    return (axis,) if isinstance(axis, str) else axis


def _warn_of_psum_quotients(graph: Graph, axes: tuple[str, ...]) -> None:
    """Warn of a loss that is divided by a `psum`: its mean over n ranks is 1/n of the mean over all samples.

        loss = loss_sum / zt.psum(count)     -->     loss = zt.global_mean(loss_sum, count)

    Gradients and scalar outputs are averaged over the ranks. So the quotient is right only if the step then sums it
    over the ranks, or multiplies it by their number.
    """
    ranks = math.prod(graph.axes[axis] for axis in axes)
    if ranks == 1:
        return
    quotients = _PsumQuotients(graph, axes, ranks)
    for e in graph.eqns:
        if quotients.divides_by_psum(e) and quotients.is_too_small(e):
            warnings.warn(
                f"shard_params: {graph.name} divides a value of this rank, {e.args[0]}, by a psum. Gradients and "
                f"scalar outputs are averaged over the ranks, so this is 1/{ranks} of the mean over all samples.\n"
                f"  at {where(e.source)}\n"
                f"Use zt.global_mean(sum, count), which is the mean over the samples of all ranks.",
                stacklevel=2,
            )
            return


class _PsumQuotients:
    """Finds the places where a plain program divides a value by a `psum` and averages the quotient."""

    def __init__(self, graph: Graph, axes: tuple[str, ...], ranks: int) -> None:
        self.ranks = ranks
        self.varying = varying(graph, axes)
        self.makers = producers(graph.eqns)
        self.readers = users(graph)
        self.averaged_outputs = {v for v in graph.results if v in self.varying and not v.shape}

    def divides_by_psum(self, e: Eqn) -> bool:
        """Whether an equation divides a varying value by an invariant one that depends on a `psum`."""
        if e.op is not torch.ops.aten.div.Tensor or not isinstance(e.args[1], Var):
            return False
        value, divisor = e.args
        if value not in self.varying or divisor in self.varying or divisor.shape:
            return False
        makers = [self.makers[divisor]] if divisor in self.makers else []
        invariant = reachable(makers, self._invariant_makers)
        return any(REDUCTIONS.get(x.op) == "sum" for x in invariant)

    def _invariant_makers(self, e: Eqn) -> list[Eqn]:
        """The equations that compute the arguments of `e` that are the same on all ranks, as every psum is."""
        makers = []
        for v in e.ins:
            if v in self.makers and v not in self.varying:
                makers.append(self.makers[v])
        return makers

    def is_too_small(self, e: Eqn) -> bool:
        """Whether a quotient is averaged over the ranks, without a factor of the number of ranks."""
        # Users may multiply by the number of ranks themselves, before or after the division.
        numerator = self.makers.get(e.args[0])
        if numerator is not None and self._multiplies_by_ranks(numerator):
            return False
        multiples = list(reachable([e], self._linear_readers))
        if any(map(self._multiplies_by_ranks, multiples)):
            return False
        return any(map(self._is_averaged, multiples))

    def _linear_readers(self, e: Eqn) -> list[Eqn]:
        """The equations outside of backward whose results are multiples of the results of `e`."""
        linear: list[Eqn] = []
        for v in e.results:
            for reader in self.readers.get(v, ()):
                if reader.region != "backward" and _is_linear(reader):
                    linear.append(reader)
        return linear

    def _multiplies_by_ranks(self, e: Eqn) -> bool:
        return e.op is torch.ops.aten.mul.Tensor and self.ranks in e.args

    def _is_averaged(self, e: Eqn) -> bool:
        is_mean = REDUCTIONS.get(e.op) == "mean"
        return is_mean or any(v in self.averaged_outputs for v in e.results)


def _is_linear(e: Eqn) -> bool:
    adds_up = REDUCTIONS.get(e.op) == "mean" or rules(e).over_all_micro_batches
    return adds_up or op_facts(e.op).linear or is_view_or_cast(e)
