"""Check that the analyses of some 360 programs agree with each other.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.analyses        # from the project's root; about twenty minutes
    OMP_NUM_THREADS=1 python -m benchmarks.plans.analyses "GPT 2" --print
    OMP_NUM_THREADS=1 python -m benchmarks.plans.analyses --limits   # recomputation within eight limits each; two hours

The programs are models x ranks x clusters x ZeRO stages x memory budgets. Each is planned and simulated, with shapes
alone. These laws must hold for all of them:

    bound      the lower bound, which no order can beat, is at most the seconds of the simulated step
    budget     the peak of the memory analysis is at most the given budget
    more       a larger budget makes the step at most 1% slower
    stages     ZeRO stage 2 fits within the peak of stage 0, and stage 3 within that of stage 2, for models that train
               all leaves
    near       at stage 3 with an automatic budget, the step of the largest model takes at most 1.05 times its bound

With `--limits`, 256 programs recompute within eight limits each (`remat(memory=...)`): the peak is within the limit,
and a larger limit makes the step at most 0.5% slower.

Prints and writes benchmarks/results/analyses.md. Fails if a law is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations

import torch

import ztrans as zt
from ztrans.ir.printer import format_bytes, format_seconds
from ztrans.planning.cost import memory
from ztrans.planning.limit import DoesNotFit

from .. import RESULTS
from .analysis_models import MODELS

NVLINK, NIC, SLOW = ("h100", "nvlink4"), ("h100", "infiniband"), ("cpu", "ethernet-1g")
A100, ETHERNET = ("a100", "infiniband"), ("h100", "ethernet-100g")
PLACES: dict[
    str, list[tuple[int, tuple[str, str]]]
] = {  # by model: pairs of a number of ranks and a cluster
    "GPT 2 x 128, fp32": [(2, SLOW), (8, NVLINK), (32, A100), (64, NIC)],
    "GPT 6 x 512, fp32": [(2, SLOW), (64, NIC), (16, ETHERNET)],
    "GPT 6 x 1024, bf16": [(8, NVLINK), (32, A100), (512, NIC)],
    "GPT 12 x 2048, bf16": [(64, NIC), (512, NIC)],
    "GPT 24 x 2048, bf16": [(32, NIC), (64, NIC)],
    "GPT 4 x 1024, clipped": [(8, NVLINK), (64, NIC)],
    "GPT 4 x 512, two micro-batches": [(32, A100), (64, NIC)],
    "MLP 8 x 4096": [(2, SLOW), (8, NVLINK), (512, NIC)],
    "MLP, uneven and thin leaves": [(8, NVLINK), (32, A100), (64, NIC)],
    "convolutions 8 x 256": [(8, NVLINK), (64, NIC)],
    "experts 4 x 8": [(2, SLOW), (16, ETHERNET), (64, NIC), (512, NIC)],
    "LoRA 8 x 2048": [(8, NVLINK), (64, NIC)],
}
# By stage: budgets as multiples of the peak of the program in its written order. None is "auto".
BUDGETS: dict[int, list[float | None]] = {
    3: [None, 1.0, 1.1, 1.3, 2.0],
    2: [None, 1.1, 1.5],
    0: [None],
}
HIGHER = {0: 2, 2: 3}  # by stage: the next higher one
LAWS = {
    "bound": "the lower bound is at most the seconds of the simulated step",
    "budget": "the peak is at most the given budget",
    "more": "a larger budget makes the step at most 1% slower",
    "stages": "stage 2 fits within the peak of stage 0, and stage 3 within that of stage 2",
    "near": "at stage 3 with an automatic budget, the largest model takes at most 1.05 times its bound",
}
LARGEST = "GPT 24 x 2048, bf16"
NEAR = 1.05  # the most that its step may take, as a multiple of its bound
NOTES = """\
Every program is a train step with forward, backward and update, and with `overlap_grads`, `prefetch` and
`fuse_cast_gather`. Budgets are "auto", and 1 to 2 times the peak of the program in its written order. Stages are
compared only for models whose leaves are all trained and have optimizer state. A frozen leaf takes more memory at
stage 2, which holds its shard and the whole leaf, than at stage 0, which holds the whole leaf alone. A plan may take as
much memory as it is given, so with "auto" the peak of a higher stage may be above that of the lower one. Such programs
are listed, and planned again with the peak of the lower stage as their budget. The seconds to plan are wall time, also
on a machine that does other work.
"""


@dataclass(frozen=True)
class Row:
    """One program: its model, ranks, cluster and options, and the results of its analyses."""

    model: str
    ranks: int
    cluster: str
    stage: int
    reshard: str
    update: str
    budget: int | None
    written: int  # the peak in bytes of the program in its written order
    seconds: float
    bound: float
    binds: str
    peak: int  # if the program does not fit its budget, the peak that it needs
    took: float

    @property
    def place(self) -> tuple[str, int, str]:
        """Model, ranks and cluster."""
        return self.model, self.ranks, self.cluster

    @property
    def usual(self) -> bool:
        """Whether the program has no options besides a stage and a budget."""
        return self.reshard == "auto" and self.update == "eager"

    def __str__(self) -> str:
        budget = "auto" if self.budget is None else format_bytes(self.budget)
        return (
            f"{self.model}, {self.ranks} ranks, {self.cluster}, stage {self.stage}, memory {budget}"
        )


def rows(models: Iterable[str] = tuple(MODELS), places: int | None = None) -> Iterator[Row]:
    """All programs of some models, on the first `places` entries of `PLACES` of each model."""
    for model in models:
        step, state, batch = MODELS[model].make()
        traced = zt.Step.of(step).trace(state, *batch)
        for ranks, (device, link) in PLACES[model][:places]:
            yield from _at(model, traced, ranks, device, link)


def _at(model: str, traced: zt.stages.Traced, ranks: int, device: str, link: str) -> Iterator[Row]:
    cluster, mesh = zt.cluster(device, dp=link), zt.AbstractMesh(dp=ranks)

    def lower(*transforms: zt.Transform) -> zt.stages.Lowered:
        chosen = (*transforms, zt.fuse_cast_gather())
        return dataclasses.replace(traced, transforms=chosen).planned(cluster)

    def row(stage: int, budget: int | None, reshard: str = "auto", update: str = "eager") -> Row:
        began = time.perf_counter()
        shard = zt.shard_params(mesh, stage=stage, reshard=reshard)
        prefetch = zt.prefetch(memory="auto" if budget is None else budget)
        options = (model, ranks, f"{device}, {link}", stage, reshard, update, budget)
        try:
            lowered = lower(shard, zt.overlap_grads(update=update), prefetch)
        except DoesNotFit as error:
            took = time.perf_counter() - began
            return Row(*options, written[stage], math.inf, 0.0, "", error.least.peak, took)
        line, took = lowered.timeline(), time.perf_counter() - began
        return Row(
            *options,
            written[stage],
            line.seconds,
            *line.bound,
            lowered.memory_analysis().peak,
            took,
        )

    written = {
        stage: lower(zt.shard_params(mesh, stage=stage)).memory_analysis().peak for stage in BUDGETS
    }
    auto = {}
    for stage, budgets in BUDGETS.items():
        for share in budgets:
            each = row(stage, None if share is None else int(share * written[stage]))
            if share is None:
                auto[stage] = each
            yield each
    for low, high in HIGHER.items():
        if MODELS[model].trains and auto[high].peak > auto[low].peak:
            yield row(high, auto[low].peak)
    yield row(3, None, reshard="always")
    yield row(3, None, update="last")


def broken(programs: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The laws that are broken: the key in `LAWS`, and a description."""
    for r in programs:
        if r.bound > r.seconds * (1 + 1e-9):
            yield (
                "bound",
                f"{r}: {format_seconds(r.seconds)}, and a bound of {format_seconds(r.bound)} ({r.binds})",
            )
        if r.budget is not None and r.peak > r.budget:
            yield "budget", f"{r}: a peak of {format_bytes(r.peak)}"
    for a, b in _pairs(programs):
        if b.seconds > 1.01 * a.seconds:
            yield (
                "more",
                f"{b}: {format_seconds(b.seconds)}, {format_seconds(a.seconds)} in {format_bytes(a.budget)}",
            )
    for a, b in _stages(programs):
        same = (r.peak for r in programs if r.usual and (r.place, r.stage) == (b.place, b.stage))
        if min(same) > a.peak:
            yield "stages", _rise(a, b)
    for r in _largest(programs):
        if math.isfinite(r.seconds) and r.seconds > NEAR * r.bound:
            yield "near", f"{r}: {r.seconds / r.bound:.3f} times its bound ({r.binds})"


