"""Draw timelines as a picture, with matplotlib.

The picture shows the same as the page (see `page`): the lanes with compute on top, the stalls of compute hatched, and
the curves of live memory below the lanes, with the limit. Two timelines are drawn one below the other, on the same time
scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..ir.dependencies import grouped
from ..ir.printer import format_bytes, format_seconds
from .event import COMPUTE, Curve
from .palette import COLOURS, MEMORY_COLOURS, kind_of, used_kinds

if TYPE_CHECKING:  # `timeline` imports this module
    from .timeline import Timeline

ENDINGS = (".png", ".svg", ".pdf")
_MANY = (
    150  # a lane with this many bars or more has no gaps between them, which would hide too much
)
_INK = "#33363b"
_FAINT = "#8b8f96"
_STALL = "#b5b8bd"
_GROUND = "#fcfbf9"
_LIMIT = "#b4553d"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 8,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # texts stay texts
}


def save(timelines: Sequence[Timeline], path: Any) -> None:
    """Draw timelines into a file. Its name ends in one of `ENDINGS`.

    Raises: ImportError if matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "save: pictures need matplotlib: pip install matplotlib, or save a .html page."
        ) from error
    heights: list[float] = []  # in inches: of the lanes and of the memory of each timeline
    for timeline in timelines:
        heights += [0.34 * len(timeline.lanes) + 0.5, 0.95]
    longest = max(timeline.seconds for timeline in timelines)
    scale, unit = _scale(longest)
    with rc_context(_STYLE):
        figure = Figure(figsize=(11, sum(heights) + 1.0), facecolor=_GROUND, layout="constrained")
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        for k, timeline in enumerate(timelines):
            _lanes(axes[2 * k], timeline, scale)
            _memory(axes[2 * k + 1], timeline, scale)
        axes[-1].set_xlim(0, longest * scale)
        axes[-1].set_xlabel(unit, color=_FAINT)
        axes[-1].tick_params(axis="x", bottom=True, labelbottom=True, length=3)
        _legend(figure, timelines)
        figure.savefig(path, dpi=160)


def _scale(seconds: float) -> tuple[float, str]:
    """The unit of the time axis: how many make a second, and its name."""
    if seconds < 1e-3:
        return 1e6, "us"
    return (1e3, "ms") if seconds < 10 else (1.0, "s")


def _lanes(ax: Any, timeline: Timeline, scale: float) -> None:
    """The bars of every lane, and the stalls of compute."""
    rows = {lane: -k for k, lane in enumerate(timeline.lanes)}
    bars = []
    stalls = []
    for event in timeline.events:
        bars.append(((event.lane, kind_of(event)), (event.start * scale, event.seconds * scale)))
        if event.stall > 0:
            stalls.append(((event.end - event.stall) * scale, event.stall * scale))
    for (lane, kind), spans in grouped(bars).items():
        gap = 0.25 if lane != COMPUTE and len(spans) < _MANY else 0.0
        ax.broken_barh(
            spans,
            (rows[lane] - 0.36, 0.72),
            facecolor=COLOURS[kind][0],
            edgecolor=_GROUND,
            linewidth=gap,
        )
    ax.broken_barh(
        stalls, (-0.36, 0.72), facecolor="none", edgecolor=_STALL, hatch="//////", linewidth=0
    )
    ax.set_yticks(list(rows.values()), list(rows), color=_INK)
    ax.set_ylim(-len(rows) + 0.45, 0.55)
    ax.set_title(timeline.name, loc="left", color=_INK, fontsize=10, fontweight="bold")
    exposed = format_seconds(timeline.stalled)
    figures = f"{format_seconds(timeline.seconds)} a step, {exposed} exposed"
    ax.set_title(figures, loc="right", color=_FAINT, fontsize=9)
    _plain(ax)


def _memory(ax: Any, timeline: Timeline, scale: float) -> None:
    """The curves of live memory with their peaks, and the limit."""
    top = max(timeline.peaks.values()) or 1
    limit = timeline.limit or 0
    if limit > 2 * timeline.peak:
        limit = 0  # the curve would be flat far below it
    for kind, curve in timeline.curves.items():
        name = "peak" if kind == "device" else kind
        _curve(ax, curve, timeline.seconds, scale, MEMORY_COLOURS[kind][0], name, limit)
    if limit:
        ax.plot([0, timeline.seconds * scale], [limit, limit], "--", color=_LIMIT, linewidth=0.9)
        # The text is on the side away from the peak.
        on_right = timeline.peak_time < timeline.seconds / 2
        time = timeline.seconds if on_right else 0.0
        _text(ax, f"limit {format_bytes(limit)}", (time * scale, limit), on_right, 2, _LIMIT)
    ax.set_ylim(0, 1.25 * max(top, limit))
    ax.set_yticks([0.5 * top], ["memory"], color=_INK)
    _plain(ax)


def _curve(
    ax: Any, curve: Curve, seconds: float, scale: float, colour: str, name: str, limit: int
) -> None:
    """A curve of live memory, with a dot and its bytes at the peak."""
    if not curve:
        return
    # The last bytes stay live until the end.
    points = (*curve, (seconds, curve[-1][1]))
    times = [time * scale for time, _ in points]
    live = [size for _, size in points]
    ax.fill_between(times, live, step="post", color=colour, alpha=0.25, linewidth=0)
    ax.step(times, live, where="post", color=colour, linewidth=0.8)
    time, peak = max(curve, key=lambda point: point[1])
    ax.plot([time * scale], [peak], "o", color=_INK, markersize=3, clip_on=False)
    # If the limit is just above the peak, the text goes below the dot: above, it would cover the line of the limit.
    height = -11 if peak < limit < 1.25 * peak else 2
    place = time * scale, peak
    _text(ax, f"{name} {format_bytes(peak)}", place, time > 0.8 * seconds, height, _INK)


def _text(
    ax: Any, text: str, place: tuple[float, float], is_left: bool, height: int, colour: str
) -> None:
    """A text to the left or the right of a place, `height` points above it."""
    offset, side = (-6, "right") if is_left else (6, "left")
    ax.annotate(text, place, (offset, height), textcoords="offset points", ha=side, color=colour)


def _plain(ax: Any) -> None:
    """Remove frame and ticks from axes, and add a pale grid."""
    ax.set_facecolor(_GROUND)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelbottom=False, labelcolor=_INK)
    ax.grid(axis="x", color="#e8e6e1", linewidth=0.6)
    ax.set_axisbelow(True)


def _legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    """A legend of the kinds of bars in the timelines, with their colours."""
    from matplotlib.patches import Patch

    patches = []
    for kind in used_kinds(timelines):
        light, _ = COLOURS[kind]
        patches.append(Patch(facecolor=light, label=kind))
    stall: dict[str, Any] = {
        "facecolor": "none",
        "edgecolor": _STALL,
        "hatch": "//////",
        "linewidth": 0,
    }
    patches.append(Patch(label="compute stands still", **stall))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, labelcolor=_INK,
        handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip
