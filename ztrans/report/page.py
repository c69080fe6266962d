"""page: show timelines on one page of HTML, which loads nothing.

`page.html` is the page, with a script that draws it. `page` puts the timelines into that script as JSON, in which each
text occurs once, and a bar is a row of numbers.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..ir.printer import equation
from ..planning.timeline import COMPUTE, Event, Timeline
from .palette import COLOURS, stands_for
from .table import compared, label, source_line, table, title

# The most characters of an equation that are shown. That of a large bucket would fill pages.
_LONGEST = 600
_DATA = '"data goes here"'
_HEIGHT = 620  # pixels of the page in a notebook


def save(timelines: Sequence[Timeline], path: Any) -> None:
    """Write the page to a file."""
    Path(path).write_text(page(timelines), encoding="utf-8")


def page(timelines: Sequence[Timeline]) -> str:
    """The page as text."""
    # Within a script, `<!--` and `<script` begin sections that `</script>` does not end, so every `<` is escaped.
    data = json.dumps(_data(timelines), separators=(",", ":")).replace("<", "\\u003c")
    return Path(__file__).with_suffix(".html").read_text(encoding="utf-8").replace(_DATA, data)


def frame(timelines: Sequence[Timeline]) -> str:
    """The page as a frame for a cell of a notebook. Its script is confined to the frame."""
    style = f"width: 100%; height: {_HEIGHT}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page(timelines))}"></iframe>'


def _data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The data that the script of the page draws."""
    texts: dict[str, int] = {}
    kinds = list(COLOURS)
    used_kinds = {stands_for(e) for t in timelines for e in t.events}

    def bar(event: Event, lanes: Sequence[str]) -> list[float]:
        words = title(event.eqn), equation(event.eqn)[:_LONGEST], source_line(event.eqn)
        return [
            lanes.index(event.lane),
            *_microseconds(event.start, event.seconds, event.stall),
            kinds.index(stands_for(event)),
            event.bytes,
            *(texts.setdefault(text, len(texts)) for text in words),
        ]

    def timeline_data(timeline: Timeline) -> dict[str, Any]:
        lanes = timeline.lanes
        events = sorted(timeline.events, key=lambda e: (e.lane != COMPUTE, e.start))
        return {
            "name": timeline.name,
            "label": label(timeline),
            "seconds": _microseconds(timeline.seconds)[0],
            "lanes": lanes,
            "bars": [bar(event, lanes) for event in events],
            "memory": [[*_microseconds(time), live] for time, live in timeline.memory],
            "host": [[*_microseconds(time), live] for time, live in timeline.host_memory],
            "peak": timeline.peak,
            "table": table(timeline),
        }

    return {
        "timelines": [timeline_data(timeline) for timeline in timelines],
        "texts": list(texts),
        "kinds": [[kind, *COLOURS[kind], kind in used_kinds] for kind in kinds],
        "table": compared(*timelines) if len(timelines) == 2 else table(timelines[0]),
    }


def _microseconds(*seconds: float) -> list[float]:
    return [round(s * 1e6, 3) for s in seconds]