def _rise(a: Row, b: Row) -> str:
    took = f"{format_seconds(b.seconds)}, and {format_bytes(a.peak)} and {format_seconds(a.seconds)} at stage {a.stage}"
    return f"{b}: a peak of {format_bytes(b.peak)} and {took}"


def _pairs(programs: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs of programs that differ only in their budget, the smaller budget first."""
    asked = sorted(
        (r for r in programs if r.usual and r.budget is not None), key=lambda r: r.budget
    )
    return ((a, b) for a, b in combinations(asked, 2) if (a.place, a.stage) == (b.place, b.stage))


def _stages(programs: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs of programs that differ only in their stage, the lower stage first. Their models train all leaves."""
    auto = {
        (r.place, r.stage): r
        for r in programs
        if r.usual and r.budget is None and MODELS[r.model].trains
    }
    for low, high in HIGHER.items():
        for (place, stage), lower in auto.items():
            if stage == low and (place, high) in auto:
                yield lower, auto[place, high]


def _largest(programs: Sequence[Row]) -> list[Row]:
    """The programs of the largest model within the memory of the device, with all messages: at stage 3."""
    return [
        r for r in programs if r.model == LARGEST and r.stage == 3 and r.usual and r.budget is None
    ]


# Recomputation within limits: `remat(memory=...)`.

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of what a step has live besides its state
EQUAL = 1.005  # a larger limit may be slower by this factor: the search does not always find the best order


@dataclass(frozen=True)
class Limited:
    """One program within one limit. If it does not fit, it has no seconds, and the peak that it needs."""

    program: str
    limit: int
    seconds: float | None
    peak: int


def limited(
    models: Iterable[str] = tuple(MODELS),
    places: int | None = None,
    stages: Sequence[int] = (0, 1, 2, 3),
    policies: Sequence[str | None] = (None, "save_matmuls"),
) -> Iterator[list[Limited]]:
    """Each program within eight limits, the largest first: models x places x stages x policies of `remat`."""
    for model in models:
        step, state, batch = MODELS[model].make()
        traced = zt.Step.of(step).trace(state, *batch)
        for ranks, (device, link) in PLACES[model][:places]:
            machines = zt.cluster(device, dp=link)
            for stage in stages:
                shard = zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage)
                for save in policies:
                    name = f"{model}, {ranks} ranks, {device}, {link}, stage {stage}, save {save}"
                    yield _within_limits(name, traced, shard, machines, save)


