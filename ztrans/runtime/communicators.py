"""The process groups of torch: which backend they have, how they are made, and how NCCL connects their ranks.

NCCL makes a communicator and its connections at the first messages. They take some hundred MB of the GPU's memory,
outside of PyTorch's allocator. The first reductions come in backward, near the peak of memory, when PyTorch's cache may
hold all the rest. So each communicator sends a tiny message of each kind when it is opened, and the needs of a step are
compared with the memory that is left then.

The options of a group are in private attributes of torch; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ends the purpose of a channel for the first level of hierarchical reductions.
INSIDE = " inside hosts"


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """The backend for messages of a group between devices of one kind.

    None if the group has no such backend, or has been destroyed.
    """
    try:
        config = dist.get_backend_config(group)
    except (ValueError, TypeError):  # it has been destroyed
        return None
    backends = dict(pair.split(":") for pair in config.split(","))
    return backends.get(device_type)


def is_nccl(group: dist.ProcessGroup | None) -> bool:
    """Whether NCCL sends the messages of a group between GPUs. The group may have been closed or destroyed."""
    return group is not None and backend_of(group, "cuda") == "nccl"


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The shortest time-out of a group and of the world; None if their backends have none."""
    timeouts = []
    for candidate in (group, dist.group.WORLD):
        if candidate is None:
            continue
        for device in candidate._device_types:
            with contextlib.suppress(AttributeError, RuntimeError):
                timeouts.append(candidate._get_backend(device).options._timeout)
    return min(timeouts, default=None)


def tuning_of(group: dist.ProcessGroup, timeout: timedelta | None) -> Any:
    """New options of NCCL with the user's tuning of a group, such as its number of blocks.

    The other options of a group concern that group alone. None for other backends, which cannot be tuned.
    """
    for device in group._device_types:
        options: Any = getattr(group._get_backend(device), "options", None)
        if hasattr(options, "config"):
            new_options: Any = type(options)()
            new_options.config = options.config
            new_options.is_high_priority_stream = options.is_high_priority_stream
            new_options._timeout = timeout
            return new_options
    return None


def host_name() -> tuple[str, ...]:
    """A unique name of this host. Each network namespace of a machine counts as a host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = "/proc/self/ns/net"
    return (
        socket.gethostname(),
        boot.read_text() if boot.exists() else "",
        os.readlink(namespace) if os.path.exists(namespace) else "",
    )


def check_splits(ranks: Sequence[int], base: dist.ProcessGroup) -> None:
    """Check that the ranks of a mesh can make NCCL groups without the other ranks of the world.

    Raises: RuntimeError if they would wait for the other ranks forever. In a world with a `device_id`, torch splits
        each new communicator from the world's communicator, and all ranks of the world must do that together.
    """
    world = dist.group.WORLD
    is_split = world is not None and world.bound_device_id is not None and is_nccl(base)
    if is_split and len(ranks) < dist.get_world_size():
        raise RuntimeError(
            f"ztrans: the mesh has {len(ranks)} of the {dist.get_world_size()} ranks of the world, and "
            f"init_process_group was given a device_id. All ranks of such a world must make each NCCL group together, "
            f"and those outside of the mesh do not.\n"
            f"Choose the device with torch.cuda.set_device(local_rank), and call init_process_group without device_id."
        )


def run_uninterrupted(open_groups: Callable[[], object], device_type: str) -> None:
    """Run a function that opens groups. An interrupt that arrives meanwhile is raised afterwards.

    Torch names groups by a count. If an interrupt made only some ranks count a group, the same later group would have
    different names. Signal handlers raise only in the main thread, so the function runs in another one.
    """
    # Each thread has its own current GPU.
    device = None if device_type == "cpu" else torch.accelerator.current_device_index()

    def run() -> None:
        with torch.accelerator.device_index(device):
            open_groups()

    with ThreadPoolExecutor(1, "ztrans-open") as executor:  # its exit waits for the thread
        executor.submit(run).result()


def connect(group: dist.ProcessGroup, purpose: str, hosts: int) -> None:
    """Send a tiny message of each kind that a channel on `hosts` hosts will carry. All of its ranks must call it.

    Each connection to a peer takes memory, so an all_to_all connects only the ranks that will exchange terms: on one
    host all ranks; in a hierarchical reduction the ranks of this host, and the ranks at the same place on each host.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    size = group.size()
    on_host = size // hosts
    all_ranks = torch.zeros(size, device=device)
    mine = torch.zeros(1, device=device)
    # The names since torch 2.13, and the older ones.
    gather = _function("all_gather_single", "all_gather_into_tensor")
    scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
    if purpose in (
        "gathers",
        "weights",
    ):  # NCCL connects two ranks at their first message to each other
        gather(all_ranks, mine, group=group)
    elif purpose.endswith(INSIDE):
        first = group.rank() // on_host * on_host
        _exchange(all_ranks, group, range(first, first + on_host))
    else:
        dist.all_reduce(mine, group=group)
        scatter(mine, all_ranks, group=group)
        gather(all_ranks, mine, group=group)
        step = on_host if hosts > 1 else 1
        _exchange(all_ranks, group, range(group.rank() % step, size, step))
    torch.cuda.synchronize(device)


def usable_bytes() -> int:
    """The bytes of the current GPU that PyTorch holds or can get: all but CUDA's context, NCCL and other processes."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def _exchange(terms: torch.Tensor, group: dist.ProcessGroup, peers: range) -> None:
    splits = [int(rank in peers) for rank in range(len(terms))]
    dist.all_to_all_single(
        torch.empty_like(terms[: len(peers)]), terms[: len(peers)], splits, splits, group=group
    )


def _function(*names: str) -> Callable[..., object]:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))
