"""Start copies between two memories early and wait for them late, so that compute hides them.

A copy involves no other rank, so it is placed last, in the order that the plan has given to everything else:

    m = wait(to_device(h))      f = to_device(h); ...rest of backward...
    m1 = update(m, g)      -->  m = wait(f); m1 = update(m, g); f1 = to_host(m1, over=h)
    h1 = wait(to_host(m1))      ...other updates...; h1 = wait(f1)

Each direction is a queue. Copies to the host start where their value exists, and are waited for where they have ended.
Copies to the device end where their value is needed: from the last one back to the first, each starts just early
enough. A copy that would raise the peak of memory gets less time, and compute waits for the rest.

With `offload(across_steps=True)`, a copy to the host that outlasts the step is carried: the next step waits for it
where it has ended (see `rewrites.carried_copies`).

Equal updates next to each other take one launch (see `rewrites.update_groups`), so no copy starts or ends between them.
Leaves are copied in sets, before and after the updates of a set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir.collectives import lane, rules
from ..ir.copies import is_copy, other_memory
from ..ir.dependencies import grouped
from ..ir.donation import donation, first_write
from ..ir.graph import Eqn, Graph, MemoryKind, Var, producers, users
from ..ir.liveness import liveness
from ..ir.printer import format_bytes
from ..ir.rewriter import reordered
from ..rewrites.carried_copies import carriable_copies, carry_copies
from ..rewrites.half_copies import with_half_copies
from ..rewrites.update_groups import may_change_places
from .buffers import by_memory, device_bytes, live_bytes, local_bytes, storages
from .cluster import Cluster
from .cost import memory
from .durations import equation_seconds, messages
from .kept_arrivals import keep_arrivals
from .limit import more_ranks
from .play import play
from .simulate import simulate

# Bytes of leaves that are copied as one set: with fewer, launches cost more than copies gain by an earlier start.
_SET_BYTES = 64 << 20
_SHARES_OF_STAYS = (0.25, 0.5, 1.0)  # of the room that other values leave
_AHEAD = 4  # the leaves that are on their way at once: a parameter, two moments, and the next one
_TRIALS = 4  # each with less memory, because a value cannot be overwritten while it is copied

# The order of the equations at one index: the ones that move there, around the one that was there before.
_EARLIER_WAITS = 0  # for copies that have started before this index
_STARTS_BEFORE = 1
_WAITS_BEFORE = 2
_ITSELF = 3
_STARTS_AFTER = 4
_WAITS_AFTER = 5


class _Position(NamedTuple):
    """Where an equation will stand, as a key for sorting.

    Attributes:
        anchor: its new index, as an index of the old order.
        turn: its turn among the equations at that index, one of the constants above.
    """

    anchor: int
    turn: int


def place_copies(graph: Graph, cluster: Cluster) -> Graph:
    """The program with its copies placed; other equations keep their order.

    The peak of memory does not rise. If a transform names a limit, it may rise up to that. Values that stay on the
    device save copies and take the room in which other copies start early, and copies that go on after the step delay
    those of the next one. So there are several placements, and the fastest is taken. Copies of leaves in half precision
    on the host (see `half_copies`) are tried with that one.
    """
    if not any(map(is_copy, graph.eqns)):
        return graph
    graph = copied_when_needed(graph)
    allowed = memory(graph).peak
    limit = graph.hints.memory_limit
    if limit is not None and (graph.hints.offload or graph.hints.limit_option):
        allowed = max(allowed, limit)

    room = allowed - np.array(_live_on_device(graph), dtype=np.int64)
    programs = [graph]
    for share in _SHARES_OF_STAYS:
        program = keep_arrivals(graph, (share * room).astype(np.int64))
        if len(program.eqns) < len(programs[-1].eqns):
            programs.append(program)
    choices = [(program, False) for program in programs]
    if graph.hints.carry_copies:
        choices = [*((program, True) for program in programs), *choices]

    def placed(choice: tuple[Graph, bool]) -> Graph:
        program, carries = choice
        return _placed(_in_sets(program, allowed), cluster, allowed, carries)

    def seconds(program: Graph) -> float:
        return simulate(program, cluster).seconds

    found = [placed(choice) for choice in choices]
    best = min(range(len(found)), key=lambda i: seconds(found[i])) if len(found) > 1 else 0
    program, carries = choices[best]
    in_half = with_half_copies(program)
    if in_half is program or any(_full_memories(in_half, cluster)):
        return found[best]
    return min(found[best], placed((in_half, carries)), key=seconds)


def room_for_copies(graph: Graph) -> int:
    """The bytes that a plan leaves for leaves on their way to the device, which it does not place."""
    size = local_bytes(graph)
    leaves = set(graph.state)
    # A plan knows of values of forward that come back from the host: they count where they are read.
    arriving = [e.out for e in graph.eqns if is_copy(e) and e.ins[0] in leaves]
    return _AHEAD * max((size(v) for v in arriving if v.memory == "device"), default=0)


def _placed(graph: Graph, cluster: Cluster, allowed: int, carries: bool) -> Graph:
    """The program with its copies placed, with at most `allowed` bytes live; `carries` lets some go on after it."""
    # `_Placing` counts the bytes of the whole program, but programs of micro-batches may run instead, with more bytes
    # live: in the last one, the sums of gradients are live throughout. So the difference of the peaks is subtracted.
    may_use = max(_live_on_device(graph)) + allowed - memory(graph).peak
    for _ in range(_TRIALS):
        placed = _Placing(graph, cluster, may_use, carries).run()
        excess = memory(placed).peak - allowed
        if excess <= 0:
            return placed
        may_use -= excess
    return graph


def _in_sets(graph: Graph, allowed: int) -> Graph:
    """The program with leaves copied in sets, or one by one if sets need more bytes than are allowed."""
    in_sets = copied_when_needed(graph, _SET_BYTES)
    return in_sets if memory(in_sets).peak <= allowed else copied_when_needed(graph)


class HostIsFull(ValueError):
    """A step keeps more on the host than a rank may use there."""


def check_host_memory(graph: Graph, cluster: Cluster) -> None:
    """Check that a program keeps no more in the memory of the host, or another one, than a rank may use there.

    Raises: HostIsFull if it does.
    """
    for kind, peak in _full_memories(graph, cluster):
        capacity = cluster.tiers[kind].capacity
        has_leaves = any(v.memory == kind for v in graph.state)
        advice = "Choose fewer leaves with `where`" if has_leaves else f"Move less to the {kind}"
        ranks = more_ranks(graph, kind, peak, capacity)
        if ranks:
            advice += f", or shard the state over {ranks}"
        raise HostIsFull(
            f"offload: {graph.name} keeps {format_bytes(peak)} in the memory of the {kind}, and a rank has "
            f"{format_bytes(capacity)} there: zt.cluster(..., {kind}_memory={capacity:.0f}).\n{advice}."
        )


def _full_memories(graph: Graph, cluster: Cluster) -> Iterator[tuple[MemoryKind, int]]:
    """The memories in which a program keeps more than a rank may use there, and how much."""
    for kind, peak in memory(graph).other_peaks.items():
        if peak > cluster.tiers[kind].capacity:
            yield kind, peak


def copied_when_needed(graph: Graph, set_bytes: int = 0) -> Graph:
    """The program in which no copy is under way while compute runs, which needs the least memory.

    A copy to the device starts and is waited for right before its first reader; a copy to the host right after its
    value is computed and all readers of what it overwrites have run. Copies to the host write the state, so in a
    program that writes its state last, they follow everything that can fail. The leaves that updates read are copied in
    sets of `set_bytes`.
    """
    readers = users(graph)
    makers = producers(graph.eqns)
    positions = _unmoved(graph)
    departures, arrivals = _copies(graph)
    first_reader: dict[Eqn, int] = {}
    for e in arrivals:
        (wait,) = readers[e.out]
        indices = (positions[reader].anchor for reader in readers.get(wait.out, ()))
        first_reader[e] = min(indices, default=len(graph.eqns))
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    if set_bytes:
        begins, ends = _sets(graph, first_reader, set_bytes)

    # Right before the first reader, or the set of updates that it is in.
    for e, first in first_reader.items():
        (wait,) = readers[e.out]
        index = begins.get(first, first)
        positions[e] = _Position(index, _STARTS_BEFORE)
        positions[wait] = _Position(index, _WAITS_BEFORE)

    # Right after the value and all readers of what is overwritten, or the sets of updates that they are in.
    for e in departures:
        (wait,) = readers[e.out]
        earlier_eqns = [makers[v] for v in e.ins if v in makers]
        index = -1
        if "over" in e.kwargs:
            earlier_eqns += _waits_before_writing(e, readers)
            index = first_write(graph) - 1
        for earlier in earlier_eqns:
            anchor = positions[earlier].anchor
            index = max(index, ends.get(anchor, anchor))
        positions[e] = _Position(index, _STARTS_AFTER)
        positions[wait] = _Position(index, _WAITS_AFTER)
    return reordered(graph, positions.__getitem__)


def _unmoved(graph: Graph) -> dict[Eqn, _Position]:
    """The positions of the equations of a program if all stay."""
    return {e: _Position(i, _ITSELF) for i, e in enumerate(graph.eqns)}


def _sets(
    graph: Graph, first_reader: Mapping[Eqn, int], set_bytes: int
) -> tuple[dict[int, int], dict[int, int]]:
    """For each update, the first and the last update of its set, by index. Copies between updates do not separate them.

    Args:
        graph: the program.
        first_reader: for each copy to the device, the equation that reads it first.
        set_bytes: the most bytes that the updates of a set read from the host; one larger leaf is a set too.
    """
    size = local_bytes(graph)
    arriving: Counter[int] = Counter()
    for e, first in first_reader.items():
        arriving[first] += size(e.out)
    members: list[list[int]] = [[]]
    filled = 0
    for i, e in enumerate(graph.eqns):
        if rules(e).copies:
            continue
        is_update = may_change_places(e)
        if not is_update or filled + arriving[i] > set_bytes:
            members.append([])
            filled = 0
        if is_update:
            members[-1].append(i)
            filled += arriving[i]

    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for updates in members:
        for i in updates:
            begins[i] = updates[0]
            ends[i] = updates[-1]
    return begins, ends


def _waits_before_writing(e: Eqn, readers: Mapping[Var, Sequence[Eqn]]) -> list[Eqn]:
    """The waits for the other copies of the value that a copy to the host overwrites."""
    waits: list[Eqn] = []
    for copy in readers[e.kwargs["over"]]:
        if copy is not e:
            waits += readers[copy.out]
    return waits


def _copies(graph: Graph) -> tuple[list[Eqn], list[Eqn]]:
    """The copies that leave the device, and the copies that arrive there, in order."""
    copies = [e for e in graph.eqns if is_copy(e)]
    departures = [e for e in copies if e.out.memory != "device"]
    arrivals = [e for e in copies if e.out.memory == "device"]
    return departures, arrivals


def _around_updates(graph: Graph) -> tuple[list[int], list[int]]:
    """For each place, the places before and after the row of updates around it; itself if it is not between updates."""
    count = len(graph.eqns)
    is_update = [may_change_places(e) for e in graph.eqns]
    before = list(range(count + 1))
    after = list(range(count + 1))
    for k in range(1, count):
        if is_update[k - 1] and is_update[k]:
            before[k] = before[k - 1]
    for k in range(count - 1, 0, -1):
        if is_update[k - 1] and is_update[k]:
            after[k] = after[k + 1]
    return before, after


def _live_on_device(graph: Graph) -> list[int]:
    """The bytes that are live on the device at each equation."""
    return live_bytes(graph, by_memory(storages(graph, donation(graph)))["device"])


class _Placing:
    """Moves the starts and waits of copies apart, in a program that copies each value when it is needed.

    Attributes:
        position: the new position of each equation.
        time: when each equation and the end begin, if compute waits for no copy.
        live: the bytes that are live on the device at each equation; `limit` is the most that may be.
        carriable: the copies to the host that may be carried, each with its leaf.
        carried: the copies to the host that are carried, each with its leaf.
        arrives: for the leaf of each carried copy, the place of the next step at which the copy has ended.
    """

    def __init__(self, graph: Graph, cluster: Cluster, limit: int, carries: bool) -> None:
        self.graph = graph
        self.cluster = cluster
        self.limit = limit
        self.index = {e: i for i, e in enumerate(graph.eqns)}
        self.position = _unmoved(graph)
        self.readers = users(graph)
        self.makers = producers(graph.eqns)
        self.lifetimes = liveness(graph)
        self.bytes_of = local_bytes(graph)
        self.bytes_on_device = device_bytes(graph)
        collectives = [message for e, message, _ in messages(graph, cluster) if not is_copy(e)]
        self.time = play(equation_seconds(graph, cluster), collectives).start
        self.live = np.array(_live_on_device(graph), dtype=np.int64)
        self.before_updates, self.after_updates = _around_updates(graph)
        self.carriable = carriable_copies(graph) if carries else {}
        self.carried: dict[Eqn, Var] = {}
        self.arrives: dict[Var, int] = {}

    def run(self) -> Graph:
        """The program in the new order."""
        departures, arrivals = _copies(self.graph)
        for copies in grouped((lane(e), e) for e in departures).values():
            self._place_waits(copies)
        for copies in grouped((lane(e), e) for e in arrivals).values():
            self._place_starts(copies)
        # Not `reordered`: the wait for a carried copy stands before its start.
        in_order = sorted(self.graph.eqns, key=self.position.__getitem__)
        return carry_copies(self.graph.replace(eqns=tuple(in_order)), self.carried)

    def _seconds(self, e: Eqn) -> float:
        """The seconds of a copy."""
        return sum(self.cluster.tiers[other_memory(e)].copy_seconds(self.bytes_of(e.out)))

    def _place_waits(self, copies: list[Eqn]) -> None:
        """Wait for copies to the host where they have ended."""
        ends = self._ends(copies)
        count = self._count_of_carried(copies, ends)
        end = 0.0  # of the copies so far, in the next step
        for e in copies[len(copies) - count :]:
            end += self._seconds(e)
            self._carry(e, end)
        for e, end in zip(copies[: len(copies) - count], ends):
            (wait,) = self.readers[e.out]
            first = self.index[wait]
            readers = (self.index[reader] for reader in self.readers.get(wait.out, ()))
            latest = min(readers, default=len(self.live))
            place = min(bisect_left(self.time, end), latest)
            place = min(self.after_updates[place], latest)

            place = self._reserve_until(self._first_after(e), place, self.bytes_on_device(e.ins[0]))
            index = max(self.before_updates[place], first)
            self.position[wait] = _Position(index, _EARLIER_WAITS)

    def _ends(self, copies: list[Eqn]) -> list[float]:
        """When each copy to the host ends."""
        ends = []
        end = 0.0
        for e in copies:
            (wait,) = self.readers[e.out]
            end = max(end, self.time[self.index[wait]]) + self._seconds(e)
            ends.append(end)
        return ends

    def _count_of_carried(self, copies: list[Eqn], ends: Sequence[float]) -> int:
        """How many copies are carried: the last ones of the queue that outlast the step, and have room until its end.

        An earlier copy has ended before the last one that the step waits for.
        """
        room = self.limit - self.live
        count = 0
        for e, end in zip(reversed(copies), reversed(ends)):
            if e not in self.carriable or end <= self.time[-1]:
                break
            size = self.bytes_on_device(e.ins[0])
            first = self._first_after(e)
            if room[0] < size or (room[first:] < size).any():
                break
            room[first:] -= size
            room[0] -= size
            count += 1
        return count

    def _carry(self, e: Eqn, end: float) -> None:
        """Carry a copy that ends at time `end` of the next step, while there is room."""
        (wait,) = self.readers[e.out]
        leaf = self.carriable[e]
        size = self.bytes_on_device(e.ins[0])
        self.live[self._first_after(e) :] += size
        latest = min(self.index[reader] for reader in self.readers[leaf])
        place = self._reserve_until(0, min(bisect_left(self.time, end), latest), size)
        self.position[wait] = _Position(place, _EARLIER_WAITS)
        self.carried[e] = leaf
        self.arrives[leaf] = place

    def _first_after(self, e: Eqn) -> int:
        """The place from which only a copy to the host, and no equation, needs the storage of its source."""
        (wait,) = self.readers[e.out]
        return max(self.index[wait], self._needed_until(e.ins[0]))

    def _needed_until(self, v: Var) -> int:
        """The place until which the program needs the storage of a value."""
        return min(self.lifetimes.last[self.lifetimes.root[v]] + 1, len(self.live))

    def _place_starts(self, copies: list[Eqn]) -> None:
        """Start copies to the device so that they have ended where they are needed."""
        begin = float("inf")  # of the copies so far, from the last one back
        begins: dict[Eqn, float] = {}
        for e in reversed(copies):
            needed = self.time[self.index[e]]
            begin = min(begin, needed) - self._seconds(e) - self.cluster.device.kernel_gap
            begins[e] = begin
        # Room goes to the copies that are needed first, because no copy starts before one that is needed earlier.
        latest = 0
        for e in copies:
            index = self.index[e]
            exists = self._exists(e.ins[0])
            place = max(bisect_right(self.time, begins[e]) - 1, exists)
            place = max(self.before_updates[place], exists, latest)
            place = self._reserve_from(place, index, self.bytes_on_device(e.out))
            latest = max(latest, min(self.after_updates[place], index))
            self.position[e] = _Position(latest, _STARTS_BEFORE)

    def _exists(self, host_value: Var) -> int:
        """The first place at which a value on the host can be read."""
        if host_value in self.makers:
            return self.position[self.makers[host_value]].anchor
        return self.arrives.get(host_value, 0)

    def _reserve_until(self, first: int, end: int, size: int) -> int:
        """Reserve `size` bytes from equation `first` to place `end`, or while there is room. Return where they end."""
        full = np.flatnonzero(self.live[first:end] + size > self.limit)
        end = first + int(full[0]) if len(full) else max(first, end)
        self.live[first:end] += size
        return end

    def _reserve_from(self, begin: int, index: int, size: int) -> int:
        """Reserve `size` bytes up to equation `index`, from `begin` or once there is room. Return where they begin."""
        begin = min(begin, index)
        full = np.flatnonzero(self.live[begin:index] + size > self.limit)
        begin += int(full[-1]) + 1 if len(full) else 0
        self.live[begin:index] += size
        return begin
