"""What the analyses say of 300 programs, held against each other.

    OMP_NUM_THREADS=1 python -m benchmarks.analyses        # from the project's root; some fifteen minutes
    OMP_NUM_THREADS=1 python -m benchmarks.analyses "GPT 2" --print

Models x ranks x clusters x ZeRO stages x memory budgets, every one planned and simulated with shapes alone. In all of
them must hold:

    bound      the bound, which no order can beat, is not above the simulated step
    budget     the peak of the memory analysis is not above a budget that was asked for
    more       a larger budget is not slower by more than a percent
    stages     the peak does not rise from ZeRO stage 0 to 2 to 3, where all leaves are trained

Prints and writes benchmarks/results/analyses.md, and fails when something does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations
from pathlib import Path

import torch

import ztrans as zt
from benchmarks.analysed import MODELS
from ztrans.ir.printer import format_bytes, format_seconds

RESULTS = Path(__file__).parent / "results"
NVLINK, NIC, SLOW = ("h100", "nvlink4"), ("h100", "infiniband"), ("cpu", "ethernet-1g")
A100, ETHERNET = ("a100", "infiniband"), ("h100", "ethernet-100g")
PLACES: dict[str, list[tuple[int, tuple[str, str]]]] = {  # by model: ranks, and the cluster that they are on
    "GPT 2 x 128, fp32": [(2, SLOW), (8, NVLINK), (32, A100), (64, NIC)],
    "GPT 6 x 512, fp32": [(2, SLOW), (64, NIC), (16, ETHERNET)],
    "GPT 6 x 1024, bf16": [(8, NVLINK), (32, A100), (512, NIC)],
    "GPT 12 x 2048, bf16": [(64, NIC), (512, NIC)],
    "GPT 24 x 2048, bf16": [(32, NIC)],
    "GPT 4 x 1024, clipped": [(8, NVLINK), (64, NIC)],
    "GPT 4 x 512, two micro-batches": [(32, A100), (64, NIC)],
    "MLP 8 x 4096": [(2, SLOW), (8, NVLINK), (512, NIC)],
    "MLP, uneven and thin leaves": [(8, NVLINK), (32, A100), (64, NIC)],
    "convolutions 8 x 256": [(8, NVLINK), (64, NIC)],
    "experts 4 x 8": [(2, SLOW), (16, ETHERNET), (64, NIC), (512, NIC)],
    "LoRA 8 x 2048": [(8, NVLINK), (64, NIC)],
}
# By stage: budgets as multiples of the peak of the program in its own order; None is "auto".
BUDGETS: dict[int, list[float | None]] = {3: [None, 1.0, 1.1, 1.3, 2.0], 2: [None, 1.1, 1.5], 0: [None]}
SAID = {
    "bound": "the bound is not above the simulated step",
    "budget": "the peak is not above a budget that was asked for",
    "more": "a larger budget is not slower by more than 1%",
    "stages": "the peak does not rise from stage 0 to 2 to 3",
}
NOTES = """\
Every program is a train step, forward, backward and update, for so many ranks of a cluster, with `overlap_grads`,
`prefetch` and `fuse_cast_gather`. Budgets are "auto", and 1 to 2 times the peak of the program in its own order. Stages
are compared where all leaves are trained and have optimizer state: at stage 2 the shard of a frozen leaf lies beside
the whole of it, which at stage 0 is all there is.
"""


@dataclass(frozen=True)
class Row:
    """One program: what it is of, and what the analyses say of it."""

    model: str
    ranks: int
    cluster: str
    stage: int
    reshard: str
    update: str
    budget: int | None
    written: int  # the peak of the program in its own order
    seconds: float
    bound: float
    binds: str
    peak: int
    took: float

    @property
    def place(self) -> tuple[str, int, str]:
        """Model, ranks and cluster."""
        return self.model, self.ranks, self.cluster

    @property
    def usual(self) -> bool:
        """Whether it has no other options than a stage and a budget."""
        return self.reshard == "auto" and self.update == "eager"

    def __str__(self) -> str:
        budget = "auto" if self.budget is None else format_bytes(self.budget)
        return f"{self.model}, {self.ranks} ranks, {self.cluster}, stage {self.stage}, memory {budget}"


def rows(models: Iterable[str] = tuple(MODELS), places: int | None = None) -> Iterator[Row]:
    """All programs of some models, at the first `places` of each."""
    for model in models:
        step, state, batch = MODELS[model].make()
        traced = zt.Step.of(step).trace(state, *batch)
        for ranks, (device, link) in PLACES[model][:places]:
            yield from _at(model, traced, ranks, device, link)


def _at(model: str, traced: zt.Traced, ranks: int, device: str, link: str) -> Iterator[Row]:
    cluster, mesh = zt.cluster(device, dp=link), zt.AbstractMesh(dp=ranks)

    def lower(*transforms: zt.Transform) -> zt.Lowered:
        chosen = (*transforms, zt.fuse_cast_gather())
        return dataclasses.replace(traced, transforms=chosen).lower(cluster=cluster)

    def row(stage: int, budget: int | None, reshard: str = "auto", update: str = "eager") -> Row:
        began = time.perf_counter()
        shard = zt.shard_params(mesh, stage=stage, reshard=reshard)
        prefetch = zt.prefetch(memory="auto" if budget is None else budget)
        lowered = lower(shard, zt.overlap_grads(update=update), prefetch)
        line, took = lowered.timeline(), time.perf_counter() - began
        options = (model, ranks, f"{device}, {link}", stage, reshard, update, budget)
        return Row(*options, written[stage], line.seconds, *line.bound, lowered.memory_analysis().peak, took)

    written = {stage: lower(zt.shard_params(mesh, stage=stage)).memory_analysis().peak for stage in BUDGETS}
    for stage, budgets in BUDGETS.items():
        for share in budgets:
            yield row(stage, None if share is None else int(share * written[stage]))
    yield row(3, None, reshard="always")
    yield row(3, None, update="last")


def broken(every: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """What does not hold, with which of `SAID` it is."""
    for r in every:
        if r.bound > r.seconds * (1 + 1e-9):
            yield "bound", f"{r}: {format_seconds(r.seconds)}, and a bound of {format_seconds(r.bound)} ({r.binds})"
        if r.budget is not None and r.peak > r.budget:
            yield "budget", f"{r}: a peak of {format_bytes(r.peak)}"
    for a, b in _pairs(every):
        if b.seconds > 1.01 * a.seconds:
            yield "more", f"{b}: {format_seconds(b.seconds)}, {format_seconds(a.seconds)} in {format_bytes(a.budget)}"
    for a, b in _stages(every):
        if b.peak > a.peak:
            yield "stages", f"{b}: a peak of {format_bytes(b.peak)}, and {format_bytes(a.peak)} at stage {a.stage}"


def _pairs(every: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Programs that differ in their budget alone, the smaller first."""
    asked = sorted((r for r in every if r.usual and r.budget is not None), key=lambda r: r.budget)
    return ((a, b) for a, b in combinations(asked, 2) if (a.place, a.stage) == (b.place, b.stage))


