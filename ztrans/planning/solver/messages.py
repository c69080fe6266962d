"""The message of a bucket, and the bytes that are live for it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ..buffers import AT_START, AT_WAIT, Buffer
from ..network import Level, Message
from .problem import Gather, MemberIndices, Problem, Reduction, Wire

BucketMembers = Sequence[Gather] | Sequence[Reduction]


def message_of(problem: Problem, members: BucketMembers, start: int, wait: int) -> Message:
    """The message of a bucket that is sent at place `start` and waited for at place `wait`.

    A gather copies this rank's part into the buffer that receives the value. Small members share a buffer, and their
    values are copied out of it. Compute decodes values at the wait. A reduction copies gradients that it cannot send
    from their own storage, and sums the parts that it receives.
    """
    wire = problem.wires[members[0].key]
    wire_bytes = sum(member.wire for member in members)
    packing = wire.pack * packed_gradients(members)
    unpacking = wire.copy_out * packed_values(members)
    decoding = 0.0
    for member in members:
        member_packing, member_unpacking = copy_seconds(wire, member)
        packing += member_packing
        if is_decoded_at_wait(member):
            decoding += member_unpacking
        else:
            unpacking += member_unpacking

    overhead = wire.overhead + wire.byte_overhead * wire_bytes
    unpack = wire.unpack * wire_bytes + decoding
    pack_beside = 0.0
    unpack_beside = 0.0
    inside = None
    if not wire.beside:
        overhead += packing
        unpack += unpacking
    elif wire.inside is None:
        pack_beside = packing
        unpack_beside = unpacking
    else:
        # The parts that the ranks of one host have sent are summed before the sums leave the host.
        pack_beside = packing
        level = wire.inside
        inside = Level(level.lane, level.link, level.latency, level.pace * wire_bytes, unpacking)

    latency, seconds = wire.travel(wire_bytes)
    return Message(
        start,
        wait,
        wire.lane,
        wire.link,
        latency,
        seconds,
        overhead,
        unpack,
        pack_beside,
        unpack_beside,
        inside,
        wire.taken,
    )


def second_message(problem: Problem, reductions: Sequence[Reduction], wait: int) -> Message | None:
    """The message of a bucket's second reductions, sent at place `wait`. None if it has none."""
    second = [r.second for r in reductions if r.second is not None]
    if not second:
        return None
    return message_of(problem, second, wait, _deadline(problem, reductions))


def second_deadline(problem: Problem, members: MemberIndices) -> int:
    """The last place where the second reductions of a bucket may be waited for."""
    return _deadline(problem, [problem.reductions[i] for i in members])


def _deadline(problem: Problem, reductions: Sequence[Reduction]) -> int:
    return min(len(problem.seconds), *(r.deadline for r in reductions))


