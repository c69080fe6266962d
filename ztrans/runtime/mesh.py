"""Make a DeviceMesh from axis names, under torchrun or in one process; check that it can run, and find its memory."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..ir.layout import AbstractMesh
from ..ir.printer import counted
from .session import all_sessions


def make_mesh(device: str | None = None, **sizes: int) -> DeviceMesh:
    """Make a DeviceMesh with the given axes, in order. One size may be -1, which stands for all remaining ranks.

    Under torchrun this starts torch.distributed, unless it runs already, and ends it with the process; each rank uses
    the GPU of its local rank. Without torchrun this makes a mesh of one rank. A mesh from PyTorch's `init_device_mesh`
    works as well.

    Raises:
        TypeError: the device is not a name, or the size of an axis is not a number of ranks.
        ValueError: there are no axes, or two sizes are -1.
        RuntimeError: the axes do not fit the number of ranks, the device is missing, or the process has a WORLD_SIZE
            but no RANK.
    """
    _check_axes(device, sizes)
    device = _chosen_device(device)
    if device == "cuda":
        _set_up_nccl()
    if not dist.is_initialized():
        _begin("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    known_ranks = math.prod(size for size in sizes.values() if size != -1)
    shape = tuple(world // known_ranks if size == -1 else size for size in sizes.values())
    if math.prod(shape) != world:
        axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        ranks = counted(world, "rank")
        alternative = "" if -1 in sizes.values() else ", or use -1 for one axis"
        raise RuntimeError(
            f"make_mesh: {axes} does not fit {ranks}.\n"
            f"Start the script with torchrun --nproc-per-node {max(known_ranks, 1)}{alternative}."
        )
    return init_device_mesh(device, shape, mesh_dim_names=tuple(sizes))


def _check_axes(device: object, sizes: Mapping[str, object]) -> None:
    if not isinstance(device, str | None):
        raise TypeError(
            f"make_mesh: the device is {device!r}, not a name such as 'cpu' or 'cuda'.\n"
            f"Give each axis a name and a size: zt.make_mesh('cpu', dp={device if isinstance(device, int) else -1})."
        )
    if not sizes:
        raise ValueError(
            f"make_mesh: the mesh has no axes.\nName one: zt.make_mesh({device or 'cpu'!r}, dp=-1)."
        )
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise TypeError(
                f"make_mesh: {axis}={size!r}; a size is a number of ranks, or -1 for all remaining ranks."
            )
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(
            f"make_mesh: two sizes are -1, {dict(sizes)}.\nOne of them may be; give the other a number."
        )


def _chosen_device(device: str | None) -> str:
    """The device of the mesh, by default CUDA where there is a GPU. Selects the GPU of this rank's local rank."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cuda":
        return device
    if not torch.cuda.is_available():
        raise RuntimeError(
            "make_mesh: 'cuda' needs a CUDA device and a PyTorch built for it, and torch sees none here.\n"
            "Make the mesh of CPUs, zt.make_mesh('cpu', ...), or look at programs with zt.AbstractMesh(...)."
        )
    if "LOCAL_RANK" in os.environ:  # even if every rank has used GPU 0 until now
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    elif "RANK" not in os.environ:  # init_device_mesh warns unless a process has chosen its GPU
        torch.cuda.set_device(torch.cuda.current_device())
    return device


def _set_up_nccl() -> None:
    """Set variables that NCCL reads once, with its first communicator or message, unless the user has set them."""
    # The messages of all communicators start in the order in which this process launches them. Otherwise two of them
    # may wait for each other on GPUs that have no room for both.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # NCCL would register the buffers that a CUDA graph sends. Between GPUs of one host the replay then hangs if the
    # allocator has expandable segments (pytorch/torchtitan#3306, pytorch#158029), and sums may have another order.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def _begin(backend: str) -> None:
    """Start torch.distributed, with a world of one rank unless torchrun has started this process."""
    world = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    elif world != "1":
        raise RuntimeError(
            f"make_mesh: WORLD_SIZE is {world}, and RANK is not set, so this process does not know which rank it is.\n"
            f"Start the script with torchrun, which sets both; for a mesh of one rank, unset WORLD_SIZE."
        )
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_end, os.getpid())


def _end(process: int) -> None:
    """End torch.distributed, at the exit of the process that started it."""
    if process != os.getpid():
        return  # a forked child has the groups of its parent, but none of their threads
    if not dist.is_initialized():
        return
    # Destroying an NCCL communicator waits for all of its ranks. They may stay inside a collective forever, if sys.exit
    # has ended this program before theirs, which cannot be seen here. The process that watches over this rank has told
    # them that it leaves.
    would_wait = dist.get_backend() == "nccl" and dist.get_world_size() > 1
    has_failed = hasattr(sys, "last_type") or any(x.is_closed for x in all_sessions())
    if would_wait or has_failed:
        return
    for session in all_sessions():
        # Another rank may be slower, and wait for the messages of these gathers before its last step ends.
        with contextlib.suppress(RuntimeError):  # the groups may have been destroyed
            session.drop_carried()
    dist.destroy_process_group()


def device_memory(device_type: str) -> int | None:
    """The memory in bytes, in whole GiB, of this process's accelerator of a type; None without an accelerator.

    GPUs of one kind may differ by a few MiB, and their ranks must make the same plan.
    """
    if device_type == "cpu" or not torch.accelerator.is_available():
        return None
    _, total = torch.get_device_module(device_type).mem_get_info()
    return total >> 30 << 30


def check_runs(mesh: DeviceMesh | AbstractMesh) -> None:
    """Check that programs can run on a mesh.

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
