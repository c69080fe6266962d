"""Leaves in the memory of the host, on the ranks of a mesh: with them a step has the bits of a step without."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, slices
from ztrans.runtime.agreement import everywhere

RANK = int(os.environ.get("RANK", 0))


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


def on_host(mesh: DeviceMesh, report: Callable) -> None:
    (folder, *_) = everywhere(tempfile.mkdtemp(), mesh)
    plain = trained(mesh, Path(folder) / "plain")
    for where, across_steps in (("[mv].*", False), ("[mv].*", True), ("*", True)):
        offload = zt.offload(
            where=where, gradients=where == "*", across_steps=across_steps, at_least=0
        )
        moved = trained(mesh, Path(folder) / f"moved_{across_steps}", offload)
        pairs = zip(*map(pytree.tree_leaves, (plain, moved)), strict=True)
        same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
        report("on host", RANK, where=where, across_steps=across_steps, bitwise=same)