def _stages(every: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Programs that differ in their stage alone, the lower one first, of models that train all their leaves."""
    auto = {(r.place, r.stage): r for r in every if r.usual and r.budget is None and MODELS[r.model].trains}
    return ((auto[place, low], r) for (place, stage), r in auto.items() for low in {2: [0], 3: [2]}.get(stage, []))


def report(every: Sequence[Row]) -> str:
    """The counts, what does not hold, and a line for each model and place."""
    wrong = list(broken(every))
    tried = {"bound": len(every), "budget": sum(r.budget is not None for r in every)}
    tried |= {"more": len(list(_pairs(every))), "stages": len(list(_stages(every)))}
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    lines = ["# The analyses of real programs, held against each other", ""]
    lines += [f"{where}. {len(every)} programs.", "", NOTES]
    lines += ["| what must hold | tried | broken |", "|---|---:|---:|"]
    lines += [f"| {SAID[what]} | {tried[what]} | {sum(w == what for w, _ in wrong)} |" for what in SAID]
    lines += ["", *(f"- {what}: {text}" for what, text in wrong), ""]
    columns = ("model", "ranks", "cluster", "stage 3", "times the bound", "peak at stages 0, 2, 3", "seconds to plan")
    lines += [f"| {' | '.join(columns)} |", "|---|---:|---|---:|---:|---:|---:|", *_table(every), ""]
    return "\n".join(lines)


def _table(every: Sequence[Row]) -> Iterator[str]:
    for place in dict.fromkeys(r.place for r in every):
        here = [r for r in every if r.place == place]
        auto = {r.stage: r for r in here if r.usual and r.budget is None}
        model, ranks, cluster = place
        peaks = ", ".join(format_bytes(auto[stage].peak) for stage in sorted(auto))
        ratio, took = auto[3].seconds / auto[3].bound, max(r.took for r in here)
        seconds = format_seconds(auto[3].seconds)
        yield f"| {model} | {ranks} | {cluster} | {seconds} | {ratio:.3f} | {peaks} | {took:.1f} |"


def main(models: list[str], write: bool) -> None:
    torch.set_num_threads(1)
    every = []
    for row in rows(models):
        every.append(row)
        step, bound = format_seconds(row.seconds), format_seconds(row.bound)
        print(f"{row}: {step}, bound {bound}, peak {format_bytes(row.peak)}", flush=True)
    text = report(every)
    print(text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "analyses.md").write_text(text)
    if failed := [f"{what}: {text}" for what, text in broken(every)]:
        sys.exit("\n".join(["does not hold:", *failed]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="a part of the names of models (default: all)")
    parser.add_argument("--print", action="store_true", help="write no results")
    given = parser.parse_args()
    main([name for name in MODELS if given.model in name], not given.print)