def copy_seconds(wire: Wire, member: Gather | Reduction) -> tuple[float, float]:
    """The seconds of the copies, codes and sums of a member in any bucket: before it is sent, and after its arrival."""
    if member.coding.decoded:
        return wire.coding * member.coding.encoded, wire.coding * member.coding.decoded
    if isinstance(member, Gather):
        return wire.pack * member.bytes / wire.ranks, 0.0
    packing = wire.pack * member.bytes if member.copied else 0.0
    return packing, wire.copy_out * (member.bytes + member.bytes // wire.ranks)


def is_decoded_at_wait(member: Gather | Reduction) -> bool:
    """Whether compute decodes the value of a member, so that it takes no memory before the wait."""
    return isinstance(member, Gather) and member.codes > 0


def sharing(members: BucketMembers) -> list[Gather | Reduction]:
    """The members of a bucket that are copied to share a buffer: the small ones, if there are several.

    Codes need no copy: they are written to the send buffer of a bucket, and decoded from the buffer that received them.
    """
    small = [member for member in members if member.small and not member.coding.decoded]
    return small if len(small) > 1 else []


def packed_values(members: BucketMembers) -> int:
    """The bytes of values that are copied out of the shared buffer of a bucket of gathers."""
    return sum(member.bytes for member in sharing(members) if isinstance(member, Gather))


def packed_gradients(members: BucketMembers) -> int:
    """The bytes of gradients that are copied only because several small members share a buffer."""
    size = 0
    for member in sharing(members):
        if isinstance(member, Reduction) and not member.copied:
            size += member.bytes
    return size


# The bytes of a bucket.


def gather_buffers(
    problem: Problem, members: Sequence[Gather], start: int, wait: int
) -> Iterator[Buffer]:
    """The buffers of a bucket of gathers, and each value up to its use.

    A value is live from the start on. Where codes are received in its place, they are live up to the wait, and the
    value from there on. The buffer that small members share is live where the bucket starts and where it is waited for.
    In between, only this rank's part of it is live. What was copied to the device to be sent is live where the bucket
    starts.
    """
    for g in members:
        if g.codes:
            yield Buffer(g.codes, 2 * start, 2 * wait)
        yield Buffer(g.bytes, 2 * (wait if g.codes else start), 2 * g.use - 1)
    arriving = sum(member.arriving for member in members)
    if arriving:
        yield Buffer(arriving, 2 * start, 2 * start)
    packed = packed_values(members)
    part = packed // problem.wires[members[0].key].ranks
    if packed:
        yield Buffer(packed + part, 2 * wait, 2 * wait)
        if start < wait:
            yield Buffer(packed, 2 * start, 2 * start)
            yield Buffer(part, 2 * start, 2 * wait - 1)


class ReductionBytes:
    """The bytes of a bucket of reductions.

    Attributes:
        computed: the members whose gradients an operation computes. A leaf of the state, which a `pmean` sends as it
            is, is live throughout, and counts as state.
        sent, allocated: the buffers that begin at its start, and at its wait.
        awaiting: the results of other reductions that are live until its wait.
        staying: the buffers that are live after its wait, without temporaries.
        temporaries: the temporaries of the updates after its wait, as in `Reduction`.
    """

    def __init__(self, members: Sequence[Reduction]) -> None:
        buffers = list(chain.from_iterable(r.buffers for r in members))
        self.members = members
        self.computed = [r for r in members if r.born >= 0]
        self.sent = [buffer for buffer in buffers if buffer.first == AT_START]
        self.allocated = [buffer for buffer in buffers if buffer.first == AT_WAIT]
        self.awaiting = [buffer for buffer in buffers if buffer.first >= 0]
        self.staying = [buffer for buffer in self.sent if buffer.last != AT_WAIT] + self.allocated
        self.temporaries = list(chain.from_iterable(r.temporaries for r in members))

    @functools.cached_property
    def gradients(self) -> int:
        """The bytes of the gradients of all members, without leaves of the state."""
        return _total(self.computed)

    @functools.cached_property
    def starting(self) -> int:
        """The bytes where it starts."""
        return self.gradients + _total(self.sent) + packed_gradients(self.members)

    @functools.cached_property
    def under_way(self) -> int:
        """The bytes between its start and its wait."""
        return _total(self.sent) + _total(r for r in self.computed if not r.copied)

    @functools.cached_property
    def awaiting_bytes(self) -> int:
        """The bytes of `awaiting`."""
        return _total(self.awaiting)

    def at_wait(self, wait: int) -> int:
        """The peak at a wait: where a result is allocated, or where an update that may run there runs."""
        # A wait allocates one result at a time, or decodes all of them, while the buffers of the bucket are still live.
        # Updates run one by one.
        results = max((buffer.bytes for buffer in self.allocated), default=0)
        results = max(results, sum(r.decoded for r in self.members))
        running = max((size for release, size in self.temporaries if release <= wait), default=0)
        second_bytes = sum(r.second_bytes for r in self.members)
        return max(self.under_way + results, _total(self.staying) + second_bytes + running)

    def buffers(self, start: int, wait: int) -> Iterator[Buffer]:
        """All buffers of the bucket, if it starts and is waited for at these places."""
        for r in self.computed:
            yield Buffer(r.bytes, 2 * r.born + 1, 2 * start - 1)
        for buffer in self.awaiting:
            yield Buffer(buffer.bytes, buffer.first, 2 * wait)
        for buffer in self.staying:
            if buffer.last > 2 * wait:
                yield Buffer(buffer.bytes, 2 * wait + 1, buffer.last)
        for release, size in self.temporaries:
            if release > wait:
                yield Buffer(size, 2 * release, 2 * release)
        if start == wait:
            # The bucket starts, and is then waited for, so the bytes of the two are not live at once.
            yield Buffer(max(self.starting, self.at_wait(wait)), 2 * start, 2 * start)
        else:
            yield Buffer(self.starting, 2 * start, 2 * start)
            yield Buffer(self.under_way, 2 * start + 1, 2 * wait - 1)
            yield Buffer(self.at_wait(wait), 2 * wait, 2 * wait)


def _total(items: Iterable[Buffer | Reduction]) -> int:
    return sum(item.bytes for item in items)


def second_buffer(problem: Problem, size: int) -> Buffer:
    """The buffer that is reserved for second reductions, from the first birth on."""
    return Buffer(size, 2 * problem.births[0], 2 * len(problem.seconds))


def reserved_for_second(reductions: Iterable[Sequence[Reduction]]) -> int:
    """The bytes of the largest second reduction of some buckets. One at a time is under way between two waits."""
    most = 0
    for members in reductions:
        most = max(most, sum(r.second_bytes for r in members))
    return most
