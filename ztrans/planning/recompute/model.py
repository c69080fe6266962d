"""model: the live bytes and the seconds of a program, for every choice of what backward repeats or finds on the host.

A computation is an equation of forward that depends on the batch. If it is repeated, backward runs it again right
before backward first needs one of its results, and its results are not live in between. Or its results wait on the
host, and return before backward first needs them:

    kept         live from its birth to the last use in forward or backward
    recomputed   live from its birth to the last use in forward, and from the first use in backward to the last one
    on the host  live from its birth until it has left, and from the start of its return to the last use in backward

What a repeated computation reads is needed at the place where it runs again. So it lives longer if it is kept, and is
recomputed or returns earlier if it is not. Values that depend on the state alone weigh nothing here: parameters and
their casts are there in backward anyway, or are gathered for it. Views are repeated with the storages that they show.

The bytes are those of the program in which nothing is recomputed or moved, as planning counts them (see `buffers`), and
the differences from there. Places are its operations, by number.
"""

from __future__ import annotations

import functools
import heapq
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...ir.graph import Eqn, Graph, Var, producers
from ...ir.liveness import liveness
from ...ir.recompute import repeatable
from ...ir.varying import varying
from ..buffers import local_bytes
from .absences import Absence, Copied, HostLink, Stay, absences

NEVER = sys.maxsize  # a place that is in no program


class Value(NamedTuple):
    """A storage that forward allocates: where it is used, and whether backward may recompute it."""

    var: Var
    bytes: int
    maker: int  # the computation that allocates it, by index
    forward: int  # the last place before backward that needs it
    first: int  # the first place in backward that needs it, or `NEVER`
    last: int  # the last place in backward that needs it, or -1
    may_go: bool  # it need not be kept from forward
    born: int = 0  # the place of its computation
    may_wait: bool = False  # it may wait for backward on the host


class Computation(NamedTuple):
    """An equation of forward, with what it reads and what it allocates, by index."""

    eqn: Eqn
    seconds: float
    args: tuple[int, ...]
    results: tuple[int, ...]
    droppable: tuple[int, ...]  # the results that need not be kept, if it may run again
    movable: tuple[int, ...] = ()  # the results that may wait for backward on the host


@dataclass(frozen=True, eq=False)
class Model:
    """The computations and values of a program, and its live bytes.

    Attributes:
        values, computations: in order.
        readers: for each value, the computations that read it.
        live: by operation, the live bytes if nothing is recomputed or moved.
        link: to the host, if values may wait there.
    """

    values: tuple[Value, ...]
    computations: tuple[Computation, ...]
    readers: tuple[tuple[int, ...], ...]
    live: np.ndarray
    link: HostLink | None = None

    @functools.cached_property
    def forced(self) -> tuple[int, ...]:
        """The computations that a checkpoint of the step, or the user, wants to run again."""
        wanted = enumerate(self.computations)
        return tuple(i for i, c in wanted if c.eqn.demand == "recompute" and c.droppable)


class Places(NamedTuple):
    """The places at which a program needs the storages of forward, by the names of their first values."""

    born: dict[str, int]
    forward: dict[str, int]
    first: dict[str, int]
    last: dict[str, int]
    bytes: dict[str, int]


def places_of(graph: Graph, operations: Sequence[Eqn]) -> Places:
    """Where the operations of a program, by number, need its storages."""
    root = liveness(graph).root
    size = local_bytes(graph)
    places = Places({}, {}, {}, {}, {})
    for place, e in enumerate(operations):
        for v in (*e.ins, *e.results):
            name = root[v].name
            if e.region == "backward":
                places.first.setdefault(name, place)
                places.last[name] = place
            else:
                places.born.setdefault(name, place)
                places.forward[name] = place
        places.bytes.update((v.name, size(v)) for v in e.results)
    return places


