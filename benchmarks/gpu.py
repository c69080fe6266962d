"""Kernels and collectives on one GPU: right first, then how fast, beside what peers use for the same work.

    python benchmarks/gpu.py                  # under 8 minutes; results/gpu.json and results/gpu.md
    python benchmarks/gpu.py --only kernels   # of: numerics kernels ranks processes

Where ztrans is not installed, from the root of the sources: PYTHONPATH=. python benchmarks/gpu.py

Figures are written of a GPU that was there, and of nothing else: without one the command says so and
writes no file. Each section runs in what is left of the time; one that fails or comes too late is
in the report as that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path

# Before torch: kernels of ranks that wait for each other must not wait for one another's loading or queues.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

RESULTS = Path(__file__).parent / "results"
SECONDS = 450


def sections() -> dict[str, Callable[[torch.device, Callable[[], float]], list[dict]]]:
    """What is run, in this order; each gives its lines, given a device and a clock of what is left."""
    import gpu_kernels
    import gpu_numerics
    import gpu_ranks

    return {
        "numerics": gpu_numerics.checks,
        "kernels": gpu_kernels.table,
        "ranks": gpu_ranks.one_launch,
        "processes": gpu_ranks.processes,
    }


def card() -> dict:
    """What the figures were measured on."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "sms": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": str(date.today()),
    }


def run(names: list[str], device: torch.device, seconds: float) -> dict:
    """All sections of `names`, each as its lines or as what went wrong."""
    end, found = time.monotonic() + seconds, {}
    left = lambda: end - time.monotonic()  # noqa: E731
    for name, section in sections().items():
        if name not in names:
            continue
        if left() < 5:
            found[name] = "not run: the time was over"
            continue
        start = time.monotonic()
        try:
            found[name] = section(device, left)
        except Exception as error:
            found[name] = f"failed: {type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        if name == "numerics" and isinstance(found[name], str):
            break  # how fast a wrong kernel is does not matter
    return found


def markdown(where: dict, found: dict) -> str:
    """The results as tables, a column for each key of a section's lines."""
    lines = ["# One GPU", "", ", ".join(f"{key} {value}" for key, value in where.items()) + ".", ""]
    for name, rows in found.items():
        lines += [f"## {name}", ""]
        if isinstance(rows, str):
            lines += [rows, ""]
            continue
        keys = list(dict.fromkeys(key for row in rows for key in row))
        lines += ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        lines += ["| " + " | ".join(_cell(row.get(key, "")) for key in keys) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(sections()), default=list(sections()))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py measures an NVIDIA GPU, and torch sees none here: nothing is written.")
    where = card()
    found = run(args.only, torch.device("cuda", 0), args.seconds)
    text = markdown(where, found)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu.md").write_text(text + "\n")
    (RESULTS / "gpu.json").write_text(json.dumps({**where, "sections": found}, indent=1) + "\n")
    sys.exit(any(isinstance(rows, str) and rows.startswith("failed") for rows in found.values()))


if __name__ == "__main__":
    main()
