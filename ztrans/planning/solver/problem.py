"""What a schedule of collectives decides, without the program that it belongs to.

Operations 0..n-1 run in a fixed order. Place k is before operation k, and place n is the end. A gather must have
arrived before the operation that first uses it. Its value is live from its start to its last use. A gradient is live
from the operation that makes it until its reduction has been waited for. A gather that repeats an earlier one has a
lever, which a schedule may pull. Then the gather is not sent, and the earlier value stays live. It may have another
lever, with which each rank keeps only a part of the earlier value, and a gather among neighbours brings the rest. A
`Choice` says which messages and levers there are, and a `Schedule` also at which places.

The equations of an eager update have no place of their own: they run at the place where the last of the reductions that
they need is waited for. Collectives that no schedule places, as the step's own, are issued and waited for at fixed
places.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ...ir.dependencies import grouped
from ..buffers import Buffer
from ..network import Message
from ..play import play

# A place that is not before the end of any problem.
END = sys.maxsize
# The bytes at a place of which nothing is known: no limit is reached there.
UNKNOWN = -(2**52)


class Inside(NamedTuple):
    """How the first level of a hierarchical message travels, inside each host. Received bytes are then summed there."""

    lane: str
    link: str
    latency: float
    pace: float


class Wire(NamedTuple):
    """How the messages of one key travel, and what they cost on their link and of compute.

    Attributes:
        lane, link: the communicator of the messages, and the link that they cross.
        latency: seconds for a message.
        pace: seconds for a byte, if nothing else uses the link.
        overhead, byte_overhead: seconds for which compute stands still to send a message, and for each of its bytes.
        unpack: seconds for which compute makes values of a received byte.
        ranks: how many take part in a message.
        pack: seconds to copy a byte that is sent.
        copy_out: seconds for a received byte that is copied out of a buffer, or summed.
        beside: whether these two happen beside compute, which otherwise stands still for them.
        inside: the first level, of a hierarchical message.
        taken: the share of compute that a message takes while it is under way.
        tree: the latency and pace of a message that goes by a tree, where that may be faster.
    """

    lane: str
    link: str
    latency: float
    pace: float
    overhead: float = 0.0
    byte_overhead: float = 0.0
    unpack: float = 0.0
    ranks: int = 1
    pack: float = 0.0
    copy_out: float = 0.0
    beside: bool = False
    inside: Inside | None = None
    taken: float = 0.0
    tree: tuple[float, float] | None = None

    def travel(self, wire_bytes: int) -> tuple[float, float]:
        """The latency of a message, and the seconds in which its bytes move."""
        ways = [(self.latency, self.pace * wire_bytes)]
        if self.tree is not None:
            latency, pace = self.tree
            ways.append((latency, pace * wire_bytes))
        return min(ways, key=sum)

    @property
    def least_latency(self) -> float:
        """The latency of a message that goes the way with the lower one."""
        return self.latency if self.tree is None else min(self.latency, self.tree[0])


class Gather(NamedTuple):
    """A gather, whose value is live from its start to operation `last`.

    Attributes:
        key: members of a bucket share it. `Problem.wires` says how a message with this key travels.
        wire: the bytes that this rank receives.
        bytes: of the value.
        use, last: the first and the last operation that uses the value.
        release: the earliest place at which it may start.
        repeats: the earlier gather of the same value, if that value may be kept.
        small: whether it shares a buffer with other small members of its bucket.
        name: its name in a plan.
        replaces: the gather in whose place a lever sends this one. Such gathers come after all others.
    """

    key: Hashable
    wire: int
    bytes: int
    use: int
    last: int
    release: int = 0
    repeats: int | None = None
    small: bool = False
    name: str = ""
    replaces: int | None = None


class Reduction(NamedTuple):
    """A reduction, whose gradient is live from operation `born` until its wait.

    Attributes:
        key, wire: as those of a gather.
        bytes: of the gradient.
        born: the operation that makes the gradient.
        deadline: the last place at which it may be waited for.
        copied: whether the gradient is copied to be sent, and so is freed where the reduction starts.
        buffers: what is sent and received, from AT_START to AT_WAIT or beyond, and what the wait and the updates after
            it allocate, from AT_WAIT on.
        temporaries: for each update that follows, the first place where it may run, and the bytes that it has for
            itself then.
        second: the reduction of its result, as over replicas. It is sent right after the wait, in the same bucket, and
            waited for right after the next one of its kind has been sent, or where it is needed.
        second_bytes: what is live for the second reduction.
        small: whether it shares a buffer with other small members of its bucket.
        name: its name in a plan.
    """

    key: Hashable
    wire: int
    bytes: int
    born: int
    deadline: int = END
    copied: bool = False
    buffers: tuple[Buffer, ...] = ()
    temporaries: tuple[tuple[int, int], ...] = ()
    second: Reduction | None = None
    second_bytes: int = 0
    small: bool = False
    name: str = ""


class Update(NamedTuple):
    """Compute that runs once all the reductions that it needs have been waited for.

    Attributes:
        seconds: its duration, without launches that it may share with others.
        after: the reductions, by index.
        release: the earliest place at which it may run.
        launches: pairs of the number of a launch and its seconds. Of several updates that run one after the other, the
            first makes the launch for all of them.
    """

    seconds: float
    after: tuple[int, ...]
    release: int = 0
    launches: tuple[tuple[int, float], ...] = ()


class Dependents(NamedTuple):
    """All updates that need the same reductions.

    Attributes:
        reductions, updates: by index.
        born: the last operation that makes one of the gradients.
        seconds: of all these updates.
    """

    reductions: tuple[int, ...]
    updates: tuple[int, ...]
    born: int
    seconds: float


@dataclass(frozen=True)
class Lever:
    """A choice between memory and time: bytes stay live, so that a gather is not sent.

    The value of that gather counts as live from its use on, whether it is gathered or was kept.

    Attributes:
        name: its name in a plan.
        drops: the gather that is not sent.
        buffer: the earlier value, or a part of it, while it is kept for that gather. None if it is live anyway.
        sends: if only a part is kept, the gather among neighbours that is sent instead.
        copied_at, copy_seconds: where compute copies the part, right before the operation there, and for how long.
    """

    name: str
    drops: int
    buffer: Buffer | None = None
    sends: int | None = None
    copied_at: int = 0
    copy_seconds: float = 0.0


# The levers that a schedule pulls, by index.
Levers = frozenset[int]
NO_LEVERS: Levers = frozenset()


@dataclass(frozen=True)
class Problem:
    """Operations, gathers and reductions, and the limits that a schedule of them must keep.

    An operation whose compute is among the `updates` takes no seconds.

    Attributes:
        seconds: by operation, its seconds.
        matmul: by operation, the number of matrix products in it, and of operations that take as long as one.
        live, live_at_places: bytes that are live in every schedule: by operation, and by place, if they are known.
        gathers, reductions: in order of use, and in order of birth.
        memory: bytes that may be live.
        max_between: matmuls between two starts of reductions; the first birth counts as a start.
        gathers_in_flight, reductions_in_flight: bytes that are started and not yet waited for, at most.
        fixed_messages: messages at places that no schedule changes.
        names: of the places, for errors.
        levers: what a schedule may pull, the best first.
    """

    seconds: tuple[float, ...]
    live: tuple[int, ...]
    matmul: tuple[int, ...]
    gathers: tuple[Gather, ...]
    reductions: tuple[Reduction, ...]
    wires: Mapping[Hashable, Wire] = field(hash=False)
    memory: float = float("inf")
    max_between: float = float("inf")
    gathers_in_flight: float = float("inf")
    reductions_in_flight: float = float("inf")
    live_at_places: tuple[int, ...] = ()
    updates: tuple[Update, ...] = ()
    fixed_messages: tuple[Message, ...] = ()
    names: tuple[str, ...] = ()
    levers: tuple[Lever, ...] = ()

    def place_text(self, k: int) -> str:
        """A place, as an error names it."""
        return f"at {self.names[k]}" if self.names else f"at place {k}"

    # What changes in a schedule that pulls some levers.

    def _pulled(self, levers: Iterable[int]) -> list[Lever]:
        """Some levers, always in the same order, so that sums of floats are the same on every rank."""
        return [self.levers[i] for i in sorted(levers)]

    def lever_buffers(self, levers: Iterable[int]) -> list[Buffer]:
        """What is live in addition if these levers are pulled."""
        pulled = self._pulled(levers)
        return [lever.buffer for lever in pulled if lever.buffer is not None]

    def compute(self, levers: Iterable[int]) -> Sequence[float]:
        """By operation, its seconds if these levers are pulled."""
        copying = [lever for lever in self._pulled(levers) if lever.copy_seconds]
        if not copying:
            return self.seconds
        seconds = list(self.seconds)
        for lever in copying:
            seconds[lever.copied_at] += lever.copy_seconds
        return seconds

    def dropped(self, levers: Iterable[int]) -> frozenset[int]:
        """The gathers that are not sent if these levers are pulled."""
        dropped = set(self.replacements)
        for lever in self._pulled(levers):
            dropped.add(lever.drops)
            if lever.sends is not None:
                dropped.remove(lever.sends)
        return frozenset(dropped)

    @functools.cached_property
    def values(self) -> tuple[Gather, ...]:
        """The gathers that bring a value of their own: one that is sent in place of another brings that one's."""
        return tuple(gather for gather in self.gathers if gather.replaces is None)

    @functools.cached_property
    def replacements(self) -> frozenset[int]:
        """The gathers that are sent only in place of others, if a lever says so."""
        return frozenset(i for i, gather in enumerate(self.gathers) if gather.replaces is not None)

    @functools.cached_property
    def part_levers(self) -> tuple[int, ...]:
        """The levers that keep parts of values."""
        return tuple(i for i, lever in enumerate(self.levers) if lever.sends is not None)

    @functools.cached_property
    def whole_levers(self) -> tuple[int, ...]:
        """The levers that keep whole values."""
        return tuple(i for i, lever in enumerate(self.levers) if lever.sends is None)

    @functools.cached_property
    def rivals(self) -> tuple[Levers, ...]:
        """For each lever, those that cannot be pulled with it: the others that drop the same gather."""
        dropping = grouped((lever.drops, i) for i, lever in enumerate(self.levers))
        rivals = []
        for i, lever in enumerate(self.levers):
            rivals.append(frozenset(dropping[lever.drops]) - {i})
        return tuple(rivals)

    @functools.cached_property
    def free_levers(self) -> Levers:
        """The levers that cost nothing: the earlier value is live anyway, and nothing else is sent."""
        free = []
        for i, lever in enumerate(self.levers):
            if lever.buffer is None and lever.sends is None:
                free.append(i)
        return frozenset(free)

    @functools.cached_property
    def seconds_before(self) -> tuple[float, ...]:
        """The seconds of compute before each place."""
        return tuple(accumulate(self.seconds, initial=0.0))

    @functools.cached_property
    def clock(self) -> tuple[float, ...]:
        """The seconds before each place, if compute waits only for the messages that no schedule places.

        It is an estimate: no lever is pulled.
        """
        if not self.fixed_messages:
            return self.seconds_before
        return play(self.seconds, self.fixed_messages).start

    def update_seconds(self, updates: Iterable[int]) -> float:
        """The seconds of updates that run one after the other."""
        seconds = 0.0
        launches: dict[int, float] = {}
        for u in updates:
            update = self.updates[u]
            seconds += update.seconds
            for launch, launch_seconds in update.launches:
                launches.setdefault(launch, launch_seconds)
        return seconds + sum(launches.values())

    @functools.cached_property
    def dependents(self) -> tuple[Dependents, ...]:
        """The updates by the reductions that they need. After a norm of all gradients, all need the same ones."""
        by_reductions = grouped((update.after, u) for u, update in enumerate(self.updates))
        dependents = []
        for after, updates in by_reductions.items():
            born = max((self.reductions[r].born for r in after), default=-1)
            seconds = sum(self.updates[u].seconds for u in updates)
            dependents.append(Dependents(after, tuple(updates), born, seconds))
        return tuple(dependents)

    @functools.cached_property
    def dependents_of(self) -> Mapping[int, list[int]]:
        """For each reduction, the `dependents` that need it, by index."""
        dependents_of: dict[int, list[int]] = {}
        for k, dependents in enumerate(self.dependents):
            for r in dependents.reductions:
                dependents_of.setdefault(r, []).append(k)
        return dependents_of

    @functools.cached_property
    def unawaited_updates(self) -> tuple[int, ...]:
        """The updates that need no reduction, by index."""
        return tuple(u for u, update in enumerate(self.updates) if not update.after)

    @functools.cached_property
    def releases(self) -> frozenset[int]:
        """The places from which on updates may run."""
        return frozenset(update.release for update in self.updates)

    @functools.cached_property
    def births(self) -> tuple[int, ...]:
        """The places right after the births of gradients."""
        return tuple(sorted({r.born + 1 for r in self.reductions}))

    @functools.cached_property
    def matmuls(self) -> tuple[int, ...]:
        """How many matmuls come before each place."""
        return tuple(accumulate(self.matmul, initial=0))

    @functools.cached_property
    def fixed_bytes(self) -> np.ndarray:
        """By slot: the bytes that are live in every schedule."""
        # Slot 2k is place k, slot 2k + 1 is operation k.
        slots = np.full(2 * len(self.live) + 1, UNKNOWN, dtype=np.int64)
        slots[1::2] = self.live
        if self.live_at_places:
            slots[::2] = self.live_at_places
        return slots

    def gap_between_starts(self, starts: Iterable[int]) -> tuple[int, int] | None:
        """The first gap between starts of reductions that has a birth and too many matmuls, as two places, or None."""
        if self.max_between == float("inf"):
            return None
        for a, b in pairwise(sorted({*self.births[:1], *starts})):
            has_birth = bisect_left(self.births, b) > bisect_right(self.births, a)
            if has_birth and self.matmuls[b] - self.matmuls[a] > self.max_between:
                return a, b
        return None


