"""Leaves in the memory of the host, on the ranks of a mesh: with them a step has the bits of a step without."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, slices
from tests.transforms.test_offload_parameters import X, layers_state, layers_step
from ztrans.runtime.agreement import everywhere

RANK = int(os.environ.get("RANK", 0))


def is_same(first: Any, second: Any) -> bool:
    pairs = zip(*map(pytree.tree_leaves, (first, second)), strict=True)
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def trained(mesh: DeviceMesh, folder: Path, *transforms: zt.Transform) -> tuple:
    """The full state after six steps, with a checkpoint that is loaded in between, and the last output."""
    case = CASES["clipped"]
    step = zt.chain(zt.shard_params(mesh), *transforms, *ALL)(case.step)
    state = step.shard(case.state())
    for k, batch in enumerate(batches(case, 6)):
        state, output = step(state, *slices(batch, mesh.size())[RANK])
        if k == 2:
            zt.save(folder, state).result()
            dist.barrier()
            state = zt.load(folder, state, step)
    return step.unshard(state), output


def trained_in_half(mesh: DeviceMesh, *transforms: zt.Transform) -> tuple:
    """The full state and the last output after steps that cast parameters; and whether these have copies on the host.

    The caller writes to a parameter in between.
    """
    slow = zt.cluster("h100", dp="nvlink4", host_link=zt.Link("slow", latency=1e-6, bandwidth=1e8))
    step = zt.chain(zt.accumulate(2), zt.shard_params(mesh), *transforms, *ALL)(layers_step)
    state = step.shard(layers_state())
    x = slices((X,), mesh.size())[RANK]
    compiled = step.lower(state, *x, cluster=slow).compile()
    for k in range(4):
        state, output = compiled(state, *x)
        if k == 1:
            state["params"]["w1"].mul_(2)
    return step.unshard(state), output, bool(compiled.graph.hidden)


def on_host(mesh: DeviceMesh, report: Callable) -> None:
    *plain_in_half, _ = trained_in_half(mesh)
    *moved_in_half, has_copies = trained_in_half(mesh, zt.offload(where="*", at_least=0))
    same = is_same(plain_in_half, moved_in_half) and has_copies
    report("on host", RANK, where="copies in half precision", bitwise=same)
    (folder, *_) = everywhere(tempfile.mkdtemp(), mesh)
    plain = trained(mesh, Path(folder) / "plain")
    for where, across_steps in (("[mv].*", False), ("[mv].*", True), ("*", True)):
        offload = zt.offload(
            where=where, gradients=where == "*", across_steps=across_steps, at_least=0
        )
        moved = trained(mesh, Path(folder) / f"moved_{across_steps}", offload)
        same = is_same(plain, moved)
        report("on host", RANK, where=where, across_steps=across_steps, bitwise=same)
