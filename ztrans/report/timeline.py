"""Timelines of one rank's step, simulated or measured.

One lane shows compute, and each communicator has a lane. Communication is exposed while compute waits for it. A curve
below the lanes shows the live memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..ir.graph import MemoryKind
from ..ir.printer import format_seconds
from . import figure, page, perfetto
from .event import COMPUTE, Curve, Event, most_bytes
from .table import compared, table


class _Drawable:
    """One timeline or two, to be saved as a drawing or a trace, or shown in a notebook."""

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
            raise ValueError(f"save: {str(path)!r} does not end in one of {endings}.")

    def to_perfetto(self, path: str | PathLike) -> None:
        """Save a trace, JSON in the Chrome format, for ui.perfetto.dev or chrome://tracing."""
        perfetto.save(self._timelines, path)

    def _repr_html_(self) -> str:
        return page.frame(self._timelines)


@dataclass(frozen=True, repr=False)
class Timeline(_Drawable):
    """One step as bars on lanes, with its live bytes over time.

    Attributes:
        memory: the live bytes of the device.
        bound: the lower bound in seconds, and its cause, if they are known.
        other_memories: the live bytes of each other memory, such as the host, where values are moved to.
        limit: the most bytes that may be live on the device, if there is a limit.
    """

    name: str
    seconds: float
    events: tuple[Event, ...]
    memory: Curve
    bound: tuple[float, str] | None = None
    other_memories: Mapping[MemoryKind, Curve] = dataclasses.field(default_factory=dict)
    limit: int | None = None

    @property
    def lanes(self) -> list[str]:
        """Compute first, then the communicators in order of first use."""
        in_time = sorted(self.events, key=lambda event: event.start)
        return list(dict.fromkeys([COMPUTE, *(event.lane for event in in_time)]))

    def busy(self, lane: str) -> float:
        """The busy seconds of a lane."""
        return sum(event.seconds for event in self.events if event.lane == lane)

    @property
    def compute(self) -> float:
        """The busy seconds of compute."""
        return self.busy(COMPUTE)

    @property
    def stalled(self) -> float:
        """The seconds that compute waits for communication."""
        return sum(event.stall for event in self.events)

    @functools.cached_property
    def peak(self) -> int:
        """The most bytes that are live on the device."""
        return most_bytes(self.memory)

    @property
    def peak_time(self) -> float:
        """The time at which the peak is first reached."""
        return max(self.memory, key=lambda point: point[1], default=(0.0, 0))[0]

    @property
    def curves(self) -> dict[MemoryKind, Curve]:
        """The live bytes of each memory, the device first."""
        return {"device": self.memory, **self.other_memories}

    @property
    def peaks(self) -> dict[MemoryKind, int]:
        """The most bytes that are live in each memory, the device first."""
        return {kind: most_bytes(curve) for kind, curve in self.curves.items()}

    @property
    def host_peak(self) -> int:
        """The most bytes that are live on the host."""
        return self.peaks.get("host", 0)

    @property
    def exposed(self) -> dict[tuple[str, str], float]:
        """The seconds that compute waits for communication, by (axis, role)."""
        stalls: defaultdict[tuple[str, str], float] = defaultdict(float)
        for event in self.events:
            provenance = event.eqn.provenance
            if event.lane != COMPUTE and provenance is not None:
                stalls[provenance.axis, provenance.role] += event.stall
            elif event.stall:
                stalls[event.lane, "user"] += event.stall
        return dict(sorted(stalls.items()))

    def compare(self, second: Timeline) -> Comparison:
        """Compare this timeline with another one of the same program, such as a simulated and a measured one."""
        return Comparison(self, second)

    @property
    def _timelines(self) -> tuple[Timeline, ...]:
        return (self,)

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        return f"Timeline({self.name!r}, {format_seconds(self.seconds)}, {len(self.events)} events)"


def one_by_one(name: str, timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of several programs that run one after another."""
    begin = 0.0
    events: list[Event] = []
    points: dict[MemoryKind, list[tuple[float, int]]] = {"device": []}
    for timeline in timelines:
        events += (dataclasses.replace(e, start=e.start + begin) for e in timeline.events)
        for kind, curve in timeline.curves.items():
            later = ((time + begin, live) for time, live in curve)
            points.setdefault(kind, []).extend(later)
        begin += timeline.seconds
    curves = {kind: tuple(curve) for kind, curve in points.items()}
    memory = curves.pop("device")
    limit = timelines[0].limit if timelines else None
    return Timeline(name, begin, tuple(events), memory, other_memories=curves, limit=limit)


@dataclass(frozen=True, repr=False)
class Comparison(_Drawable):
    """Two timelines of one program. They print row by row with ratios, and are drawn one below the other."""

    first: Timeline
    second: Timeline

    @property
    def _timelines(self) -> tuple[Timeline, ...]:
        return (self.first, self.second)

    def __str__(self) -> str:
        return compared(self.first, self.second)

    def __repr__(self) -> str:
        return f"Comparison({self.first!r}, {self.second!r})"
