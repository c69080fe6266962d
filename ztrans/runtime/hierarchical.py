"""Hierarchical messages between CPUs of several hosts: one level inside each host, and one between hosts.

    a reduction   the terms of a host are summed inside it; then the sums of hosts are exchanged
    a gather      parts go to one rank of each other host, which sends them on inside its host

So each byte of a sum or part is sent once between two hosts, not once for each rank of a host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from ..ir.wire_format import Format
from .channels import Channel, Work


class HierarchicalMessage:
    """A message with two or more levels: each level sends what the level before has received.

    Nothing runs in the background, so this rank begins the next level when it next starts or waits for a message of
    the channel. The tags of all levels are drawn at the start, so they do not depend on when a level begins.
    """

    def __init__(
        self,
        channel: Channel,
        first: Sequence[Work],
        begin_next: Callable[[], Sequence[Work]],
        is_urgent: bool = True,
    ) -> None:
        """Make a message whose first level is in progress.

        Args:
            channel: the channel of the message.
            first: the work of the first level.
            begin_next: begins the second level once the first has arrived.
            is_urgent: whether other calls of the channel begin the second level, not only the wait for this message.
        """
        self._channel = channel
        self._works = first
        self._next_levels = [begin_next]
        self._lock = threading.Lock()
        if is_urgent:
            channel.first_levels.append(self)

    def then(self, begin_next: Callable[[], Sequence[Work]]) -> None:
        """Add a level, which `begin_next` begins once the levels before have arrived."""
        self._next_levels.append(begin_next)

    def advance(self) -> None:
        """Wait for the level in progress, and begin the next one if there is any."""
        self._begin_level()
        if self._next_levels:
            self._channel.first_levels.append(self)

    def wait(self) -> None:
        """Wait for all levels."""
        while self._next_levels:
            self._begin_level()
        self._wait_for_level()
        self._works = ()

    def _begin_level(self) -> None:
        with self._lock:
            if not self._next_levels:
                return
            self._wait_for_level()
            self._works = ()  # it keeps the received buffers alive
            self._works = self._next_levels[0]()
            del self._next_levels[0]  # not before: if this level fails, the next wait must fail too

    def _wait_for_level(self) -> None:
        with self._channel.errors():
            for work in self._works:
                work.wait()


def reduction_of_hosts(reduction: str, sent: Format) -> str:
    """The reduction inside each host, whose result is sent to other hosts as `sent`.

    For a mean, hosts send sums, and the total is divided once; in fp16 a sum could overflow, so hosts send means.
    """
    return "sum" if reduction == "mean" and sent.carrier != torch.float16 else reduction


def exchange_sums(
    channel: Channel,
    rank: int,
    rows: torch.Tensor,
    sum_terms: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor],
) -> tuple[list[torch.Tensor], Sequence[Work]]:
    """Sum each row r over the ranks of this host by `sum_terms`, and send the sum to rank r.

    `sum_terms(terms, memory)` returns the sum as it is sent. It may overwrite `memory`, which is one of the terms.

    On 2 hosts of 2 ranks, rank 1 receives the terms of rank 0 for ranks 1 and 3, and adds its own. It keeps the sum for
    itself, and sends the other one to rank 3. So between hosts, each byte of a sum is sent once.

    Returns: the terms of this rank's result, one from each host, which are valid when the returned work is done.
    """
    hosts = channel.hosts
    host, local_rank = divmod(rank, hosts.local)
    ranks_here = range(host * hosts.local, (host + 1) * hosts.local)
    peers = range(
        local_rank, hosts.ranks, hosts.local
    )  # the ranks with this local rank, one on each host

    received: list[list[torch.Tensor]] = []
    first: list[Work] = []
    for peer in peers:
        # Each rank of this host receives the terms for the rank with its local rank on the host of `peer`.
        terms = [rows[peer] if r == rank else torch.empty_like(rows[peer]) for r in ranks_here]
        pieces = [rows[peer - local_rank + k] for k in range(hosts.local)]
        first += channel.exchange(pieces, terms, ranks_here)
        received.append(terms)

    tag = next(channel.tags)
    sums_here: list[torch.Tensor] = []  # of this host, one for each peer
    sums: list[torch.Tensor] = []  # for this rank, one from each host

    def begin_second() -> Sequence[Work]:
        while received:
            terms = received[0]
            # The sum overwrites a received term, because this rank's own may belong to the caller.
            memory = terms[1] if local_rank == 0 else terms[0]
            sums_here.append(sum_terms(terms, memory))
            del received[0], terms, memory  # the next sums reuse their memory
        for k, sum_here in enumerate(sums_here):
            sums.append(sum_here if k == host else torch.empty_like(sum_here))
        return channel.exchange(sums_here, sums, peers, tag)

    return sums, [HierarchicalMessage(channel, first, begin_second)]


def tags_of_parts(channel: Channel) -> list[int]:
    """The tags that `exchange_parts` needs: one between hosts, and one inside this host for each host."""
    return [next(channel.tags) for _ in range(1 + channel.hosts.count)]


def exchange_parts(
    channel: Channel, rank: int, rows: Sequence[torch.Tensor], tags: Sequence[int]
) -> HierarchicalMessage:
    """Send this rank's row of `rows` to all ranks, and receive row r from rank r.

    On 2 hosts of 2 ranks, rank 1 receives the row of rank 3, and sends it on to rank 0 with its own. So between hosts,
    each byte is sent once. The second level, inside the host, begins only when this message is waited for: compute
    would stall if an earlier call waited for the first level of a message that is needed later.
    """
    hosts = channel.hosts
    host, local_rank = divmod(rank, hosts.local)
    ranks_here = range(host * hosts.local, (host + 1) * hosts.local)
    peers = range(
        local_rank, hosts.ranks, hosts.local
    )  # the ranks with this local rank, one on each host
    first_tag, *tags_inside = tags
    from_peers = [rows[peer] for peer in peers]
    first = channel.exchange([rows[rank]] * hosts.count, from_peers, peers, first_tag)

    def begin_second() -> Sequence[Work]:
        works: list[Work] = []
        for peer, tag in zip(peers, tags_inside):
            first_row = peer - local_rank  # of the host of `peer`
            host_rows = rows[first_row : first_row + hosts.local]
            works += channel.exchange([rows[peer]] * hosts.local, host_rows, ranks_here, tag)
        return works

    return HierarchicalMessage(channel, first, begin_second, is_urgent=False)
