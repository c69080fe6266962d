"""place: choose where given buckets start and are waited for, so that they fit and compute waits little.

The schedule is simulated from the first place to the last, and each decision depends on what has happened by then. The
bytes that are live in every schedule with these buckets are taken from the budget first: those of gathers from their
use on, and those of gradients until they are sent. Two decisions share the room that is left. A reduction holds its
gradients until it has arrived, or until there is no more room for them; it is waited for there. The next gather of
each lane starts once it is due, and as soon as there is room for it until its use.
"""

from __future__ import annotations

import functools
import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..buffers import Buffer, changes, live_by_slot, sum_changes
from ..network import Message, Network, Stalls, in_lane
from .problem import (
    Bucket,
    Levers,
    PendingUpdates,
    Problem,
    Reduction,
    ReductionBytes,
    Schedule,
    gather_buffers,
    message_of,
    packed_values,
    reserved_for_second,
    second_buffer,
)

ENDLESS = 2**52  # bytes: more than there are, and exact as a float
NEVER = float("inf")
MemberIndices = tuple[int, ...]


class Rejected(Exception):
    """A bucket is not possible, or a choice does not fit the memory or takes longer than its limit."""


class Choice(NamedTuple):
    """Buckets by index, in order of use and of birth within a key; the levers that are pulled; when gathers start.

    A gather is due `lead` times its transfer before its use. If `reserve`, a gather that is used after the first
    gradient starts only where it leaves room for the largest reduction.
    """

    gathers: tuple[MemberIndices, ...]
    reductions: tuple[MemberIndices, ...]
    levers: Levers
    lead: float = 1.0
    reserve: bool = True


class GatherLoad(NamedTuple):
    """A bucket of gathers as a message, and the bytes that it takes."""

    members: MemberIndices
    use: int
    release: int  # the first place at which it may start
    bytes: int  # of its values
    size: int  # live between its start and its use
    burst: int  # live in addition where it starts, if that is before its use
    message: Message  # as if it started at its use
    changes: np.ndarray  # of what is live, compared with its members alone


class ReductionLoad(NamedTuple):
    """A bucket of reductions as a message, and the bytes that it takes."""

    members: MemberIndices
    start: int
    first_wait: int
    deadline: int
    bytes: ReductionBytes
    size: int  # live between its start and its wait
    burst: int  # live in addition at its wait
    staying: int  # counted as live after its first wait, up to the slot `until`
    until: int
    spare: int  # live at its first wait, and not if it is waited for later
    message: Message
    changes: np.ndarray

    def needs(self, place: int, end: int) -> np.ndarray:
        """By slot, from after a place to an end: the room that it needs to be waited for there or later."""
        needs = np.full(2 * (end - place), self.size)
        needs[1::2] += self.burst  # at places, where it may be waited for
        # What stays after the first wait, and the updates that run later, are counted already.
        needs[: max(self.until - 2 * place, 0)] -= self.staying
        for release, size in self.bytes.temporaries:
            if max(place, self.first_wait) < release <= end:
                needs[2 * (release - place) - 1] -= size
        return needs


def gather_load(problem: Problem, members: MemberIndices) -> GatherLoad:
    """The load of a bucket of gathers, of which each may start before any is used."""
    gathers = [problem.gathers[i] for i in members]
    use = min(g.use for g in gathers)
    release = max(g.release for g in gathers)
    if release > use:
        raise Rejected
    size = sum(g.bytes for g in gathers)
    packed = packed_values(gathers)
    part = packed // problem.wires[gathers[0].key].ranks
    early = [Buffer(g.bytes, 2 * use, 2 * g.use - 1) for g in gathers]
    load_changes = changes([*early, *gather_buffers(problem, gathers, use, use)])
    message = message_of(problem, gathers, use, use)
    return GatherLoad(members, use, release, size, size + part, packed, message, load_changes)


