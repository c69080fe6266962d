"""Checkpoints of several processes: saved by four ranks while steps go on, loaded by three, two and one.

torchrun --standalone --nproc-per-node 4 tests/support/checkpoints.py FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import batch, lifted
from ztrans.runtime.channels import LostRank
from ztrans.runtime.checkpoints import load

RANK = int(os.environ.get("RANK", 0))


def report(check: str, rank: int = 0, **figures) -> None:
    if rank == RANK:
        sys.stdout.write(json.dumps({"check": check, **figures}) + "\n")
        sys.stdout.flush()


def equal(a, b) -> bool:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def saved_while_steps_go_on(folder: Path, mesh: DeviceMesh, name: str, **options):
    """Train, save, and train on until the save is complete. Returns the state that was saved, whole."""
    step = zt.chain(zt.shard_params(mesh, **options), zt.overlap_grads())(lifted()[2])
    state = step.shard(lifted()[3])
    for i in range(2):
        state, _ = step(state, batch(i).chunk(4)[RANK])
    before = step.unshard(state)
    future = zt.save(folder / name, state)
    for i in range(2, 8):  # the same number on every rank
        state, _ = step(state, batch(i).chunk(4)[RANK])
    future.result()
    report("saved", name=name, moved=not equal(step.unshard(state)["params"], before["params"]))
    return before


def loaded(folder: Path, mesh: DeviceMesh, before, **options) -> None:
    """Load on the ranks of a mesh, which are the first ones, and go on."""
    ranks = mesh.size()
    if ranks > RANK:
        step = zt.shard_params(mesh, axis="data", **options)(lifted()[2])
        like = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), lifted(seed=1)[3])
        state = zt.load(folder, like, step)
        placed = [x.placements for x in pytree.tree_leaves(state)]
        wanted = [x.placements for x in pytree.tree_leaves(step.shard(lifted()[3]))]
        same = equal(step.unshard(state), before)
        state, loss = step(state, batch(9).chunk(ranks)[RANK])
        report(
            "loaded",
            RANK,
            ranks=ranks,
            equal=same,
            placed=placed == wanted,
            finite=loss.isfinite().item(),
            **options,
        )
    dist.barrier()


def copies_that_differ(folder: Path) -> None:
    """A state with tensor parallelism of its own, whose leaves differ between ranks of an axis that no leaf is cut over."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    step = zt.shard_params(mesh)(lambda state, x: (state, x.sum()))
    state = step.shard({"w": torch.full((4, 2), float(mesh.get_local_rank("tp")))})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            zt.save(folder / "tp", state).result()
        except RuntimeError as error:
            report("copies", error=str(error), rest=sorted(file.name for file in folder.iterdir()))


def different_paths(folder: Path, mesh: DeviceMesh) -> None:
    state = zt.shard_params(mesh)(lifted()[2]).shard(lifted()[3])
    try:
        zt.save(folder / f"half-{RANK // 2}" / ("шаг " * 30), state)
    except RuntimeError as error:
        report("paths", error=str(error))


def interrupted_load(folder: Path, mesh: DeviceMesh) -> None:
    """Rank 1 is interrupted while it reads its part."""
    step = zt.shard_params(mesh)(lifted()[2])
    state = step.shard(lifted()[3])
    interrupt = mock.patch.object(load._Checkpoint, "fill", side_effect=KeyboardInterrupt)
    began = time.monotonic()
    try:
        with interrupt if RANK == 1 else contextlib.nullcontext():
            zt.load(folder, state, step)
    except (KeyboardInterrupt, LostRank) as error:
        kind, seconds = type(error).__name__, time.monotonic() - began
        report("interrupted", RANK, kind=kind, error=str(error), seconds=seconds)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    mesh = zt.make_mesh("cpu", dp=4)
    cut = saved_while_steps_go_on(folder, mesh, "three", stage=3)
    whole = saved_while_steps_go_on(folder, mesh, "zero", stage=0)
    hosts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "dp"))
    before = saved_while_steps_go_on(folder, hosts, "hosts", replicate_axis="host")
    if RANK == 0:
        torch.save(cut, folder / "whole.pt")
    different_paths(folder, mesh)
    copies_that_differ(folder)
    interrupted_load(folder / "zero", mesh)
    # Meshes of some ranks come last: torch names a group by the number of groups that a rank has made, and in torch
    # 2.14 groups of some ranks count too, so a later group of all ranks would wait for ranks that call it otherwise.
    three = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("data",))
    loaded(folder / "three", three, cut)
    loaded(folder / "zero", three, whole)
    loaded(folder / "hosts", three, before, stage=2)
    two = DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",))
    loaded(folder / "three", two, cut, stage=1)
    dist.destroy_process_group()
