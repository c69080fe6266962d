"""Show timelines on one page of HTML, which loads nothing.

`page.html` is the page, with a script that draws it. `page` puts the timelines into that script as JSON, in which each
text occurs once, and a bar is a row of numbers. The JSON is compressed, because the texts of equal layers differ in a
few letters. Of a program with more bars than a screen could show, neighbours of one kind share a bar.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.printer import equation
from .event import COMPUTE, Curve, Event
from .palette import COLOURS, kind_of, used_kinds
from .table import compared, label, table

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline

# The most characters of an equation that are shown. That of a large bucket would fill pages.
_LONGEST = 600
_MOST = 50_000  # bars on a page, and points of its curves
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
    kinds = {kind: k for k, kind in enumerate(COLOURS)}

    def text_number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def bar(events: Sequence[Event], lane: int) -> list[float]:
        longest = max(events, key=lambda e: e.seconds)
        what = longest.title
        if len(events) > 1:
            noun = "messages" if lane else "operations"
            what = f"{len(events)} {noun}, the longest {what}"
        return [
            lane,
            *_microseconds(events[0].start, events[-1].end - events[0].start, events[0].stall),
            kinds[kind_of(longest)],
            sum(e.bytes for e in events),
            text_number(what),
            text_number(equation(longest.eqn)[:_LONGEST]),
            text_number(longest.source_line),
        ]

    def timeline_data(timeline: Timeline) -> dict[str, Any]:
        lanes = {lane: k for k, lane in enumerate(timeline.lanes)}
        bars = _bars(timeline, most)
        return {
            "name": timeline.name,
            "label": label(timeline),
            "seconds": _microseconds(timeline.seconds)[0],
            "lanes": list(lanes),
            "bars": [bar(events, lanes[events[0].lane]) for events in bars],
            "memory": _points(timeline.memory, most),
            "peak": timeline.peak,
            "hostMemory": _points(timeline.host_memory, most),
            "hostPeak": timeline.host_peak,
            "limit": timeline.limit,
            "table": table(timeline),
        }

    used = used_kinds(timelines)
    return {
        "timelines": [timeline_data(timeline) for timeline in timelines],
        "texts": list(texts),
        "kinds": [[kind, *colours, kind in used] for kind, colours in COLOURS.items()],
        "table": compared(*timelines) if len(timelines) == 2 else table(timelines[0]),
    }


def _bars(timeline: Timeline, most: int) -> list[list[Event]]:
    """The events of each bar, compute first: one, or so many that the bars are not more than `most`."""
    events = sorted(timeline.events, key=lambda e: (e.lane != COMPUTE, e.start))
    bars = [[e] for e in events]
    # The longest bar in which events share: twice as long in each trial.
    longest = timeline.seconds / most
    while len(bars) > most and longest <= timeline.seconds:
        bars = _merged(events, longest)
        longest *= 2
    return bars


def _merged(events: Sequence[Event], longest: float) -> list[list[Event]]:
    """The events of bars in which neighbours of one kind are together, as long as a bar is not longer than `longest`.

    A message for which compute waits has a bar of its own.
    """
    bars: list[list[Event]] = []
    last: dict[str, list[Event]] = {}  # by lane, its last bar

    def joins(e: Event, bar: Sequence[Event]) -> bool:
        if e.stall or bar[0].stall:
            return False
        return kind_of(e) == kind_of(bar[0]) and e.end - bar[0].start <= longest

    for e in events:
        bar = last.get(e.lane)
        if bar is not None and joins(e, bar):
            bar.append(e)
        else:
            last[e.lane] = [e]
            bars.append(last[e.lane])
    return bars


def _points(curve: Curve, most: int) -> list[list[float]]:
    """The points at which the live bytes change; of too many neighbours, the one with the most bytes."""
    share = -(-len(curve) // most)  # of the curve's points, for each one that is drawn
    points: list[list[float]] = []
    for k in range(0, len(curve), share or 1):
        live = max(b for _, b in curve[k : k + share])
        if not points or points[-1][1] != live:
            points.append([*_microseconds(curve[k][0]), live])
    return points


def _microseconds(*seconds: float) -> list[float]:
    return [round(s * 1e6, 3) for s in seconds]