def reduction_load(
    problem: Problem, first_waits: Sequence[int], members: MemberIndices
) -> ReductionLoad:
    """The load of a bucket of reductions, given the first wait of each, before which no result is needed."""
    reductions = [problem.reductions[i] for i in members]
    start = max(r.born for r in reductions) + 1
    first_wait = max(start, *(first_waits[i] for i in members))
    end = len(problem.seconds)
    deadline = min(end, *(r.need for r in reductions))
    if first_wait > deadline:
        raise Rejected
    total = ReductionBytes(reductions)
    bytes_before = total.starting if first_wait == start else total.under_way
    staying = [b for b in total.staying if b.last > 2 * first_wait]
    buffers = [
        *total.buffers(start, first_wait),
        *_minus_unbucketed(members, reductions, first_waits),
    ]
    return ReductionLoad(
        members,
        start,
        first_wait,
        deadline,
        total,
        size=total.under_way + total.waiting,
        burst=total.at_wait(end) - total.under_way,
        staying=sum(b.bytes for b in staying),
        until=min((b.last for b in staying), default=0),
        spare=max(total.at_wait(first_wait) - bytes_before, 0),
        message=message_of(problem, reductions, start, first_wait),
        changes=changes(buffers),
    )


def _minus_unbucketed(
    members: MemberIndices, reductions: Sequence[Reduction], first_waits: Sequence[int]
) -> Iterator[Buffer]:
    """The negative of what the members of a bucket have live if each is a bucket of its own."""
    for i, r in zip(members, reductions):
        for b in ReductionBytes([r]).buffers(r.born + 1, first_waits[i]):
            yield b._replace(bytes=-b.bytes)