def model_of(
    graph: Graph,
    seconds: Callable[[Eqn], float],
    places: Places,
    live: np.ndarray,
    at_least: int | None,
    link: HostLink | None = None,
    movable: Collection[str] = (),
) -> Model:
    """The model of a program.

    Args:
        graph: the program before it is sharded, in which backward recomputes nothing.
        seconds: how long an equation of it takes.
        places: where the program of one rank needs the storages of `graph`.
        live: by operation, the live bytes of the program of one rank.
        at_least: the least size of a value that is recomputed, unless the user demands it. If it is None, none is.
        link: to the host.
        movable: the names of the values that may wait there.
    """
    root = liveness(graph).root
    over_batch = varying(graph, ("batch",))
    views = _views_for_backward(graph)
    may_go = set() if at_least is None else _may_go(graph, places, at_least)
    number: dict[Var, int] = {}
    values: list[Value] = []
    computations: list[Computation] = []
    for e in graph.eqns:
        allocated = [v for v in e.results if root[v] is v and v in over_batch]
        if e.region != "forward" or not allocated:
            continue
        args = tuple(dict.fromkeys(number[root[v]] for v in e.ins if root[v] in number))
        results = range(len(values), len(values) + len(allocated))
        number.update(zip(allocated, results))
        for v in allocated:
            values.append(_value(v, len(computations), places, v in may_go, v.name in movable))
        total = seconds(e) + sum(map(seconds, views.get(e, ())))
        computations.append(_computation(e, total, args, results, values))
    return Model(tuple(values), tuple(computations), _readers(values, computations), live, link)


def _may_go(graph: Graph, places: Places, at_least: int) -> set[Var]:
    """The values that need not be kept from forward: large ones, and those that the user wants to recompute."""
    chosen = set()
    for v, e in repeatable(graph).items():
        is_large = places.bytes.get(v.name, 0) >= at_least
        is_wanted = e.demand == "recompute" or (e.demand is None and is_large)
        if is_wanted and v.name in places.bytes:
            chosen.add(v)
    return chosen


def _readers(
    values: Sequence[Value], computations: Sequence[Computation]
) -> tuple[tuple[int, ...], ...]:
    """For each value, the computations that read it."""
    readers: list[list[int]] = [[] for _ in values]
    for i, computation in enumerate(computations):
        for v in computation.args:
            readers[v].append(i)
    return tuple(map(tuple, readers))


def _views_for_backward(graph: Graph) -> dict[Eqn, list[Eqn]]:
    """For each equation of forward, the views of its results that backward reads, which run again with it."""
    root = liveness(graph).root
    makers = producers(graph.eqns)
    read = {v for e in graph.eqns if e.region == "backward" for v in e.ins}
    views: dict[Eqn, list[Eqn]] = {}
    for e in graph.eqns:
        if e.region == "forward" and any(v in read and root[v] is not v for v in e.results):
            maker = makers.get(root[e.results[0]])
            if maker is not None and maker is not e:
                views.setdefault(maker, []).append(e)
    return views


def _computation(
    e: Eqn, seconds: float, args: tuple[int, ...], results: range, values: Sequence[Value]
) -> Computation:
    droppable = tuple(v for v in results if values[v].may_go)
    movable = tuple(v for v in results if values[v].may_wait)
    return Computation(e, seconds, args, tuple(results), droppable, movable)


def _value(v: Var, maker: int, places: Places, may_go: bool, may_wait: bool) -> Value:
    return Value(
        v,
        places.bytes.get(v.name, 0),
        maker,
        places.forward.get(v.name, 0),
        places.first.get(v.name, NEVER),
        places.last.get(v.name, -1),
        may_go,
        places.born.get(v.name, 0),
        may_wait,
    )


Hosts = Mapping[int, Copied | None]  # how results of computations are copied, or None if they stay
_NO_CHANGE: Hosts = {}


class Move(NamedTuple):
    """What changes if computations join or leave those that are repeated, or those whose results wait on the host."""

    repeats: Mapping[int, bool]  # for each of these computations, whether it is repeated
    hosts: Hosts
    runs_at: Mapping[int, int]  # where computations run again, or `NEVER`
    first: Mapping[int, int]  # where values are needed in backward
    last: Mapping[int, int]
    absent: Mapping[int, Absence]  # when values on the host are away, of all such values
    spans: tuple[tuple[int, int, int], ...]  # bytes more, from a place to a place, both included
    seconds: float  # of compute in addition
    stalls: float  # seconds in addition for which compute waits for copies

    @property
    def price(self) -> float:
        return self.seconds + self.stalls


