"""Functions that call torch.distributed's in-place collectives, and a comparison of their results on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

import ztrans as zt


def all_reduce(x):
    dist.all_reduce(x)
    return x * 2


def maximum_of_a_view(x):
    dist.all_reduce(x[1:], dist.ReduceOp.MAX)
    return x


def not_waited_for_at_once(x):
    work = dist.all_reduce(x, async_op=True)
    ones = torch.ones(3).sum()
    work.wait()
    return x + ones


def broadcast(x):
    dist.broadcast(x, 1)
    return x


def all_gather(x):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return parts


def all_gather_of_a_scalar(x):
    parts = [torch.empty(()) for _ in range(2)]
    dist.all_gather(parts, x.sum())
    return parts


def all_gather_into_tensor(x):
    rows = x.new_empty(2 * len(x), x.shape[1])
    dist.all_gather_into_tensor(rows, x)
    return rows


def all_gather_stacked(x):
    stacked = x.new_empty(2, *x.shape)
    dist.all_gather_into_tensor(stacked, x)
    return stacked


def all_to_all_single(x):
    received, uneven = torch.empty_like(x), torch.empty_like(x)
    dist.all_to_all_single(received, x)
    dist.all_to_all_single(uneven, x, [2, 2], [2, 2])
    return received + uneven


def reduce_scatter_tensor(x):
    part = x.new_empty(2, x.shape[1])
    dist.reduce_scatter_tensor(part, x)
    return part


# Each is called on two ranks, with a different tensor [4, 6] on each.
CALLS: dict[str, Callable] = {f.__name__: f for f in (
    all_reduce, maximum_of_a_view, not_waited_for_at_once, broadcast, all_gather, all_gather_of_a_scalar,
    all_gather_into_tensor, all_gather_stacked, all_to_all_single, reduce_scatter_tensor,
)}  # fmt: skip
NOT_OF_GLOO = {"all_gather_stacked"}


def own(rank: int) -> torch.Tensor:
    return torch.arange(24.0).view(4, 6).mul(rank * 2 - 1).sin()


def as_plain(mesh, report: Callable) -> None:
    """Report whether each call has the same bits inside a compiled step as outside of any step, on real ranks."""
    rank = mesh.get_local_rank("dp")
    for name, call in CALLS.items():
        if name in NOT_OF_GLOO:
            continue
        want = call(own(rank))
        _, got = zt.Step.of(lambda s, x, call=call: (s, call(x.clone())))(torch.zeros(1), own(rank))
        pairs = list(zip(*map(torch.utils._pytree.tree_leaves, (got, want)), strict=True))
        report("in_place", rank, call=name, bitwise=all(torch.equal(a, b) for a, b in pairs))
