"""perfetto: save timelines as a trace in the Chrome format, for ui.perfetto.dev and chrome://tracing.

The trace has a process for each timeline, a thread for each lane, and a counter of live bytes, on the device and on the
host. An arrow goes from the operation that starts a collective to its message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.printer import equation
from .event import COMPUTE
from .table import source_line, title

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline


def save(timelines: Sequence[Timeline], path: Any) -> None:
    """Write the trace to a file: first the names, then the events in order of time, in microseconds."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines, 1):
        events += _events(process, timeline)
    in_order = sorted(events, key=lambda event: event.get("ts", -1.0))
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": in_order}))


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The events of one timeline, whose number in the trace is `process`."""
    thread = {lane: k for k, lane in enumerate(timeline.lanes, 1)}
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": timeline.name}}
    for lane, k in thread.items():
        yield {"ph": "M", "pid": process, "tid": k, "name": "thread_name", "args": {"name": lane}}
        yield {
            "ph": "M",
            "pid": process,
            "tid": k,
            "name": "thread_sort_index",
            "args": {"sort_index": k},
        }

    def bar(name: str, lane: str, start: float, seconds: float, **args: Any) -> dict[str, Any]:
        place = {
            "ph": "X",
            "pid": process,
            "tid": thread[lane],
            "ts": start * 1e6,
            "dur": seconds * 1e6,
        }
        return {**place, "name": name, "cat": lane, "args": args}

    starts = {e.eqn: e.start for e in timeline.events if e.lane == COMPUTE}
    for number, e in enumerate(timeline.events):
        name = title(e.eqn)
        facts = {"equation": equation(e.eqn), "source": source_line(e.eqn), "region": e.eqn.region}
        if e.lane == COMPUTE:
            yield bar(name, COMPUTE, e.start, e.seconds, **facts)
            continue
        yield bar(name, e.lane, e.start, e.seconds, **facts, bytes=e.bytes, stall_us=e.stall * 1e6)
        if e.stall > 0:
            yield bar(
                "stall",
                COMPUTE,
                e.end - e.stall,
                e.stall,
                waits_for=name,
                source=source_line(e.eqn),
            )
        if e.eqn in starts:
            arrow = {
                "cat": "message",
                "name": "message",
                "id": f"{process}.{number}",
                "pid": process,
            }
            yield {**arrow, "ph": "s", "tid": thread[COMPUTE], "ts": starts[e.eqn] * 1e6}
            yield {**arrow, "ph": "f", "bp": "e", "tid": thread[e.lane], "ts": e.start * 1e6}
    for name, curve in (("live bytes", timeline.memory), ("on the host", timeline.host_memory)):
        for time, live in curve:
            yield {
                "ph": "C",
                "pid": process,
                "name": name,
                "ts": time * 1e6,
                "args": {"bytes": live},
            }