def _within_limits(
    name: str,
    traced: zt.stages.Traced,
    shard: zt.Transform,
    machines: zt.Cluster,
    save: str | None,
) -> list[Limited]:
    def variant(*remat: zt.Transform) -> zt.stages.Traced:
        schedules = zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
        return dataclasses.replace(traced, transforms=(shard, *schedules, *remat))

    written = memory(variant().without_order(machines).unordered)
    rows = []
    for share in SHARES:
        limit = int(written.state + share * (written.peak - written.state))
        try:
            lowered = variant(zt.remat(memory=limit, save=save)).planned(machines)
            seconds = lowered.timeline().seconds
            rows.append(Limited(name, limit, seconds, lowered.memory_analysis().peak))
        except DoesNotFit as error:
            rows.append(Limited(name, limit, None, error.least.peak))
    return rows


def broken_limits(rows: Sequence[Limited]) -> Iterator[str]:
    """Where one program has a peak above its limit, or is slower within a larger limit."""
    for row in rows:
        if (row.seconds is not None) != (row.peak <= row.limit):
            yield f"{row.program}: {row.peak} bytes live, and {row.limit} allowed"
    planned = [row for row in rows if row.seconds is not None]
    for larger, smaller in combinations(planned, 2):
        if larger.seconds > EQUAL * smaller.seconds:
            taken = f"{format_seconds(larger.seconds)}, and {format_seconds(smaller.seconds)}"
            yield f"{larger.program}: {taken} within {smaller.limit} bytes of {larger.limit}"


