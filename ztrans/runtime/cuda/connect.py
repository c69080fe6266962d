"""Connect the ranks of a NCCL communicator when it is opened.

NCCL makes a communicator and its connections at the first messages. They take some hundred MB of the GPU's memory,
outside of PyTorch's allocator. The first reductions come in backward, near the peak of memory, when PyTorch's cache may
hold all the rest. So each communicator sends a tiny message of each kind when it is opened, and the needs of a step are
compared with the memory that is left then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

INSIDE = (
    " inside hosts"  # ends the purpose of a channel for the first level of hierarchical reductions
)


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
    if purpose == "gathers":
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
