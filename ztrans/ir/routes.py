"""Routes: which way the bytes of a collective take between the ranks and hosts of a group, and why.

    exchange               every rank sends every other rank its part; a reduction sums the parts in rank order, and an
                           all_to_all sends each rank another part
    ring                   the backend passes parts from rank to rank, and reduces them on the way
    hierarchical exchange  a reduction: an exchange inside each host, then an exchange of the sums of hosts, which are
                           summed in the order of hosts; a gather: parts go to one rank of each other host, which passes
                           them on inside the host

Between hosts, an exchange sends each part once for each rank of a host; the other two send it about once for each host.
The order of both exchanges does not depend on the schedule. An all_reduce whose terms the ranks must reduce themselves
is two messages, each with its own route: an exchange of the terms of each part, and a gather of the parts.

The runtime follows the route, and the planner charges its bytes, with one exception: in a short all_reduce the ranks
exchange whole terms, unless these are codes. Over gloo they do so between 2 ranks, and with a short message among up to
8; over NCCL with short terms that they must reduce themselves. Among more than 2 ranks this sends more bytes than are
charged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .collectives import (
    LARGE_MEMBER,
    MOST_RANKS_OF_EXCHANGE,
    buffer_bytes,
    host_sum_format,
    part_sizes,
    rules,
    wire_format,
)
from .graph import Eqn
from .rules import ALL_TO_ALL_KIND, Sizes
from .wire_format import Format

EXCHANGE = "exchange"
RING = "ring"
HIERARCHICAL = "hierarchical exchange"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group.

    Attributes:
        ranks: the number of ranks.
        count: the number of hosts.
        even: whether each host has the same number of ranks, next to each other.
    """

    ranks: int
    count: int = 1
    even: bool = True

    @property
    def local(self) -> int:
        """The number of ranks on each host, if the hosts are even."""
        return self.ranks // self.count


def hosts_of(names: Sequence[Hashable]) -> Hosts:
    """The hosts of a group, from the host of each of its ranks.

    >>> hosts_of("aabb"), hosts_of("abab")
    (Hosts(ranks=4, count=2, even=True), Hosts(ranks=4, count=2, even=False))
    """
    count = len(set(names))
    runs = [len(list(run)) for _, run in itertools.groupby(names)]
    are_adjacent = len(runs) == count
    are_equally_many = len(set(runs)) == 1
    return Hosts(len(names), count, are_adjacent and are_equally_many)


def common(groups: Sequence[Hosts]) -> Hosts:
    """The hosts of all groups of a mesh axis. If the groups differ, they count as not even, so that all have one route.

    With several routes, the copies of a leaf over another axis could differ by rounding.

    >>> common([Hosts(4, 2), Hosts(4, 1)])
    Hosts(ranks=4, count=2, even=False)
    """
    if len(set(groups)) == 1:
        return groups[0]
    return Hosts(groups[0].ranks, max(group.count for group in groups), even=False)


@dataclass(frozen=True)
class Route:
    """The way of a collective, with its reason and the bytes that a rank receives.

    The bytes are means over the ranks of the group. If hosts are not even, each rank counts as a separate host.

    Attributes:
        way: `EXCHANGE`, `RING` or `HIERARCHICAL`.
        reason: why, as text.
        inside, between: the bytes that a rank receives from its own host, and from other hosts.
        gather_way: how an all_reduce gathers the parts of its total after an exchange; None for other messages.
    """

    way: str
    reason: str
    inside: float
    between: float
    gather_way: str | None = None

    def __str__(self) -> str:
        return f"{self.way} ({self.reason})"


def route_of(eqn: Eqn, sizes: Sizes, hosts: Hosts, gloo: bool) -> Route:
    """The route of a collective equation.

    Args:
        eqn: the equation.
        sizes: the sizes of the mesh axes.
        hosts: the hosts of the ranks of its axis.
        gloo: whether gloo sends it, or else NCCL.

    >>> import torch
    >>> from ztrans.ir import Partial, Split, Var, reduce
    >>> g = Var("g", torch.float32, (8,), (Partial("dp", "sum"),))
    >>> scatter = reduce([g], ["f"], "dp", "sum", Split("dp"))
    >>> print(route_of(scatter, {"dp": 4}, Hosts(4, 2), gloo=True))
    hierarchical exchange (sums inside each of 2 hosts first: 25% of the bytes come from other hosts, not 50%)
    >>> print(route_of(scatter, {"dp": 4}, Hosts(4, 2), gloo=False))
    ring (NCCL reduces f32 on the way)
    """
    halves = rules(eqn).halves(eqn)
    if halves is None:
        is_exchanged = rules(eqn).is_exchanged(eqn, hosts.ranks, gloo)
        return _route(eqn, sizes, hosts, gloo, is_exchanged)
    scatter, gather = halves
    first = _route(scatter, sizes, hosts, gloo, is_exchanged=True)
    second = _route(gather, sizes, hosts, gloo, is_exchanged=gloo)
    return Route(
        first.way,
        first.reason,
        first.inside + second.inside,
        first.between + second.between,
        second.way,
    )


def is_gathered_whole(eqn: Eqn, sizes: Sizes) -> bool:
    """Whether NCCL gathers the whole terms of an all_reduce, because they are short and the ranks must reduce them."""
    if rules(eqn).halves(eqn) is None or wire_format(eqn, eqn.ins[0]).is_coded:
        return False
    total = sum(buffer_bytes(eqn, k, sizes) for k in range(len(eqn.outs)))
    return total * sizes[eqn.kwargs["axis"]] <= LARGE_MEMBER * MOST_RANKS_OF_EXCHANGE


def share_of_exchange(hosts: Hosts, wire: Format, host_format: Format) -> float:
    """The share of the terms of a hierarchical reduction that one call exchanges inside a host on GPUs.

    With this share, the buffers of a call and the sums of the host need no more memory than the received terms of a
    plain exchange. A single term for one host is sent in place, so it may be larger.
    """
    received = (hosts.ranks - 1) / hosts.ranks
    sums = host_format.bytes_per_element / wire.bytes_per_element / hosts.local
    return max(received - sums, 0.0) / 2


def exchanges_inside(eqn: Eqn, hosts: Hosts) -> int:
    """About how many calls a hierarchical reduction on GPUs needs to exchange its terms inside a host."""
    member = eqn.ins[0]
    share = share_of_exchange(hosts, wire_format(eqn, member), host_sum_format(eqn, member))
    return min(hosts.count, math.ceil(1 / share)) if share else hosts.count


def _route(eqn: Eqn, sizes: Sizes, hosts: Hosts, gloo: bool, is_exchanged: bool) -> Route:
    """The route of a collective that is one message."""
    ranks = hosts.ranks
    local = hosts.local if hosts.even else 1  # ranks that reach each other inside a host
    spans_hosts = hosts.count > 1
    reduces = not rules(eqn).moves
    wire = wire_format(eqn, eqn.ins[0])
    received = rules(eqn).wire_bytes(eqn, sizes)

    if not is_exchanged:
        between = _ring_bytes_between(received, hosts)
        backend = "gloo" if gloo else "NCCL"
        work = f"reduces {wire} on the way" if reduces else "gathers"
        return Route(RING, f"{backend} {work}", received - between, between)

    all_bytes = received * ranks / max(ranks - 1, 1)
    host_format = host_sum_format(eqn, eqn.ins[0]) if reduces else wire
    # The shares of all bytes that come from other hosts, if each rank sends its part there, or if each host sends one.
    flat_share = (ranks - local) / ranks if spans_hosts else 0.0
    widening = _widening(eqn, sizes, host_format) if host_format != wire else 1.0
    hierarchical_share = (hosts.count - 1) / ranks * widening
    reason = _why_not_hierarchical(hosts, wire, host_format, hierarchical_share < flat_share)
    if spans_hosts and rules(eqn).kind == ALL_TO_ALL_KIND:
        reason = "each rank needs other elements, so no rank can pass them on"
    if reason is not None:
        between = flat_share * all_bytes
        return Route(EXCHANGE, reason, received - between, between)

    reason = f"{hierarchical_share:.0%} of the bytes come from other hosts, not {flat_share:.0%}"
    if reduces:
        precision = f", sent in {host_format}" if host_format != wire else ""
        reason = f"sums inside each of {hosts.count} hosts first{precision}: {reason}"
    else:
        reason = f"parts go to one rank of each of {hosts.count} hosts first: {reason}"
    inside = all_bytes * (local - 1) / local
    return Route(HIERARCHICAL, reason, inside, all_bytes * hierarchical_share)


def _widening(eqn: Eqn, sizes: Sizes, host_format: Format) -> float:
    """The bytes of the sum of a host for each byte of one of its terms."""
    sums = terms = 0
    for k in range(len(eqn.outs)):
        elements, parts = part_sizes(eqn, k, sizes)
        sums += parts * host_format.nbytes(elements)
        terms += buffer_bytes(eqn, k, sizes)
    return sums / terms if terms else 1.0


def _ring_bytes_between(received: float, hosts: Hosts) -> float:
    """The bytes that a rank of a ring receives from another host, of all that it receives."""
    local = hosts.local if hosts.even else 1
    return received / local if hosts.count > 1 else 0.0


def _why_not_hierarchical(
    hosts: Hosts, wire: Format, host_format: Format, saves_bytes: bool
) -> str | None:
    """Why an exchange is not hierarchical, or None if it is.

    Args:
        hosts: the hosts of its ranks.
        wire, host_format: how the terms are sent, and the sums of hosts.
        saves_bytes: whether a hierarchical exchange sends fewer bytes between hosts.
    """
    if hosts.count == 1:
        return "one host"
    if not hosts.even:
        return f"the ranks of {hosts.count} hosts are not equally many, and neighbours, in every group of the axis"
    if hosts.local == 1:
        return "one rank on each host"
    if not saves_bytes:
        terms = f"its {hosts.local} terms in {wire}"
        return f"the sum of a host in {host_format} has as many bytes as {terms}"
    return None
