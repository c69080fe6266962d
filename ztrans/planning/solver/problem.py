"""problem: what a schedule of collectives decides, without the program that it belongs to.

Operations 0..n-1 run in a fixed order. Place k is before operation k, and place n is the end. A gather must have
arrived before the operation that first uses it. Its value is live from its start to its last use. A gradient is live
from the operation that makes it until its reduction has been waited for. A schedule may pull levers. Each changes
which bytes are live, how long compute takes, and which messages are sent. A gather that repeats an earlier one has a
lever that drops it: then it is not sent, and the earlier value stays live. It may have another lever, which sends a
gather among neighbours in its place, if each rank keeps a part of the earlier value.

The equations of an eager update have no place of their own: they run as soon as the reductions that they need have
been waited for. Collectives that no schedule places, as the step's own, are issued and waited for at fixed places.
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

from ...ir.relations import grouped
from ..buffers import Buffer
from ..network import Message
from ..play import play

END = sys.maxsize  # a place that is not before the end of any problem
UNKNOWN = -(2**52)  # the bytes at a place of which nothing is known: no limit is reached there


class Inside(NamedTuple):
    """How the first of two levels of a message travels, inside each host. Received bytes are then summed there."""

    lane: str
    link: str
    latency: float
    pace: float


class Wire(NamedTuple):
    """How the messages of one key travel: their communicator, its link, and what they cost on it and of compute."""

    lane: str
    link: str
    latency: float  # seconds for a message
    pace: float  # seconds for a byte, if nothing else uses the link
    overhead: float = 0.0  # seconds for which compute stands still to send a message
    byte_overhead: float = 0.0  # and for each of its bytes
    unpack: float = 0.0  # seconds for which compute makes values of a received byte
    ranks: int = 1  # that take part in a message
    pack: float = 0.0  # seconds to copy a byte that is sent
    copy: float = 0.0  # seconds for a received byte that is copied out of a buffer, or summed
    beside: bool = (
        False  # whether both happen beside compute, which otherwise stands still for them
    )
    inside: Inside | None = None
    taken: float = 0.0  # the share of compute that a message takes while it is under way
    # The latency and pace of a message that goes by a tree, if that is faster.
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

    Small members of a bucket share a buffer.
    """

    key: Hashable  # members of a bucket share it; `Problem.wires` says how it travels
    wire: int  # bytes that this rank receives
    bytes: int  # of the value
    use: int  # the operation that first uses it
    last: int  # the last one that does
    release: int = 0  # the earliest place at which it may start
    repeats: int | None = None  # the earlier gather of the same value, if that value may be kept
    small: bool = False
    name: str = ""  # its name in a plan
    # The gather in whose place a lever sends this one. Such gathers come after all others.
    instead: int | None = None


class Reduction(NamedTuple):
    """A reduction, whose gradient is live from operation `born` until its wait.

    A gradient that is `copied` to be sent is freed where the reduction starts. Further buffers are what is sent and
    received, from AT_START to AT_WAIT or beyond, and what the wait and the updates after it allocate, from AT_WAIT on.
    """

    key: Hashable
    wire: int
    bytes: int  # of the gradient
    born: int  # the operation that makes the gradient
    need: int = END  # the last place at which it may be waited for
    copied: bool = False
    buffers: tuple[Buffer, ...] = ()
    # For each update that follows: the first place where it may run, and the bytes that it has for itself then.
    temporaries: tuple[tuple[int, int], ...] = ()
    # The reduction of its result, as over replicas. It is sent right after the wait, in the same bucket, and waited for
    # right after the next one of its kind has been sent, or where it is needed.
    again: Reduction | None = None
    second: int = 0  # bytes that are live for it
    small: bool = False
    name: str = ""


class Update(NamedTuple):
    """Compute that runs once all the reductions that it needs have been waited for."""

    seconds: float
    after: tuple[int, ...]  # the reductions, by index
    release: int = 0  # the earliest place at which it may run


class Need(NamedTuple):
    """Reductions, and all updates that need exactly these."""

    after: tuple[int, ...]
    updates: tuple[int, ...]
    born: int  # the last operation that makes one of the gradients
    seconds: float  # of all these updates


