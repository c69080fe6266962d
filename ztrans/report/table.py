"""Print a timeline as text, or two timelines side by side.

The rows are: the time of the step, how long each lane is busy, the exposed communication by axis and role, the lower
bound, and the peak of memory. `label` is the name of a column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from ..ir.graph import MemoryKind
from ..ir.printer import counted, format_bytes, format_seconds
from .event import COMPUTE, Event

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline

_STALLS = 5  # the most stalls that are listed
# The names of rows.
_STEP = "step"
_EXPOSED = "exposed"
# The peak of each memory.
_PEAKS = {kind: f"on the {kind}" for kind in get_args(MemoryKind)} | {"device": "peak memory"}


def table(timeline: Timeline) -> str:
    """One timeline as text."""
    step = timeline.seconds

    def row(name: str, seconds: float, note: str = "") -> list[str]:
        share = f"{seconds / step:.1%}" if step else ""
        return [name, format_seconds(seconds), share, note]

    rows = []
    for lane in timeline.lanes:
        bars = [event for event in timeline.events if event.lane == lane]
        work = counted(len(bars), "operation")
        if lane != COMPUTE:
            received = sum(event.bytes for event in bars)
            arrived = sum(event.arrives for event in bars)
            work = f"{arrived} messages, {format_bytes(received)}"
        rows.append(row(lane, timeline.busy(lane), work))
    rows.append(row(_EXPOSED, timeline.stalled))
    for (axis, role), seconds in timeline.exposed.items():
        rows.append(row(f"  {axis} {role}", seconds))
    if timeline.bound is not None:
        least, cause = timeline.bound
        rows.append(row("bound", least, f"{cause} binds: {step / least:.2f}x"))
    rows += _memory_rows(timeline)
    text = f"{timeline.name}: {format_seconds(step)}\n{columns(rows)}"

    stalls = []
    for event in _worst_stalls(timeline):
        stalls.append(row(f"  {event.title}", event.stall, event.source_line))
    return f"{text}\nworst stalls\n{columns(stalls)}" if stalls else text


def _memory_rows(timeline: Timeline) -> list[list[str]]:
    """The peak of each memory; for the device also its time and its share of the limit."""
    share = ""
    note = f"at {format_seconds(timeline.peak_time)}"
    if timeline.limit:
        share = f"{timeline.peak / timeline.limit:.1%}"
        note = f"{note}, of {format_bytes(timeline.limit)}"
    rows = []
    for kind, peak in timeline.peaks.items():
        details = [share, note] if kind == "device" else ["", ""]
        rows.append([_PEAKS[kind], format_bytes(peak), *details])
    return rows


def _worst_stalls(timeline: Timeline) -> list[Event]:
    stalled = [event for event in timeline.events if event.stall > 0]
    return sorted(stalled, key=lambda event: -event.stall)[:_STALLS]


def compared(first: Timeline, second: Timeline) -> str:
    """Two timelines as text, row by row, with the ratio of the second to the first."""
    first_figures = _figures(first)
    second_figures = _figures(second)
    rows = [["", label(first), label(second), "ratio"]]
    for name in sorted({**first_figures, **second_figures}, key=_position):
        a = first_figures.get(name)  # None if the timeline has no such row
        b = second_figures.get(name)
        ratio = f"{b / a:.2f}" if a and b else "-"
        rows.append([name, _figure_text(name, a), _figure_text(name, b), ratio])
    return columns(rows, left_aligned=(0,))


def _position(row: str) -> int:
    """The position of a row. Lanes come before `exposed`, and the parts of `exposed`, which are indented, after it."""
    positions = {_STEP: 0, COMPUTE: 1, _EXPOSED: 3} | dict.fromkeys(_PEAKS.values(), 5)
    if row in positions:
        return positions[row]
    return 4 if row.startswith(" ") else 2


def _figure_text(row: str, figure: float | None) -> str:
    """A figure of a row as text: bytes for peaks, else seconds."""
    if figure is None:
        return "-"
    return format_bytes(figure) if row in _PEAKS.values() else format_seconds(figure)


def label(timeline: Timeline) -> str:
    """The kind of a timeline, `simulated` or `measured`, which tells it from another timeline of the same step."""
    return timeline.name.rpartition(", ")[2]


def _figures(timeline: Timeline) -> dict[str, float]:
    """The figures of a timeline by the name of their row, in seconds, and in bytes for peaks."""
    figures = {_STEP: timeline.seconds, _EXPOSED: timeline.stalled}
    for lane in timeline.lanes:
        figures[lane] = timeline.busy(lane)
    for (axis, role), seconds in timeline.exposed.items():
        figures[f"  {axis} {role}"] = seconds
    for kind, peak in timeline.peaks.items():
        figures[_PEAKS[kind]] = peak
    return figures


def columns(rows: list[list[str]], left_aligned: tuple[int, ...] = (0, 3)) -> str:
    """Rows in columns, each aligned to the right, or to the left if it holds words."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = []
        for k, (cell, width) in enumerate(zip(row, widths)):
            cells.append(cell.ljust(width) if k in left_aligned else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
