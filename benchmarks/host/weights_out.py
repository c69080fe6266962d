"""Weights that leave a sharded state on two hosts: bytes on the wire and seconds, beside `step.unshard`.

    benchmarks/netlab up 2 1gbit                                                    # from the project's root, as root
    OMP_NUM_THREADS=1 benchmarks/netlab run .venv/bin/python -m benchmarks.host.weights_out
    benchmarks/netlab down

The state has 25 M parameters of fp32 in 12 layers, 101 MB, with two moments each. Each host has one rank with half of
it. Bytes are what both hosts send, counted by their network interfaces; seconds are medians of five runs in turns.
Prints and writes benchmarks/results/weights_out.md.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ztrans as zt

from .. import RESULTS, processor

RUNS = 5


def train_step(state: Any, x: torch.Tensor) -> Any:
    return state, x.sum()


def state_of(layers: int = 12, rows: int = 2048, columns: int = 1024) -> dict[str, Any]:
    """A state as AdamW has it."""
    random = torch.Generator().manual_seed(0)
    params = {f"{i}.weight": torch.randn(rows, columns, generator=random) for i in range(layers)}
    params |= {f"{i}.bias": torch.randn(rows, generator=random) for i in range(layers)}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in params.items()}
    return {"params": params, "moments": moments}


def sent_bytes() -> int:
    """The bytes that this host has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measured(run: Callable[[], object]) -> tuple[float, int]:
    """The seconds of a run on all ranks, and the bytes that they send."""
    dist.barrier()
    before = sent_bytes()
    began = time.perf_counter()
    run()
    dist.barrier()
    figures: list[Any] = [None] * dist.get_world_size()
    seconds, sent = time.perf_counter() - began, sent_bytes() - before
    dist.all_gather_object(figures, (seconds, sent))
    return max(seconds for seconds, _ in figures), sum(sent for _, sent in figures)


def exhaust(**options: Any) -> None:
    for _ in zt.stream_weights(**options):
        pass


def main() -> None:
    torch.set_num_threads(1)
    mesh = zt.make_mesh("cpu", dp=-1)
    step = zt.shard_params(mesh)(train_step)
    state = step.shard(state_of())
    params = state["params"]
    folder = Path(tempfile.gettempdir(), "ztrans-weights-out")
    bf16 = torch.bfloat16
    sent: dict[str, Any] = {}
    exhaust(weights=params, to=0, dtype=bf16, since=sent)

    def one_layer_changed() -> None:
        with torch.no_grad():
            params["3.weight"].to_local().add_(1)
        exhaust(weights=params, to=0, dtype=bf16, since=sent)

    subjects: dict[str, Callable[[], object]] = {
        "`step.unshard(state)`: parameters and moments": lambda: step.unshard(state),
        "`step.unshard` of the parameters": lambda: step.unshard({"params": params}),
        "`stream_weights` to all ranks": lambda: exhaust(weights=params),
        "`stream_weights` to all ranks, bf16": lambda: exhaust(weights=params, dtype=bf16),
        "`stream_weights` to one rank, bf16": lambda: exhaust(weights=params, to=0, dtype=bf16),
        "the same with `since`, one layer of 12 changed": one_layer_changed,
        "the same with `since`, nothing changed": lambda: exhaust(
            weights=params, to=0, dtype=bf16, since=sent
        ),
        "`export`, bf16, two files": lambda: zt.export(
            folder, params, dtype=bf16, max_file_bytes=30_000_000
        ),
    }
    figures: dict[str, list[tuple[float, int]]] = {name: [] for name in subjects}
    for _ in range(RUNS + 1):
        for name, run in subjects.items():
            figures[name].append(measured(run))
    rows = []
    for name, measurements in figures.items():
        seconds, nbytes = zip(*measurements[1:])  # the first run opens connections
        rows.append(
            f"| {name} | {statistics.median(nbytes) / 1e6:.1f} | {statistics.median(seconds):.2f} |"
        )
    machine = f"{processor()}, torch {torch.__version__}, load average {os.getloadavg()[1]:.1f}"
    page = [
        "# Weights that leave a sharded state\n",
        f"{date.today()}, {machine}; two hosts of netlab at 1 Gbit/s, one rank each.",
        "101 MB of parameters in fp32. Written by `benchmarks/host/weights_out.py`.\n",
        "| | MB sent by both hosts | seconds |",
        "|---|--:|--:|",
        *rows,
    ]
    if mesh.get_rank() == 0:
        text = "\n".join(page) + "\n"
        (RESULTS / "weights_out.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
