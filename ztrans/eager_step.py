"""Run the function of a step as ordinary Python, with autograd, in place of its program.

Each rank runs the function on the whole state and on its own batch. Marks reduce at once (see `tracing.eager_marks`).
The ranks exchange values through the session of their mesh, as objects, so an error on one rank ends the step on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from . import ops
from .calling.call import BoundCall, ExtraInputs
from .calling.inputs import local_part
from .calling.leaf_records import RECORDS
from .calling.meta_leaves import check_written
from .calling.trees import opened
from .ir.axes import groups_along, members_of
from .ir.layout import LeafSharding, as_tensor
from .ir.user_sharding import UserSharding
from .runtime.agreement import agree_on_call
from .runtime.failure import Writes, check_ended, ending_together
from .runtime.replicas import digest
from .runtime.session import session_of
from .runtime.state import unshard_state
from .tracing.eager_marks import EagerFunctions, EagerMarks
from .tracing.trace import check_result
from .transforms.base import Transform, all_axes

_is_eager: ContextVar[bool] = ContextVar("ztrans.eager", default=False)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run the function of a step as ordinary Python in each call inside the context, as `jax.disable_jit`.

    Inside, `print(x)`, `breakpoint()`, hooks, branches on values and `torch.autograd.detect_anomaly()` work in the
    function of a step. A call returns what the step returns: the state as it lies on the ranks, updated in place;
    gradients, `zt.pmean`, `zt.psum`, batch statistics and scalar outputs reduced over the ranks. The results are those
    of the program within rounding.

    It is for debugging. Each rank gathers the whole state, and runs the function on its own batch, so it needs the
    memory of the whole model, and time. Of the transforms, only the axes and layouts of `shard_params` count: order,
    recomputation, memory of the host, dtypes of messages and transforms of your own do not, and what transforms keep in
    the state, such as averages, stays as it is. With `accumulate` the batch is one piece. A rank that stops at a
    breakpoint keeps the others waiting, up to the time-out of their process group.

    A `Compiled`, and `trace`, `lower`, `profile` and `tune` of a step, do the same inside as outside.

    Raises: ValueError from a step whose leaves live on different axes, as experts do, or which divides leaves itself,
        as `parallelize_module` does.

    >>> import ztrans as zt
    >>> @zt.Step.of
    ... def step(state, x):
    ...     if x.sum() > 2:
    ...         print("a large batch")
    ...     return state + x.mean(), x.sum()
    >>> with zt.eager():
    ...     state, output = step(torch.zeros(2), torch.ones(3))
    a large batch
    """
    token = _is_eager.set(True)
    try:
        yield
    finally:
        _is_eager.reset(token)


