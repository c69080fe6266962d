"""make_mesh: a DeviceMesh by axis names; under torchrun, or in one process."""

from __future__ import annotations

import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..ir.layout import AbstractMesh


def make_mesh(device: str | None = None, **sizes: int) -> DeviceMesh:
    """A DeviceMesh with the given axes, in order; one size may be -1, for what the others leave.

    Under torchrun it starts torch.distributed if nobody has, and ends it with the process, and a rank takes
    the GPU of its number on the host; in a single process without torchrun it makes a mesh of one.
    `init_device_mesh` of PyTorch does as well.

    Raises: RuntimeError when the axes need more ranks than there are, or the device is not there.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "make_mesh: 'cuda' needs a CUDA device and a PyTorch built for it, and torch sees none here.\n"
            "Make the mesh of CPUs, zt.make_mesh('cpu', ...), or look at programs with zt.AbstractMesh(...)."
        )
    if device == "cuda" and "LOCAL_RANK" in os.environ:  # also where all ranks have used the first GPU before
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_end, os.getpid())
    world, known = dist.get_world_size(), 1
    for size in sizes.values():
        known *= size if size != -1 else 1
    shape = [world // known if size == -1 else size for size in sizes.values()]
    total = 1
    for size in shape:
        total *= size
    if total != world:
        want = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise RuntimeError(
            f"make_mesh: {want} does not fit {world} rank{'s' * (world > 1)}.\n"
            f"Start the script with torchrun --nproc-per-node {max(known, 1)}, or use -1 for one axis."
        )
    return init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(sizes))


def _end(process: int) -> None:
    if process != os.getpid():  # a child that was forked has the groups of its parent, and none of their threads
        return
    # NCCL ends a communicator with all its ranks, and those of a program that failed here wait for this one
    # somewhere else: they are to see it die instead.
    failed = hasattr(sys, "last_type")
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()


def check_runs(mesh: DeviceMesh | AbstractMesh) -> None:
    """Refuse a mesh on which nothing can run: an abstract one, or one whose process group is gone."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"{mesh} has no devices: it can be traced, lowered, printed and costed, not run.\n"
            f"Run under a DeviceMesh: zt.make_mesh({', '.join(f'{a}={n}' for a, n in mesh.axes)}) under torchrun."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "no process group: the mesh's has been destroyed, or was never there.\n"
            "Start the script with torchrun and make the mesh with zt.make_mesh(...) or init_device_mesh(...)."
        )
