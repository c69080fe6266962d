"""Save timelines as a trace in the Chrome format, for ui.perfetto.dev and chrome://tracing.

The trace has a process for each timeline, a thread for each lane, and a counter of the live bytes of each memory. An
arrow goes from the operation that starts a collective to its message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.printer import equation
from .event import COMPUTE

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline


def save(timelines: Sequence[Timeline], path: Any) -> None:
    """Write the trace to a file: first the names, then the events in order of time, in microseconds."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines, 1):
        events += _events(process, timeline)
    in_order = sorted(events, key=lambda event: event.get("ts", -1.0))  # names have no time
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": in_order}))


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of one timeline, which is number `process` in the trace.

    In the Chrome format, M names something, X is a bar, s and f begin and end an arrow, and C is a value of a counter.
    """
    threads = {lane: k for k, lane in enumerate(timeline.lanes, 1)}

    def event(letter: str, name: str, **fields: Any) -> dict[str, Any]:
        return {"ph": letter, "pid": process, "name": name, **fields}

    def bar(name: str, lane: str, start: float, seconds: float, **args: Any) -> dict[str, Any]:
        times = {"ts": start * 1e6, "dur": seconds * 1e6}
        return event("X", name, cat=lane, tid=threads[lane], args=args, **times)

    yield event("M", "process_name", args={"name": timeline.name})
    for lane, k in threads.items():
        yield event("M", "thread_name", tid=k, args={"name": lane})
        yield event("M", "thread_sort_index", tid=k, args={"sort_index": k})

    starts = {e.eqn: e.start for e in timeline.events if e.lane == COMPUTE}
    for number, e in enumerate(timeline.events):
        name = e.title
        source = e.source_line
        facts = {"equation": equation(e.eqn), "source": source, "region": e.eqn.region}
        if e.lane == COMPUTE:
            yield bar(name, COMPUTE, e.start, e.seconds, **facts)
            continue
        yield bar(name, e.lane, e.start, e.seconds, **facts, bytes=e.bytes, stall_us=e.stall * 1e6)
        if e.stall > 0:
            begin = e.end - e.stall
            yield bar("stall", COMPUTE, begin, e.stall, waits_for=name, source=source)
        if e.eqn in starts:
            arrow = {"cat": "message", "id": f"{process}.{number}"}
            yield event("s", "message", tid=threads[COMPUTE], ts=starts[e.eqn] * 1e6, **arrow)
            yield event("f", "message", bp="e", tid=threads[e.lane], ts=e.start * 1e6, **arrow)

    for kind, curve in timeline.curves.items():
        name = "live bytes" if kind == "device" else f"on the {kind}"
        for time, live in curve:
            yield event("C", name, ts=time * 1e6, args={"bytes": live})
