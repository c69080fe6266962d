"""page: show timelines on one page of HTML, which loads nothing.

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
from .palette import COLOURS, stands_for
from .table import compared, label, source_line, table, title

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
    texts: dict[str, int] = {}
    kinds = {kind: k for k, kind in enumerate(COLOURS)}
    used_kinds = {stands_for(e) for t in timelines for e in t.events}

    def bar(events: Sequence[Event], lane: int) -> list[float]:
        longest = max(events, key=lambda e: e.seconds)
        what = title(longest.eqn)
        if len(events) > 1:
            noun = "messages" if lane else "operations"
            what = f"{len(events)} {noun}, the longest {what}"
        words = what, equation(longest.eqn)[:_LONGEST], source_line(longest.eqn)
        return [
            lane,
            *_microseconds(events[0].start, events[-1].end - events[0].start, events[0].stall),
            kinds[stands_for(longest)],
            sum(e.bytes for e in events),
            *(texts.setdefault(text, len(texts)) for text in words),
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

    return {
        "timelines": [timeline_data(timeline) for timeline in timelines],
        "texts": list(texts),
        "kinds": [[kind, *colours, kind in used_kinds] for kind, colours in COLOURS.items()],
        "table": compared(*timelines) if len(timelines) == 2 else table(timelines[0]),
    }


def _bars(timeline: Timeline, most: int) -> list[list[Event]]:
    """The events of each bar, compute first: one, or so many that the bars are not more than `most`."""
    events = sorted(timeline.events, key=lambda e: (e.lane != COMPUTE, e.start))
    bars = [[e] for e in events]
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
    kind_of: dict[str, str] = {}
    for e in events:
        kind = stands_for(e)
        bar = last.get(e.lane)
        joins = bar is not None and kind == kind_of[e.lane] and not e.stall and not bar[0].stall
        if bar is not None and joins and e.end - bar[0].start <= longest:
            bar.append(e)
            continue
        last[e.lane] = [e]
        kind_of[e.lane] = kind
        bars.append(last[e.lane])
    return bars


def _points(curve: Curve, most: int) -> list[list[float]]:
    """The points at which the live bytes change; of too many neighbours, the one with the most bytes."""
    share = -(-len(curve) // most)
    points: list[list[float]] = []
    for k in range(0, len(curve), share or 1):
        live = max(b for _, b in curve[k : k + share])
        if not points or points[-1][1] != live:
            points.append([*_microseconds(curve[k][0]), live])
    return points


def _microseconds(*seconds: float) -> list[float]:
    return [round(s * 1e6, 3) for s in seconds]
