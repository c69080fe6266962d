"""Llama-3-8B on 8 H100s, with the moments of AdamW on the GPUs and in the memory of their host.

    python -m benchmarks.plans.offload                        # some minutes; writes benchmarks/results/offload.md
    python -m benchmarks.plans.offload --layers 4             # a look

Parameters, gradients and moments are fp32 and sharded over dp=8, NVLink between the GPUs; matrices are bf16 in forward
and backward; a rank has one sequence of 8192 tokens. No GPU and no second process: ranks are fake, values have shapes
only, and times are simulated. All activations are kept, whatever memory an H100 has. `share` is the time that the
copies add to the step with moments on the GPUs. With `across_steps` the copies back may go on under the next step.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import platform
import time
from collections.abc import Iterator
from datetime import date

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from ztrans.planning.cluster import DEVICES, HOST_LINKS
from ztrans.stages import Lowered, Traced

from .. import RESULTS
from .llama_model import Config, init, make_step

PAGE = RESULTS / "offload.md"
DP = 8
MOMENTS = "[mv].*"
LINKS = ("pcie5", "pcie4", "pcie4, shared by two", "c2c")


def traced(config: Config, sequence: int, clips: bool) -> Traced:
    mesh = init_device_mesh("cpu", (DP, 1), mesh_dim_names=("dp", "tp"))
    tokens = torch.empty(1, sequence + 1, dtype=torch.int64, device="meta")
    step = zt.shard_params(mesh, axis="dp")(make_step(config, mesh, clips))
    return step.trace(init(config, 1), tokens, 0)


def lowered(program: Traced, *transforms: zt.Transform) -> Lowered:
    schedules = (zt.fuse_cast_gather(), zt.overlap_grads(), zt.prefetch())
    every = (*program.transforms, *transforms, *schedules)
    return dataclasses.replace(program, transforms=every).lower(cluster=machines(LINKS[0]))


def machines(name: str) -> zt.Cluster:
    """H100s with this link to the host. Their memory is no limit, because all activations are kept."""
    kind, _, shared = name.partition(", ")
    host_link = dataclasses.replace(HOST_LINKS[kind], shared=2 if shared else 1)
    device = dataclasses.replace(DEVICES["h100"], memory=float("inf"))
    return zt.cluster(device, dp="nvlink4", tp="nvlink4", host_link=host_link)


def rows(config: Config, sequence: int, clips: bool) -> Iterator[list[str]]:
    """The step with moments on the GPUs, then with moments on the host for each link, in the same plan."""
    update = "clipped, after backward" if clips else "during backward"
    program = traced(config, sequence, clips)
    plain = lowered(program)
    yield [update, "-", "-", *figures(plain), "", ""]
    least = plain.timeline().seconds
    within = lowered(program, zt.offload(where=MOMENTS))
    across = lowered(program, zt.offload(where=MOMENTS, across_steps=True))
    for name in LINKS:
        for ends, moved in (("in the step", within), ("in the next", across)):
            here = dataclasses.replace(moved, cluster=machines(name)).with_plan(moved.plan)
            timeline = here.timeline()
            exposed = sum(s for (_, role), s in timeline.exposed.items() if role == "offload")
            share = f"{100 * (timeline.seconds / least - 1):.1f}%"
            yield [update, name, ends, *figures(here), f"{1e3 * exposed:.1f}", share]


def figures(low: Lowered) -> list[str]:
    """The milliseconds of a step, and the peaks of both memories in GiB."""
    memory = low.memory_analysis()
    peaks = [f"{n / 2**30:.2f}" for n in (memory.peak, memory.host_peak)]
    return [f"{1e3 * low.timeline().seconds:.1f}", *peaks]


def main(layers: int, sequence: int) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=DP, store=FakeStore())
    begin = time.perf_counter()
    columns = [
        "updates",
        "link to the host",
        "copies back end",
        "step ms",
        "GPU GiB",
        "host GiB",
        "exposed ms",
        "share",
    ]
    lines = [columns, ["---"] * len(columns)]
    for clips in (False, True):
        for row in rows(Config(layers=layers), sequence, clips):
            print(row, flush=True)
            lines.append(row)
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    seconds = time.perf_counter() - begin
    text = "\n".join(
        [
            f"# Moments of Llama-3-8B in the memory of the host, {layers} layers, dp={DP}\n",
            f"{where}. Simulated; all programs were made in {seconds:.0f} s.\n",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )
    print(text)
    PAGE.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=8192)
    arguments = parser.parse_args()
    main(arguments.layers, arguments.sequence)
