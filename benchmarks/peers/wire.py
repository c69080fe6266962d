"""Gathers and reduce-scatters of flat buffers over gloo as point-to-point messages.

Gloo's own all-gather and all-to-all of more than a megabyte or two use one direction of a link at
a time, and its reduce-scatter is an all-reduce. Messages use both directions, each byte once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Works(dist.Work):
    """Several works as one."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[dist.Work] = []

    def wait(self) -> bool:
        return all(work.wait() for work in self.works)


def exchange(received: Tensor, send: Tensor, group: dist.ProcessGroup) -> Works:
    """Row r of `send` goes to rank r; row r of `received` comes from there. This rank's own is left out."""
    me, works = group.rank(), Works()
    for step in range(1, group.size()):  # each round every rank sends to another one
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
    """FSDP2's gather."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> Works | None:
        works = all_gather(output_tensor, input_tensor, group)
        if async_op:
            return works
        works.wait()
        return None


class ReduceScatter(_Allocate):
    """FSDP2's reduction."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        rows = input_tensor.view(group.size(), -1)
        received = torch.empty_like(rows)
        exchange(received, rows, group).wait()
        received[group.rank()] = rows[group.rank()]
        assert op == dist.ReduceOp.AVG
        torch.mean(received, 0, out=output_tensor)
