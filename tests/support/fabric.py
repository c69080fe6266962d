"""NCCL between ranks that are threads of one process: the calls of a process group that ztrans makes, and their values.

values = on_all_ranks(eqn, hosts, terms)        the values of a collective equation on each rank
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support.fake_cuda import FakeCuda
from ztrans.ir.collectives import wire_format
from ztrans.ir.graph import Eqn
from ztrans.ir.routes import Hosts, is_gathered_whole, route_of
from ztrans.runtime.collectives import wait
from ztrans.runtime.cuda.hierarchical import HierarchicalStart
from ztrans.runtime.cuda.nccl import StreamedStart
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.transports import choose_transport

PATIENCE = 20  # seconds
# As NCCL: its maximum and minimum are those of C's `fmax` and `fmin`, which return the other one of NaN and a number.
COMBINE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.fmax,
    dist.ReduceOp.MIN: torch.fmin,
}


class Fabric:
    """What connects the ranks: each sees what the others have posted."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=PATIENCE)
        self.posts: list[Any] = [None] * ranks

    def posted(self, rank: int, post: Any) -> list[Any]:
        """What all ranks post, once they have all posted."""
        self.posts[rank] = post
        self.barrier.wait()
        posts = list(self.posts)
        self.barrier.wait()
        return posts


class Rank:
    """The channel of one rank, and its process group. The calls have the names of torch 2.11 and of 2.13."""

    is_gloo = False

    def __init__(self, fabric: Fabric, rank: int, hosts: Hosts) -> None:
        self.fabric = fabric
        self.rank = rank
        self.hosts = hosts
        self.group = self

    def size(self) -> int:
        return self.hosts.ranks

    def errors(self) -> AbstractContextManager:
        return nullcontext()

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any) -> None:
        for tensor in tensors:
            tensor.copy_(_total(self.fabric.posted(self.rank, tensor.clone()), options))

    def reduce_scatter_tensor_coalesced(self, received, sent, options) -> None:
        for into, terms in zip(received, sent):
            posts = self.fabric.posted(self.rank, terms.clone())
            rows = [post.view(-1, into.numel())[self.rank] for post in posts]
            into.copy_(_total(rows, options))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def allgather_into_tensor_coalesced(self, received, sent, options) -> None:
        for into, part in zip(received, sent):
            into.copy_(torch.cat(self.fabric.posted(self.rank, part.clone())))

    all_gather_single_coalesced = allgather_into_tensor_coalesced


def _total(terms: Sequence[torch.Tensor], options: Any) -> torch.Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        COMBINE[options.reduceOp.op](total, term, out=total)
    return total


def all_to_all_single(incoming, outgoing, into_sizes=None, from_sizes=None, *, group: Rank) -> None:
    """What `torch.distributed` has under this name."""
    ranks = len(group.fabric.posts)
    pieces = outgoing.clone().split(from_sizes or len(outgoing) // ranks)
    posts = group.fabric.posted(group.rank, pieces)
    incoming.copy_(torch.cat([post[group.rank] for post in posts]))


def on_all_ranks(
    eqn: Eqn,
    hosts: Hosts,
    terms: Sequence[Sequence[torch.Tensor]],
    modes: Sequence[AbstractContextManager] | None = None,
) -> list[list[torch.Tensor]]:
    """The values that each rank gets over NCCL, if rank r passes `terms[r]`, and runs in the context `modes[r]`."""
    fabric, inside = Fabric(hosts.ranks), Fabric(hosts.ranks)
    axis = eqn.kwargs["axis"]
    sizes = {axis: hosts.ranks}
    route = route_of(eqn, sizes, hosts, gloo=False)
    wire = wire_format(eqn, eqn.ins[0])
    op, is_whole = eqn.kwargs.get("op"), is_gathered_whole(eqn, sizes)
    transport = choose_transport(eqn.op, op, wire, lambda: "a double", route, is_whole)

    def run(rank: int) -> list[torch.Tensor]:
        channel = Rank(fabric, rank, hosts)
        common = eqn, sizes, {axis: rank}, channel, Streams(FakeCuda()), transport
        of_hosts = [Rank(inside, rank, hosts)] if transport.way == "hierarchical" else []
        start = (HierarchicalStart if of_hosts else StreamedStart)(*of_hosts, *common)
        with modes[rank] if modes else nullcontext():
            return [wait(member) for member in start(*terms[rank])]

    with (
        mock.patch.object(dist, "all_to_all_single", all_to_all_single),
        ThreadPoolExecutor(hosts.ranks) as threads,
    ):
        return list(threads.map(run, range(hosts.ranks)))
