"""Hierarchical messages between CPUs of several hosts, with one level inside each host and one between hosts.

    a reduction   the terms of a host are summed inside it; then the sums of hosts are exchanged
    a gather      parts go to one rank of each other host; then they are sent on inside that host

So each byte of a sum, or of a part, is sent once between two hosts, not once for each rank of a host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from .. import ops
from .process_groups import Channel, Work


class HierarchicalMessage:
    """A message with two levels: the second one sends what the first one has brought.

    Nothing runs in the background, so this rank begins the second level when it next starts or waits for a message of
    the channel, or for this one. The tags of both levels are taken at the start, so a thread that waits earlier changes
    nothing.
    """

    def __init__(self, begin_second: Callable[[], Sequence[Work]]) -> None:
        """`begin_second` waits for the first level, and begins the second one."""
        self._begin_second: Callable[[], Sequence[Work]] | None = begin_second
        self._works: Sequence[Work] = ()
        self._lock = threading.Lock()

    def advance(self) -> None:
        """Wait for the first level, and begin the second, unless that has happened."""
        with self._lock:
            if self._begin_second is not None:
                self._works = self._begin_second()
                self._begin_second = None

    def wait(self) -> None:
        """Wait for both levels."""
        self.advance()
        for work in self._works:
            work.wait()


def exchange_sums(
    channel: Channel, rank: int, rows: torch.Tensor, reduction: str, partial: torch.dtype
) -> tuple[list[torch.Tensor], Sequence[Work]]:
    """Send the sum, over the ranks of this host, of row r to rank r, in the dtype `partial`.

    On 2 hosts of 2 ranks, rank 1 receives the terms of rank 0 for ranks 1 and 3, and adds its own. It keeps the sum for
    itself, and sends the other one to rank 3. So between hosts, each byte of a sum is sent once.

    Returns: the terms of this rank's result, one from each host, which are valid when the returned work is done.
    """
    hosts = channel.hosts
    host, place = divmod(rank, hosts.local)
    of_host = range(host * hosts.local, (host + 1) * hosts.local)
    peers = range(place, hosts.ranks, hosts.local)  # the ranks at this rank's place on each host

    received: list[list[torch.Tensor]] = []
    first: list[Work] = []
    for peer in peers:
        # Each rank of this host gets the terms for the rank at its own place on the host of `peer`.
        terms = [rows[peer] if r == rank else torch.empty_like(rows[peer]) for r in of_host]
        pieces = [rows[peer - place + k] for k in range(hosts.local)]
        first += channel.exchange(pieces, terms, of_host)
        received.append(terms)

    tag = next(channel.tags)
    sums_here: list[torch.Tensor] = []  # of this host, one for each peer
    sums: list[torch.Tensor] = []  # for this rank, one from each host

    def begin_second() -> Sequence[Work]:
        with channel.errors():
            for work in first:
                work.wait()
        first.clear()  # they hold what they have received
        # A mean is divided once, when the sums of hosts are added.
        first_reduction = "sum" if reduction == "mean" else reduction
        while received:
            terms = received[0]
            # Written over a term that was received: this rank's own may belong to the caller.
            out = terms[1] if place == 0 else terms[0]
            sums_here.append(ops.reduce(terms, first_reduction, partial, out))
            del received[0], terms, out  # the next sums take their memory
        for k, sum_here in enumerate(sums_here):
            sums.append(sum_here if k == host else torch.empty_like(sum_here))
        return channel.exchange(sums_here, sums, peers, tag)

    message = HierarchicalMessage(begin_second)
    channel.first_levels.append(message)
    return sums, [message]


def exchange_parts(
    channel: Channel, rank: int, rows: Sequence[torch.Tensor]
) -> HierarchicalMessage:
    """Send this rank's row of `rows` to all ranks, and receive row r from rank r.

    On 2 hosts of 2 ranks, rank 1 receives the row of rank 3, and sends it on to rank 0 with its own. So between hosts,
    each byte is sent once. The second level is inside the host, and begins when this message is waited for: a wait for
    the first level of a message that is needed later would let compute stand still.
    """
    hosts = channel.hosts
    host, place = divmod(rank, hosts.local)
    of_host = range(host * hosts.local, (host + 1) * hosts.local)
    peers = range(place, hosts.ranks, hosts.local)  # the ranks at this rank's place on each host
    first = channel.exchange([rows[rank]] * hosts.count, [rows[peer] for peer in peers], peers)
    tags = [next(channel.tags) for _ in peers]

    def begin_second() -> Sequence[Work]:
        with channel.errors():
            for work in first:
                work.wait()
        works: list[Work] = []
        for peer, tag in zip(peers, tags):
            of_peer = rows[peer - place : peer - place + hosts.local]
            works += channel.exchange([rows[peer]] * hosts.local, of_peer, of_host, tag)
        return works

    return HierarchicalMessage(begin_second)
