"""A choice of what backward repeats and what waits on the host, with its places, bytes and seconds.

A residency changes in small steps, and a search weighs thousands of them. So a `ResidencyChange` has only the
differences: bytes from one place to another, and seconds. It is computed without copying the residency, and applied
only if the search accepts it. Several changes have the same result as one change to the same choice.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from .absences import Absence, Copied, HostLink, Stay, absences
from .model import NOWHERE, Model, Value

# By computation, how its results are copied to the host and back. None keeps them on the device.
HostMoves = Mapping[int, Copied | None]
_NO_HOST_MOVES: HostMoves = {}


class ResidencyChange(NamedTuple):
    """The differences in a residency if some computations are repeated or not, or their results move or stay.

    Attributes:
        repeats: for each computation that changes, whether it is repeated.
        host_moves: by computation, how its results are copied to the host and back. None keeps them on the device.
        runs_at: by computation, the new place where it runs again, or `NOWHERE`.
        first, last: by value, the new first and last place in backward that needs it.
        absent: the absences of all values on the host, changed or not.
        spans: additional bytes, each with its first and its last place.
        seconds: additional seconds of compute.
        stalls: additional seconds that compute waits for copies.
    """

    repeats: Mapping[int, bool]
    host_moves: HostMoves
    runs_at: Mapping[int, int]
    first: Mapping[int, int]
    last: Mapping[int, int]
    absent: Mapping[int, Absence]
    spans: tuple[tuple[int, int, int], ...]
    seconds: float
    stalls: float

    @property
    def price(self) -> float:
        """The additional seconds of the step."""
        return self.seconds + self.stalls


class Residency:
    """The computations that are repeated and the results that wait on the host, with their places, bytes and seconds.

    Attributes:
        repeated: the computations that backward runs again, where one of their results is needed.
        on_host: the computations whose results wait on the host, and how these are copied. They are not repeated.
        absent: the absence of each value on the host that backward needs.
        runs_at: for each computation, the place where it runs again, or `NOWHERE`.
        first, last: for each value, the first and the last place in backward that needs it.
        live: by operation, the live bytes.
        seconds: the seconds of all repeated computations, and of the calls that start copies.
        stalls: the seconds that compute waits for copies.
    """

    def __init__(self, model: Model, repeated: Collection[int] = ()) -> None:
        self.model = model
        self.repeated: set[int] = set()
        self.on_host: dict[int, Copied] = {}
        self.absent: Mapping[int, Absence] = {}
        self.runs_at = [NOWHERE for _ in model.computations]
        self.first = [v.use.first for v in model.values]
        self.last = [v.use.last for v in model.values]
        self.live = model.live.copy()
        self.seconds = 0.0
        self.stalls = 0.0
        if repeated:
            self.apply(self.change(dict.fromkeys(repeated, True)))

    @property
    def peak(self) -> int:
        return int(self.live.max(initial=0))

    def recomputed(self) -> list[int]:
        """The values that backward recomputes."""
        values: list[int] = []
        for i in sorted(self.repeated):
            if self.runs_at[i] != NOWHERE:
                values += self.model.computations[i].droppable
        return values

    def waiting(self) -> list[int]:
        """The values that wait on the host for backward."""
        return sorted(self.absent)

    @property
    def chosen_values(self) -> tuple[frozenset[int], frozenset[int]]:
        """The values that backward recomputes, and the values that wait on the host."""
        return frozenset(self.recomputed()), frozenset(self.waiting())

    @property
    def price(self) -> float:
        """The additional seconds of the step, as far as the model knows."""
        return self.seconds + self.stalls

    def change(
        self, repeats: Mapping[int, bool], host_moves: HostMoves = _NO_HOST_MOVES
    ) -> ResidencyChange:
        """The differences if some computations are repeated or not, or their results move or stay.

        Args:
            repeats: for each computation that changes, whether it is repeated.
            host_moves: by computation, how its results are copied to the host and back. None keeps them on the device.
        """
        model = self.model
        runs_at: dict[int, int] = {}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        seconds = 0.0
        # Later computations first: they determine where earlier ones must run again.
        queue = [-i for i in repeats]
        heapq.heapify(queue)
        queued = set(repeats)
        while queue:
            i = -heapq.heappop(queue)
            computation = model.computations[i]
            # It runs right before the first of its results is needed. If none is needed, it does not run.
            place = NOWHERE
            if repeats.get(i, i in self.repeated):
                place = min(first.get(v, self.first[v]) for v in computation.droppable)
            if place == self.runs_at[i]:
                continue

            runs_at[i] = place
            # It runs once more, once less, or as often as before at another place.
            seconds += computation.seconds * ((place != NOWHERE) - (self.runs_at[i] != NOWHERE))
            for v in computation.args:
                self._update_needs(v, runs_at, first, last)
                maker = model.values[v].maker
                if v in first and maker not in queued and maker in self.repeated:
                    queued.add(maker)
                    heapq.heappush(queue, -maker)

        absent, stalls = self._absences(host_moves, first)
        seconds += self._call_seconds(absent) - self._call_seconds(self.absent)
        spans = self._spans(repeats, first, last, absent)
        additional_stalls = stalls - self.stalls
        return ResidencyChange(
            repeats, host_moves, runs_at, first, last, absent, spans, seconds, additional_stalls
        )

    @property
    def _link(self) -> HostLink:
        if self.model.link is None:
            raise ValueError("a value can wait on the host only if the model knows a link to it")
        return self.model.link

    def _call_seconds(self, absent: Mapping[int, Absence]) -> float:
        """The seconds of the calls that start both copies of each value."""
        return 2 * self._link.call * len(absent) if absent else 0.0

    def _absences(
        self, host_moves: HostMoves, first: Mapping[int, int]
    ) -> tuple[Mapping[int, Absence], float]:
        """The absences of the values on the host, and the seconds that compute waits for their copies."""
        # All copies share the two lanes, so a value that is needed at another place may change every absence.
        if not host_moves and not (self.on_host and first):
            return self.absent, self.stalls
        stays: list[Stay] = []
        stalls = 0.0
        for i, copied in {**self.on_host, **host_moves}.items():
            if copied is None:
                continue
            for v in self.model.computations[i].movable:
                use = self.model.values[v].use
                place = first.get(v, self.first[v])
                if place == NOWHERE:
                    continue
                stays.append(Stay(v, use.bytes, use.born, use.forward, place, copied))
                if copied == "exposed":
                    stalls += 2 * self._link.seconds(use.bytes)
        return absences(self._link, stays), stalls

    def _update_needs(
        self, v: int, runs_at: Mapping[int, int], first: dict[int, int], last: dict[int, int]
    ) -> None:
        """Write to `first` and `last` where backward needs a value, if computations run again at `runs_at`."""
        earliest = self.model.values[v].use.first
        latest = self.model.values[v].use.last
        for reader in self.model.readers[v]:
            place = runs_at.get(reader, self.runs_at[reader])
            if place != NOWHERE:
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
        """The differences in live bytes, as spans of places: negative for bytes that are no longer live."""
        model = self.model
        changed = {*first, *last}
        if absent is not self.absent:
            for v in {*absent, *self.absent}:
                if absent.get(v) != self.absent.get(v):
                    changed.add(v)
        for i in repeats:
            changed.update(model.computations[i].droppable)

        spans: list[tuple[int, int, int]] = []
        for v in sorted(changed):
            value = model.values[v]
            was_repeated = value.maker in self.repeated
            is_repeated = repeats.get(value.maker, was_repeated)
            old_first = self.first[v]
            old_last = self.last[v]
            new_first = first.get(v, old_first)
            new_last = last.get(v, old_last)
            before = _live_after_forward(
                value, was_repeated, old_first, old_last, self.absent.get(v)
            )
            after = _live_after_forward(value, is_repeated, new_first, new_last, absent.get(v))
            # Where the old spans and the new ones overlap, the bytes cancel out.
            if before != after:
                spans += [(-value.use.bytes, begin, end) for begin, end in before]
                spans += [(value.use.bytes, begin, end) for begin, end in after]
        return tuple(spans)

    def apply(self, change: ResidencyChange) -> None:
        """Apply a change."""
        for i, is_repeated in change.repeats.items():
            if is_repeated:
                self.repeated.add(i)
            else:
                self.repeated.discard(i)
        for i, copied in change.host_moves.items():
            self.on_host.pop(i, None)
            if copied:
                self.on_host[i] = copied
        self.absent = change.absent
        for i, place in change.runs_at.items():
            self.runs_at[i] = place
        for v, place in change.first.items():
            self.first[v] = place
        for v, place in change.last.items():
            self.last[v] = place
        for size, begin, end in change.spans:
            self.live[begin : end + 1] += size
        self.seconds += change.seconds
        self.stalls += change.stalls

    def window(self, change: ResidencyChange) -> tuple[np.ndarray, np.ndarray]:
        """The live bytes before and after a change, from the first place where it changes them to the last."""
        window_begin = min((begin for _, begin, _ in change.spans), default=0)
        window_end = max((end for _, _, end in change.spans), default=-1) + 1
        before = self.live[window_begin:window_end]
        after = before.copy()
        for size, begin, end in change.spans:
            after[begin - window_begin : end + 1 - window_begin] += size
        return before, after


def _live_after_forward(
    value: Value, is_repeated: bool, first: int, last: int, absent: Absence | None
) -> list[tuple[int, int]]:
    """The spans of places where a value is live after its last use in forward: at most two."""
    if absent is not None and absent[0] <= absent[1]:
        left, returns = absent
        spans = (value.use.forward + 1, left - 1), (returns + 1, last)
        return [(begin, end) for begin, end in spans if begin <= end]
    begin = value.use.forward + 1
    if is_repeated and value.droppable:
        begin = first
    return [(begin, last)] if begin <= last else []
