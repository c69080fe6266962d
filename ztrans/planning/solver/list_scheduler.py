"""list_scheduler: choose where given buckets start and are waited for, so that they fit and compute waits little.

The schedule is played from the first place to the last, and each decision depends on what has happened by then. The
bytes that are live in every schedule with these buckets are taken from the budget first: those of gathers from their
use on, and those of gradients until they are sent. Two decisions share the room that is left. A reduction holds its
gradients until it has arrived, or until there is no more room for them; it is waited for there. The next gather of
each lane starts once it is due, and as soon as there is room for it until its use.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

from ..event_simulator import Network
from .in_flight import GatherInFlight, InFlight, Lane, ReductionInFlight
from .load import Load
from .loads import Choice, Loaded, Loads
from .problem import Bucket, Schedule
from .updates import Updates

# What happens at one place, in this order.
_ARRIVE, _SEND_FIXED, _SEND_GATHERS, _SEND_REDUCTION, _UPDATE, _WAIT = range(6)
_NEVER = float("inf")
_Item = tuple[
    int, int, int | str, Any
]  # place, kind, the order of equal kinds at one place, and what it happens to


class Placed(NamedTuple):
    """A choice with the places of its buckets, its seconds, and its peak of live bytes."""

    seconds: float
    peak: int
    choice: Choice
    schedule: Schedule


def place_choice(loads: Loads, choice: Choice, limit: float = _NEVER) -> Placed | None:
    """Place the buckets of a choice; None if they do not fit, or are seen to take longer than `limit` seconds."""
    loaded = loads.of(choice)
    try:
        return None if loaded is None else _Play(loads, choice, loaded, limit).placed()
    except _Rejected:
        return None


class _Rejected(Exception):
    """A choice does not fit the memory, or takes longer than its limit."""


class _Play:
    """One choice while it is played: the time, the room that is left by slot, and the messages that are under way."""

    def __init__(self, loads: Loads, choice: Choice, loaded: Loaded, limit: float) -> None:
        gathers, reductions, self.room = loaded
        self.problem, self.memory = loads.problem, loads.memory
        self.before, self.expected = self.problem.before, self.problem.clock
        self.choice, self.limit = choice, limit
        self.first_gradient = min(
            (r.born for r in self.problem.reductions), default=len(self.before)
        )
        self.reserve = max((load.size for load in reductions), default=0) if choice.reserve else 0
        self.network, self.updates, self.clock, self.at = Network(), Updates(self.problem), 0.0, 0

        # Of messages that arrive together, reductions take the first turns, and those of no schedule the last.
        self.reductions = [
            ReductionInFlight(-1 - r, load.message, r, load) for r, load in enumerate(reductions)
        ]
        self.gathers = [GatherInFlight(g, load.message, load) for g, load in enumerate(gathers)]
        self.fixed = [
            InFlight(o, message) for o, message in enumerate(self.problem.others, len(gathers))
        ]
        self.ahead: list[GatherInFlight] = []  # gathers that are under way
        self.behind: list[ReductionInFlight] = []  # reductions that are under way
        self.lanes: dict[str, Lane] = {}
        for message in (each.message for each in (*self.gathers, *self.reductions, *self.fixed)):
            lane = self.lanes.setdefault(message.lane, Lane(message.lane))
            lane.work = lane.work + message.latency + message.seconds
        for gather in self.gathers:
            self.lanes[gather.message.lane].queue.append(gather)
        self.queued = [lane for lane in self.lanes.values() if lane.queue]
        for lane in self.queued:
            self._set_due(lane)
            lane.next = max(lane.queue[0].due, lane.queue[0].load.bound)
        self.agenda = self._agenda()

    def _agenda(self) -> list[_Item]:
        """A heap of everything that is known to happen."""
        agenda: list[_Item] = [
            *((each.message.issue, _SEND_FIXED, each.turn, each) for each in self.fixed),
            *((lane.next, _SEND_GATHERS, lane.name, lane) for lane in self.queued),
            *((each.load.place, _SEND_REDUCTION, each.index, each) for each in self.reductions),
            *(
                (place, _UPDATE, 0, None)
                for place in {update.release for update in self.problem.updates}
            ),
            *((each.message.need, _WAIT, each.turn, each) for each in (*self.gathers, *self.fixed)),
        ]
        heapq.heapify(agenda)
        return agenda

    def _set_due(self, lane: Lane) -> None:
        """Find from where each gather, and those of its lane after it, arrive in time if nothing else waits."""
        latest = _NEVER
        for gather in reversed(lane.queue):
            message, use = gather.message, gather.load.place
            latest = min(self.expected[use], latest) - self.choice.lead * (
                message.latency + message.seconds
            )
            gather.due = min(max(0, bisect_right(self.expected, latest) - 1), use)

    def placed(self) -> Placed:
        """Play the choice; raise `_Rejected` if it takes longer than the limit."""
        if max((lane.work for lane in self.lanes.values()), default=0.0) > self.limit:
            raise _Rejected
        happen = (
            self._arrive,
            self._send,
            self._send_gathers,
            self._send_reduction,
            self._update,
            self._wait,
        )
        while self.agenda:
            place, kind, _, item = heapq.heappop(self.agenda)
            self.clock += self.before[place] - self.before[self.at]
            self.at = place
            self.network.run(self.clock)
            happen[kind](item, place)
        seconds = self.clock + self.before[-1] - self.before[self.at] + self.updates.left
        issued = sorted(self.gathers, key=lambda gather: gather.number)
        gathers = (Bucket(each.load.members, each.start, each.load.place) for each in issued)
        reductions = (
            Bucket(each.load.members, each.load.place, each.wait) for each in self.reductions
        )
        schedule = Schedule(tuple(gathers), tuple(reductions), self.choice.dropped)
        return Placed(
            seconds, int(self.memory - self.room.min(initial=self.memory)), self.choice, schedule
        )

    def _send(self, sent: InFlight, place: int) -> None:
        """Send a message."""
        message, lane = sent.message, self.lanes[sent.message.lane]
        self.clock += message.host
        self.network.run(self.clock)
        lane.work += max(
            self.clock - (0.0 if lane.last is None else self.network.end[lane.last]), 0.0
        )
        if lane.work > self.limit:
            raise _Rejected
        lane.clear = max(lane.clear, self.clock) + message.latency + message.seconds
        lane.last = sent.number = self.network.issue(message, self.clock)

    def _send_gathers(self, lane: Lane, place: int) -> None:
        """Start the gathers of a lane whose time has come."""
        while lane.queue and lane.next == place:
            gather = lane.queue[0]
            load, start = (
                gather.load,
                self._earliest(gather.load, max(place, gather.due, gather.load.bound)),
            )
            if start > place:
                lane.next = start
                heapq.heappush(self.agenda, (start, _SEND_GATHERS, lane.name, lane))
                return
            lane.queue.popleft()
            gather.start = place
            self.room[2 * place : 2 * load.place] -= load.size
            if place < load.place:
                self.room[2 * place] -= load.burst
            self._send(gather, place)
            self.ahead.append(gather)

    def _earliest(self, load: Load, place: int) -> int:
        """The first place, from `place` on, at which a gather may start; its use if there is none before that."""
        use = load.place
        start = min(place, use)
        most = self.problem.gathers_in_flight
        if most < _NEVER and start < use:
            ahead = [gather.load for gather in self.ahead if gather.load.place > start]
            if sum(earlier.held for earlier in ahead) + load.held > most:
                return use if load.held > most else min(use, *(earlier.place for earlier in ahead))
        return self._with_room(load, start) if start < use else start

    def _with_room(self, load: Load, start: int) -> int:
        """The first place from `start` on, and before its use, from which a gather has room until its use."""
        use, size = (
            load.place,
            load.size + (self.reserve if load.place >= self.first_gradient else 0),
        )
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
        load, most = reduction.load, self.problem.reductions_in_flight
        while self.behind and sum(earlier.load.held for earlier in self.behind) + load.held > most:
            self._decide_wait(self.behind[0], place, stall=True)
        self._send(reduction, place)
        reduction.expected = self.lanes[load.message.lane].clear
        self.behind.append(reduction)
        reduction.until = load.wait
        if load.held <= most:
            self._hold(reduction, place)
        else:
            self._decide_wait(reduction, place, stall=True)

    def _hold(self, reduction: ReductionInFlight, place: int) -> None:
        """Take room for a reduction until it should have arrived, or as long as there is any; if none, wait here."""
        load, begin = reduction.load, reduction.until
        end = bisect_left(
            self.expected, reduction.expected - self.clock + self.expected[place], place
        )
        end = min(end, load.bound)
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

        Those that were sent before it over the same lane have arrived too, and are waited for first.
        """
        load, until, lane = reduction.load, reduction.until, reduction.message.lane
        for earlier in [
            r for r in self.behind if r.message.lane == lane and r.index < reduction.index
        ]:
            self._decide_wait(earlier, place, stall)
        if place < load.wait:
            raise _Rejected
        self.behind.remove(reduction)
        reduction.wait = place
        if place > load.wait:
            self.room[2 * load.wait] += load.spared
            self.room[2 * load.wait + 2 : 2 * place : 2] += load.burst
            self.room[2 * place] += load.unreleased(self.problem, place)
        self.room[2 * place + 1 : 2 * until + 1] += load.needs(place, until)
        if until > place:
            for queued in self.queued:
                if queued.queue and queued.next > place:
                    queued.next = place + stall
                    heapq.heappush(self.agenda, (queued.next, _SEND_GATHERS, queued.name, queued))
        heapq.heappush(self.agenda, (place, _WAIT, reduction.turn, reduction))

    def _arrive(self, reduction: ReductionInFlight, place: int) -> None:
        """See whether a reduction has arrived by now; if not, hold its gradients for longer, or wait for it here."""
        if reduction.wait >= 0:
            return
        if self.network.end[reduction.number] <= self.clock and place >= reduction.load.wait:
            self._decide_wait(reduction, place, stall=False)
        elif reduction.until == place:
            reduction.expected = max(reduction.expected, self.clock)
            self._hold(reduction, place)
        elif place < reduction.load.wait:
            self._check_at(reduction.load.wait, reduction)

    def _update(self, _: None, place: int) -> None:
        """Run the updates that are released here."""
        self.clock += self.updates.seconds(place)

    def _wait(self, first: InFlight, place: int) -> None:
        """Let compute stand still until the messages that are needed here have arrived, and unpack each then."""
        needed = [first]
        while self.agenda and self.agenda[0][:2] == (place, _WAIT):
            needed.append(heapq.heappop(self.agenda)[3])
        arrivals = sorted(
            (self.network.come(message.number), message.turn, message) for message in needed
        )
        for end, _, message in arrivals:
            if end > self.clock:
                self.clock = end
                for (
                    reduction
                ) in self.behind:  # at the next place, see which have arrived during the stall
                    if self.network.end[reduction.number] <= end and reduction.until > place:
                        self._check_at(place + 1, reduction)
            self.clock += message.message.unpack + self._follows(message, place)
        if self.clock + self.before[-1] - self.before[place] > self.limit:
            raise _Rejected

    def _follows(self, received: InFlight, place: int) -> float:
        """The seconds of the updates that may run now that a message was unpacked."""
        if isinstance(received, GatherInFlight):
            self.ahead.remove(received)
        if isinstance(received, ReductionInFlight):
            self.updates.meet(received.load.members)
            return self.updates.seconds(place)
        return 0.0
