"""sending: a bucket as a message, with the seconds that it takes of its link, and of compute.

A gather copies this rank's part into the buffer in which it receives. Small members share a buffer, and their values
are copied out of it. A reduction copies gradients that it cannot send from their own storage, and sums up the parts
that it has received.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..event_simulator import Message
from .problem import Gather, Problem, Reduction, Wire
from .slots import copied, shared


def sending(
    problem: Problem, members: Sequence[Gather] | Sequence[Reduction], start: int, wait: int
) -> Message:
    """A bucket as a message that is sent at place `start` and waited for at place `wait`."""
    wire, moved = problem.wires[members[0].key], sum(member.wire for member in members)
    pack, unpack = (sum(seconds) for seconds in zip(*(copying(wire, member) for member in members)))
    unpack += wire.copy * sum(
        gather.held for gather in shared([m for m in members if isinstance(m, Gather)])
    )
    pack += wire.pack * copied([m for m in members if isinstance(m, Reduction)])
    host, unpack = wire.call + wire.host * moved + pack, wire.unpack * moved + unpack
    return Message(start, wait, wire.lane, wire.link, wire.latency, wire.pace * moved, host, unpack)


def copying(wire: Wire, member: Gather | Reduction) -> tuple[float, float]:
    """The seconds of copies and sums that a member takes in any bucket: to send it, and to unpack it."""
    if isinstance(member, Gather):
        return wire.pack * member.held / wire.ranks, 0.0
    return wire.pack * member.freed, wire.copy * (member.held + member.held // wire.ranks)
