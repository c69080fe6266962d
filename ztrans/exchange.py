"""exchange: every rank of a group sends one piece to every other, from where it lies to where it is wanted.

On CPUs each piece crosses a connection of its own (`sockets`); where there can be none, gloo carries it. No
copy is made: gloo's own collectives flatten what they send and unflatten what they receive. The bytes are
those of the best gather or scatter; the messages grow with the group, so it is for groups of a few ranks.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from .sockets import Peer, connect

PEERS = 8  # in larger groups a collective needs fewer messages


def is_direct(group: dist.ProcessGroup) -> bool:
    """Whether pieces are exchanged directly in this group."""
    return dist.get_backend(group) == "gloo" and group.size() <= PEERS


class Exchanges:
    """Sends and receives under way, waited for together."""

    def __init__(self, works: Sequence) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def exchange(pieces: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None], group: dist.ProcessGroup) -> list:
    """Send `pieces[r]` to rank r of `group` and receive `into[r]` from it, for all r but this rank's own."""
    rank, found = group.rank(), _peers(group)
    others = [(rank + step) % group.size() for step in range(1, group.size())]
    if found is not None:
        return [*(found[r].receive(into[r]) for r in others), *(found[r].send(pieces[r]) for r in others)]
    tag = next(_tags(group))
    received = [dist.irecv(into[r], group=group, group_src=r, tag=tag) for r in others]
    return received + [dist.isend(pieces[r], group=group, group_dst=r, tag=tag) for r in others]


@functools.cache
def _peers(group: dist.ProcessGroup) -> dict[int, Peer] | None:
    """Connections to the other ranks, made when the group first exchanges anything; all of its ranks do."""
    found = connect(group)
    if isinstance(found, dict):
        for peer in found.values():
            atexit.register(peer.close)
        return found
    warnings.warn(
        f"ranks that cannot connect directly exchange over gloo, which takes more compute ({found}).\n"
        f"Set GLOO_SOCKET_IFNAME to the interface by which hosts reach each other.",
        stacklevel=2,
    )
    return None


@functools.cache
def _tags(group: dist.ProcessGroup) -> Iterator[int]:
    """One number for each exchange, the same on all ranks: all start them in one order."""
    return itertools.cycle(range(1 << 20))
