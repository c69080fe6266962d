"""Step time within five limits of memory: `remat(memory=...)` beside checkpoints of blocks and today's `remat()`.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.frontier                  # all parts; about half an hour
    OMP_NUM_THREADS=1 python -m benchmarks.plans.frontier "GPT, nvlink4"   # one of them

A part is a model on a cluster of H100s. Its limits are its state and 1.0 to 0.35 of its activations: of what the step
in which everything is kept has live besides. That step fits the first limit only. Within each limit the same step is
planned four times: with `remat(memory=...)`, with a checkpoint around each block, with a selective checkpoint that
saves the results of matrix products and attention, and with `remat()`. Programs have shapes only, times are simulated,
and bytes are counted. The last column is the time of recomputation. Writes benchmarks/results/frontier.md, .json and
.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ztrans as zt
from ztrans.planning.cost import memory
from ztrans.planning.durations import equation_seconds
from ztrans.planning.limit import DoesNotFit
from ztrans.planning.make_plan import SLACK
from ztrans.stages import Lowered, Traced

from .. import RESULTS
from .frontier_models import Around, Made, gpt, llama, per_block, plain, selective

SHARES = (1.0, 0.8, 0.65, 0.5, 0.35)
OURS = "remat(memory=)"
ALL_KEPT = "all kept"
OTHERS = (ALL_KEPT, "block", "selective", "remat()")


class Part(NamedTuple):
    """A model on a cluster."""

    make: Callable[[Around], Made]
    ranks: int
    link: str


PARTS = {
    "GPT, nvlink4": Part(gpt, 8, "nvlink4"),
    "GPT, infiniband": Part(gpt, 64, "infiniband"),
    "Llama-3-8B, 8 layers": Part(partial(llama, layers=8), 8, "nvlink4"),
    "Llama-3-8B, 32 layers": Part(partial(llama, layers=32), 8, "nvlink4"),
}


class Row(NamedTuple):
    """A step within a limit. One that does not fit has no seconds, and the peak that it needs."""

    part: str
    share: float
    limit: int
    method: str
    seconds: float | None
    peak: int
    recomputed: float = 0.0


class Subject:
    """The steps of one part: with everything kept, and with each kind of checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.part = PARTS[name]
        self.cluster = zt.cluster("h100", dp=self.part.link)
        self.kept = self._traced(plain)
        self.checkpointed = {
            "block": self._traced(per_block),
            "selective": self._traced(selective),
            "remat()": self.kept,
        }
        own_order = self._with(self.kept).without_order(self.cluster).unordered
        least = int(memory(own_order).peak * (1 + SLACK))
        self.full = self._with(self.kept, limit=least).planned(self.cluster)
        self.state = self.full.memory_analysis().state

    def _traced(self, around: Around) -> Traced:
        step, state, batch = self.part.make(around)
        return zt.Step.of(step).trace(state, *batch)

    def _with(self, traced: Traced, *more: zt.Transform, limit: int | str = "auto") -> Traced:
        shard = zt.shard_params(zt.AbstractMesh(dp=self.part.ranks))
        schedules = zt.overlap_grads(), zt.prefetch(memory=limit), zt.fuse_cast_gather()
        return dataclasses.replace(traced, transforms=(shard, *schedules, *more))

    def limit(self, share: float) -> int:
        activations = self.full.memory_analysis().peak - self.state
        return int(self.state + share * activations)

    def rows(self, share: float) -> Iterator[Row]:
        """One limit."""
        limit = self.limit(share)
        ours = self._with(self.kept, zt.remat(memory=limit), limit=limit)
        row, lowered = self._row(share, OURS, ours)
        if lowered is not None:
            row = row._replace(recomputed=recomputed(lowered))
        yield row
        yield self.all_kept(share)
        for method, traced in self.checkpointed.items():
            more = [zt.remat()] if method == "remat()" else []
            yield self._row(share, method, self._with(traced, *more, limit=limit))[0]

    def all_kept(self, share: float) -> Row:
        """The step in which everything is kept, which has the same plan within every limit."""
        limit = self.limit(share)
        peak = self.full.memory_analysis().peak
        seconds = self.full.timeline().seconds if peak <= limit else None
        return Row(self.name, share, limit, ALL_KEPT, seconds, peak)

    def _row(self, share: float, method: str, traced: Traced) -> tuple[Row, Lowered | None]:
        row = Row(self.name, share, self.limit(share), method, None, 0)
        try:
            lowered = traced.planned(self.cluster)
        except DoesNotFit as error:
            return row._replace(peak=error.least.peak), None
        step = lowered.timeline().seconds
        peak = lowered.memory_analysis().peak
        return row._replace(seconds=step, peak=peak), lowered


