"""table: print a timeline as text, or two timelines side by side.

The rows are: the time of the step, how long each lane is busy, the exposed communication by axis and role, the lower
bound, and the peak of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.graph import Eqn
from ..ir.printer import format_bytes, format_seconds, op_name
from .event import COMPUTE, Event

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline

_STALLS = 5  # the number of the longest stalls that are listed
_PEAK = "peak memory"
_HOST_PEAK = "on the host"


def table(timeline: Timeline) -> str:
    """One timeline as text."""
    step = timeline.seconds

    def row(name: str, seconds: float, note: str = "") -> list[str]:
        share = f"{seconds / step:.1%}" if step else ""
        return [name, format_seconds(seconds), share, note]

    rows = []
    for lane in timeline.lanes:
        bars = [event for event in timeline.events if event.lane == lane]
        received = format_bytes(sum(event.bytes for event in bars))
        work = f"{len(bars)} operations" if lane == COMPUTE else f"{len(bars)} messages, {received}"
        rows.append(row(lane, timeline.busy(lane), work))
    rows.append(row("exposed", timeline.stalled))
    for (axis, role), seconds in timeline.exposed.items():
        rows.append(row(f"  {axis} {role}", seconds))
    if timeline.bound is not None:
        least, cause = timeline.bound
        rows.append(row("bound", least, f"{cause} binds: {step / least:.2f}x"))
    rows += _memory_rows(timeline)
    text = f"{timeline.name}: {format_seconds(step)}\n{_columns(rows)}"
    worst = _worst_stalls(timeline)
    if not worst:
        return text
    stalls = [row(f"  {title(e.eqn)}", e.stall, source_line(e.eqn)) for e in worst]
    return f"{text}\nworst stalls\n{_columns(stalls)}"


def _memory_rows(timeline: Timeline) -> list[list[str]]:
    """The peak of the device's memory, with its share of the limit, and that of the host's memory."""
    share = ""
    note = f"at {format_seconds(timeline.peak_time)}"
    if timeline.limit:
        share = f"{timeline.peak / timeline.limit:.1%}"
        note = f"{note}, of {format_bytes(timeline.limit)}"
    rows = [[_PEAK, format_bytes(timeline.peak), share, note]]
    if timeline.host_memory:
        rows.append([_HOST_PEAK, format_bytes(timeline.host_peak), "", ""])
    return rows


def _worst_stalls(timeline: Timeline) -> list[Event]:
    stalled = [event for event in timeline.events if event.stall > 0]
    return sorted(stalled, key=lambda event: -event.stall)[:_STALLS]


def compared(first: Timeline, second: Timeline) -> str:
    """Two timelines as text, row by row, with the ratio of the second to the first."""
    of_first = _figures(first)
    of_second = _figures(second)
    rows = [["", label(first), label(second), "ratio"]]
    for name in sorted({**of_first, **of_second}, key=_place):
        show = format_bytes if name in (_PEAK, _HOST_PEAK) else format_seconds
        a = of_first.get(name)  # None where a timeline has no such row
        b = of_second.get(name)
        figures = ["-" if x is None else show(x) for x in (a, b)]
        rows.append([name, *figures, f"{b / a:.2f}" if a and b else "-"])
    return _columns(rows, left_aligned=(0,))


def _place(row: str) -> int:
    """The place of a row: lanes come before `exposed`, and its parts, which are indented, after it."""
    places = {"step": 0, COMPUTE: 1, "exposed": 3, _PEAK: 5, _HOST_PEAK: 6}
    return places.get(row, 4 if row.startswith(" ") else 2)


def label(timeline: Timeline) -> str:
    """The kind of a timeline, `simulated` or `measured`, which distinguishes it from another of the same step."""
    return timeline.name.rpartition(", ")[2]


def title(eqn: Eqn) -> str:
    """An equation in a few words: its first result, the number of further results, and its operation."""
    names = [out.name.removesuffix("'") for out in eqn.results]
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return f"{names[0] if names else '_'}{more} = {op_name(eqn.op)}"


def source_line(eqn: Eqn) -> str:
    """The user's line of an equation, or an empty text if it is unknown."""
    return str(eqn.source or "")


def _figures(timeline: Timeline) -> dict[str, float]:
    """The figures of a timeline by the name of their row, in seconds, and in bytes for peaks."""
    lanes = {lane: timeline.busy(lane) for lane in timeline.lanes}
    exposed = {f"  {axis} {role}": seconds for (axis, role), seconds in timeline.exposed.items()}
    peaks = {_PEAK: timeline.peak}
    if timeline.host_memory:
        peaks[_HOST_PEAK] = timeline.host_peak
    return {
        "step": timeline.seconds,
        **lanes,
        "exposed": timeline.stalled,
        **exposed,
        **peaks,
    }


def _columns(rows: list[list[str]], left_aligned: tuple[int, ...] = (0, 3)) -> str:
    """Rows in columns, each aligned to the right, or to the left if it holds words."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = []
        for k, (cell, width) in enumerate(zip(row, widths)):
            cells.append(cell.ljust(width) if k in left_aligned else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