def gather_levers(gathers: Sequence[Gather]) -> tuple[Lever, ...]:
    """For each gather that repeats an earlier one, the lever that drops it and keeps the earlier value instead.

    The value is then idle from its last use to the use of this gather. Those that are idle for the shortest time come
    first. A value that is live anyway takes no bytes.
    """
    levers = []
    for i, gather in enumerate(gathers):
        if gather.repeats is not None:
            after = gathers[gather.repeats].last + 1
            idle = None
            if gather.use > after:
                idle = Buffer(gather.bytes, 2 * after, 2 * gather.use - 1)
            levers.append((gather.use - after, Lever(gather.name, i, idle)))
    levers.sort(key=lambda item: item[0])
    return tuple(lever for _, lever in levers)


# The members of a bucket, by index, in the gathers or in the reductions of the problem.
MemberIndices = tuple[int, ...]


class Choice(NamedTuple):
    """Buckets, the levers that are pulled, when gathers start, and how many reductions are waited for at one place.

    Buckets are given by the indices of their members, in order of use and of birth within a key. A gather is due `lead`
    times its transfer before its use. If `reserve`, a gather that is used after the first gradient starts only where it
    leaves room for the largest reduction. Where there is room, `waited_together` reductions of a lane are waited for at
    one place. So the updates that follow them share launches, and do not delay the gradients that come next.
    """

    gathers: tuple[MemberIndices, ...]
    reductions: tuple[MemberIndices, ...]
    levers: Levers
    lead: float = 1.0
    reserve: bool = True
    waited_together: int = 1


@dataclass(frozen=True)
class Bucket:
    """Gathers or reductions that share a message.

    A schedule decides one of the two places. The other one follows from the members.

    Attributes:
        members: the gathers or the reductions.
        start: the place at which it starts. Reductions start right after the birth of the last member.
        wait: the place at which it is waited for. Gathers are waited for at the first use of a member.
        with_next: of reductions: whether the updates after them run together with those of the next bucket that is
            waited for at that place, and not before that wait. No bucket with second reductions says so.
    """

    members: MemberIndices
    start: int
    wait: int
    with_next: bool = False


@dataclass(frozen=True)
class Schedule:
    """A solution: buckets in the order of their start, and the levers that are pulled."""

    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]
    levers: Levers = NO_LEVERS