def check_limits(models: list[str], places: int | None) -> None:
    """Plan all programs within their limits, and fail if one is above its limit or slower within a larger one."""
    wrong = []
    count = 0
    begin = time.perf_counter()
    for rows in limited(models, places):
        count += 1
        wrong += broken_limits(rows)
        fits = sum(row.seconds is not None for row in rows)
        print(f"{rows[0].program}: {fits} of {len(rows)} limits fit", flush=True)
    took = time.perf_counter() - begin
    print(f"{count} programs within {len(SHARES)} limits in {took:.0f} s, {len(wrong)} broken")
    if wrong:
        sys.exit("\n".join(["broken laws:", *wrong]))


def report(programs: Sequence[Row]) -> str:
    """The report in Markdown: how often each law was checked and broken, and a line for each model and cluster."""
    wrong = list(broken(programs))
    tried = {"bound": len(programs), "budget": sum(r.budget is not None for r in programs)}
    tried |= {"more": len(list(_pairs(programs))), "stages": len(list(_stages(programs)))}
    tried |= {"near": len(_largest(programs))}
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    lines = ["# The analyses of real programs agree with each other", ""]
    lines += [f"{where}. {len(programs)} programs.", "", NOTES]
    lines += ["| law | checked | broken |", "|---|---:|---:|"]
    lines += [f"| {LAWS[law]} | {tried[law]} | {sum(w == law for w, _ in wrong)} |" for law in LAWS]
    lines += ["", *(f"- {law}: {text}" for law, text in wrong), ""]
    rises = [_rise(a, b) for a, b in _stages(programs) if b.peak > a.peak]
    lines += [
        "Peaks above that of the lower stage:",
        "",
        *(f"- {text}" for text in rises or ["none"]),
        "",
    ]
    columns = (
        "model",
        "ranks",
        "cluster",
        "stage 3",
        "times the bound",
        "peak at stages 0, 2, 3",
        "seconds to plan",
    )
    lines += [
        f"| {' | '.join(columns)} |",
        "|---|---:|---|---:|---:|---:|---:|",
        *_table(programs),
        "",
    ]
    return "\n".join(lines)


def _table(programs: Sequence[Row]) -> Iterator[str]:
    for place in dict.fromkeys(r.place for r in programs):
        here = [r for r in programs if r.place == place]
        auto = {r.stage: r for r in here if r.usual and r.budget is None}
        model, ranks, cluster = place
        peaks = ", ".join(format_bytes(auto[stage].peak) for stage in sorted(auto))
        ratio, took = auto[3].seconds / auto[3].bound, max(r.took for r in here)
        seconds = format_seconds(auto[3].seconds)
        yield f"| {model} | {ranks} | {cluster} | {seconds} | {ratio:.3f} | {peaks} | {took:.1f} |"


def main(models: list[str], write: bool) -> None:
    torch.set_num_threads(1)
    programs = []
    for row in rows(models):
        programs.append(row)
        step, bound = format_seconds(row.seconds), format_seconds(row.bound)
        print(f"{row}: {step}, bound {bound}, peak {format_bytes(row.peak)}", flush=True)
    text = report(programs)
    print(text)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "analyses.md").write_text(text)
    if failed := [f"{law}: {text}" for law, text in broken(programs)]:
        sys.exit("\n".join(["broken laws:", *failed]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", default="", help="only models whose names contain this (default: all)"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the report, but do not write it"
    )
    parser.add_argument(
        "--limits", action="store_true", help="check recomputation within limits instead"
    )
    parser.add_argument("--places", type=int, help="only the first clusters of each model")
    given = parser.parse_args()
    chosen = [name for name in MODELS if given.model in name]
    if given.limits:
        check_limits(chosen, given.places)
    else:
        main(chosen, not given.print)
