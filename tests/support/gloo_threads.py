"""Gloo between ranks that are threads of one process: the real one, without processes to start.

with gloo_channels(hosts) as channels:          a channel for each rank
    on_threads(hosts.ranks, run)                what `run(rank)` returns on each rank, in a thread for each
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tests.support.mailbox import LocalChannel
from ztrans.ir.routes import Hosts
from ztrans.runtime.channels import Channel

T = TypeVar("T")
PATIENCE = timedelta(seconds=20)


@contextlib.contextmanager
def gloo_channels(hosts: Hosts) -> Iterator[list[Channel]]:
    """A channel for each rank, over a group of gloo. The ranks count as ranks of these hosts."""
    store = dist.HashStore()
    make = lambda rank: dist.ProcessGroupGloo(store, rank, hosts.ranks, PATIENCE)
    groups = on_threads(hosts.ranks, make)
    channels: list[Channel] = [LocalChannel("dp", "reductions", hosts=hosts) for _ in groups]
    for channel, group in zip(channels, groups):
        channel.open(group)
    yield channels


def on_threads(ranks: int, run: Callable[[int], T]) -> list[T]:
    """What `run` returns on each rank."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))