class Residency:
    """Which computations are repeated, whose results wait on the host, and what follows: places, bytes and seconds.

    Attributes:
        repeated: the computations that backward runs again, where one of their results is needed.
        on_host: those whose results wait on the host, and how these are copied. They are not repeated.
        absent: for each value on the host that backward needs, when it is not on the device.
        runs_at: for each computation, the place where it runs again, or `NEVER`.
        first, last: for each value, the first and the last place in backward that needs it.
        live: by operation, the live bytes.
        seconds: of all that is computed again, and of the calls that start copies.
        stalls: seconds for which compute waits for copies.
    """

    def __init__(
        self, model: Model, repeated: Collection[int] = (), on_host: Hosts = _NO_CHANGE
    ) -> None:
        self.model = model
        self.repeated: set[int] = set()
        self.on_host: dict[int, Copied] = {}
        self.absent: Mapping[int, Absence] = {}
        self.runs_at = [NEVER for _ in model.computations]
        self.first = [v.first for v in model.values]
        self.last = [v.last for v in model.values]
        self.live = model.live.copy()
        self.seconds = 0.0
        self.stalls = 0.0
        if repeated or on_host:
            self.apply(self.move(dict.fromkeys(repeated, True), on_host))

    @property
    def peak(self) -> int:
        return int(self.live.max(initial=0))

    def recomputed(self) -> list[int]:
        """The values that backward computes again."""
        values: list[int] = []
        for i in sorted(self.repeated):
            if self.runs_at[i] != NEVER:
                values += self.model.computations[i].droppable
        return values

    def waiting(self) -> list[int]:
        """The values that wait on the host for backward."""
        return sorted(self.absent)

    @property
    def price(self) -> float:
        """The seconds that the step takes in addition, as far as the model knows."""
        return self.seconds + self.stalls

    def move(self, repeats: Mapping[int, bool], hosts: Hosts = _NO_CHANGE) -> Move:
        """What changes if computations join or leave those that are repeated, or whose results wait on the host."""
        model = self.model
        runs_at: dict[int, int] = {}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        # Later computations first: they say where earlier ones must run again.
        waiting = [-i for i in repeats]
        heapq.heapify(waiting)
        queued = set(repeats)
        seconds = 0.0
        while waiting:
            i = -heapq.heappop(waiting)
            computation = model.computations[i]
            place = NEVER
            if repeats.get(i, i in self.repeated):
                place = min(first.get(v, self.first[v]) for v in computation.droppable)
            if place == self.runs_at[i]:
                continue
            runs_at[i] = place
            seconds += computation.seconds * ((place != NEVER) - (self.runs_at[i] != NEVER))
            for v in computation.args:
                self._needed(v, runs_at, first, last)
                maker = model.values[v].maker
                if v in first and maker not in queued and maker in self.repeated:
                    queued.add(maker)
                    heapq.heappush(waiting, -maker)
        absent, stalls = self._absences(hosts, first)
        seconds += self._call_seconds(absent) - self._call_seconds(self.absent)
        spans = self._spans(repeats, first, last, absent)
        more = stalls - self.stalls
        return Move(repeats, hosts, runs_at, first, last, absent, spans, seconds, more)

    @property
    def _link(self) -> HostLink:
        if self.model.link is None:
            raise ValueError("a value can wait on the host only if the model knows a link to it")
        return self.model.link

    def _call_seconds(self, absent: Mapping[int, Absence]) -> float:
        """The seconds of the calls that start both copies of values."""
        return 2 * self._link.call * len(absent) if absent else 0.0

    def _absences(
        self, hosts: Hosts, first: Mapping[int, int]
    ) -> tuple[Mapping[int, Absence], float]:
        """When the values on the host are away, and the seconds for which compute waits for their copies."""
        if not hosts and not (self.on_host and first):
            return self.absent, self.stalls
        stays: list[Stay] = []
        stalls = 0.0
        for i, copied in {**self.on_host, **hosts}.items():
            if copied is None:
                continue
            for v in self.model.computations[i].movable:
                value = self.model.values[v]
                place = first.get(v, self.first[v])
                if place == NEVER:
                    continue
                stays.append(Stay(v, value.bytes, value.born, value.forward, place, copied))
                if copied == "exposed":
                    stalls += 2 * self._link.seconds(value.bytes)
        return absences(self._link, stays), stalls

    def _needed(
        self, v: int, runs_at: Mapping[int, int], first: dict[int, int], last: dict[int, int]
    ) -> None:
        """Note where backward needs a value if computations run again elsewhere."""
        value = self.model.values[v]
        earliest = value.first
        latest = value.last
        for reader in self.model.readers[v]:
            place = runs_at.get(reader, self.runs_at[reader])
            if place != NEVER:
                earliest = min(earliest, place)
                latest = max(latest, place)
        if earliest != self.first[v] or v in first:
            first[v] = earliest
        if latest != self.last[v] or v in last:
            last[v] = latest

    def _spans(
        self,
        repeats: Mapping[int, bool],
        first: Mapping[int, int],
        last: Mapping[int, int],
        absent: Mapping[int, Absence],
    ) -> tuple[tuple[int, int, int], ...]:
        model = self.model
        changed = {*first, *last}
        if absent is not self.absent:
            changed.update(
                v for v in {*absent, *self.absent} if absent.get(v) != self.absent.get(v)
            )
        for i in repeats:
            changed.update(model.computations[i].droppable)
        spans: list[tuple[int, int, int]] = []
        for v in sorted(changed):
            value = model.values[v]
            was_repeated = value.maker in self.repeated
            is_repeated = repeats.get(value.maker, was_repeated)
            before = _live_after_forward(
                value, was_repeated, self.first[v], self.last[v], self.absent.get(v)
            )
            after = _live_after_forward(
                value,
                is_repeated,
                first.get(v, self.first[v]),
                last.get(v, self.last[v]),
                absent.get(v),
            )
            if before != after:
                spans += [(-value.bytes, a, b) for a, b in before]
                spans += [(value.bytes, a, b) for a, b in after]
        return tuple(spans)

    def apply(self, move: Move) -> None:
        """Make a move."""
        for i, is_repeated in move.repeats.items():
            if is_repeated:
                self.repeated.add(i)
            else:
                self.repeated.discard(i)
        for i, copied in move.hosts.items():
            self.on_host.pop(i, None)
            if copied:
                self.on_host[i] = copied
        self.absent = move.absent
        for i, place in move.runs_at.items():
            self.runs_at[i] = place
        for v, place in move.first.items():
            self.first[v] = place
        for v, place in move.last.items():
            self.last[v] = place
        for size, a, b in move.spans:
            self.live[a : b + 1] += size
        self.seconds += move.seconds
        self.stalls += move.stalls

    def window(self, move: Move) -> tuple[np.ndarray, np.ndarray]:
        """The live bytes before and after a move, where it changes them."""
        begin = min((a for _, a, _ in move.spans), default=0)
        end = max((b for _, _, b in move.spans), default=-1) + 1
        before = self.live[begin:end]
        after = before.copy()
        for size, a, b in move.spans:
            after[a - begin : b + 1 - begin] += size
        return before, after


def _live_after_forward(
    value: Value, is_repeated: bool, first: int, last: int, absent: Absence | None
) -> Iterable[tuple[int, int]]:
    """When a value is live besides the time up to its last use in forward, as a list of at most two spans."""
    if absent is not None and absent[0] <= absent[1]:
        left, returns = absent
        spans = (value.forward + 1, left - 1), (returns + 1, last)
        return [(begin, end) for begin, end in spans if begin <= end]
    begin = first if is_repeated and value.may_go else value.forward + 1
    return [(begin, last)] if begin <= last else []