@dataclass(frozen=True)
class Lever:
    """A choice between memory and time: what changes in a schedule that pulls it.

    The value of a dropped gather still counts as live from its use on. Where it is not, a buffer says so.

    Attributes:
        name: its name in a plan.
        dropped: gathers that are not sent.
        buffers: what is live in addition. A negative size is of bytes that are no longer live.
        seconds: of compute in addition, by place. They run right before the operation there.
        messages: what is sent in addition, at places that no schedule changes.
        sent: gathers that are sent in place of the dropped ones.
    """

    name: str
    dropped: tuple[int, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    seconds: tuple[tuple[int, float], ...] = ()
    messages: tuple[Message, ...] = ()
    sent: tuple[int, ...] = ()


Levers = frozenset[int]  # the levers that a schedule pulls, by index
NO_LEVERS: Levers = frozenset()


@dataclass(frozen=True)
class Problem:
    """Operations, gathers and reductions, and the limits that a schedule of them must keep.

    An operation whose compute is among the `updates` takes no seconds.

    Attributes:
        seconds, matmul: by operation, its seconds, and whether it is a matrix product, or takes as long as one.
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
    matmul: tuple[bool, ...]
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

    def place(self, k: int) -> str:
        """The text of a place in errors."""
        return f"at {self.names[k]}" if self.names else f"at place {k}"

    # What changes in a schedule that pulls some levers.

    def _pulled(self, levers: Iterable[int]) -> list[Lever]:
        """Some levers, always in the same order."""
        return [self.levers[i] for i in sorted(levers)]

    def lever_buffers(self, levers: Iterable[int]) -> list[Buffer]:
        """What is live in addition if these levers are pulled."""
        return [buffer for lever in self._pulled(levers) for buffer in lever.buffers]

    def compute(self, levers: Iterable[int]) -> Sequence[float]:
        """By operation, its seconds if these levers are pulled."""
        changes = [change for lever in self._pulled(levers) for change in lever.seconds]
        if not changes:
            return self.seconds
        seconds = list(self.seconds)
        for place, more in changes:
            seconds[place] += more
        return seconds

    def dropped(self, levers: Iterable[int]) -> frozenset[int]:
        """The gathers that are not sent if these levers are pulled."""
        dropped = set(self.replacements)
        for lever in self._pulled(levers):
            dropped.update(lever.dropped)
            dropped.difference_update(lever.sent)
        return frozenset(dropped)

    def messages(self, levers: Iterable[int]) -> list[Message]:
        """The messages at places that no schedule changes, if these levers are pulled."""
        messages = list(self.fixed_messages)
        for lever in self._pulled(levers):
            messages += lever.messages
        return messages

    @functools.cached_property
    def values(self) -> tuple[Gather, ...]:
        """The gathers that bring a value of their own: one that is sent in place of another brings that one's."""
        return tuple(gather for gather in self.gathers if gather.instead is None)

    @functools.cached_property
    def replacements(self) -> frozenset[int]:
        """The gathers that are sent only in place of others, if a lever says so."""
        return frozenset(i for i, gather in enumerate(self.gathers) if gather.instead is not None)

    @functools.cached_property
    def levers_of_parts(self) -> tuple[int, ...]:
        """The levers that send gathers in place of others."""
        return tuple(i for i, lever in enumerate(self.levers) if lever.sent)

    @functools.cached_property
    def other_levers(self) -> tuple[int, ...]:
        """The levers that send no gathers."""
        return tuple(i for i, lever in enumerate(self.levers) if not lever.sent)

    @functools.cached_property
    def rivals(self) -> tuple[Levers, ...]:
        """For each lever, those that cannot be pulled with it.

        Only one lever may drop a gather if one of them sends another gather in its place.
        """
        dropping = grouped(
            (gather, i) for i, each in enumerate(self.levers) for gather in each.dropped
        )
        rivals = []
        for i, lever in enumerate(self.levers):
            same = {k for gather in lever.dropped for k in dropping[gather]} - {i}
            rivals.append(frozenset(k for k in same if lever.sent or self.levers[k].sent))
        return tuple(rivals)

    @functools.cached_property
    def free_levers(self) -> Levers:
        """The levers that cost nothing: no bytes, no seconds, and no messages."""
        free = set()
        for i, lever in enumerate(self.levers):
            if not lever.buffers and not lever.seconds and not lever.messages:
                free.add(i)
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

    @functools.cached_property
    def needs(self) -> tuple[Need, ...]:
        """The different reductions that updates need. After a norm of all gradients, all updates need the same ones."""
        by_need = grouped((update.after, u) for u, update in enumerate(self.updates))
        needs = []
        for after, updates in by_need.items():
            born = max((self.reductions[r].born for r in after), default=-1)
            seconds = sum(self.updates[u].seconds for u in updates)
            needs.append(Need(after, tuple(updates), born, seconds))
        return tuple(needs)

    @functools.cached_property
    def needs_with(self) -> Mapping[int, list[int]]:
        """The needs to which each reduction belongs, by index."""
        return grouped((r, k) for k, need in enumerate(self.needs) for r in need.after)

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
        slots = np.full(2 * len(self.live) + 1, UNKNOWN, dtype=np.int64)
        slots[1::2] = self.live
        if self.live_at_places:
            slots[::2] = self.live_at_places
        return slots

    def without_start(self, starts: Iterable[int]) -> tuple[int, int] | None:
        """Two places between which reductions must start and do not, given all their starts; None if there are none."""
        for a, b in pairwise(sorted({*self.births[:1], *starts})):
            ready = bisect_left(self.births, b) > bisect_right(self.births, a)
            if ready and self.matmuls[b] - self.matmuls[a] > self.max_between:
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
            idle = Buffer(gather.bytes, 2 * after, 2 * gather.use - 1)
            buffers = (idle,) if gather.use > after else ()
            levers.append((gather.use - after, Lever(gather.name, (i,), buffers)))
    return tuple(lever for _, lever in sorted(levers, key=lambda item: item[0]))


@dataclass(frozen=True)
class Bucket:
    """Members by index; a gather bucket starts at place `start`, a reduction bucket at the place after
    its last member's birth, and is waited for at place `wait` (a gather: at its first use)."""

    members: tuple[int, ...]
    start: int
    wait: int


@dataclass(frozen=True)
class Schedule:
    """A solution: buckets in the order of their start, and the levers that are pulled."""

    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]
    levers: Levers = NO_LEVERS


