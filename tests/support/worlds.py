"""Worlds of many ranks in one process: train a step in lock-step and compare it with the plain one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import Case

ALL = (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


@contextlib.contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """A mesh of four ranks of which this process is the second. The others do not exist."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def batches(case: Case, steps: int) -> list[tuple]:
    torch.default_generator.manual_seed(1)
    return [case.batch(case.samples) for _ in range(steps)]


def slices(batch: tuple, ranks: int) -> list[tuple]:
    """Each rank's slice of a global batch."""
    return [pytree.tree_map(lambda x, r=r: x.chunk(ranks)[r], batch) for r in range(ranks)]


def clone(state: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, state)


def plain(case: Case, steps: int = 5, step: Callable | None = None) -> tuple[Any, list]:
    """The untouched step on the whole batch: the truth."""
    state, outputs = clone(case.state()), []
    for batch in batches(case, steps):
        state, output = (step or case.step)(state, *batch)
        outputs.append(pytree.tree_map_only(torch.Tensor, torch.clone, output))
    return state, outputs


def of_a_rank(case: Case, ranks: int) -> Case:
    """The case with the samples of rank 0, of a batch cut into as many slices as there are ranks."""
    return dataclasses.replace(case, samples=math.ceil(case.samples / ranks))


def traced(case: Case, ranks: int) -> zt.stages.Traced:
    """What a rank traces, which is the same whatever the transforms."""
    return _traced(of_a_rank(case, ranks), torch.get_default_dtype())


@functools.cache
def _traced(rank: Case, dtype: torch.dtype) -> zt.stages.Traced:
    """What a rank traces for its samples. Tracing takes most of the time, and needs no transforms and no other ranks."""
    return zt.Step.of(rank.step).trace(rank.state(), *batches(rank, 1)[0])


def on_ranks(case: Case, ranks: int, *transforms: zt.Transform, **how: Any) -> zt.stages.Lowered:
    """The step through `transforms`, for a batch cut into as many slices as there are ranks."""
    rank = of_a_rank(case, ranks)
    return _lowered(rank, torch.get_default_dtype(), transforms, tuple(how.items()))


@functools.cache
def _lowered(rank: Case, dtype: torch.dtype, transforms: tuple, how: tuple) -> zt.stages.Lowered:
    step = zt.chain(*transforms)(rank.step)
    lowered = lower_traced(_traced(rank, dtype), step, **dict(how))
    zt.ir.check(lowered.graph)
    return lowered


def unordered(
    case: Case, ranks: int, *transforms: zt.Transform, cluster: zt.Cluster
) -> zt.ir.Graph:
    """The program of `on_ranks` before a plan orders it, which takes no search."""
    step = zt.chain(*transforms)(case.step)
    stage = dataclasses.replace(traced(case, ranks), transforms=step.transforms)
    return stage.without_order(cluster).unordered


def lower_traced(traced: zt.stages.Traced, step: zt.Step, **how: Any) -> zt.stages.Lowered:
    """What `step` would lower to, from a trace of its function, which several steps share."""
    return dataclasses.replace(traced, transforms=step.transforms).lower(**how)


def sharded(
    case: Case, ranks: int, stage: int = 3, steps: int = 5, transforms=ALL, **options: Any
) -> tuple[Any, list, zt.stages.Lowered]:
    """The sharded step on every rank's slice."""
    mesh = options.pop("mesh", None) or zt.AbstractMesh(dp=ranks)
    lowered = on_ranks(case, ranks, zt.shard_params(mesh, stage=stage, **options), *transforms)
    state, outputs = case.state(), []
    for batch in batches(case, steps):
        state, each = lowered.lockstep(state, slices(batch, ranks))
        outputs.append(each)
    return state, outputs, lowered


def distance(a: Any, b: Any, floor: float = 0.0) -> float:
    """Norm-wise relative distance of the worst leaf; leaves smaller than `floor` are measured against it.

    Infinite if one side has a number that is not finite where the other side has another number.
    """
    worst = 0.0
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        is_complex = any(isinstance(t, torch.Tensor) and t.is_complex() for t in (x, y))
        x, y = (
            torch.as_tensor(t, dtype=torch.complex128 if is_complex else torch.float64)
            for t in (x, y)
        )
        is_same = (x == y) | (x.isnan() & y.isnan())
        if not (is_same | (x.isfinite() & y.isfinite())).all():
            return math.inf  # `max` would drop a NaN
        x, y = (t.where(t.isfinite(), 0) for t in (x, y))
        if x.numel():
            scale = max(y.norm().item(), floor)
            worst = max(worst, (x - y).norm().item() / scale if scale else x.norm().item())
    return worst
