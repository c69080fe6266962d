"""Two levels: a reduce_scatter between CPUs that sums terms inside each host, and sends only the sums to other hosts.

On 2 hosts of 2 ranks, rank 1 receives the terms of rank 0 for ranks 1 and 3, and adds its own. It keeps the sum for
itself, and sends the other one to rank 3. So between hosts, each byte of a sum is sent once.

Nothing runs in the background, so the second level begins when this rank next starts or waits for a message of the
channel. The tags of both levels are taken at the start, so a thread that waits earlier changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from ... import ops
from ...ir.collectives import rules
from ...ir.graph import Eqn
from ...ir.hosts import Hosts, Route, route_of
from ..process_groups import Channel, Work


class Later:
    """A message whose second level begins when its first level is done."""

    def __init__(self, begin: Callable[[], Sequence[Work]]) -> None:
        self._begin: Callable[[], Sequence[Work]] | None = begin
        self._works: Sequence[Work] = ()
        self._lock = threading.Lock()

    def advance(self) -> None:
        """Wait for the first level, and begin the second, unless that has happened."""
        with self._lock:
            if self._begin is not None:
                self._works, self._begin = self._begin(), None

    def wait(self) -> None:
        self.advance()
        for work in self._works:
            work.wait()


def gloo_route(eqn: Eqn, sizes: Mapping[str, int], channel: Channel | None) -> Route | None:
    """The route of an equation whose parts are exchanged over gloo between several hosts, or None."""
    hosts = channel.hosts if channel is not None else Hosts(1)
    is_far = hosts.count > 1 and rules(eqn).is_exchanged(eqn, hosts.ranks, gloo=True)
    return route_of(eqn, sizes, hosts, gloo=True) if is_far else None


def exchange_sums(
    channel: Channel, rank: int, rows: torch.Tensor, op: str, partial: torch.dtype
) -> tuple[list[torch.Tensor], Sequence[Work]]:
    """Send the sum, over the ranks of this host, of row r to rank r, in the dtype `partial`.

    Returns: the terms of this rank's result, one from each host, which are valid when the returned work is done.
    """
    hosts = channel.hosts
    host, local = divmod(rank, hosts.local)
    mine = range(host * hosts.local, (host + 1) * hosts.local)  # the ranks of this host
    peers = range(
        local, hosts.ranks, hosts.local
    )  # this rank and its peers: the ranks at its place on each host
    received = [
        [rows[to] if r == mine[local] else torch.empty_like(rows[to]) for r in mine] for to in peers
    ]
    first = [
        work
        for to, terms in zip(peers, received)
        for work in channel.exchange(
            [rows[to - local + k] for k in range(hosts.local)], terms, mine
        )
    ]
    tag, sums = next(channel.tags), list[torch.Tensor]()

    def begin() -> Sequence[Work]:
        for work in first:
            work.wait()
        kind = "sum" if op == "mean" else op
        # The first term that was received may be overwritten; this rank's own may belong to the caller.
        own = [ops.reduce(terms, kind, partial, terms[0 if local else 1]) for terms in received]
        received.clear()
        sums.extend(own[k] if k == host else torch.empty_like(own[k]) for k in range(hosts.count))
        return channel.exchange(own, sums, peers, tag)

    later = Later(begin)
    channel.later.append(later)
    return sums, [later]
