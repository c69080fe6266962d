"""Llama-3-8B trained with Muon on 8 and 64 H100s: every rank updates all matrices, or each rank owns some.

    python -m benchmarks.plans.owned_updates            # some minutes; writes benchmarks/results/owned_updates.md
    python -m benchmarks.plans.owned_updates --layers 2 # a look at 8 ranks

Matrices of the layers have Muon, with five steps of Newton-Schulz in bf16, all other leaves SGD with momentum.
Parameters, gradients and moments are fp32 and sharded over dp; matrices are bf16 in forward and backward; a rank has
one sequence of 8192 tokens. NVLink inside hosts of 8, InfiniBand between them. No GPU and no second process: ranks are
fake, values have shapes only, and times are simulated. All activations are kept, whatever memory an H100 has. The last
column is the step beside that of SGD with momentum.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import platform
import time
from collections.abc import Callable, Iterator
from datetime import date

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from ztrans.planning.cluster import DEVICES
from ztrans.planning.durations import equation_seconds
from ztrans.stages import Lowered

from .. import RESULTS
from .llama_model import Config, init, make_step, muon, sgd

PAGE = RESULTS / "owned_updates.md"


def lowered(
    config: Config, sequence: int, ranks: int, update: Callable, *transforms: zt.Transform
) -> Lowered:
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
    tokens = torch.empty(1, sequence + 1, dtype=torch.int64, device="meta")
    state = init(config, 1)
    del state["v"], state["step"]
    schedules = (zt.fuse_cast_gather(), zt.overlap_grads(), zt.prefetch())
    chain = zt.chain(zt.shard_params(mesh, axis="dp"), *transforms, *schedules)
    step = chain(make_step(config, mesh, clips=False, update=update))
    return step.trace(state, tokens, 0).lower(cluster=machines(ranks))


def machines(ranks: int) -> zt.Cluster:
    """H100s in hosts of 8. Their memory is no limit, because all activations are kept."""
    device = dataclasses.replace(DEVICES["h100"], memory=float("inf"))
    link = "nvlink4" if ranks <= 8 else zt.by_host(8, "nvlink4", "infiniband")
    return zt.cluster(device, dp=link, tp="nvlink4")


def rows(ranks: int, layers: int, sequence: int) -> Iterator[list[str]]:
    config = Config(layers=layers)
    programs = {"SGD": (sgd,), "Muon": (muon,), "Muon, owned_updates": (muon, zt.owned_updates())}
    least = 0.0
    for name, (update, *transforms) in programs.items():
        begin = time.perf_counter()
        low = lowered(config, sequence, ranks, update, *transforms)
        seconds = time.perf_counter() - begin
        timeline = low.timeline()
        least = least or timeline.seconds
        of_update = 0.0
        for e, duration in zip(low.graph.eqns, equation_seconds(low.graph, low.cluster)):
            of_update += duration if e.region == "update" else 0.0
        exposed = sum(s for (_, role), s in timeline.exposed.items() if role == "update")
        yield [
            f"{ranks}, {layers} layers",
            name,
            f"{1e3 * timeline.seconds:.1f}",
            f"{1e3 * of_update:.1f}",
            f"{1e3 * exposed:.1f}",
            f"{low.cost_analysis().over('dp', 'update') / 2**30:.2f}",
            f"{low.memory_analysis().peak / 2**30:.2f}",
            f"{low.cost_analysis().launches:,}",
            f"{seconds:.0f}",
            f"{timeline.seconds / least:.3f}",
        ]


COLUMNS = [
    "H100s", "optimizer", "step ms", "update, computed ms", "update, exposed messages ms",
    "received in the update, GiB", "peak GiB", "launches", "traced and lowered s", "beside SGD",
]  # fmt: skip


def main(layers: int, sequence: int) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    is_whole = layers == 32
    for ranks, count in ((8, min(layers, 8)), (64, 32))[: 1 + is_whole]:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        for row in rows(ranks, count, sequence):
            print(row, flush=True)
            lines.append(row)
        dist.destroy_process_group()
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    seconds = time.perf_counter() - begin
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = "\n\n".join(
        [
            "# Llama-3-8B with Muon, each matrix updated on all ranks or on one",
            f"{where}. Simulated; all programs were made in {seconds:.0f} s.",
            table,
        ]
    )
    print(text)
    if is_whole:
        PAGE.write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=8192)
    arguments = parser.parse_args()
    main(arguments.layers, arguments.sequence)
