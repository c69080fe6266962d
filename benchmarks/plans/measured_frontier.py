"""Measured step time within five limits of memory: `remat(memory=...)` beside checkpoints and `torch.compile`.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.measured_frontier             # about 15 minutes, on an idle machine
    OMP_NUM_THREADS=1 python -m benchmarks.plans.measured_frontier --ranks 1   # one of the two parts

A GPT is trained on one rank, and on two ranks of this machine over gloo at stage 3. The limits are its state and 1.0 to
0.35 of its activations, as in `frontier.py`. A step with `remat(memory=limit)` is compared with all others of
its backend whose measured peak is within the limit: a checkpoint around each block, a selective checkpoint that saves
matrix products and attention, and `remat()`, by ztrans; the untouched loop with a checkpoint around each block; and
`torch.compile` with several values of `activation_memory_budget`. On two ranks the loops of PyTorch use FSDP2.

All steps of a part are in one process on each rank, and take turns. malloc keeps freed memory, as the allocator of a
GPU does. Otherwise the pages of a step return to the system, and the next step waits for new ones. A peak is the state,
which is the same for all, and the most bytes that malloc has handed out in a step besides those at its start. Plans are
made from the recorded times of the step in which everything is kept. Writes benchmarks/results/measured_frontier.md and
.json. The exit status is 1 if a step is above its limit or slower than another, or if the losses differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import RESULTS, processor
from ..peers.memory import Peak, lent
from ..peers.model import Config
from .frontier import SHARES
from .measured_frontier_steps import WARM_UP, Part, Subject

SIZES = Config(layers=4, width=192, heads=3, vocab=512, sequence=512, batch=3)
BACKENDS = ("eager", "inductor")
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)  # of torch.compile
ROUNDS = 15
OBSERVED = (
    6  # steps in which the bytes are watched: a look at them may come too late for a short peak
)

BYTES_APART = 0.01  # that a measured peak may be above its limit: allocations that are no tensors
TIME_APART = 0.02  # that a step may be slower than another: the noise of medians
LOSSES_APART = 1e-3

# malloc returns no freed memory to the system, and has no block of less than 32 MiB from there alone.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}


class Row(NamedTuple):
    """What was measured of a subject. The peak is that of the rank that needs most."""

    ranks: int
    method: str
    backend: str
    share: float | None
    limit: int | None
    planned: int | None
    peak: int
    seconds: list[float]
    loss: float
    date: str

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(part: Part, subjects: Sequence[Subject], rounds: int) -> list[Row]:
    """The rows of all subjects, on every rank. Each rank must call it."""
    losses: list[float] = []
    peaks = []
    for subject in subjects:
        for _ in range(WARM_UP):
            subject.step()
    for subject in subjects:
        peaks.append(part.limits.state + max(_bytes_of_a_step(subject) for _ in range(OBSERVED)))
    seconds: list[list[float]] = [[] for _ in subjects]
    numbers = list(range(len(subjects)))
    for k in range(rounds):
        first = k % len(subjects)
        losses = [0.0] * len(subjects)
        for number in numbers[first:] + numbers[:first]:
            meet()
            start = time.perf_counter()
            losses[number] = float(subjects[number].step())
            seconds[number].append(time.perf_counter() - start)
    rows = []
    for subject, peak, each, loss in zip(subjects, peaks, seconds, losses):
        by_rank = everywhere((peak, each, loss))
        limit = None if subject.share is None else part.limits.limit(subject.share)
        rows.append(
            Row(
                ranks=part.task.ranks,
                method=subject.method,
                backend=subject.backend,
                share=subject.share,
                limit=limit,
                planned=subject.planned,
                peak=max(peak for peak, _, _ in by_rank),
                seconds=[max(same) for same in zip(*(each for _, each, _ in by_rank))],
                loss=statistics.fmean(loss for _, _, loss in by_rank),
                date=str(date.today()),
            )
        )
    return rows


def _bytes_of_a_step(subject: Subject) -> int:
    """The most bytes that are in use in a step besides those at its start."""
    gc.collect()
    meet()
    time.sleep(0.1)  # until buffers that another rank was still receiving from are freed
    before = lent()
    with Peak() as peak:
        subject.step()
    return peak.bytes - before


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def everywhere(value: Any) -> list:
    """The values of all ranks."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def fits(row: Row, limit: int) -> bool:
    return row.peak <= (1 + BYTES_APART) * limit


def fastest_other(row: Row, rows: Sequence[Row]) -> Row | None:
    """The fastest step of the same backend within the same limit that another method has made."""
    others = []
    for other in rows:
        is_peer = (other.ranks, other.backend) == (row.ranks, row.backend) and other.limit is None
        if is_peer and row.limit is not None and fits(other, row.limit):
            others.append(other)
    return min(others, key=lambda other: other.median, default=None)


