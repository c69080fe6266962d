"""The update of Muon on four ranks over gloo: every rank updates all matrices, or each rank owns some.

    OMP_NUM_THREADS=1 .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 4 \\
        -m benchmarks.host.owned_updates                       # from the project's root, with nothing beside
    ... -m benchmarks.host.owned_updates --rows 64 --columns 256 --runs 2          # a look, which writes nothing

16 matrices of 384 x 1536 and five steps of Newton-Schulz, all in fp32, at stage 2. Forward and backward
take four rows. The time of an update is that of the step less that of the same step with SGD; medians of runs in turns,
of the slowest rank. Writes benchmarks/results/owned_updates_gloo.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt

from .. import RESULTS, processor
from ..plans.llama_model import orthogonal

MATRICES = 16


def make_step(is_muon: bool) -> Callable:
    """A step of matrices with momentum, and with Muon or without."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ p).square().mean() for p in params.values()]).sum()

    def step(state: dict[str, Any], x: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        grads, value = grad_and_value(loss)(state["params"], x)
        m = {k: 0.9 * m + grads[k] for k, m in state["m"].items()}
        change = {k: orthogonal(v) if is_muon else v for k, v in m.items()}
        return {
            "params": {k: p - 0.01 * change[k] for k, p in state["params"].items()},
            "m": m,
        }, value

    return step


def main(rows: int, columns: int, runs: int) -> None:
    torch.set_num_threads(1)
    mesh = zt.make_mesh("cpu", dp=-1)
    torch.manual_seed(0)
    params = {f"{k}": torch.randn(rows, columns) / 100 for k in range(MATRICES)}
    whole = {"params": params, "m": pytree.tree_map(torch.zeros_like, params)}
    x = torch.randn(4, rows)
    chain = zt.shard_params(mesh, stage=2), zt.overlap_grads(), zt.prefetch()
    subjects = {
        "SGD": zt.chain(*chain)(make_step(False)),
        "every rank updates all": zt.chain(*chain)(make_step(True)),
        "each rank owns some": zt.chain(*chain, zt.owned_updates())(make_step(True)),
    }
    states = {name: step.shard(whole) for name, step in subjects.items()}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for run in range(runs + 1):
        for name, step in subjects.items():
            dist.barrier()
            began = time.perf_counter()
            states[name], _ = step(states[name], x)
            taken = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if run:  # the first one traces
                seconds[name].append(float(taken))
    equal = all(
        torch.equal(a.to_local(), b.to_local())
        for a, b in zip(*(pytree.tree_leaves(states[name]) for name in list(subjects)[1:]))
    )
    least, everywhere, owned = (1e3 * statistics.median(each) for each in seconds.values())
    share = (owned - least) / (everywhere - least)
    machine = f"{processor()}, torch {torch.__version__}, load average {os.getloadavg()[1]:.1f}"
    page = [
        "# The update of Muon on four ranks over gloo\n",
        f"{date.today()}, {machine}; {dist.get_world_size()} ranks of one machine with {os.cpu_count()} cores.",
        f"{MATRICES} matrices of {rows} x {columns} in fp32. Written by `benchmarks/host/owned_updates.py`.\n",
        "| | step ms | update ms | |",
        "|---|--:|--:|--:|",
        f"| SGD with momentum | {least:.0f} | | |",
        f"| Muon, every rank updates all | {everywhere:.0f} | {everywhere - least:.0f} | 1 |",
        f"| Muon, `owned_updates` | {owned:.0f} | {owned - least:.0f} | {share:.2f} |",
        f"\nThe states of both have {'the same bits' if equal else 'OTHER BITS'} on rank 0 after {runs + 1} steps.",
    ]
    if mesh.get_rank() == 0:
        text = "\n".join(page) + "\n"
        print(text)
        if (rows, columns) == (384, 1536):
            (RESULTS / "owned_updates_gloo.md").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--columns", type=int, default=1536)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    main(arguments.rows, arguments.columns, arguments.runs)
