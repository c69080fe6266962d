"""timeline: what ran when on one rank, simulated or measured.

One lane shows compute, and one each communicator. Communication is exposed while compute stands still for it. A curve
below the lanes shows the live memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..ir.graph import Eqn
from ..ir.printer import format_seconds

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """One bar: an equation on a lane, from `start` for `seconds`. Compute stood still for it for `stall` seconds."""

    lane: str
    start: float
    seconds: float
    eqn: Eqn
    stall: float = 0.0
    bytes: int = 0

    @property
    def end(self) -> float:
        return self.start + self.seconds


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
        from ..report import figure, page  # doors upwards: the pictures of a timeline

        draw = {".html": page.save, **dict.fromkeys(figure.ENDINGS, figure.save)}.get(Path(path).suffix)
        if draw is None:
            raise ValueError(f"save: {str(path)!r} ends in none of .html, {', '.join(figure.ENDINGS)}.")
        draw(self._timelines, path)

    def to_perfetto(self, path: str | PathLike) -> None:
        """Save a trace, JSON in the Chrome format, for ui.perfetto.dev or chrome://tracing."""
        from ..report.perfetto import save  # a door upwards

        save(self._timelines, path)

    def _repr_html_(self) -> str:
        from ..report.page import frame  # a door upwards: the page in a cell of a notebook

        return frame(self._timelines)


@dataclass(frozen=True, repr=False)
class Timeline(_Shown):
    """A step as bars on lanes."""

    name: str
    seconds: float
    events: tuple[Event, ...]
    memory: tuple[tuple[float, int], ...]  # (time, live bytes)
    bound: tuple[float, str] | None = None  # the lower bound in seconds and what binds it, where they are known

    @property
    def lanes(self) -> list[str]:
        """Compute first, then the communicators in order of first use."""
        return list(dict.fromkeys([COMPUTE, *(e.lane for e in sorted(self.events, key=lambda e: e.start))]))

    def busy(self, lane: str) -> float:
        """Seconds in which a lane is busy."""
        return sum(e.seconds for e in self.events if e.lane == lane)

    @property
    def compute(self) -> float:
        """Seconds in which compute is busy."""
        return self.busy(COMPUTE)

    @property
    def stalled(self) -> float:
        """Seconds in which compute stands still for communication."""
        return sum(e.stall for e in self.events)

    @property
    def peak(self) -> int:
        return max((b for _, b in self.memory), default=0)

    @property
    def exposed(self) -> dict[tuple[str, str], float]:
        """Seconds that compute stands still, by (axis, role)."""
        stalls: defaultdict[tuple[str, str], float] = defaultdict(float)
        for e in self.events:
            if e.lane != COMPUTE and e.eqn.provenance is not None:
                stalls[e.eqn.provenance.axis, e.eqn.provenance.role] += e.stall
            elif e.stall:
                stalls[e.lane, "user"] += e.stall
        return dict(sorted(stalls.items()))

    def beside(self, other: Timeline) -> Beside:
        """This timeline and another of the same program, one simulated and one measured."""
        return Beside(self, other)

    @property
    def _timelines(self) -> tuple[Timeline, ...]:
        return (self,)

    def __str__(self) -> str:
        from ..report.table import table  # a door upwards: a timeline as text

        return table(self)

    def __repr__(self) -> str:
        return f"Timeline({self.name!r}, {format_seconds(self.seconds)}, {len(self.events)} events)"


@dataclass(frozen=True, repr=False)
class Beside(_Shown):
    """Two timelines of one program: printed row by row with ratios, drawn one beneath the other."""

    first: Timeline
    second: Timeline

    @property
    def _timelines(self) -> tuple[Timeline, ...]:
        return (self.first, self.second)

    def __str__(self) -> str:
        from ..report.table import compared  # a door upwards

        return compared(self.first, self.second)

    def __repr__(self) -> str:
        return f"Beside({self.first!r}, {self.second!r})"
