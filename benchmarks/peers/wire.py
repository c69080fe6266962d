"""All-gather and reduce-scatter of flat buffers over gloo, as point-to-point messages.

For more than one or two megabytes, gloo's own all-gather and all-to-all use only one direction of a link at a time,
and its reduce-scatter is an all-reduce. Messages use both directions, and send each byte once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Works(dist.Work):
    """Several works, waited for together."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[dist.Work] = []

    def wait(self) -> bool:
        return all(work.wait() for work in self.works)


def exchange(received: Tensor, send: Tensor, group: dist.ProcessGroup) -> Works:
    """Send row r of `send` to rank r, and receive row r of `received` from it. This rank's own row is left out."""
    me, works = group.rank(), Works()
    for step in range(1, group.size()):  # in each round every rank sends to a different rank
        to, source = (me + step) % group.size(), (me - step) % group.size()
        works.works.append(dist.irecv(_bytes(received[source]), group=group, group_src=source))
        works.works.append(dist.isend(_bytes(send[to]), group=group, group_dst=to))
    return works


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Works:
    rows = whole.view(group.size(), -1)
    if rows[group.rank()].data_ptr() != part.data_ptr():
        rows[group.rank()].copy_(part)
    return exchange(rows, part.view(1, -1).expand(group.size(), -1), group)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


class _Allocate:
    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocate):
    """An all-gather for FSDP2's `set_custom_all_gather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False
    ) -> Works | None:
        works = all_gather(output_tensor, input_tensor, group)
        if async_op:
            return works
        works.wait()
        return None


class ReduceScatter(_Allocate):
    """A reduce-scatter for FSDP2's `set_custom_reduce_scatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        received = torch.empty_like(rows)
        exchange(received, rows, group).wait()
        received[group.rank()] = rows[group.rank()]
        assert op == dist.ReduceOp.AVG
        torch.mean(received, 0, out=output_tensor)
