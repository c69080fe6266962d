"""Show timelines on one self-contained page of HTML.

`page.html` is the page, with a script that draws it. `page` puts the timelines into that script as JSON: each text
occurs once, and a bar is a row of numbers. The JSON is compressed, because the texts of equal layers differ in only a
few letters. If a program has more bars than a screen can show, neighbours of one kind share a bar.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.graph import MemoryKind
from ..ir.printer import equation
from .event import COMPUTE, Curve, Event, most_bytes
from .palette import COLOURS, MEMORY_COLOURS, kind_of, used_kinds
from .table import compared, label, table

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline

# The most characters of an equation on the page. The equation of a large bucket would fill pages.
_LONGEST = 600
_MOST = 50_000  # the most bars on a page, and points of its curves
_DATA = "data goes here"
_HEIGHT = 620  # pixels of the page in a notebook


def save(timelines: Sequence[Timeline], path: Any) -> None:
    """Write the page to a file."""
    Path(path).write_text(page(timelines), encoding="utf-8")


def page(timelines: Sequence[Timeline]) -> str:
    """The page as text."""
    data = json.dumps(_data(timelines), separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()
    return Path(__file__).with_suffix(".html").read_text(encoding="utf-8").replace(_DATA, packed)


def frame(timelines: Sequence[Timeline]) -> str:
    """The page as a frame for a cell of a notebook. Its script is confined to the frame."""
    style = f"width: 100%; height: {_HEIGHT}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page(timelines))}"></iframe>'


def _data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The data that the script of the page draws."""
    most = _MOST // len(timelines)
    texts: dict[str, int] = {}  # each with its number
    kind_numbers = {kind: k for k, kind in enumerate(COLOURS)}

    def text_number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def bar(events: Sequence[Event], lane: int) -> list[float]:
        longest = max(events, key=lambda e: e.seconds)
        title = longest.title
        if len(events) > 1:
            noun = "messages" if lane else "operations"
            title = f"{len(events)} {noun}, the longest {title}"
        return [
            lane,
            *_microseconds(events[0].start, events[-1].end - events[0].start, events[0].stall),
            kind_numbers[kind_of(longest)],
            sum(e.bytes for e in events),
            text_number(title),
            text_number(equation(longest.eqn)[:_LONGEST]),
            text_number(longest.source_line),
        ]

    def memory(kind: MemoryKind, curve: Curve) -> dict[str, Any]:
        return {
            "name": kind,
            "colours": MEMORY_COLOURS[kind],
            "points": _points(curve, most),
            "peak": most_bytes(curve),
        }

    def timeline_data(timeline: Timeline) -> dict[str, Any]:
        lane_numbers = {lane: k for k, lane in enumerate(timeline.lanes)}
        bars = _bars(timeline, most)
        return {
            "name": timeline.name,
            "label": label(timeline),
            "seconds": _microseconds(timeline.seconds)[0],
            "lanes": list(lane_numbers),
            "bars": [bar(events, lane_numbers[events[0].lane]) for events in bars],
            "memories": [memory(*found) for found in timeline.curves.items()],
            "limit": timeline.limit,
            "table": table(timeline),
        }

    shown_kinds = used_kinds(timelines)
    return {
        "timelines": [timeline_data(timeline) for timeline in timelines],
        "texts": list(texts),
        "kinds": [[kind, *colours, kind in shown_kinds] for kind, colours in COLOURS.items()],
        "table": compared(*timelines) if len(timelines) == 2 else table(timelines[0]),
    }


def _bars(timeline: Timeline, most: int) -> list[list[Event]]:
    """The events of each bar, compute first: one event a bar, or several if there would be more than `most` bars."""
    events = sorted(timeline.events, key=lambda e: (e.lane != COMPUTE, e.start))
    bars = [[e] for e in events]
    # The greatest length of a shared bar, doubled until few enough bars are left.
    longest = timeline.seconds / most
    while len(bars) > most and longest <= timeline.seconds:
        bars = _merged(events, longest)
        longest *= 2
    return bars


def _merged(events: Sequence[Event], longest: float) -> list[list[Event]]:
    """The events of each bar if neighbours of one kind share bars of at most `longest` seconds.

    A message that compute waits for has a bar of its own.
    """
    bars: list[list[Event]] = []
    last_bars: dict[str, list[Event]] = {}  # by lane

    def joins(e: Event, bar: Sequence[Event]) -> bool:
        if e.stall or bar[0].stall:
            return False
        return kind_of(e) == kind_of(bar[0]) and e.end - bar[0].start <= longest

    for e in events:
        bar = last_bars.get(e.lane)
        if bar is not None and joins(e, bar):
            bar.append(e)
        else:
            last_bars[e.lane] = [e]
            bars.append(last_bars[e.lane])
    return bars


def _points(curve: Curve, most: int) -> list[list[float]]:
    """The points where the live bytes change. If there are too many, neighbours become one point with their maximum."""
    group_size = -(-len(curve) // most)  # the curve's points for each point that is drawn
    points: list[list[float]] = []
    for k in range(0, len(curve), group_size or 1):
        live = max(b for _, b in curve[k : k + group_size])
        if not points or points[-1][1] != live:
            points.append([*_microseconds(curve[k][0]), live])
    return points


def _microseconds(*seconds: float) -> list[float]:
    return [round(s * 1e6, 3) for s in seconds]
