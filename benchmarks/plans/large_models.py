"""How long it takes to trace, plan and draw the steps of large models, and how near their plans come to their bounds.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.large_models              # from the project's root; 4 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.plans.large_models "Llama-3-8B, dp=64"

The step is that of `llama_model.py`, with clipping and AdamW, and tensor parallelism by hand where tp is above 1. Its
limit is the memory of an H100: the plan chooses what backward recomputes, and where dp lies over hosts with 8 of its
ranks each, also which parameters their ranks keep in parts.
Values have shapes only, and ranks are fake. Each model runs in a fresh process. Prints processor seconds, the simulated
milliseconds of the step, and how many times its lower bound they are. Writes benchmarks/results/large_models.md if all
models ran. Fails if a model takes more seconds than it may, if its page has more than 5 MB, or if its step takes more
than 1.05 times its bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from ztrans.report.page import page

from .. import RESULTS
from .llama_model import Config, init, make_step

PAGE = RESULTS / "large_models.md"
MOST = 5_000_000  # bytes of a page
NEAR = 1.05  # a plan takes at most so many times its bound


@dataclass(frozen=True)
class Case:
    """A model on a mesh, and the seconds that it may take."""

    config: Config
    dp: int
    tp: int
    limit: float


CASES = {
    "Llama-3-8B, dp=64": Case(Config(), 64, 1, 45.0),
    "Llama-3-8B, dp=1024": Case(Config(), 1024, 1, 45.0),
    "Llama-3-8B, dp=16, tp=8": Case(Config(), 16, 8, 45.0),
    "Llama-3-70B, dp=128, tp=8": Case(
        Config(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672), 128, 8, 120.0
    ),
}
SCHEDULES = (
    zt.remat(memory="auto"),
    zt.delay_weight_grads(),
    zt.overlap_grads(),
    zt.prefetch(),
    zt.fuse_cast_gather(),
)


def measure(name: str) -> dict[str, Any]:
    """The processor seconds of each stage, and what comes out of it."""
    torch.set_num_threads(1)
    case = CASES[name]
    dist.init_process_group("fake", rank=0, world_size=case.dp * case.tp, store=FakeStore())
    mesh = init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    over_hosts = zt.by_host(8, "nvlink4", "infiniband") if case.tp == 1 else "infiniband"
    machines = zt.cluster("h100", dp=over_hosts, tp="nvlink4")
    tokens = torch.empty(1, 8193, dtype=torch.int64, device="meta")
    state = init(case.config, case.tp)
    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        seconds[stage] = time.process_time() - start
        return result

    step = zt.shard_params(mesh, axis="dp")(make_step(case.config, mesh))
    traced = timed("trace", lambda: step.trace(state, tokens, 0))
    planned = dataclasses.replace(traced, transforms=(*traced.transforms, *SCHEDULES))
    lowered = timed("lower", lambda: planned.lower(cluster=machines))
    timeline = timed("simulate", lowered.timeline)
    html = timed("draw", lambda: page([timeline]))
    dist.destroy_process_group()
    least, binds = timeline.bound
    return {
        "equations": len(lowered.graph.eqns),
        "page": len(html),
        "step": timeline.seconds,
        "times": timeline.seconds / least,
        "binds": binds,
        **seconds,
    }


def main(names: list[str]) -> None:
    head = ["model", "equations", "trace s", "lower s", "simulate s", "draw s", "sum s", "page MB"]
    head += ["step ms", "times its bound", "binds"]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    wrong = []
    print(*rows, sep="\n")
    for name in names:
        command = [sys.executable, "-m", "benchmarks.plans.large_models", "--one", name]
        shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        figures = json.loads(shown.splitlines()[-1])
        stages = [figures[stage] for stage in ("trace", "lower", "simulate", "draw")]
        cells = [name, f"{figures['equations']:,}", *(f"{s:.1f}" for s in (*stages, sum(stages)))]
        cells += [f"{figures['page'] / 1e6:.2f}", f"{figures['step'] * 1e3:.1f}"]
        cells += [f"{figures['times']:.3f}", figures["binds"]]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
        if sum(stages) > CASES[name].limit or figures["page"] > MOST:
            wrong.append(f"{name}: more than {CASES[name].limit:.0f} s, or {MOST / 1e6:.0f} MB")
        if figures["times"] > NEAR:
            wrong.append(f"{name}: {figures['times']:.3f} times its bound")
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    title = f"# From a step to a page\n\n{where}; processor seconds of one run."
    if names == list(CASES):
        PAGE.write_text("\n".join([title, "", *rows, ""]))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="the models, by default all")
    parser.add_argument("--one", choices=[*CASES])
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
    else:
        main(options.names or list(CASES))
