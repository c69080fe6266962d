"""The scheduling problem of a step, and its solutions, without the program.

Operations 0..n-1 run in a fixed order. Place k is before operation k, and place n is the end. A gather must arrive
before the first operation that uses it. Its value is live from its start to its last use. A gradient is live from the
operation that makes it until its reduction has been waited for.

A gather may have levers. A schedule that pulls one does not send the gather. In return, bytes stay live, compute takes
longer, or other gathers are sent in its place. A `Choice` decides buckets and levers. A `Schedule` also decides their
places.

An eager update has no place of its own: it runs where the last reduction that it needs is waited for. Collectives that
no schedule places, such as the step's own, are issued and waited for at fixed places.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from ...ir.dependencies import grouped
from ..buffers import Buffer
from ..network import Message
from ..play import play

# A place at or after the end of every problem.
END = sys.maxsize
# The live bytes at a place if they are not known: so low that no limit is reached there.
UNKNOWN = -(2**52)


class Inside(NamedTuple):
    """How the first level of a hierarchical message travels, inside each host, where received bytes are then summed."""

    lane: str
    link: str
    latency: float
    pace: float


class Wire(NamedTuple):
    """How the messages of one key travel, and their costs on the link and in compute.

    Attributes:
        lane, link: the communicator of the messages, and the link that they cross.
        latency: seconds for a message.
        pace: seconds for a byte, if nothing else uses the link.
        overhead, byte_overhead: seconds of compute to send a message, and for each of its bytes.
        unpack: seconds of compute to turn a received byte into values.
        coding: seconds to encode or decode, for each byte of `coding` of a member. Members that are coded have no
            `pack` and no `copy_out`.
        ranks: the number of ranks that take part in a message.
        pack: seconds to copy a byte that is sent.
        copy_out: seconds to copy a received byte out of a buffer, or to sum it.
        beside: whether packing, unpacking and sums run beside compute. Otherwise compute stands still for them.
        inside: the first level of a hierarchical message.
        taken: the share of compute that a message takes while it is under way.
        tree: the latency and the pace of a message that is sent over a tree, where that may be faster.
    """

    lane: str
    link: str
    latency: float
    pace: float
    overhead: float = 0.0
    byte_overhead: float = 0.0
    unpack: float = 0.0
    coding: float = 0.0
    ranks: int = 1
    pack: float = 0.0
    copy_out: float = 0.0
    beside: bool = False
    inside: Inside | None = None
    taken: float = 0.0
    tree: tuple[float, float] | None = None

    def travel(self, wire_bytes: int) -> tuple[float, float]:
        """The latency of a message and the seconds of its bytes, over the tree if that is faster."""
        routes = [(self.latency, self.pace * wire_bytes)]
        if self.tree is not None:
            latency, pace = self.tree
            routes.append((latency, pace * wire_bytes))
        return min(routes, key=sum)

    @property
    def least_latency(self) -> float:
        """The lower latency of the two routes."""
        return self.latency if self.tree is None else min(self.latency, self.tree[0])


class Coding(NamedTuple):
    """The bytes of memory that are read and written to encode what a rank sends of a member, and to decode it."""

    encoded: int = 0
    decoded: int = 0


class Gather(NamedTuple):
    """A gather. Its value is live from its start to operation `last`, or if it is coded, from its wait on.

    Attributes:
        key: members of a bucket share it. `Problem.wires` says how a message with this key travels.
        wire: the bytes that this rank receives.
        bytes: the size of the value.
        use, last: the first and the last operation that uses the value.
        release: the earliest place at which it may start.
        repeats: the earlier gather of the same value, if that value may be kept.
        arriving: the bytes that are copied to the device to be sent, and are live where it starts.
        codes: the bytes that are received in place of the value, from its start to its wait, where all values of its
            bucket are decoded; 0 if the value itself is received.
        coding: what is read and written to encode and decode it.
        small: whether it shares a buffer with other small members of its bucket.
        name: its name in a plan.
    """

    key: Hashable
    wire: int
    bytes: int
    use: int
    last: int
    release: int = 0
    repeats: int | None = None
    arriving: int = 0
    codes: int = 0
    coding: Coding = Coding()
    small: bool = False
    name: str = ""

    @property
    def under_way(self) -> int:
        """The bytes that are live between its start and its wait."""
        return self.codes or self.bytes


class Reduction(NamedTuple):
    """A reduction. Its gradient is live from operation `born` until its wait.

    Attributes:
        key, wire: as in `Gather`.
        bytes: the size of the gradient.
        born: the operation that makes the gradient.
        deadline: the last place at which it may be waited for.
        copied: whether the gradient is copied to be sent. If so, it is freed where the reduction starts.
        buffers: the buffers that are sent and received, from AT_START to AT_WAIT or beyond, and the buffers that the
            wait and the updates after it allocate, from AT_WAIT on.
        temporaries: for each update that follows, the first place where it may run, and the bytes that only it has
            live there.
        second: the reduction of its result, for instance over replicas. It is sent right after the wait, in the same
            bucket. It is waited for right after the next second reduction has been sent, or where it is needed.
        second_bytes: the bytes that are live for the second reduction.
        decoded: the bytes of the result if it is decoded from codes; a wait decodes all results of a bucket.
        coding: as in `Gather`.
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
    decoded: int = 0
    coding: Coding = Coding()
    small: bool = False
    name: str = ""