class PendingUpdates:
    """The updates of a problem that have not run yet.

    An update runs when the last reduction that it needs has been waited for. It may not run before its release, because
    until then something else reads the state that it writes; then it runs at that place.
    """

    def __init__(self, problem: Problem) -> None:
        self.updates = problem.updates
        self.needs = problem.needs
        self.needs_with = problem.needs_with
        self.missing = [len(need.after) for need in self.needs]
        self.ready_updates = [u for u, update in enumerate(self.updates) if not update.after]
        self.pending = set(range(len(self.updates)))
        # The first place at which one of the ready updates that follow a reduction may run.
        self.first_release = END

    def complete(self, reductions: Iterable[int]) -> None:
        """Note that reductions have been waited for."""
        for r in reductions:
            ready: list[int] = []
            for k in self.needs_with.get(r, ()):
                self.missing[k] -= 1
                if not self.missing[k]:
                    ready += self.needs[k].updates
            for u in sorted(ready):
                self.ready_updates.append(u)
                self.first_release = min(self.first_release, self.updates[u].release)

    def run(self, place: int) -> list[int]:
        """Take the updates that can run at a place. Those that need no reduction run with the first that does."""
        if place < self.first_release:
            return []
        runnable = [u for u in self.ready_updates if self.updates[u].release <= place]
        self.ready_updates = [u for u in self.ready_updates if self.updates[u].release > place]
        self.pending.difference_update(runnable)
        of_reductions = [self.updates[u] for u in self.ready_updates if self.updates[u].after]
        self.first_release = min((update.release for update in of_reductions), default=END)
        return runnable

    def seconds(self, place: int) -> float:
        """Run the updates that can run at a place, and return their seconds."""
        return sum(self.updates[u].seconds for u in self.run(place))

    @property
    def seconds_left(self) -> float:
        """The seconds of the updates that have not run: they run at the end."""
        return sum(self.updates[u].seconds for u in sorted(self.pending))
