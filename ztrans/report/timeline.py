"""When everything ran on one rank, simulated or measured.

One lane shows compute, and each communicator has a lane. Communication is exposed while compute waits for it. A curve
below the lanes shows the live memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..ir.printer import format_seconds
from . import figure, page, perfetto
from .event import COMPUTE, Curve, Event
from .table import compared, table


class _Shown:
    """One timeline or two, which can be printed, drawn, and opened in Perfetto."""

    @property
    def _timelines(self) -> tuple[Timeline, ...]:
        raise NotImplementedError

    def save(self, path: str | PathLike) -> None:
        """Save a drawing: `.html` is an interactive page in one file; `.png`, `.svg` and `.pdf` are pictures.

        Raises:
            ValueError: the path has another ending.
            ImportError: matplotlib, which pictures need, is not installed.
        """
        ending = Path(path).suffix
        if ending == ".html":
            page.save(self._timelines, path)
        elif ending in figure.ENDINGS:
            figure.save(self._timelines, path)
        else:
            endings = ", ".join([".html", *figure.ENDINGS])
            raise ValueError(f"save: {str(path)!r} ends in none of {endings}.")

    def to_perfetto(self, path: str | PathLike) -> None:
        """Save a trace, JSON in the Chrome format, for ui.perfetto.dev or chrome://tracing."""
        perfetto.save(self._timelines, path)

    def _repr_html_(self) -> str:
        return page.frame(self._timelines)


@dataclass(frozen=True, repr=False)
class Timeline(_Shown):
    """One step as bars on lanes, and the bytes that it has live.

    Attributes:
        memory, host_memory: the live bytes of the device, and those of the host, to which values are moved.
        bound: the lower bound in seconds, and what causes it, if they are known.
        limit: the bytes that may be live on the device, if there is a limit.
    """

    name: str
    seconds: float
    events: tuple[Event, ...]
    memory: Curve
    bound: tuple[float, str] | None = None
    host_memory: Curve = ()
    limit: int | None = None

    @property
    def lanes(self) -> list[str]:
        """Compute first, then the communicators in order of first use."""
        in_time = sorted(self.events, key=lambda event: event.start)
        return list(dict.fromkeys([COMPUTE, *(event.lane for event in in_time)]))

    def busy(self, lane: str) -> float:
        """The seconds in which a lane is busy."""
        return sum(event.seconds for event in self.events if event.lane == lane)

    @property
    def compute(self) -> float:
        """The seconds in which compute is busy."""
        return self.busy(COMPUTE)

    @property
    def stalled(self) -> float:
        """The seconds in which compute waits for communication."""
        return sum(event.stall for event in self.events)

    @functools.cached_property
    def peak(self) -> int:
        """The most bytes that are live on the device."""
        return max((live for _, live in self.memory), default=0)

    @property
    def peak_time(self) -> float:
        """When that many are first live."""
        return max(self.memory, key=lambda point: point[1], default=(0.0, 0))[0]

    @property
    def host_peak(self) -> int:
        """The most bytes that are live on the host."""
        return max((live for _, live in self.host_memory), default=0)

    @property
    def exposed(self) -> dict[tuple[str, str], float]:
        """The seconds in which compute waits for communication, by (axis, role)."""
        stalls: defaultdict[tuple[str, str], float] = defaultdict(float)
        for event in self.events:
            provenance = event.eqn.provenance
            if event.lane != COMPUTE and provenance is not None:
                stalls[provenance.axis, provenance.role] += event.stall
            elif event.stall:
                stalls[event.lane, "user"] += event.stall
        return dict(sorted(stalls.items()))

    def compare(self, second: Timeline) -> Comparison:
        """Compare this timeline with another one of the same program, as one simulated and one measured."""
        return Comparison(self, second)

    @property
    def _timelines(self) -> tuple[Timeline, ...]:
        return (self,)

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        return f"Timeline({self.name!r}, {format_seconds(self.seconds)}, {len(self.events)} events)"


def one_by_one(name: str, timelines: Sequence[Timeline]) -> Timeline:
    """The timelines of programs that run one after the other, as one timeline."""
    begin = 0.0
    events: list[Event] = []
    memory: list[tuple[float, int]] = []
    host_memory: list[tuple[float, int]] = []
    for each in timelines:
        events += (dataclasses.replace(e, start=e.start + begin) for e in each.events)
        memory += ((time + begin, live) for time, live in each.memory)
        host_memory += ((time + begin, live) for time, live in each.host_memory)
        begin += each.seconds
    limit = next((each.limit for each in timelines), None)
    return Timeline(
        name, begin, tuple(events), tuple(memory), host_memory=tuple(host_memory), limit=limit
    )


@dataclass(frozen=True, repr=False)
class Comparison(_Shown):
    """Two timelines of one program, which print row by row with ratios, and are drawn one beneath the other."""

    first: Timeline
    second: Timeline

    @property
    def _timelines(self) -> tuple[Timeline, ...]:
        return (self.first, self.second)

    def __str__(self) -> str:
        return compared(self.first, self.second)

    def __repr__(self) -> str:
        return f"Comparison({self.first!r}, {self.second!r})"