class Update(NamedTuple):
    """Compute that runs once all reductions that it needs have been waited for.

    Attributes:
        seconds: its duration, without launches that it may share with others.
        after: the reductions that it needs, by index.
        release: the earliest place at which it may run.
        launches: pairs of the number of a launch and its seconds. Updates that run one after the other share a launch:
            the first one makes it for all.
    """

    seconds: float
    after: tuple[int, ...]
    release: int = 0
    launches: tuple[tuple[int, float], ...] = ()


class Dependents(NamedTuple):
    """All updates that need the same reductions.

    Attributes:
        reductions, updates: their indices.
        born: the last operation that makes one of the gradients.
        seconds: the duration of all these updates, without launches.
    """

    reductions: tuple[int, ...]
    updates: tuple[int, ...]
    born: int
    seconds: float


class LeverKind(NamedTuple):
    """The levers that work in the same way. A search first decides what share of them to pull.

    Attributes:
        name: its name.
        shares: the shares that a search tries, of all its levers that fit.
    """

    name: str
    shares: tuple[float, ...]


class Lever(NamedTuple):
    """A choice between memory and time: a gather is not sent.

    The value of that gather counts as live from its use on, whether it is gathered or not. Levers that drop the same
    gather exclude each other.

    Attributes:
        kind: its kind.
        name: its name in a plan.
        drops: the gather that is not sent.
        sends: the gathers that are sent in its place. No other lever sends them.
        buffers: the bytes that it keeps live.
        compute: the seconds of compute that it adds, each with the operation before which they are spent.
    """

    kind: LeverKind
    name: str
    drops: int
    sends: tuple[int, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    compute: tuple[tuple[int, float], ...] = ()


# The pulled levers, by index.
Levers = frozenset[int]
NO_LEVERS: Levers = frozenset()


@dataclass(frozen=True)
class Problem:
    """Operations, gathers and reductions, and the limits of their schedule.

    Attributes:
        seconds: by operation, its seconds. An operation whose compute is one of the `updates` takes none.
        live: by operation, the bytes that are live in every schedule.
        matmul: by operation, the number of its matrix products, and of operations that take as long as one.
        gathers: in order of use; gathers that only levers send come last.
        reductions: in order of birth.
        wires: by key, how the messages travel.
        memory: the most bytes that may be live.
        max_between: the most matmuls between two starts of reductions. The first birth counts as a start.
        gathers_in_flight, reductions_in_flight: the most bytes that may be started and not yet waited for.
        live_at_places: by place, the bytes that are live in every schedule, if they are known.
        updates: the eager updates.
        fixed_messages: the messages at places that no schedule changes.
        names: the names of the places, for errors.
        levers: the levers that a schedule may pull, grouped by kind, the best first. A search lets the
            first kinds replace levers of later ones.
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
        """A place in words, for errors."""
        return f"at {self.names[k]}" if self.names else f"at place {k}"

    # The effects of pulled levers.

    def _pulled(self, levers: Iterable[int]) -> list[Lever]:
        """Some levers, always in the same order, so that sums of floats are the same on every rank."""
        return [self.levers[i] for i in sorted(levers)]

    def lever_buffers(self, levers: Iterable[int]) -> list[Buffer]:
        """The buffers that these levers keep live."""
        return list(chain.from_iterable(lever.buffers for lever in self._pulled(levers)))

    def compute(self, levers: Iterable[int]) -> Sequence[float]:
        """By operation, its seconds with these levers."""
        compute = list(chain.from_iterable(lever.compute for lever in self._pulled(levers)))
        if not compute:
            return self.seconds
        seconds = list(self.seconds)
        for operation, additional in compute:
            seconds[operation] += additional
        return seconds

    def dropped(self, levers: Iterable[int]) -> frozenset[int]:
        """The gathers that are not sent with these levers."""
        dropped = set(self.sent_by)
        for i in levers:
            dropped.add(self.levers[i].drops)
            dropped.difference_update(self.levers[i].sends)
        return frozenset(dropped)

    @functools.cached_property
    def values(self) -> tuple[Gather, ...]:
        """The gathers that are sent unless a lever drops them, each of which brings a value."""
        return self.gathers[: len(self.gathers) - len(self.sent_by)]

    @functools.cached_property
    def sent_by(self) -> Mapping[int, int]:
        """The gathers that only levers send, each with its lever."""
        return {i: k for k, lever in enumerate(self.levers) for i in lever.sends}

    @functools.cached_property
    def levers_of(self) -> Mapping[int, list[int]]:
        """For each gather that levers drop, these levers."""
        return grouped((lever.drops, i) for i, lever in enumerate(self.levers))

    @functools.cached_property
    def lever_kinds(self) -> Mapping[LeverKind, list[int]]:
        """The levers of each kind, in order."""
        return grouped((lever.kind, i) for i, lever in enumerate(self.levers))

    @functools.cached_property
    def rivals(self) -> tuple[Levers, ...]:
        """For each lever, the levers that exclude it: all others that drop the same gather."""
        rivals = []
        for i, lever in enumerate(self.levers):
            rivals.append(frozenset(self.levers_of[lever.drops]) - {i})
        return tuple(rivals)

    @functools.cached_property
    def free_levers(self) -> Levers:
        """The levers that cost nothing, one for each gather: no bytes, no compute, and nothing is sent instead."""
        free: dict[int, int] = {}
        for i, lever in enumerate(self.levers):
            if not (lever.buffers or lever.compute or lever.sends):
                free.setdefault(lever.drops, i)
        return frozenset(free.values())

    @functools.cached_property
    def seconds_before(self) -> tuple[float, ...]:
        """The seconds of compute before each place."""
        return tuple(accumulate(self.seconds, initial=0.0))

    @functools.cached_property
    def clock(self) -> tuple[float, ...]:
        """The seconds before each place if compute waits for the fixed messages only.

        It is an estimate: the compute of pulled levers is left out.
        """
        if not self.fixed_messages:
            return self.seconds_before
        return play(self.seconds, self.fixed_messages).start

    def update_seconds(self, updates: Iterable[int]) -> float:
        """The seconds of updates that run one after the other and share launches."""
        seconds = 0.0
        groups: dict[int, None] = {}
        for u in updates:
            seconds += self.updates[u].seconds
            groups[self._launch_groups[u]] = None
        return seconds + self._launch_seconds(tuple(groups))

    @functools.cached_property
    def _launch_groups(self) -> tuple[int, ...]:
        """For each update, a number that all updates with the same launches have."""
        numbers: dict[tuple, int] = {}
        return tuple(numbers.setdefault(u.launches, len(numbers)) for u in self.updates)

    @functools.cached_property
    def _launch_seconds(self) -> Callable[[tuple[int, ...]], float]:
        """The seconds of the launches of some `_launch_groups`, in the order in which their updates run.

        To plan a GPT of 12 layers, 50,000 sums over 300 updates are needed, and the updates have 15 groups. With these
        sums cached, that plan makes a third fewer function calls.
        """
        launches_of_group: dict[int, tuple[tuple[int, float], ...]] = {}
        for group, update in zip(self._launch_groups, self.updates):
            launches_of_group[group] = update.launches

        @functools.cache
        def launch_seconds(groups: tuple[int, ...]) -> float:
            launches: dict[int, float] = {}
            for group in groups:
                for launch, seconds in launches_of_group[group]:
                    launches.setdefault(launch, seconds)
            return sum(launches.values())

        return launch_seconds

    @functools.cached_property
    def dependents(self) -> tuple[Dependents, ...]:
        """The updates, grouped by the reductions that they need. After a norm of all gradients there is one group."""
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
        """The places where updates are released."""
        return frozenset(update.release for update in self.updates)

    @functools.cached_property
    def births(self) -> tuple[int, ...]:
        """The places right after the births of gradients."""
        return tuple(sorted({r.born + 1 for r in self.reductions}))

    @functools.cached_property
    def matmuls(self) -> tuple[int, ...]:
        """The number of matmuls before each place."""
        return tuple(accumulate(self.matmul, initial=0))

    @functools.cached_property
    def fixed_bytes(self) -> np.ndarray:
        """By slot, the bytes that are live in every schedule: slot 2k is place k, slot 2k + 1 is operation k."""
        slots = np.full(2 * len(self.live) + 1, UNKNOWN, dtype=np.int64)
        slots[1::2] = self.live
        if self.live_at_places:
            slots[::2] = self.live_at_places
        return slots

    def gap_between_starts(self, starts: Iterable[int]) -> tuple[int, int] | None:
        """The first gap between starts of reductions with a birth and too many matmuls, as two places; None without."""
        if self.max_between == float("inf"):
            return None
        for a, b in pairwise(sorted({*self.births[:1], *starts})):
            has_birth = bisect_left(self.births, b) > bisect_right(self.births, a)
            if has_birth and self.matmuls[b] - self.matmuls[a] > self.max_between:
                return a, b
        return None


# The members of a bucket: their indices among the gathers or the reductions of the problem.
MemberIndices = tuple[int, ...]


class Choice(NamedTuple):
    """Buckets and levers, and three settings from which the places of the buckets follow.

    Attributes:
        gathers, reductions: the members of each bucket, within a key in order of use and of birth.
        levers: the pulled levers.
        lead: how early a gather is due: this many times its transfer before its use.
        reserve: whether a gather that is used after the first gradient starts only where it leaves room for the largest
            reduction.
        waited_together: the number of reductions of a lane that are waited for at one place, where there is room. The
            updates that follow them then share launches, and do not delay the next gradients.
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
        start: the place where it starts. Reductions start right after the birth of the last member.
        wait: the place where it is waited for. Gathers are waited for at the first use of a member.
        with_next: whether the updates after these reductions run only after the next bucket that is waited for at that
            place, together with its updates. It is false for a bucket with second reductions.
    """

    members: MemberIndices
    start: int
    wait: int
    with_next: bool = False


@dataclass(frozen=True)
class Schedule:
    """A solution: the buckets in the order of their starts, and the pulled levers."""

    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]
    levers: Levers = NO_LEVERS
