"""Pieces over connections of our own or over gloo: the same plan of stage 3, on two hosts, in turns.

    benchmarks/netlab up 2 1gbit                    # two hosts on this machine: as root, with iproute2
    PYTHONPATH=. benchmarks/netlab run python benchmarks/sockets.py
    benchmarks/netlab down

Writes benchmarks/results/sockets.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import ztrans as zt
from benchmarks.peers.model import Config, Task
from benchmarks.peers.ztrans import lifted
from benchmarks.tensor_parallel import network
from ztrans import exchange

RESULTS = Path(__file__).parent / "results"


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    zt.make_mesh("cpu", dp=-1)
    step = lifted(Task(Config(), dist.get_world_size(), dist.get_rank()), 3)
    ways = {"connections of our own": exchange._peers, "gloo": lambda group: None}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, exchange._peers in ways.items():
            for k in range(5):  # the first of a turn is not timed
                dist.barrier()
                start = time.perf_counter()
                step()
                seconds[name] += [time.perf_counter() - start] if k else []
    if dist.get_rank() == 0:
        rows = [f"| {name} | {statistics.median(s):.3f} | {min(s):.3f} |" for name, s in seconds.items()]
        text = "\n".join([
            f"# What carries the pieces: {network()}", "",
            f"{date.today()}, torch {torch.__version__}, one core a rank; GPT of `benchmarks/peers`, fp32, stage 3, "
            f"eager; one plan, {4 * rounds} steps each, in turns.", "",
            "| | seconds a step, median | least |", "|---|---:|---:|", *rows, "",
        ])  # fmt: skip
        print(text)
        (RESULTS / "sockets.md").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    main(parser.parse_args().rounds)
