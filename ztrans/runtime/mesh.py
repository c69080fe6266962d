"""make_mesh: a DeviceMesh from axis names, under torchrun or in a single process."""

from __future__ import annotations

import atexit
import math
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..ir.layout import AbstractMesh


def make_mesh(device: str | None = None, **sizes: int) -> DeviceMesh:
    """Make a DeviceMesh with the given axes, in order. One size may be -1, which stands for all remaining ranks.

    Under torchrun this starts torch.distributed, unless it runs already, and ends it with the process; each rank uses
    the GPU of its local rank. Without torchrun it makes a mesh of one rank. A mesh from PyTorch's `init_device_mesh`
    works as well.

    Raises: RuntimeError if the axes do not fit the number of ranks, or the device is missing.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "make_mesh: 'cuda' needs a CUDA device and a PyTorch built for it, and torch sees none here.\n"
            "Make the mesh of CPUs, zt.make_mesh('cpu', ...), or look at programs with zt.AbstractMesh(...)."
        )
    if device == "cuda" and "LOCAL_RANK" in os.environ:  # even if every rank has used GPU 0 until now
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not dist.is_initialized():
        _begin("nccl" if device == "cuda" else "gloo")
    world, known = dist.get_world_size(), math.prod(size for size in sizes.values() if size != -1)
    shape = tuple(world // known if size == -1 else size for size in sizes.values())
    if math.prod(shape) != world:
        want = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise RuntimeError(
            f"make_mesh: {want} does not fit {world} rank{'s' * (world > 1)}.\n"
            f"Start the script with torchrun --nproc-per-node {max(known, 1)}, or use -1 for one axis."
        )
    return init_device_mesh(device, shape, mesh_dim_names=tuple(sizes))


def _begin(backend: str) -> None:
    """Start torch.distributed, with a world of one rank unless torchrun has started this process."""
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_end, os.getpid())


def _end(process: int) -> None:
    """End torch.distributed, at the exit of the process that started it."""
    if process != os.getpid():  # a forked child has the groups of its parent, but none of their threads
        return
    # Destroying a NCCL communicator waits for all of its ranks. If the program failed on this rank, the others may
    # still be inside a collective, so the wait would not end. They must see this process end instead.
    failed = hasattr(sys, "last_type")
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()


def check_runs(mesh: DeviceMesh | AbstractMesh) -> None:
    """Refuse a mesh on which no program can run.

    Raises: ValueError if the mesh is abstract; RuntimeError if its process group has been destroyed.
    """
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