def recomputed(lowered: Lowered) -> float:
    """The seconds of the compute that is repeated."""
    total = 0.0
    for e, taken in zip(lowered.graph.eqns, equation_seconds(lowered.graph, lowered.cluster)):
        if any(".again" in v.name for v in e.results):
            total += taken
    return total


def table(rows: Sequence[Row]) -> str:
    """The rows of one part: a line for each limit."""
    lines = [
        f"| activations | limit | {OURS} | peak | {' | '.join(OTHERS)} | recomputed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_share: dict[float, dict[str, Row]] = {}
    for row in rows:
        by_share.setdefault(row.share, {})[row.method] = row
    for share, methods in by_share.items():
        ours = methods[OURS]
        cells = [f"{share}", _size(ours.limit), _seconds(ours), _size(ours.peak)]
        cells += [_seconds(methods[other]) for other in OTHERS]
        cells.append(f"{1e3 * ours.recomputed:.2f} ms")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _seconds(row: Row) -> str:
    if row.seconds is None:
        return f"needs {_size(row.peak)}"
    return f"{1e3 * row.seconds:.1f} ms"


def broken(rows: Sequence[Row]) -> Iterator[str]:
    """Where a plan is above its limit, or slower than another method of recomputation within the same limit."""
    for row in rows:
        if row.seconds is not None and row.peak > row.limit:
            yield f"{row.part}, {row.share}: {row.method} has {row.peak} bytes live, and {row.limit} are allowed"
    best: dict[tuple[str, float], Row] = {}
    for row in rows:
        if row.method == OURS:
            best[row.part, row.share] = row
    for row in rows:
        ours = best[row.part, row.share]
        if row.method == ALL_KEPT:
            continue
        if row.seconds is not None and (ours.seconds is None or ours.seconds > row.seconds):
            yield f"{row.part}, {row.share}: {row.method} is faster, {_seconds(row)} and {_seconds(ours)}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Step time over the limit, a picture for each part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = list(dict.fromkeys(row.part for row in rows))
    figure, axes = plt.subplots(1, len(parts), figsize=(4.2 * len(parts), 3.4), squeeze=False)
    for axis, part in zip(axes[0], parts):
        for method in (OURS, *OTHERS):
            points = [
                (row.limit / 2**30, 1e3 * row.seconds)
                for row in rows
                if row.part == part and row.method == method and row.seconds is not None
            ]
            if points:
                axis.plot(*zip(*points), marker="o", label=method)
        axis.set_title(part, fontsize=9)
        axis.set_xlabel("limit, GiB")
        axis.set_ylabel("step, ms")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    path = RESULTS / "frontier.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    rows = [Row(*row) for row in kept]
    for name in options.parts or PARTS:
        subject = Subject(name)
        measured = []
        for share in options.shares:
            for row in subject.rows(share):
                print(row.part, row.share, row.method, _seconds(row), _size(row.peak), flush=True)
                measured.append(row)
        rows = [r for r in rows if r.part != name] + measured
        path.write_text(json.dumps(rows, indent=0) + "\n")
    write(rows)


def write(rows: Sequence[Row]) -> None:
    """Write the tables and the picture."""
    text = [
        f"# Step time within limits of memory\n\n`python -m benchmarks.plans.frontier`, {date.today()}."
    ]
    for name in dict.fromkeys(row.part for row in rows):
        text.append(f"## {name}\n\n{table([r for r in rows if r.part == name])}")
    wrong = list(broken(rows))
    text.append(
        "Broken: " + "; ".join(wrong)
        if wrong
        else "Every plan is within its limit, and none of the other methods of recomputation is "
        "faster within any of them."
    )
    (RESULTS / "frontier.md").write_text("\n\n".join(text) + "\n")
    draw(rows, RESULTS / "frontier.svg")


if __name__ == "__main__":
    main()
