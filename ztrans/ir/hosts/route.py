"""Route: which way the bytes of a collective take between the ranks of several hosts, and why.

    exchange     every rank sends every other rank its part; a reduction sums the parts in rank order
    ring         the backend passes parts from rank to rank, and reduces them on the way
    two levels   an exchange inside each host; then the sums of hosts are exchanged, and summed in the order of hosts

Between hosts, an exchange sends each part once for each rank of a host, and the other two send it about once for each
host. The order of both exchanges does not depend on the schedule. The runtime sends as the route says, and the planner
charges the bytes of the route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..collectives import ALL_GATHER, ALL_REDUCE, HALF, REDUCE_SCATTER, partial_dtype, wire_dtype
from ..graph import DTYPES, Eqn, Primitive
from .placement import Hosts

EXCHANGE, RING, TWO_LEVELS = "exchange", "ring", "exchange in two levels"
DIRECT = 8  # ranks; over gloo, larger groups gather by a ring


@dataclass(frozen=True)
class Route:
    """The way of a collective, its reason, and the bytes that a rank receives from its own host and from others.

    The bytes are shares of the whole value as it is sent, and means over the ranks of the group.
    """

    way: str
    reason: str
    inside: float
    between: float

    def __str__(self) -> str:
        return f"{self.way} ({self.reason})"


def route_of(eqn: Eqn, hosts: Hosts, gloo: bool) -> Route:
    """The route of a collective equation; `gloo` says whether gloo sends it, not NCCL."""
    kind: Any = eqn.op
    member = eqn.ins[0]
    return route(kind, eqn.kwargs.get("op"), wire_dtype(eqn, member), partial_dtype(eqn, member), hosts, gloo)


def route(kind: Primitive, op: str | None, wire: torch.dtype, partial: torch.dtype, hosts: Hosts, gloo: bool) -> Route:
    """Choose the route of a collective.

    Args:
        kind: the primitive.
        op: its reduction, if it reduces.
        wire: the dtype in which the terms are sent.
        partial: the dtype in which the sums of hosts would be sent.
        hosts: where its ranks are.
        gloo: whether gloo sends it, not NCCL.

    >>> print(route(REDUCE_SCATTER, "mean", torch.float32, torch.float32, Hosts(4, 2), gloo=True))
    exchange in two levels (sums inside each of 2 hosts first: 25% of the bytes come from other hosts, not 50%)
    >>> print(route(REDUCE_SCATTER, "mean", torch.float32, torch.float32, Hosts(4, 2), gloo=False))
    ring (NCCL reduces f32 on the way)
    """
    n, local = hosts.ranks, hosts.local if hosts.even else 1
    if not _is_exchanged(kind, op, wire, n, gloo):
        received = (n - 1) / n * (2 if kind is ALL_REDUCE else 1)
        between = received / local if hosts.count > 1 else 0.0
        moves = "gathers" if kind is ALL_GATHER else f"reduces {DTYPES[wire]} on the way"
        return Route(RING, f"{'gloo' if gloo else 'NCCL'} {moves}", received - between, between)
    between = (n - local) / n if hosts.count > 1 else 0.0
    by_sums = (hosts.count - 1) / n * partial.itemsize / wire.itemsize
    reason = _reason(kind, wire, partial, hosts, by_sums < between)
    if reason:
        return Route(EXCHANGE, reason, (n - 1) / n - between, between)
    sent = f", sent in {DTYPES[partial]}" if partial != wire else ""
    share = f"{by_sums:.0%} of the bytes come from other hosts, not {between:.0%}"
    reason = f"sums inside each of {hosts.count} hosts first{sent}: {share}"
    return Route(TWO_LEVELS, reason, (local - 1) / local, by_sums)


def _is_exchanged(kind: Primitive, op: str | None, wire: torch.dtype, ranks: int, gloo: bool) -> bool:
    if gloo:
        return kind is REDUCE_SCATTER or (kind is ALL_GATHER and ranks <= DIRECT)
    return kind is REDUCE_SCATTER and op in ("sum", "mean") and wire in HALF


def _reason(kind: Primitive, wire: torch.dtype, partial: torch.dtype, hosts: Hosts, fewer: bool) -> str:
    """Why an exchange has one level; empty if it has two. `fewer`: two levels send fewer bytes between hosts."""
    if kind is ALL_GATHER:
        return "a gather has nothing to sum"
    if hosts.count == 1:
        return "one host"
    if not hosts.even:
        return f"{hosts.count} hosts with different numbers of ranks, or in another order"
    if hosts.local == 1:
        return "one rank on each host"
    if not fewer:
        return f"the sum of a host in {DTYPES[partial]} has as many bytes as its {hosts.local} terms in {DTYPES[wire]}"
    return ""
