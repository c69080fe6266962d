"""What the first gathers of a step cost, and what is left of it if they start in the step before.

    python -m benchmarks.plans.across_steps                   # some minutes; writes benchmarks/results/across_steps.md
    python -m benchmarks.plans.across_steps --layers 4        # a look at Llama with 4 layers alone

Steps with AdamW, of Llama-3-8B with 8 layers on 8 H100s with NVLink and of a GPT on 64 H100s with InfiniBand, whose
updates run during backward, or after it if gradients are clipped. No GPU and no second process: ranks are fake or
abstract, values have shapes only, and times are simulated. All activations are kept, whatever memory an H100 has.
`parameters` is the time in which compute waits for gathers of parameters, and `first` what it waits for the gathers
with which the step begins.
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
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from ztrans.planning.cluster import DEVICES
from ztrans.stages import Lowered, Traced

from .. import RESULTS
from .analysis_models import gpt
from .llama_model import Config
from .offload import DP, machines, traced

PAGE = RESULTS / "across_steps.md"
LAYERS = 8
COLUMNS = ("step", "updates", "across steps", "step ms", "parameters ms", "first ms", "peak GiB")
Programs = Iterator[tuple[str, str, Traced, zt.Cluster]]


def llamas(layers: int) -> Programs:
    for clips in (False, True):
        program = traced(Config(layers=layers), 8192, clips)
        yield f"Llama-3-8B, {layers} layers, 8 ranks", _updates(clips), program, machines("pcie5")


def gpts() -> Programs:
    device = dataclasses.replace(DEVICES["h100"], memory=float("inf"))
    for layers, clips in ((12, False), (12, True)):
        step, state, batch = gpt(layers, 2048, 2048, 4, vocab=8192, clip=clips)
        shard = zt.shard_params(zt.AbstractMesh(dp=64))
        program = shard(step).trace(state, *batch)
        cluster = zt.cluster(device, dp="infiniband")
        yield f"GPT {layers} x 2048, 64 ranks", _updates(clips), program, cluster


def _updates(clips: bool) -> str:
    return "clipped, after backward" if clips else "during backward"


def lowered(program: Traced, across_steps: bool, cluster: zt.Cluster) -> Lowered:
    prefetch = zt.prefetch(across_steps=across_steps)
    every = (*program.transforms, zt.overlap_grads(), prefetch, zt.fuse_cast_gather())
    return dataclasses.replace(program, transforms=every).lower(cluster=cluster)


def rows(programs: Programs) -> Iterator[list[str]]:
    for name, updates, program, cluster in programs:
        without = lowered(program, False, cluster)
        across = lowered(program, True, cluster)
        carried = {v.name for v in across.graph.carried_inputs}
        futures = carried | {v.name for v in across.graph.carried_outputs}
        for low, text in ((without, "no"), (across, "yes")):
            timeline = low.timeline()
            of_first = 0.0
            for event in timeline.events:
                if event.stall and any(v.name in futures for v in event.eqn.results):
                    of_first += event.stall
            of_parameters = timeline.exposed.get(("dp", "param"), 0.0)
            times = [timeline.seconds, of_parameters, of_first]
            milliseconds = [f"{1e3 * seconds:.2f}" for seconds in times]
            yield [name, updates, text, *milliseconds, f"{timeline.peak / 2**30:.2f}"]


def main(layers: int) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=DP, store=FakeStore())
    begin = time.perf_counter()
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    is_whole = layers == LAYERS
    for programs in (gpts(), llamas(layers)) if is_whole else (llamas(layers),):
        for row in rows(programs):
            print(row, flush=True)
            lines.append(row)
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    seconds = time.perf_counter() - begin
    text = "\n".join(
        [
            "# The first gathers of a step, started in it or in the step before\n",
            f"{where}. Simulated; all programs were made in {seconds:.0f} s.\n",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )
    if is_whole:
        PAGE.write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    main(parser.parse_args().layers)
