"""page: timelines as one page of HTML that needs nothing from anywhere else.

`page.html` draws what is put into it here as JSON: texts once each, bars as rows of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..planning.timeline import COMPUTE, Timeline
from .palette import COLOURS, stands_for
from .table import compared, label, line, table, text, title

_LONGEST = 600  # characters of an equation; that of a large bucket goes on for pages
_DATA = '"data goes here"'


def save(timelines: Sequence[Timeline], path: Any) -> None:
    """Write the page."""
    Path(path).write_text(page(timelines), encoding="utf-8")


def page(timelines: Sequence[Timeline]) -> str:
    """The page as text."""
    # Within a script, `<!--` and `<script` begin what `</script>` alone does not end: no name may hold a `<`.
    data = json.dumps(_data(timelines), separators=(",", ":")).replace("<", "\\u003c")
    return Path(__file__).with_suffix(".html").read_text(encoding="utf-8").replace(_DATA, data)


def _data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    texts: dict[str, int] = {}

    def index(of: str) -> int:
        return texts.setdefault(of, len(texts))

    kinds = list(COLOURS)
    seen = {stands_for(e) for t in timelines for e in t.events}
    shown = []
    for t in timelines:
        lanes = t.lanes
        bars = [
            [
                lanes.index(e.lane),
                *_microseconds(e.start, e.seconds, e.stall),
                kinds.index(stands_for(e)),
                e.bytes,
                *(index(x) for x in (title(e.eqn), text(e.eqn)[:_LONGEST], line(e.eqn))),
            ]
            for e in sorted(t.events, key=lambda e: (e.lane != COMPUTE, e.start))
        ]
        memory = [[*_microseconds(at), live] for at, live in t.memory]
        shown.append({
            "name": t.name, "label": label(t), "seconds": _microseconds(t.seconds)[0], "lanes": lanes,
            "bars": bars, "memory": memory, "peak": t.peak, "table": table(t),
        })  # fmt: skip
    return {
        "timelines": shown,
        "texts": list(texts),
        "kinds": [[kind, *COLOURS[kind], kind in seen] for kind in kinds],
        "table": compared(*timelines) if len(timelines) == 2 else table(timelines[0]),
    }


def _microseconds(*seconds: float) -> list[float]:
    return [round(s * 1e6, 3) for s in seconds]