def is_eager() -> bool:
    """Whether the caller is inside `eager()`."""
    return _is_eager.get()


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a step, which exchange tensors with each other.

    Attributes:
        mesh: their mesh; None if the step runs in one process.
        axes: the axes over which the step is distributed, in the order of its reductions.
    """

    mesh: DeviceMesh | None
    axes: tuple[str, ...]

    @property
    def are_several(self) -> bool:
        return self.mesh is not None and self.mesh.size() > 1

    def reduce(self, x: torch.Tensor, op: str, axis: str | None = None) -> torch.Tensor:
        """Reduce a tensor over an axis, or over all axes of the step, one after the other, in rank order."""
        x = x.clone()
        for one_axis in self.axes if axis is None else (axis,):
            terms = self.terms(x, one_axis)
            x = ops.reduce(terms, op, x.dtype) if len(terms) > 1 else x
        return x

    def terms(self, x: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """The tensors that the ranks along an axis pass, in their order."""
        if self.mesh is None or not self.are_several:
            return [x]
        # On GPUs a pickled tensor would come back on the sender's device.
        everyone = session_of(self.mesh).from_all(x.detach().cpu())
        by_rank = dict(zip(self.mesh.mesh.flatten().tolist(), everyone))
        groups = groups_along(self.mesh.mesh, self.mesh.mesh_dim_names or (), [axis])
        mine = next(group for group in groups if dist.get_rank() in group)
        return [by_rank[rank].to(x.device) for rank in mine]

    def of_first_rank(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that the first rank passes."""
        if self.mesh is None or not self.are_several:
            return x
        return session_of(self.mesh).from_first(x.detach().cpu()).to(x.device)

    def differ(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """For each tensor, whether two ranks that should have the same have different bits."""
        if self.mesh is None or not self.are_several:
            return [False] * len(tensors)
        everyone = session_of(self.mesh).from_all([digest(x) for x in tensors])
        by_rank = dict(zip(self.mesh.mesh.flatten().tolist(), everyone))
        # Replicas that train apart are in different groups. All ranks get one answer, because they reduce together.
        groups = groups_along(self.mesh.mesh, self.mesh.mesh_dim_names or (), self.axes)
        differ = []
        for i in range(len(tensors)):
            differ.append(any(len({by_rank[rank][i] for rank in group}) > 1 for group in groups))
        return differ


def run_eagerly(
    name: str,
    fn: Callable,
    call: BoundCall,
    transforms: Sequence[Transform],
    mesh: DeviceMesh | None,
    paths: Sequence[str],
    shardings: Sequence[LeafSharding],
) -> tuple[Any, Any]:
    """Run the function of a step on a call, and update the state of the call in place. All ranks must call it.

    Args:
        name: the name of the step.
        fn: its function.
        call: the call, whose state is laid out for the step.
        transforms: the transforms of the step.
        mesh: the mesh of the step; None if it runs in one process.
        paths, shardings: of the leaves of the state.
    """
    leaves, tree = pytree.tree_flatten(call.state)
    check_ended(leaves, name)
    check_written(name, paths, leaves)
    axes = one_set_of_axes(name, paths, leaves, shardings, all_axes(transforms, shardings))
    ranks = _Ranks(mesh, axes)
    session = session_of(mesh) if mesh is not None else None
    if mesh is not None:
        agree_on_call(mesh, f"an eager step of {name}")
    writes = Writes()
    with ending_together(name, leaves, session, writes):
        if session is not None:
            session.drop_carried()
        whole = _whole_leaves(call.state, mesh, shardings)
        seen = call._replace(
            state=pytree.tree_unflatten(whole, tree),
            batch=pytree.tree_map_only(DTensor, local_part, call.batch),
        )
        if isinstance(fn, ExtraInputs):
            fn.before_run()
        batch = [x for x in pytree.tree_leaves(seen.batch) if isinstance(x, torch.Tensor)]
        marks = EagerMarks(batch, ranks.reduce, ranks.of_first_rank)
        # What the function compiles runs as Python too. Below these modes Dynamo skips the wrapper of `torch.cond`,
        # and never compiles it again in this process.
        as_python = torch.compiler.set_stance("force_eager")
        # In one thread, so that all ranks reduce in the same order.
        with as_python, torch.autograd.set_multithreading_enabled(False), marks, EagerFunctions():
            result = seen.run(fn)
        check_result(name, result, call.state)
        new_state, output = result
        with torch.no_grad():
            new_leaves = _averaged_state(name, paths, whole, pytree.tree_leaves(new_state), ranks)
            is_mean = all(getattr(t, "outputs", "mean") == "mean" for t in transforms)
            output = _averaged_output(output, ranks if is_mean else _Ranks(None, ()))
            writes.begin()
            kept = [_updated(leaf, new) for leaf, new in zip(leaves, new_leaves)]
    RECORDS.of_state(kept).steps += 1
    return pytree.tree_unflatten(kept, tree), output


def one_set_of_axes(
    name: str,
    paths: Sequence[str],
    leaves: Sequence[Any],
    shardings: Sequence[LeafSharding],
    every_axis: tuple[str, ...],
) -> tuple[str, ...]:
    """The axes of all leaves, joint ones as one.

    Raises: ValueError if leaves have different axes, or if the step divides one itself.
    """
    for path, leaf, sharding in zip(paths, leaves, shardings):
        if UserSharding.of(leaf, sharding.axes) is not None:
            problem = f"{path} is a DTensor that the step itself divides"
        elif set(members_of(sharding.axes)) != set(every_axis) - set(sharding.independent):
            axes, others = (", ".join(map(repr, x)) for x in (sharding.axes, every_axis))
            problem = f"{path} lives on the axes {axes}, and the step on {others}"
        else:
            continue
        raise ValueError(
            f"eager: {problem}, and an eager step runs on whole leaves that all ranks share.\n"
            f"Call {name}.check_finite(state, *batch) to find a NaN in this step. To print values, return them as "
            f"outputs."
        )
    return shardings[0].axes if shardings else every_axis


def _whole_leaves(
    state: Any, mesh: DeviceMesh | None, shardings: Sequence[LeafSharding]
) -> list[torch.Tensor]:
    """Copies of the whole leaves of a state as the step computes them, on its device. A number becomes a tensor."""
    with torch.no_grad():
        full = pytree.tree_leaves(unshard_state(state, mesh, shardings))
    whole = []
    for x, leaf, sharding in zip(full, pytree.tree_leaves(state), shardings):
        x = as_tensor(x).detach()
        if sharding.memory != "device" and mesh is not None:
            x = x.to(mesh.device_type)
        if sharding.dtype is not None:
            x = x.to(torch.float32)
        whole.append(x.requires_grad_(getattr(leaf, "requires_grad", False)))
    return whole


def _averaged_state(
    name: str,
    paths: Sequence[str],
    old: Sequence[torch.Tensor],
    new: Sequence[Any],
    ranks: _Ranks,
) -> list[torch.Tensor]:
    """The new leaves, with the mean of those that differ from rank to rank, such as the statistics of batch norm.

    Raises: ValueError for a leaf of another shape or dtype than before, or an integer one that differs.
    """
    leaves: list[torch.Tensor] = []
    for path, before, x in zip(paths, old, new):
        x = as_tensor(x).detach()
        if (x.dtype, x.shape) != (before.dtype, before.shape):
            raise ValueError(
                f"eager: {name} was given {path} as {before.dtype} {list(before.shape)} and returned {x.dtype} "
                f"{list(x.shape)}.\nState keeps its shapes and dtypes from step to step; cast it back before "
                f"returning it."
            )
        leaves.append(x)
    for i, differs in enumerate(ranks.differ(leaves)):
        if not differs:
            continue
        if not (leaves[i].is_floating_point() or leaves[i].is_complex()):
            raise ValueError(
                f"eager: {name} returned {paths[i]} with other integers on each rank.\n"
                f"Reduce it in the step, zt.psum or zt.pmean, or return it as an output."
            )
        leaves[i] = ranks.reduce(leaves[i], "mean")
    return leaves


def _averaged_output(output: Any, ranks: _Ranks) -> Any:
    """The output, detached, with the mean of each float scalar that differs from rank to rank."""
    leaves, tree = pytree.tree_flatten(opened(output))
    leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
    scalars = []
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor) and not x.ndim and x.is_floating_point():
            scalars.append(i)
    for i, differs in zip(scalars, ranks.differ([leaves[i] for i in scalars])):
        if differs:
            leaves[i] = ranks.reduce(leaves[i], "mean")
    return pytree.tree_unflatten(leaves, tree)


def _updated(leaf: Any, new: torch.Tensor) -> torch.Tensor:
    """A leaf of the state with its new value in place; for a number, the new value itself."""
    if not isinstance(leaf, torch.Tensor):
        return new
    part = new
    if isinstance(leaf, DTensor):
        # Without a source rank each rank cuts its own copy, and nothing is sent.
        cut = distribute_tensor(new, leaf.device_mesh, leaf.placements, src_data_rank=None)
        part = cut.to_local()
    local_part(leaf).copy_(part)
    return leaf
