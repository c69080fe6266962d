"""Measure the time of tracing and lowering GPTs of 12 and 48 layers with four transforms, on one core.

    OMP_NUM_THREADS=1 python benchmarks/trace_time.py

Prints the processor seconds (medians of `--repeats` runs), and writes benchmarks/results/trace_time.md.
"""

import argparse
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

from gpt import init, make_step  # noqa: E402
from model import GPT, Config  # noqa: E402

import ztrans as zt  # noqa: E402


def seconds(layers: int) -> tuple[float, float, int]:
    """Processor seconds of tracing and of lowering, and the number of equations of the lowered program."""
    with torch.device("meta"):
        model = GPT(Config(layers=layers, width=768, heads=12, sequence=1024))
        state = init(model, 1e-3)
        tokens = torch.empty(1, 1025, dtype=torch.int64)
    transforms = zt.shard_params(zt.AbstractMesh(dp=64)), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
    step = zt.chain(*transforms)(make_step(model, bf16=True))
    start = time.process_time()
    traced = step.trace(state, tokens)
    middle = time.process_time()
    lowered = traced.lower()
    return middle - start, time.process_time() - middle, len(lowered.graph.eqns)


def main(repeats: int) -> None:
    torch.set_num_threads(1)
    seconds(1)  # imports and caches
    rows = ["| layers | equations | trace s | lower s | together s |", "|---|---|---|---|---|"]
    totals = {}
    for layers in (12, 48):
        runs = [seconds(layers) for _ in range(repeats)]
        traced, lowered = (statistics.median(r[i] for r in runs) for i in (0, 1))
        totals[layers] = traced + lowered
        rows.append(f"| {layers} | {runs[0][2]} | {traced:.2f} | {lowered:.2f} | {totals[layers]:.2f} |")
    rows += ["", f"48 layers take {totals[48] / totals[12]:.2f} times as long as 12."]
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    text = "\n".join([f"# Tracing and lowering a GPT\n\n{where}; medians of {repeats} runs.\n", *rows, ""])
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "trace_time.md").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    main(parser.parse_args().repeats)
