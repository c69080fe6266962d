"""Place the buckets of a choice: where they start and are waited for, so that they fit and compute waits little.

The schedule is simulated from the first place to the last, and each decision depends on the events so far. Bytes that
every schedule with these buckets needs are reserved first: gathered values from their first use, gradients until they
are sent. Gathers and reductions share the room that is left:

- A reduction holds its gradients until it and the others of its group have arrived, and is waited for there
  (`Choice.waited_together` is the size of a group). If there is no room for its gradients, older reductions are waited
  for at that place, the oldest first.
- The next gather of each lane starts once it is due and has room until its use.

Events at one place have the order of `tape`. The tests simulate the tape of each finished schedule, and the program
that is written from it. Both must have the seconds and bytes of the simulation here, and no fewer seconds than `bound`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any, NamedTuple

from ...ir.dependencies import grouped
from ..network import NEVER, Message, in_lane
from ..play import Rank
from .after_waits import PendingUpdates, SecondReductions
from .loads import ChoiceLoad, GatherLoad, Loads, ReductionLoad, Rejected
from .problem import Bucket, Choice, Schedule

# Sums of the same seconds in another order differ by less than this share.
ROUNDING = 1e-9


@dataclass(slots=True, eq=False)
class InFlight:
    """A message, before and after it is sent. Once it is sent, `number` identifies it in the network."""

    message: Message
    number: int = field(default=-1, init=False)


@dataclass(slots=True, eq=False)
class GatherInFlight(InFlight):
    """A bucket of gathers. It is `due` at the last place from which it and the gathers after it arrive in time."""

    load: GatherLoad
    due: int = 0
    start: int = 0


@dataclass(slots=True, eq=False)
class ReductionInFlight(InFlight):
    """A bucket of reductions.

    Attributes:
        index: its number among the buckets of reductions.
        load: its load.
        group_end: the last reduction of its group, which may be itself.
        until: the place up to which room is reserved for its gradients.
        wait: the place at which it is waited for; -1 until that is decided.
        with_next: as in `Bucket`.
        expected: the time at which it should have arrived.
        is_received: whether it has been waited for.
    """

    index: int
    load: ReductionLoad
    group_end: ReductionInFlight = field(init=False)
    until: int = 0
    wait: int = -1
    with_next: bool = False
    expected: float = 0.0
    is_received: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """A communicator: the gathers that it has not sent yet, and the state of its messages.

    Attributes:
        name: as in messages.
        queue: the gathers that it has not sent yet, in order of use.
        next_place: the place at which the first of them is considered.
        last_sent: the number of the last message that was sent.
        clear: the time at which that message arrives if no other lane slows it down.
        work: the seconds of all its messages, and its idle seconds so far.
    """

    name: str
    queue: deque[GatherInFlight] = field(default_factory=deque)
    next_place: int = 0
    last_sent: int | None = None
    clear: float = 0.0
    work: float = 0.0


class Placed(NamedTuple):
    """A choice with the places of its buckets, its seconds, and its peak of live bytes."""

    seconds: float
    peak: int
    choice: Choice
    schedule: Schedule


def place_choice(loads: Loads, choice: Choice, most_seconds: float = NEVER) -> Placed | None:
    """Place the buckets of a choice. None if they do not fit, or certainly take longer than `most_seconds`."""
    try:
        return _Simulation(loads, choice, loads.of(choice), most_seconds).placed()
    except Rejected:
        return None


# The kinds of events at one place, in the order of `tape`. Messages that no schedule places are operations of the
# program: they are sent by the operation before the place, and waited for by the one after it.
(
    _ARRIVE,
    _SEND_FIXED,
    _SEND_GATHERS,
    _SEND_REDUCTION,
    _UPDATE,
    _WAIT,
    _WAIT_SECOND,
    _SEND_GATHERS_LAST,
    _WAIT_GATHER,
    _WAIT_FIXED,
) = range(10)
# A place, a kind, the order of equal kinds at one place, and the subject: a message or a lane.
_Item = tuple[int, int, int | str, Any]


class _Simulation:
    """The simulation of one choice: the time, the room that is left by slot, and the messages under way."""

    def __init__(
        self, loads: Loads, choice: Choice, choice_load: ChoiceLoad, most_seconds: float
    ) -> None:
        problem = loads.problem
        self.problem = problem
        self.memory = loads.memory
        self.room = choice_load.room
        self.choice = choice
        self.most_seconds = most_seconds
        self.seconds_before = choice_load.seconds_before
        self.first_gradient = len(self.seconds_before)
        if problem.births:
            self.first_gradient = problem.births[0] - 1
        self.reserve = 0
        if choice.reserve:
            self.reserve = max((load.size for load in choice_load.reductions), default=0)
        self.updates = PendingUpdates(problem)
        self.rank = Rank()
        self.place = 0  # the place that compute has reached

        self.reductions = []
        for r, load in enumerate(choice_load.reductions):
            self.reductions.append(ReductionInFlight(load.message, r, load))
        self._group_reductions()
        self.gathers = [GatherInFlight(load.message, load) for load in choice_load.gathers]
        self.fixed_messages = [InFlight(message) for message in problem.fixed_messages]
        is_limited = problem.gathers_in_flight < NEVER
        self.send_gathers_kind = _SEND_GATHERS_LAST if is_limited else _SEND_GATHERS

        self.gathers_under_way: list[GatherInFlight] = []
        self.reductions_under_way: list[ReductionInFlight] = []
        self.second_under_way: SecondReductions[tuple[InFlight, ReductionLoad]] = SecondReductions()
        self.lanes: dict[str, Lane] = {}
        self._fill_lanes()
        # By link: the seconds of its messages, and of compute after the last place where one is waited for.
        self.least_of_link = self._least_of_link()

        self.gather_lanes = [lane for lane in self.lanes.values() if lane.queue]
        for lane in self.gather_lanes:
            self._set_due(lane)
            first = lane.queue[0]
            lane.next_place = max(first.due, first.load.release)
        self.agenda = list(self._known_items())
        heapq.heapify(self.agenda)

    def _fill_lanes(self) -> None:
        """Add up the work of each lane, and queue its gathers."""
        in_flight = (*self.gathers, *self.reductions, *self.fixed_messages)
        messages = [item.message for item in in_flight]
        for reduction in self.reductions:
            if reduction.load.second is not None:
                messages.append(reduction.load.second)
        for message in messages:
            self._lane(message.lane).work += in_lane(message)
            if message.inside is not None:
                self._lane(message.inside.lane).work += in_lane(message.inside)
        for gather in self.gathers:
            self.lanes[gather.message.lane].queue.append(gather)

    def _group_reductions(self) -> None:
        """Put the reductions of each lane into groups that are waited for together."""
        by_lane = grouped((reduction.message.lane, reduction) for reduction in self.reductions)
        for lane_reductions in by_lane.values():
            # The last reduction is a group of its own, because the updates of the others run while it is under way.
            # The groups before it are counted back from it.
            group_end = lane_reductions[-1]
            for distance, reduction in enumerate(reversed(lane_reductions)):
                if distance % self.choice.waited_together == 1 or self.choice.waited_together == 1:
                    group_end = reduction
                reduction.group_end = group_end

    def _least_of_link(self) -> dict[str, float]:
        """By link, the least seconds of the step: the link is never idle. Second reductions are left out."""
        last_wait = 0
        least: dict[str, float] = {}
        for item in (*self.gathers, *self.reductions, *self.fixed_messages):
            message = item.message
            latest = item.load.deadline if isinstance(item, ReductionInFlight) else message.need
            last_wait = max(last_wait, latest)
            least[message.link] = least.get(message.link, 0.0) + message.seconds
            inside = message.inside
            if inside is not None:
                least[inside.link] = least.get(inside.link, 0.0) + inside.seconds
        after = self.seconds_before[-1] - self.seconds_before[last_wait]
        return {link: seconds + after for link, seconds in least.items()}

    def _lane(self, name: str) -> Lane:
        if name not in self.lanes:
            self.lanes[name] = Lane(name)
        return self.lanes[name]

    def _known_items(self) -> Iterator[_Item]:
        """The events that are known from the beginning. Waits for reductions are decided in the simulation."""
        for i, fixed_message in enumerate(self.fixed_messages):
            yield fixed_message.message.issue, _SEND_FIXED, i, fixed_message
            yield fixed_message.message.need, _WAIT_FIXED, i, fixed_message
        for lane in self.gather_lanes:
            yield lane.next_place, self.send_gathers_kind, lane.name, lane
        second_deadlines = set()
        for reduction in self.reductions:
            yield reduction.load.start, _SEND_REDUCTION, reduction.index, reduction
            if reduction.load.second is not None:
                second_deadlines.add(reduction.load.second.need)
        for place in second_deadlines:
            yield place, _WAIT_SECOND, 0, None
        for place in self.problem.releases:
            yield place, _UPDATE, 0, None
        for place in {gather.load.use for gather in self.gathers}:
            yield place, _WAIT_GATHER, 0, None

    def _set_due(self, lane: Lane) -> None:
        """For each gather, find the last place from which it and those after it in its lane arrive in time."""
        clock = self.problem.clock
        latest = NEVER
        for gather in reversed(lane.queue):
            use = gather.load.use
            latest = min(clock[use], latest) - self.choice.lead * gather.load.seconds_alone
            gather.due = min(max(0, bisect_right(clock, latest) - 1), use)

    def placed(self) -> Placed:
        """Simulate the choice.

        Raises: Rejected if it does not fit, or takes longer than `most_seconds`.
        """
        # The step takes at least as long as all messages of a lane.
        if max((lane.work for lane in self.lanes.values()), default=0.0) > self.most_seconds:
            raise Rejected
        handlers = (  # by kind
            self._arrive,
            self._send,
            self._send_gathers,
            self._send_reduction,
            self._update,
            self._wait,
            self._wait_second,
            self._send_gathers,
            self._wait_gathers,
            self._wait_fixed,
        )
        while self.agenda:
            place, kind, _, subject = heapq.heappop(self.agenda)
            self.rank.clock += self.seconds_before[place] - self.seconds_before[self.place]
            self.place = place
            self.rank.network.run(self.rank.clock)
            handlers[kind](subject, place)

        end = self.rank.clock + self.seconds_before[-1] - self.seconds_before[self.place]
        seconds = end + self.updates.seconds_left
        # A schedule lists its gathers in the order of their starts.
        in_order = sorted(self.gathers, key=lambda gather: gather.number)
        gathers = [Bucket(g.load.members, g.start, g.load.use) for g in in_order]
        reductions = [
            Bucket(r.load.members, r.load.start, r.wait, r.with_next) for r in self.reductions
        ]
        schedule = Schedule(tuple(gathers), tuple(reductions), self.choice.levers)
        peak = int(self.memory - self.room.min(initial=self.memory))
        return Placed(seconds, peak, self.choice, schedule)

    def _send(self, in_flight: InFlight, place: int) -> None:
        """Send a message."""
        message = in_flight.message
        lane = self.lanes[message.lane]
        in_flight.number = self.rank.send(message)

        # A lane that was idle for too long cannot send the rest in time, so the choice is rejected early.
        free_since = 0.0 if lane.last_sent is None else self.rank.network.end[lane.last_sent]
        lane.work += max(self.rank.clock - free_since, 0.0)
        if lane.work > self.most_seconds:
            raise Rejected
        lane.last_sent = in_flight.number

        ready = self.rank.clock + message.pack_beside
        if message.inside is not None:
            inside_lane = self.lanes[message.inside.lane]
            inside_lane.clear = max(inside_lane.clear, ready) + in_lane(message.inside)
            ready = inside_lane.clear
        lane.clear = max(lane.clear, ready) + in_lane(message)

    def _send_gathers(self, lane: Lane, place: int) -> None:
        """Start the gathers of a lane that are due here and have room."""
        while lane.queue and lane.next_place == place:
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
                self.room[2 * place] -= load.extra_at_start
                self.room[2 * load.use] += load.freed_at_use
            self._send(gather, place)
            self.gathers_under_way.append(gather)

    def _consider(self, lane: Lane, place: int) -> None:
        """Consider the next gather of a lane at a place."""
        lane.next_place = place
        heapq.heappush(self.agenda, (place, self.send_gathers_kind, lane.name, lane))

    def _earliest(self, load: GatherLoad, place: int) -> int:
        """The first place, from `place` on, at which a gather may start; its use if there is none before that."""
        use = load.use
        if place >= use:
            return use
        most = self.problem.gathers_in_flight
        if most < NEVER:
            under_way = [gather.load for gather in self.gathers_under_way]
            earlier_loads = [earlier for earlier in under_way if earlier.use > place]
            if sum(earlier.bytes for earlier in earlier_loads) + load.bytes > most:
                if load.bytes > most:
                    return use
                # Once the first of them has been used, fewer bytes are under way.
                return min(use, *(earlier.use for earlier in earlier_loads))
        return self._earliest_with_room(load, place)

    def _earliest_with_room(self, load: GatherLoad, start: int) -> int:
        """The first place, from `start` on, from which a gather has room until its use; its use if there is none."""
        use = load.use
        size = load.size
        if use >= self.first_gradient:
            size += self.reserve
        # Start after the last slot that is too full.
        (full,) = (self.room[2 * start : 2 * use] < size).nonzero()
        if len(full):
            start += int(full[-1]) // 2 + 1
        if load.extra_at_start and start < use:
            fits = self.room[2 * start : 2 * use : 2] >= size + load.extra_at_start
            if not fits.any():
                return use
            start += int(fits.argmax())
        return start

    def _send_reduction(self, reduction: ReductionInFlight, place: int) -> None:
        """Start a reduction; if too many bytes would be under way, wait for others first."""
        load = reduction.load
        most = self.problem.reductions_in_flight
        if most < NEVER:
            self._make_way(load, place)
        self._send(reduction, place)
        reduction.expected = self.lanes[load.message.lane].clear
        self.reductions_under_way.append(reduction)
        reduction.until = load.first_wait
        if load.gradients <= most:
            self._hold(reduction, place)
        else:
            self._decide_wait(reduction, place, stall=True)

    def _make_way(self, load: ReductionLoad, place: int) -> None:
        """Wait for the oldest reductions until another bucket keeps the limit of the bytes under way."""
        under_way = []
        for reduction in self.reductions:
            if reduction.number >= 0 and not reduction.is_received:
                under_way.append(reduction)
        size = load.gradients + sum(reduction.load.gradients for reduction in under_way)
        oldest: deque[ReductionInFlight] = deque()
        for reduction in under_way:
            if size <= self.problem.reductions_in_flight:
                break
            size -= reduction.load.gradients
            oldest.append(reduction)
            if reduction.wait < 0:
                self._decide_wait(reduction, place, stall=True)
        self._wait_in_order(oldest, place)

    def _hold(self, reduction: ReductionInFlight, place: int) -> None:
        """Reserve room for a reduction until it should have arrived, or as far as there is room.

        If there is no room after this place, wait for older reductions, which frees their bytes. If that is not enough,
        wait for this reduction.
        """
        end = self._expected_place(reduction, place)
        self._reserve_room(reduction, end)
        if reduction.until == place < end:
            for older in self._older_that_make_room(reduction, place):
                self._decide_wait(older, place, stall=True)
            self._reserve_room(reduction, end)

        if reduction.until == place:
            self._decide_wait(reduction, place, stall=True)
        else:
            self._check_at(reduction.until, reduction)

    def _expected_place(self, reduction: ReductionInFlight, place: int) -> int:
        """The place that compute reaches when a reduction and its group should have arrived, if nothing stalls."""
        clock = self.problem.clock
        group_end = reduction.group_end
        expected = max(reduction.expected, group_end.expected)
        end = bisect_left(clock, expected - self.rank.clock + clock[place], place)
        # If the last reduction of the group has not been sent yet, hold the gradients at least until it is sent.
        if group_end.load.start >= place:
            end = max(end, group_end.load.start + 1)
        return min(end, reduction.load.deadline)

    def _reserve_room(self, reduction: ReductionInFlight, end: int) -> None:
        """Reserve room for the gradients of a reduction up to a place, or as far as there is room."""
        begin = reduction.until
        if end > begin:
            needed = reduction.load.room.between(begin, end)
            full = self.room[2 * begin + 1 : 2 * end + 1] < needed
            first = int(full.argmax())  # 0 if no slot is full
            if full[first]:
                end = begin + first // 2
            self.room[2 * begin + 1 : 2 * end + 1] -= needed[: 2 * (end - begin)]
            reduction.until = end

    def _older_that_make_room(
        self, reduction: ReductionInFlight, place: int
    ) -> list[ReductionInFlight]:
        """The oldest reductions that together free enough room for a new one right after a place.

        The list is empty if all of them are not enough. Reductions that may not be waited for at this place, or that
        have no bytes after it, are left out.
        """
        slots = slice(2 * place + 1, 2 * place + 3)
        lacking = reduction.load.room.between(place, place + 1) - self.room[slots]
        chosen: list[ReductionInFlight] = []
        for older in self.reductions_under_way:
            if older is reduction:
                break
            if older.until > place >= older.load.first_wait:
                freed = older.load.room.between(place, place + 1)
                if freed.max() > 0:
                    chosen.append(older)
                    lacking = lacking - freed
                    if lacking.max() <= 0:
                        return chosen
        return []

    def _check_at(self, place: int, reduction: ReductionInFlight) -> None:
        """Check at a later place whether a reduction has arrived."""
        heapq.heappush(self.agenda, (place, _ARRIVE, reduction.index, reduction))

    def _decide_wait(self, reduction: ReductionInFlight, place: int, stall: bool) -> None:
        """Decide to wait for a reduction at a place, and release the room that was reserved for it after that place.

        Earlier reductions of the same lane have arrived too, and are waited for first.
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
        heapq.heappush(self.agenda, (place, _WAIT, reduction.index, reduction))

        if place > load.first_wait:
            # `ChoiceLoad.room` has counted a wait at the first place, and `_hold` a wait at every place after it. The
            # wait is at this place only.
            self.room[2 * load.first_wait] += load.freed_at_first_wait
            self.room[2 * load.first_wait + 2 : 2 * place : 2] += load.extra_at_wait
            if place < load.last_release:
                self.room[2 * place] += load.size_at_wait - load.storage.at_wait(place)
        until = reduction.until
        if until > place:
            self.room[2 * place + 1 : 2 * until + 1] += load.room.between(place, until)
            # The released room may be enough for a gather. After a stall, it starts after the wait.
            next_place = place + 1 if stall else place
            for gather_lane in self.gather_lanes:
                if gather_lane.queue and gather_lane.next_place > place:
                    self._consider(gather_lane, next_place)

    def _arrive(self, reduction: ReductionInFlight, place: int) -> None:
        """Wait for a reduction here if it has arrived. Otherwise hold its gradients for longer, if there is room."""
        if reduction.wait >= 0:
            return
        first_wait = reduction.load.first_wait
        has_arrived = self.rank.network.end[reduction.number] <= self.rank.clock
        if has_arrived and place >= first_wait and reduction.group_end is reduction:
            self._decide_wait(reduction, place, stall=False)
        elif reduction.until == place:
            reduction.expected = max(reduction.expected, self.rank.clock)
            self._hold(reduction, place)
        elif place < first_wait:
            self._check_at(first_wait, reduction)

    def _update(self, _: None, place: int) -> None:
        """Run the updates that can run here, including the ones that are released here."""
        self.rank.clock += self.updates.seconds(place)

    def _wait(self, first: ReductionInFlight, place: int) -> None:
        """Wait for the reductions with a wait here: `first`, which was started first, and the others."""
        here = [first]
        while self.agenda and self.agenda[0][:2] == (place, _WAIT):
            here.append(heapq.heappop(self.agenda)[3])
        # Some were waited for already, to make way for others.
        unreceived = deque(reduction for reduction in here if not reduction.is_received)
        self._wait_in_order(unreceived, place)

    def _wait_in_order(self, reductions: deque[ReductionInFlight], place: int) -> None:
        """Wait for reductions in the order of their starts, and run the updates that follow.

        Updates run before a second reduction is sent and after the last wait. They also run where compute would stall,
        if that hides more seconds than the additional launches take. A plan states for each reduction whether updates
        run right after it, so updates that do not run at a stall run after the next reduction.
        """
        waited_for: list[ReductionInFlight] = []
        while reductions:
            reduction = reductions[0]
            end = self.rank.network.arrival(reduction.number)
            is_hidden = end > self.rank.clock and self._is_worth_updating(end, reductions, place)
            if is_hidden or reduction.load.second is not None:
                self._update_together(waited_for, place)
            self._receive(reduction, place)
            reduction.is_received = True
            reductions.popleft()
            self._finish_wait(reduction, waited_for, place)
        self._update_together(waited_for, place)
        self._check_seconds(place)

    def _wait_gathers(self, _: None, place: int) -> None:
        """Wait for the gathers that are needed here, in the order of their starts."""
        needed = [gather for gather in self.gathers_under_way if gather.load.use == place]
        for gather in needed:
            self._receive(gather, place)
            self.gathers_under_way.remove(gather)
        self._check_seconds(place)

    def _wait_fixed(self, message: InFlight, place: int) -> None:
        """Wait for a message that no schedule places."""
        self._receive(message, place)
        self._check_seconds(place)

    def _is_worth_updating(
        self, end: float, reductions: Iterable[ReductionInFlight], place: int
    ) -> bool:
        """Whether to run the updates that can run now, while compute waits until `end`.

        If they run now, the seconds before `end` cost nothing. If they run after the other reductions that are waited
        for at this place, they share launches with the updates of these. `reductions` begin with the one that arrives
        at `end`.
        """
        earlier = self.updates.runnable(place)
        if not earlier:
            return True  # there is nothing to run, and nothing to share
        # The updates run before a second reduction is sent in any case, so they share no launches after it.
        without_second = takewhile(lambda reduction: reduction.load.second is None, reductions)
        members = chain.from_iterable(reduction.load.members for reduction in without_second)
        later = self.updates.runnable_after(members, place)
        seconds_of = self.problem.update_seconds
        earlier_seconds = seconds_of(earlier)
        hidden = min(end - self.rank.clock, earlier_seconds)
        shared = earlier_seconds + seconds_of(later) - seconds_of([*earlier, *later])
        return hidden >= shared

    def _check_seconds(self, place: int) -> None:
        """Reject the choice once the step is certain to take too long.

        One reason is a link that was idle for so long that its last message arrives too late.

        Raises: Rejected
        """
        end = self.rank.clock + self.seconds_before[-1] - self.seconds_before[place]
        if end > self.most_seconds:
            raise Rejected
        # These sums add the seconds of the link in another order than the simulation, so they are rounded differently.
        most = self.most_seconds * (1 + ROUNDING)
        for name, link in self.rank.network.links.items():
            if self.least_of_link.get(name, 0.0) + link.idle > most:
                raise Rejected

    def _receive(self, in_flight: InFlight, place: int) -> None:
        """Wait for a message, and unpack it."""
        if self.rank.wait(in_flight.number):
            # Reductions that arrived while compute stood still can be waited for at the next place.
            ends = self.rank.network.end
            for reduction in self.reductions_under_way:
                if ends[reduction.number] <= ends[in_flight.number] and reduction.until > place:
                    self._check_at(place + 1, reduction)

    def _finish_wait(
        self, reduction: ReductionInFlight, waited_for: list[ReductionInFlight], place: int
    ) -> None:
        """After a wait, send the second reduction of the bucket, or make its updates ready."""
        load = reduction.load
        if load.second is None:
            self.updates.complete(load.members)
            waited_for.append(reduction)
        else:
            self._send_second(load, load.second, place)

    def _update_together(self, waited_for: list[ReductionInFlight], place: int) -> None:
        """Run the updates that can run after these reductions. Set `with_next` of all reductions but the last."""
        if not waited_for:
            return
        updates = self.updates.run(place)
        if updates:
            self.rank.clock += self.problem.update_seconds(updates)
            for reduction in waited_for[:-1]:
                reduction.with_next = True
        waited_for.clear()

    def _send_second(self, load: ReductionLoad, message: Message, place: int) -> None:
        """Send the second reduction of a bucket, wait for the previous one, and run the updates that can run."""
        second = InFlight(message)
        self._send(second, place)
        for earlier, earlier_load in self.second_under_way.add((second, load), message.need):
            self._receive(earlier, place)
            self.updates.complete(earlier_load.members)
        self._update(None, place)

    def _wait_second(self, _: None, place: int) -> None:
        """Wait for the second reduction that is needed here, and run the updates that can run."""
        for second, load in self.second_under_way.needed(place):
            self._receive(second, place)
            self.updates.complete(load.members)
            self._update(None, place)
