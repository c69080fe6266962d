"""problem: what a schedule of collectives decides, without the program that it belongs to.

Operations 0..n-1 run in a fixed order. A gather must have arrived before the operation that first uses it. Its value
takes memory from its start to its last use. A gather that repeats an earlier one may be dropped, and the earlier
value kept. A gradient takes memory from the operation that makes it until its reduction has been waited for. Place k
is before operation k, and place n is the end.

The equations of an eager update have no place of their own: they run as soon as the reductions that they need have
been waited for. Collectives that no schedule places, as the step's own, are issued and waited for at fixed places.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from ...ir.relations import grouped
from ..event_simulator import Message, play


class Wire(NamedTuple):
    """How the messages of one key travel: their communicator, its link, and what they cost on it and of compute."""

    lane: str
    link: str
    latency: float  # seconds for a message
    pace: float  # seconds for a byte, if nothing else uses the link
    call: float = 0.0  # seconds for which compute stands still to send a message
    host: float = 0.0  # and for each of its bytes
    unpack: float = 0.0  # seconds for which compute makes values of a received byte
    ranks: int = 1  # that take part in a message
    pack: float = 0.0  # seconds for which compute stands still to copy a byte that is sent
    copy: float = 0.0  # seconds for a received byte that is copied out of a buffer, or summed


class Gather(NamedTuple):
    key: Hashable  # members of a bucket share it; `Problem.wires` says how it travels
    wire: int  # bytes that this rank receives
    held: int  # bytes live from the place of its start until after operation `last`
    use: int  # the operation that first uses it
    last: int  # the last one that does
    release: int = 0  # the earliest place at which it may start
    again: int | None = None  # the earlier gather of the same value, if it may be kept instead
    small: bool = False  # it shares a buffer with other small members of its bucket
    name: str = ""  # its name in a plan


END = sys.maxsize  # a place that is not before the end of any problem


class Reduction(NamedTuple):
    key: Hashable
    wire: int
    held: int  # bytes of the gradient, live from operation `born` on, until the wait
    born: int  # the operation that makes the gradient
    received: int = (
        0  # bytes of the buffer in which it is received, live from the start until the wait
    )
    need: int = END  # the place that needs the result at the latest
    freed: int = 0  # the part of `held` that is not live after the start, because a copy is sent
    sent: int = 0  # bytes of that copy, live from the start until its bucket's first wait
    value: int = 0  # bytes that the wait makes for the reduced value; 0 if it lies in the buffer that was received
    updated: int = 0  # bytes that the updates which follow it make, and that stay
    updating: int = (
        0  # bytes of temporaries that one of them has at once, if it may run at every wait
    )
    released: tuple[
        tuple[int, int], ...
    ] = ()  # and those of the others, each with the first place where it may run
    results: tuple[
        tuple[int, int], ...
    ] = ()  # bytes that stay after the wait, each up to a slot (see `slots`)
    waiting: int = (
        0  # bytes of results that wait for it, live from the place after its birth until its wait
    )
    second: int = 0  # bytes of a second reduction, live from its wait until that of the next bucket that has one
    small: bool = False
    name: str = ""


class Update(NamedTuple):
    """Compute that runs once all the reductions that it needs have been waited for."""

    seconds: float
    after: tuple[int, ...]  # the reductions, by index
    release: int = 0  # the earliest place at which it may run


@dataclass(frozen=True)
class Problem:
    """Operations, gathers and reductions, and the limits that a schedule of them must keep.

    An operation whose compute is among the `updates` takes no seconds.
    """

    seconds: tuple[float, ...]  # by operation
    live: tuple[
        int, ...
    ]  # by operation: bytes live while it runs, without gathered values and gradients
    matmul: tuple[
        bool, ...
    ]  # by operation: whether it is a matrix product, or takes as long as one
    gathers: tuple[Gather, ...]  # in order of use
    reductions: tuple[Reduction, ...]  # in order of birth
    wires: Mapping[Hashable, Wire] = field(hash=False)
    memory: float = float("inf")  # bytes that may be live
    max_between: float = float(
        "inf"
    )  # matmuls between two starts of reductions; the first birth counts as one
    gathers_in_flight: float = float(
        "inf"
    )  # bytes of gathers started and not yet waited for, at most
    reductions_in_flight: float = float(
        "inf"
    )  # bytes of gradients started and not yet waited for, at most
    across: tuple[int, ...] = ()  # by place: bytes live there, if they are known
    updates: tuple[Update, ...] = ()
    others: tuple[Message, ...] = ()  # messages at places that no schedule changes
    names: tuple[str, ...] = ()  # of the places, for errors; "" is the end

    def place(self, k: int) -> str:
        """The text of a place in errors."""
        if not self.names:
            return f"at place {k}"
        return f"before {self.names[k]}" if self.names[k] else "at the end"

    def keepers(self, dropped: Iterable[int]) -> dict[int, int]:
        """For each dropped gather, the earlier gather whose value is kept for it."""
        keeper: dict[int, int] = {}
        for i in sorted(dropped):
            earlier = self.gathers[i].again
            if earlier is not None:
                keeper[i] = keeper.get(earlier, earlier)
        return keeper

    def last_uses(self, dropped: Iterable[int]) -> list[int]:
        """By gather: the last operation that reads its value, in place of a dropped gather too."""
        last = [gather.last for gather in self.gathers]
        for i, keeper in self.keepers(dropped).items():
            last[keeper] = max(last[keeper], self.gathers[i].last)
        return last

    @functools.cached_property
    def repeats(self) -> tuple[int, ...]:
        """The gathers that may be dropped. Those whose value is kept for a short time come first."""
        return tuple(
            sorted((i for i, g in enumerate(self.gathers) if g.again is not None), key=self.idle)
        )

    def idle(self, i: int) -> int:
        """The operations from the last use of the earlier value to the first use of a gather that repeats it."""
        earlier = self.gathers[i].again
        return self.gathers[i].use - self.gathers[i if earlier is None else earlier].last

    @functools.cached_property
    def before(self) -> tuple[float, ...]:
        """The seconds of compute before each place."""
        return tuple(accumulate(self.seconds, initial=0.0))

    @functools.cached_property
    def clock(self) -> tuple[float, ...]:
        """The seconds before each place, if compute waits only for the messages that no schedule places."""
        return play(self.seconds, self.others).start if self.others else self.before

    @functools.cached_property
    def updated(self) -> Mapping[int, list[int]]:
        """The updates that need each reduction, by index."""
        return grouped((r, u) for u, update in enumerate(self.updates) for r in update.after)

    @functools.cached_property
    def births(self) -> tuple[int, ...]:
        """The places right behind the births of gradients."""
        return tuple(sorted({r.born + 1 for r in self.reductions}))

    def without_start(self, starts: Iterable[int]) -> tuple[int, int] | None:
        """Two places between which reductions must start and do not, given all their starts; None if there are none."""
        for a, b in pairwise(sorted({*self.births[:1], *starts})):
            ready = bisect_left(self.births, b) > bisect_right(self.births, a)
            if ready and self.matmuls[b] - self.matmuls[a] > self.max_between:
                return a, b
        return None

    @functools.cached_property
    def matmuls(self) -> tuple[int, ...]:
        """How many matmuls come before each place."""
        return tuple(accumulate(self.matmul, initial=0))


@dataclass(frozen=True)
class Bucket:
    """Members by index; a gather bucket starts at place `start`, a reduction bucket at the place after
    its last member's birth, and is waited for at place `wait` (a gather: at its first use)."""

    members: tuple[int, ...]
    start: int
    wait: int


@dataclass(frozen=True)
class Schedule:
    """A solution: buckets in the order of their start, and the gathers that are dropped."""

    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]
    dropped: frozenset[int] = frozenset()
