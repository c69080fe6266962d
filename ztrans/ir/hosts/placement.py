"""Placement: how the ranks of a group lie on hosts."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group on `count` hosts. They are even if each host has equally many, one behind the other."""

    ranks: int
    count: int = 1
    even: bool = True

    @property
    def local(self) -> int:
        """The ranks of one host, if they are even."""
        return self.ranks // self.count


def common(groups: Sequence[Hosts]) -> Hosts:
    """The hosts of all groups of a mesh axis. If they differ, they count as not even, so that all send in one way.

    Otherwise copies of a leaf over another axis could differ by rounding.

    >>> common([Hosts(4, 2), Hosts(4, 1)])
    Hosts(ranks=4, count=2, even=False)
    """
    first, most = groups[0], max(group.count for group in groups)
    return first if len(set(groups)) == 1 else Hosts(first.ranks, most, even=False)


def hosts_of(names: Sequence[Hashable]) -> Hosts:
    """The hosts of a group, given the host of each of its ranks.

    >>> hosts_of("aabb"), hosts_of("abab")
    (Hosts(ranks=4, count=2, even=True), Hosts(ranks=4, count=2, even=False))
    """
    runs = [len(list(run)) for _, run in itertools.groupby(names)]
    count = len(set(names))
    return Hosts(len(names), count, len(runs) == count and len(set(runs)) == 1)