class Loads:
    """The loads of one problem's buckets, and the bytes that are live with them, by slot.

    Attributes:
        first_waits: for each reduction, the first place at which it can be waited for.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.memory = int(min(problem.memory, ENDLESS))
        self.second = reserved_for_second([r] for r in problem.reductions)
        starts = [r.born + 1 for r in problem.reductions]
        self.first_waits = first_waits(problem, self._bytes_unbucketed(starts))
        self._without_levers = self._bytes_unbucketed(self.first_waits)
        self._gather = functools.cache(functools.partial(gather_load, problem))
        self._reduction = functools.cache(
            functools.partial(reduction_load, problem, self.first_waits)
        )

    def _bytes_unbucketed(self, waits: Sequence[int]) -> np.ndarray:
        """By slot, what is live if every message is a bucket of its own, gathers start at their use, and no lever is
        pulled."""
        problem = self.problem
        buffers = [Buffer(g.bytes, 2 * g.use, 2 * g.last + 1) for g in problem.values]
        for r, wait in zip(problem.reductions, waits):
            buffers += ReductionBytes([r]).buffers(r.born + 1, wait)
        if self.second:
            buffers.append(second_buffer(problem, self.second))
        return problem.fixed_bytes + live_by_slot(buffers, len(problem.fixed_bytes))

    def bytes_unbucketed(self, levers: Levers) -> np.ndarray:
        """By slot, what is live if every message is a bucket of its own, and these levers are pulled."""
        buffers = self.problem.lever_buffers(levers)
        return self._without_levers + live_by_slot(buffers, len(self.problem.fixed_bytes))

    def of(self, choice: Choice) -> Loaded:
        """The loads of a choice, in which every bucket is possible, and for which there is room."""
        problem = self.problem
        gathers = [self._gather(members) for members in choice.gathers]
        reductions = [self._reduction(members) for members in choice.reductions]
        if problem.without_start(load.start for load in reductions):
            raise Rejected
        # A bucket of one member changes nothing.
        shared = [load.changes for load in gathers if len(load.members) > 1]
        shared += [load.changes for load in reductions if len(load.members) > 1]
        used = self.bytes_unbucketed(choice.levers) + sum_changes(shared, len(problem.fixed_bytes))
        room = self.memory - used
        second = reserved_for_second(load.bytes.members for load in reductions)
        if second > self.second:
            room[2 * problem.births[0] :] -= second - self.second
        if room.min(initial=0) < 0:
            raise Rejected
        gathers.sort(key=lambda load: (load.use, load.release))
        reductions.sort(key=lambda load: (load.start, load.deadline))
        return Loaded(gathers, reductions, room)


class Loaded(NamedTuple):
    """The loads of a choice, and by slot the room that is left if each gather starts at its use, and each reduction is
    waited for at its first wait."""

    gathers: list[GatherLoad]
    reductions: list[ReductionLoad]
    room: np.ndarray


def first_waits(problem: Problem, live_bytes: np.ndarray) -> list[int]:
    """The first place at which each reduction can be waited for, so that none is waited for before an earlier one.

    It is the place at which the reduction starts, unless the bytes of the wait and of the updates after it do not fit
    there. An update at the beginning of backward, when most activations are live, may fit a few operations later. A
    reduction that fits nowhere is waited for where it starts.

    Args:
        problem: the reductions, and the memory.
        live_bytes: by slot, if every message is a bucket of its own and every reduction is waited for where it starts.
    """
    starts = [r.born + 1 for r in problem.reductions]
    if problem.reductions_in_flight < NEVER or live_bytes.max(initial=0) <= problem.memory:
        return starts
    room = problem.memory - live_bytes
    waits = list(starts)
    earliest = 0
    for i, (r, start) in enumerate(zip(problem.reductions, starts)):
        need = min(r.need, len(problem.seconds))
        if earliest > need:
            return starts
        total = ReductionBytes([r])
        at_once = live_by_slot(total.buffers(start, start), len(room))
        if earliest > start or room[at_once > 0].min(initial=0) < 0:
            room += at_once
            waits[i] = _first_wait(total, room, start, max(earliest, start), need)
            room -= live_by_slot(total.buffers(start, waits[i]), len(room))
        earliest = waits[i]
    return waits


def _first_wait(
    total: ReductionBytes, room: np.ndarray, start: int, earliest: int, need: int
) -> int:
    """The first place, from `earliest` on, where a reduction can be waited for; `earliest` if there is none."""
    full = room[2 * start + 1 : 2 * need] < total.under_way + total.waiting
    latest = start + (int(full.argmax()) + 1) // 2 if full.any() else need
    places = np.arange(earliest, max(latest, earliest) + 1)
    until = max((b.last + 1 for b in total.staying), default=0)
    too_full = np.flatnonzero(room[:until] < sum(b.bytes for b in total.staying))
    waits_fit = room[2 * places] >= total.at_wait(need) + total.waiting
    fits = waits_fit & (2 * places + 1 > too_full.max(initial=-1))
    return int(places[fits.argmax()]) if fits.any() else earliest


# The simulation of a choice.


@dataclass(slots=True, eq=False)
class InFlight:
    """A message that is, or will be, on its way.

    Of messages that arrive at the same time, the one with the lowest `turn` is unpacked first.
    """

    turn: int
    message: Message
    number: int = field(default=-1, init=False)  # in the network, once it has been sent


@dataclass(slots=True, eq=False)
class GatherInFlight(InFlight):
    """A bucket of gathers. It is `due` at the last place from which it and those after it arrive in time."""

    load: GatherLoad
    due: int = 0
    start: int = 0


@dataclass(slots=True, eq=False)
class ReductionInFlight(InFlight):
    """A bucket of reductions. There is room for its gradients up to place `until`."""

    index: int
    load: ReductionLoad
    until: int = 0
    wait: int = -1  # the place at which it is waited for; -1 until that is decided
    expected: float = 0.0  # the time at which it should have arrived


@dataclass(slots=True, eq=False)
class Lane:
    """A communicator: the gathers that it has not sent yet, and what is known of its messages."""

    name: str
    queue: deque[GatherInFlight] = field(default_factory=deque)
    next: int = 0  # the place at which the first of the queue is considered
    last: int | None = None  # the number of the last message
    clear: float = 0.0  # when that message has arrived, if no other lane slows it down
    work: float = 0.0  # seconds of all its messages, and seconds in which it was idle so far


class Placed(NamedTuple):
    """A choice with the places of its buckets, its seconds, and its peak of live bytes."""

    seconds: float
    peak: int
    choice: Choice
    schedule: Schedule


def place_choice(loads: Loads, choice: Choice, limit: float = NEVER) -> Placed | None:
    """Place the buckets of a choice; None if they do not fit, or are seen to take longer than `limit` seconds."""
    try:
        return _Simulation(loads, choice, loads.of(choice), limit).placed()
    except Rejected:
        return None


# What happens at one place, in this order.
_ARRIVE, _SEND_FIXED, _SEND_GATHERS, _SEND_REDUCTION, _UPDATE, _WAIT = range(6)
_Item = tuple[int, int, int | str, Any]  # place, kind, order of equal kinds at one place, subject


class _Simulation:
    """One choice while it is simulated: the time, the room that is left by slot, the messages that are under way."""

    def __init__(self, loads: Loads, choice: Choice, loaded: Loaded, limit: float) -> None:
        problem = loads.problem
        self.problem = problem
        self.memory = loads.memory
        self.room = loaded.room
        self.choice = choice
        self.limit = limit
        compute = problem.compute(choice.levers)
        if compute is problem.seconds:
            self.seconds_before = problem.seconds_before
        else:
            self.seconds_before = tuple(accumulate(compute, initial=0.0))
        self.first_gradient = min(
            (r.born for r in problem.reductions), default=len(self.seconds_before)
        )
        largest = max((load.size for load in loaded.reductions), default=0)
        self.reserve = largest if choice.reserve else 0
        self.network = Network()
        self.stalls = Stalls()
        self.updates = PendingUpdates(problem)
        self.clock = 0.0
        self.now = 0  # the place

        # Of messages that arrive together, reductions take the first turns, and those of no schedule the last.
        self.reductions = []
        for r, reduction in enumerate(loaded.reductions):
            self.reductions.append(ReductionInFlight(-1 - r, reduction.message, r, reduction))
        self.gathers = []
        for g, gather in enumerate(loaded.gathers):
            self.gathers.append(GatherInFlight(g, gather.message, gather))
        self.fixed = []
        for turn, message in enumerate(problem.messages(choice.levers), len(self.gathers)):
            self.fixed.append(InFlight(turn, message))
        self.gathers_under_way: list[GatherInFlight] = []
        self.reductions_under_way: list[ReductionInFlight] = []
        self.lanes: dict[str, Lane] = {}
        self._fill_lanes()
        self.queued = [lane for lane in self.lanes.values() if lane.queue]
        for lane in self.queued:
            self._set_due(lane)
            first = lane.queue[0]
            lane.next = max(first.due, first.load.release)
        self.agenda = list(self._known_items())
        heapq.heapify(self.agenda)

    def _fill_lanes(self) -> None:
        """Add up the work of each lane, and queue its gathers."""
        for each in (*self.gathers, *self.reductions, *self.fixed):
            message = each.message
            lane = self.lanes.setdefault(message.lane, Lane(message.lane))
            lane.work += in_lane(message)
            if message.inside is not None:
                first = self.lanes.setdefault(message.inside.lane, Lane(message.inside.lane))
                first.work += in_lane(message.inside)
        for gather in self.gathers:
            self.lanes[gather.message.lane].queue.append(gather)

    def _known_items(self) -> Iterator[_Item]:
        """Everything that is known to happen."""
        for each in self.fixed:
            yield each.message.issue, _SEND_FIXED, each.turn, each
        for lane in self.queued:
            yield lane.next, _SEND_GATHERS, lane.name, lane
        for reduction in self.reductions:
            yield reduction.load.start, _SEND_REDUCTION, reduction.index, reduction
        for place in {update.release for update in self.problem.updates}:
            yield place, _UPDATE, 0, None
        for each in (*self.gathers, *self.fixed):
            yield each.message.need, _WAIT, each.turn, each

    def _set_due(self, lane: Lane) -> None:
        """Find from where each gather, and those of its lane after it, arrive in time if nothing else waits."""
        clock = self.problem.clock
        latest = NEVER
        for gather in reversed(lane.queue):
            use = gather.load.use
            latest = min(clock[use], latest) - self.choice.lead * gather.message.alone
            gather.due = min(max(0, bisect_right(clock, latest) - 1), use)

    def placed(self) -> Placed:
        """Simulate the choice; raise `Rejected` if it takes longer than the limit."""
        # A lane needs at least the time of all its messages.
        if max((lane.work for lane in self.lanes.values()), default=0.0) > self.limit:
            raise Rejected
        happen = (
            self._arrive,
            self._send,
            self._send_gathers,
            self._send_reduction,
            self._update,
            self._wait,
        )
        while self.agenda:
            place, kind, _, subject = heapq.heappop(self.agenda)
            self.clock += self.seconds_before[place] - self.seconds_before[self.now]
            self.now = place
            self.network.run(self.clock)
            happen[kind](subject, place)
        end = self.clock + self.seconds_before[-1] - self.seconds_before[self.now]
        seconds = end + self.updates.seconds_left
        issued = sorted(self.gathers, key=lambda gather: gather.number)
        schedule = Schedule(
            tuple(Bucket(g.load.members, g.start, g.load.use) for g in issued),
            tuple(Bucket(r.load.members, r.load.start, r.wait) for r in self.reductions),
            self.choice.levers,
        )
        peak = int(self.memory - self.room.min(initial=self.memory))
        return Placed(seconds, peak, self.choice, schedule)

    def _send(self, in_flight: InFlight, place: int) -> None:
        """Send a message."""
        message = in_flight.message
        lane = self.lanes[message.lane]
        self.clock += message.host
        self.network.run(self.clock)
        free_since = 0.0 if lane.last is None else self.network.end[lane.last]
        lane.work += max(self.clock - free_since, 0.0)
        if lane.work > self.limit:
            raise Rejected
        ready = self.clock + message.pack_beside
        if message.inside is not None:
            first = self.lanes[message.inside.lane]
            first.clear = max(first.clear, ready) + in_lane(message.inside)
            ready = first.clear
        lane.clear = max(lane.clear, ready) + in_lane(message)
        in_flight.number = self.network.issue(message, self.clock)
        lane.last = in_flight.number

    def _send_gathers(self, lane: Lane, place: int) -> None:
        """Start the gathers of a lane whose time has come."""
        while lane.queue and lane.next == place:
            gather = lane.queue[0]
            load = gather.load
            start = self._earliest(load, max(place, gather.due, load.release))
            if start > place:
                self._consider(lane, start)
                return
            lane.queue.popleft()
            gather.start = place
            self.room[2 * place : 2 * load.use] -= load.size
            if place < load.use:
                self.room[2 * place] -= load.burst
            self._send(gather, place)
            self.gathers_under_way.append(gather)

    def _consider(self, lane: Lane, place: int) -> None:
        """Consider the next gather of a lane at a place."""
        lane.next = place
        heapq.heappush(self.agenda, (place, _SEND_GATHERS, lane.name, lane))

    def _earliest(self, load: GatherLoad, place: int) -> int:
        """The first place, from `place` on, at which a gather may start; its use if there is none before that."""
        use = load.use
        start = min(place, use)
        most = self.problem.gathers_in_flight
        if most < NEVER and start < use:
            ahead = [gather.load for gather in self.gathers_under_way if gather.load.use > start]
            if sum(earlier.bytes for earlier in ahead) + load.bytes > most:
                return use if load.bytes > most else min(use, *(earlier.use for earlier in ahead))
        return self._with_room(load, start) if start < use else start

    def _with_room(self, load: GatherLoad, start: int) -> int:
        """The first place from `start` on, and before its use, from which a gather has room until its use."""
        use = load.use
        size = load.size + (self.reserve if use >= self.first_gradient else 0)
        # Search from the use backwards for the last slot that is too full, and start after it.
        full = (self.room[2 * start : 2 * use] < size)[::-1]
        last = int(full.argmax())  # 0 if no slot is full
        if full[last]:
            start = use - last // 2
        if load.burst and start < use:
            fits = self.room[2 * start : 2 * use : 2] >= size + load.burst
            start = start + int(fits.argmax()) if fits.any() else use
        return start

    def _send_reduction(self, reduction: ReductionInFlight, place: int) -> None:
        """Start a reduction; if too many bytes would be under way, wait for others first."""
        load = reduction.load
        gradients = load.bytes.gradients
        most = self.problem.reductions_in_flight
        under_way = self.reductions_under_way
        # The oldest arrive first, so they are waited for first.
        while under_way and sum(r.load.bytes.gradients for r in under_way) + gradients > most:
            self._decide_wait(under_way[0], place, stall=True)
        self._send(reduction, place)
        reduction.expected = self.lanes[load.message.lane].clear
        under_way.append(reduction)
        reduction.until = load.first_wait
        if gradients <= most:
            self._hold(reduction, place)
        else:
            self._decide_wait(reduction, place, stall=True)

    def _hold(self, reduction: ReductionInFlight, place: int) -> None:
        """Take room for a reduction until it should have arrived, or as long as there is any; if none, wait here."""
        load = reduction.load
        begin = reduction.until
        clock = self.problem.clock
        # The place that compute reaches when the reduction should have arrived, if nothing else stalls until then.
        end = bisect_left(clock, reduction.expected - self.clock + clock[place], place)
        end = min(end, load.deadline)
        if end > begin:
            needs = load.needs(begin, end)
            full = self.room[2 * begin + 1 : 2 * end + 1] < needs
            first = int(full.argmax())  # 0 if no slot is full
            if full[first]:
                end = begin + first // 2
            self.room[2 * begin + 1 : 2 * end + 1] -= needs[: 2 * (end - begin)]
            reduction.until = end
        if reduction.until == place:
            self._decide_wait(reduction, place, stall=True)
        else:
            self._check_at(reduction.until, reduction)

    def _check_at(self, place: int, reduction: ReductionInFlight) -> None:
        """Add to the agenda a check, at a place, whether a reduction has arrived."""
        heapq.heappush(self.agenda, (place, _ARRIVE, reduction.index, reduction))

    def _decide_wait(self, reduction: ReductionInFlight, place: int, stall: bool) -> None:
        """Wait for a reduction at a place, and give back the room that was taken for it after that place.

        Earlier messages of the same lane have arrived too, and are waited for first.
        """
        load = reduction.load
        lane = reduction.message.lane
        for earlier in list(self.reductions_under_way):
            if earlier.message.lane == lane and earlier.index < reduction.index:
                self._decide_wait(earlier, place, stall)
        if place < load.first_wait:
            raise Rejected
        self.reductions_under_way.remove(reduction)
        reduction.wait = place
        until = reduction.until
        if place > load.first_wait:
            # The room that was left was counted for a wait at the first place, and for one at every place up to here.
            self.room[2 * load.first_wait] += load.spare
            self.room[2 * load.first_wait + 2 : 2 * place : 2] += load.burst
            end = len(self.problem.seconds)
            self.room[2 * place] += load.bytes.at_wait(end) - load.bytes.at_wait(place)
        self.room[2 * place + 1 : 2 * until + 1] += load.needs(place, until)
        if until > place:
            # The room that is free again may be enough for a gather. After a stall, it starts after the wait.
            for queued in self.queued:
                if queued.queue and queued.next > place:
                    self._consider(queued, place + stall)
        heapq.heappush(self.agenda, (place, _WAIT, reduction.turn, reduction))

    def _arrive(self, reduction: ReductionInFlight, place: int) -> None:
        """See whether a reduction has arrived by now; if not, hold its gradients for longer, or wait for it here."""
        if reduction.wait >= 0:
            return
        first_wait = reduction.load.first_wait
        if self.network.end[reduction.number] <= self.clock and place >= first_wait:
            self._decide_wait(reduction, place, stall=False)
        elif reduction.until == place:
            reduction.expected = max(reduction.expected, self.clock)
            self._hold(reduction, place)
        elif place < first_wait:
            self._check_at(first_wait, reduction)

    def _update(self, _: None, place: int) -> None:
        """Run the updates that are released here."""
        self.clock += self.updates.seconds(place)

    def _wait(self, first: InFlight, place: int) -> None:
        """Let compute stand still until the messages that are needed here have arrived, and unpack each then."""
        needed = [first]
        while self.agenda and self.agenda[0][:2] == (place, _WAIT):
            needed.append(heapq.heappop(self.agenda)[3])
        arrivals = [(self.network.arrival(each.number), each.turn, each) for each in needed]
        for end, _, arrived in sorted(arrivals):
            if end > self.clock:
                self.stalls.add(self.clock, end)
                self.clock = end
                # At the next place, see which reductions have arrived during the stall.
                for reduction in self.reductions_under_way:
                    if self.network.end[reduction.number] <= end and reduction.until > place:
                        self._check_at(place + 1, reduction)
            self.clock += self.stalls.lost(self.network, arrived.number, self.clock)
            self.clock += arrived.message.unpack
            if isinstance(arrived, GatherInFlight):
                self.gathers_under_way.remove(arrived)
            elif isinstance(arrived, ReductionInFlight):
                self.updates.complete(arrived.load.members)
                self.clock += self.updates.seconds(place)
        if self.clock + self.seconds_before[-1] - self.seconds_before[place] > self.limit:
            raise Rejected
