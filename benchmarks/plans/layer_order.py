"""Micro-batches of Llama-3-8B one after the other, and layer by layer, over fast and slow links between hosts.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.layer_order    # from the project's root; a minute or two

The Llama of `frontier_models.py` has 4 layers, each in a checkpoint. A rank has 4 sequences of 8,192 tokens, each a
micro-batch; in the order of layers the loss has tiles of 4,096 tokens. Values have shapes only; times are simulated.
A limit is one that `prefetch` got; without it, a plan takes 5% more memory than the program in its written order.
Writes benchmarks/results/layer_order.md. Fails if a step in the order of layers is slower, or larger, than it may be.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import sys
import time
from datetime import date
from typing import NamedTuple

import torch

import ztrans as zt
from ztrans.planning.cluster import DEVICES
from ztrans.stages import Lowered, Traced

from .. import RESULTS
from .frontier_models import llama, per_block

PAGE = RESULTS / "layer_order.md"
LAYERS, MICRO = 4, 4
SCHEDULES = (zt.fuse_cast_gather(), zt.overlap_grads())
OTHERS = (
    ("accumulate(4), stage 3", 3, (zt.accumulate(MICRO),)),
    ('accumulate(4, keep="whole"), stage 3', 3, (zt.accumulate(MICRO, keep="whole"),)),
    ("accumulate(4), stage 1", 1, (zt.accumulate(MICRO),)),
)
BY_LAYERS = 'tile(), accumulate(4, order="layers"), stage 3'
Micro = tuple[zt.Transform, ...]


class Case(NamedTuple):
    """A cluster, the limit that a plan gets there, and what the step by layers may take."""

    name: str
    ranks: int
    link: zt.Link | str
    limit: float | None  # GiB
    most_ms: float
    most_gib: float


CASES = (
    Case(
        "64 H100s, hosts of 8, InfiniBand between them",
        64,
        zt.by_host(8, "nvlink4", "infiniband"),
        None,
        1039.7,
        11.65,
    ),
    Case(
        "16 H100s, hosts of 8, 10 Gbit/s between them",
        16,
        zt.by_host(8, "nvlink4", "ethernet-10g"),
        16.9,
        6980.3,
        17.41,
    ),
    Case("4 hosts with one H100, 10 Gbit/s between them", 4, "ethernet-10g", 21.88, 9657.3, 22.54),
)


def lowered(program: Traced, case: Case, stage: int, micro: Micro, limit: bool) -> Lowered:
    """The step on a cluster, within its limit or without one. `program` is that of one micro-batch."""
    memory = int(case.limit * 2**30) if limit and case.limit else "auto"
    shard = zt.shard_params(zt.AbstractMesh(dp=case.ranks), stage=stage)
    transforms = (*micro, shard, *SCHEDULES, zt.prefetch(memory=memory))
    device = dataclasses.replace(DEVICES["h100"], memory=float("inf"))
    machines = zt.cluster(device, dp=case.link)
    return dataclasses.replace(program, transforms=transforms).lower(cluster=machines)


def row(case: Case, name: str, low: Lowered) -> tuple[list[str], float, float]:
    """A row of the table, with the milliseconds and the GiB of the step."""
    timeline = low.timeline()
    peak = low.memory_analysis().peak / 2**30
    sent = {"param": 0, "grad": 0}
    for (_, role), size in low.cost_analysis().wire:
        sent[role] = sent.get(role, 0) + size
    ms = 1e3 * timeline.seconds
    gib = [f"{sent[role] / 2**30:.1f}" for role in ("param", "grad")]
    compute = f"{1e3 * timeline.compute:.1f}"
    equations = f"{len(low.graph.eqns):,}"
    return [case.name, name, f"{ms:.1f}", compute, f"{peak:.2f}", *gib, equations], ms, peak


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start = time.process_time()
    step, state, batch = llama(per_block, layers=LAYERS, batch=MICRO)
    program = zt.accumulate(MICRO)(step).trace(state, *batch)
    columns = ["cluster", "program", "step ms", "compute ms", "peak GiB", "gathers GiB"]
    columns += ["reductions GiB", "equations"]
    lines = [columns, ["---"] * len(columns)]
    wrong = []

    def add(case: Case, name: str, low: Lowered) -> tuple[float, float]:
        cells, ms, gib = row(case, name, low)
        print(f"| {' | '.join(cells)} |", flush=True)
        lines.append(cells)
        return ms, gib

    for case in CASES:
        for name, stage, micro in OTHERS:
            add(case, name, lowered(program, case, stage, micro, limit=False))
        by_layers = (zt.tile(), zt.accumulate(MICRO, order="layers"))
        ms, gib = add(case, BY_LAYERS, lowered(program, case, 3, by_layers, limit=False))
        if case.limit:
            name = f"{BY_LAYERS}, within {case.limit} GiB"
            ms, gib = add(case, name, lowered(program, case, 3, by_layers, limit=True))
        if ms > case.most_ms or gib > case.most_gib:
            wrong.append(f"{case.name}: {ms:.1f} ms and {gib:.2f} GiB are too much")
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    seconds = time.process_time() - start
    title = f"# Micro-batches of Llama-3-8B, layer by layer, {LAYERS} layers"
    text = [title, "", f"{where}. Simulated; all programs took {seconds:.0f} s of one core.", ""]
    PAGE.write_text("\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines), ""]))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
