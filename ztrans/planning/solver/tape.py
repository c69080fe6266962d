"""The tape of a schedule: its events at each place, in one order.

The program that is written from a schedule has this order (`planning/realise.py`), the tests simulate schedules in it,
and `place` makes its decisions in it. At a place:

1. Gathers start.
2. Reductions start. If the gradients under way are limited, the oldest that are waited for here are received first.
3. Updates that are released here run.
4. Reductions are waited for, in the order of their starts. After each, its second reduction starts, or updates run.
5. The second reduction that is needed here is waited for, and updates run.
6. If the bytes of gathers under way are limited, gathers start only now, because updates would run while they are under
   way.
7. Gathers are waited for, in the order of their starts.

Messages are packed in the order of their starts, and a step waits for its parameters sooner than for its gradients. So
gathers start before reductions. They are waited for last, because updates then run while they are under way.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from ...ir.dependencies import grouped
from .after_waits import PendingUpdates, SecondReductions
from .messages import second_deadline
from .problem import Bucket, Problem, Schedule


class Kind(enum.Enum):
    """The kind of an event: a start or a wait of a bucket, or updates."""

    START_GATHER = enum.auto()
    WAIT_GATHER = enum.auto()
    START_REDUCTION = enum.auto()
    WAIT_REDUCTION = enum.auto()
    START_SECOND = enum.auto()
    WAIT_SECOND = enum.auto()
    UPDATE = enum.auto()


class Event(NamedTuple):
    """One entry of a tape.

    Attributes:
        kind: the kind of the event.
        members: the gathers or reductions, by index. A gather is waited for at its own first use, which may be later
            than the first use of its bucket.
        updates: the updates that run one after the other, by index.
    """

    kind: Kind
    members: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()


Tape = dict[int, list[Event]]  # by place; the other places have no events


def tape(problem: Problem, schedule: Schedule) -> Tape:
    """The events of a schedule by place, in order.

    Updates that need none of the reductions are not on the tape: they stay where they are in the program.
    """
    return _Writer(problem, schedule).tape()


class _Writer:
    """Writes a tape, place by place, with the reductions that are under way after the events so far."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem = problem
        self.schedule = schedule
        self.events: list[Event] = []  # of one place
        self.updates = PendingUpdates(problem)
        self.under_way: deque[Bucket] = deque()
        self.second_under_way: SecondReductions[Bucket] = SecondReductions()
        self.with_second = {i for i, r in enumerate(problem.reductions) if r.second is not None}

    def tape(self) -> Tape:
        gathers = self.schedule.gathers
        reductions = self.schedule.reductions
        gather_starts = grouped((bucket.start, bucket) for bucket in gathers)
        starts = grouped((bucket.start, bucket) for bucket in reductions)
        waits = grouped((bucket.wait, bucket) for bucket in reductions)
        gather_waits = self._gather_waits()
        second_needs = {second_deadline(self.problem, bucket.members) for bucket in reductions}
        places = {*gather_starts, *starts, *waits, *gather_waits, *second_needs}
        gathers_start_first = self.problem.gathers_in_flight == float("inf")

        by_place: Tape = {}
        for k in sorted(places.union(self.problem.releases)):
            self.events = []
            starting = [Event(Kind.START_GATHER, b.members) for b in gather_starts.get(k, ())]
            if gathers_start_first:
                self.events += starting
            self._reduce(starts.get(k, ()), deque(waits.get(k, ())), k)
            if not gathers_start_first:
                self.events += starting
            self.events += gather_waits.get(k, ())
            by_place[k] = self.events
        return by_place

    def _reduce(self, starts: Iterable[Bucket], waits: deque[Bucket], place: int) -> None:
        """Add the events of reductions and updates at a place."""
        for bucket in starts:
            self._start(bucket, waits, place)
        if place in self.problem.releases:
            self._update(place)
        for bucket in waits:
            self._wait(bucket, place)
        # In an edited plan, the last bucket may have `with_next`, though no other bucket follows.
        self._update(place)
        for bucket in self.second_under_way.needed(place):
            self._wait_second(bucket)
            self._update(place)

    def _gather_waits(self) -> dict[int, list[Event]]:
        """By place, the waits for gathers: one for all members of a bucket that are first used there."""
        waits: dict[int, list[Event]] = {}
        for bucket in self.schedule.gathers:
            by_use = grouped((self.problem.gathers[i].use, i) for i in bucket.members)
            for use, members in by_use.items():
                waits.setdefault(use, []).append(Event(Kind.WAIT_GATHER, tuple(members)))
        return waits

    def _start(self, bucket: Bucket, waits: deque[Bucket], place: int) -> None:
        """Start a bucket of reductions. If too many bytes are under way, wait for some of `waits` first."""
        most = self.problem.reductions_in_flight
        while waits and waits[0] in self.under_way and self._gradients(bucket) > most:
            self._wait(waits.popleft(), place)
        self.events.append(Event(Kind.START_REDUCTION, bucket.members))
        self.under_way.append(bucket)

    def _gradients(self, started: Bucket) -> int:
        """The bytes of the gradients under way once another bucket has started."""
        members = chain.from_iterable(bucket.members for bucket in (*self.under_way, started))
        return sum(self.problem.reductions[i].bytes for i in members)

    def _wait(self, bucket: Bucket, place: int) -> None:
        """Wait for a bucket of reductions, and start its second reduction or run the updates that can run."""
        self.events.append(Event(Kind.WAIT_REDUCTION, bucket.members))
        self.under_way.remove(bucket)
        if any(i in self.with_second for i in bucket.members):
            self.events.append(Event(Kind.START_SECOND, bucket.members))
            need = second_deadline(self.problem, bucket.members)
            for earlier in self.second_under_way.add(bucket, need):
                self._wait_second(earlier)
        else:
            self.updates.complete(bucket.members)
        if not bucket.with_next:
            self._update(place)

    def _wait_second(self, bucket: Bucket) -> None:
        self.events.append(Event(Kind.WAIT_SECOND, bucket.members))
        self.updates.complete(bucket.members)

    def _update(self, place: int) -> None:
        """Run the updates that can run at a place."""
        updates: Iterable[int] = self.updates.run(place)
        if updates:
            self.events.append(Event(Kind.UPDATE, updates=tuple(updates)))
