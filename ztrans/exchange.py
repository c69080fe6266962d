"""exchange: every rank of a group sends one piece to every other, from where it lies to where it is wanted.

On gloo that is a send and a receive for each peer, without a copy: gloo's own collectives flatten
what they send and unflatten what they receive. The bytes are those of the best gather or scatter;
the messages grow with the group, so it is for groups of a few ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

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
    rank, tag, works = group.rank(), next(_tags(group)), []
    peers = [(rank + step) % group.size() for step in range(1, group.size())]
    for r in peers:
        works.append(dist.irecv(into[r], group=group, group_src=r, tag=tag))
    for r in peers:
        works.append(dist.isend(pieces[r], group=group, group_dst=r, tag=tag))
    return works


@functools.cache
def _tags(group: dist.ProcessGroup) -> Iterator[int]:
    """One number for each exchange, the same on all ranks: all start them in one order."""
    return itertools.cycle(range(1 << 20))