def broken(rows: Sequence[Row]) -> Iterator[str]:
    """Where a step is above its limit, or slower than another within it, or computes something else."""
    first_of: dict[int, Row] = {}
    for row in rows:
        first = first_of.setdefault(row.ranks, row)
        name = f"{_on(row.ranks)}, {row.backend}, {row.method}"
        if not abs(row.loss / first.loss - 1) <= LOSSES_APART:
            yield f"{name}: the last loss is {row.loss}, that of the first row {first.loss}"
        if row.limit is None:
            continue
        if not fits(row, row.limit):
            above = row.peak / row.limit - 1
            yield f"{name}, {row.share}: {_size(row.peak)} were live, {above:.1%} above the limit"
        other = fastest_other(row, rows)
        if other is not None and row.median > (1 + TIME_APART) * other.median:
            ratio = row.median / other.median
            yield f"{name}, {row.share}: slower, {ratio:.3f} of the time of {other.method}"


def _on(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks"


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f} MiB"


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The steps within limits, and below them those that they are compared with."""
    yield "| activations | limit | planned | measured peak | ms | fastest other | its peak | its ms | ratio |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row.limit is not None:
            cells = [f"{row.share}", *map(_size, (row.limit, row.planned, row.peak))]
            cells.append(f"{1e3 * row.median:.1f}")
            other = fastest_other(row, rows)
            if other is None:
                cells += ["none fits", "", "", ""]
            else:
                cells += [other.method, _size(other.peak), f"{1e3 * other.median:.1f}"]
                cells.append(f"{row.median / other.median:.3f}")
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield "| method | planned | measured peak | ms |"
    yield "|---|---|---|---|"
    for row in rows:
        if row.limit is None:
            sizes = f"{_size(row.planned)} | {_size(row.peak)}"
            yield f"| {row.method} | {sizes} | {1e3 * row.median:.1f} |"


def report(where: str, rows: Sequence[Row]) -> str:
    """The page of results."""
    lines = ["# Measured step time within limits of memory", ""]
    lines += [f"`python -m benchmarks.plans.measured_frontier`; {where}, a core for each rank.", ""]
    for ranks in dict.fromkeys(row.ranks for row in rows):
        for backend in BACKENDS:
            of_backend = [row for row in rows if (row.ranks, row.backend) == (ranks, backend)]
            if of_backend:
                when = f"medians of {len(of_backend[0].seconds)}, {of_backend[0].date}"
                lines += [f"## {_on(ranks).capitalize()}, {backend}; {when}", ""]
                lines += [*tables(of_backend), ""]
    wrong = list(broken(rows))
    if wrong:
        lines += ["Broken:", "", *(f"- {each}" for each in wrong)]
    else:
        lines.append(
            "Every step is within its limit, no other step of its backend that fits the limit is more than "
            f"{TIME_APART:.0%} faster, and all compute the same losses."
        )
    return "\n".join([*lines, ""])


def worker(options: argparse.Namespace) -> None:
    """What each rank of a part does. Rank 0 prints the rows."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    part = Part(SIZES, dist.get_world_size(), options.backends)
    rows = measure(part, [*part.subjects(options.shares, options.budgets)], options.rounds)
    if dist.get_rank() == 0:
        print(json.dumps([row._asdict() for row in rows]), flush=True)
    dist.destroy_process_group()


def on_ranks(ranks: int, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a part, measured in processes of its own."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += ["--nproc-per-node", str(ranks), "-m", "benchmarks.plans.measured_frontier", "--worker"]
    environment = {**os.environ, **KEEPS_MEMORY}
    done = subprocess.run([*run, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"The part on {_on(ranks)} has failed.")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))


def main(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    file = RESULTS / "measured_frontier.json"
    where = f"{processor()}, torch {torch.__version__}"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    # Figures of another processor or another torch are not compared with these.
    results = earlier if earlier.get("where") == where else {"where": where, "rows": []}
    results["config"] = dataclasses.asdict(SIZES)
    for ranks in options.ranks:
        measured = on_ranks(ranks, arguments)
        results["rows"] = [row for row in results["rows"] if row["ranks"] != ranks] + measured
        results["rows"].sort(key=lambda row: row["ranks"])
        file.write_text(json.dumps(results, indent=1) + "\n")
    rows = [Row(**row) for row in results["rows"]]
    text = report(where, rows)
    (RESULTS / "measured_frontier.md").write_text(text)
    print(text)
    sys.exit(1 if list(broken(rows)) else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.worker:
        worker(parsed)
    else:
        main(parsed, sys.argv[1:])
