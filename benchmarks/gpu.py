"""Kernels, collectives and a training step on one GPU: right first, then how fast, beside what peers do.

    python benchmarks/gpu.py                  # under 8 minutes; results/gpu.json and results/gpu.md
    python benchmarks/gpu.py --only kernels   # of: numerics kernels ranks processes collectives step

Where ztrans is not installed, from the root of the sources: PYTHONPATH=. python benchmarks/gpu.py

Figures are written of a GPU that was there, and of nothing else: without one the command says so and
writes no file. Files are written anew with every line that is found, and keep what other sections
found on the same card, with the same versions, on the same day. Each section runs in what is left of
the time; what fails or comes too late is in the report as that. Nothing is launched by this process: what
ends badly for a GPU, or never ends, does so in a process of its own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
SECONDS = 450


def sections() -> dict[str, Callable[[torch.device, Callable[[], float]], Iterator[list[dict]]]]:
    """What is run, in this order; each gives its lines so far, again and again, given a device and a clock of what
    is left. What it says of itself stands above its table."""
    import gpu_kernels
    import gpu_nccl
    import gpu_numerics
    import gpu_ranks
    import gpu_rounds

    return {
        "numerics": gpu_rounds.apart(gpu_numerics.checks),
        "kernels": gpu_rounds.apart(gpu_kernels.table),
        "ranks": gpu_rounds.apart(gpu_ranks.one_launch),
        "processes": gpu_ranks.processes,
        "collectives": gpu_nccl.collectives,
        "step": gpu_rounds.steps,
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
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "date": str(date.today()),
    }


def run(
    names: Sequence[str], device: torch.device, seconds: float, found: dict, write: Callable[[dict], None]
) -> bool:
    """All sections of `names` into `found`, written with every line; whether all went well."""
    end = time.monotonic() + seconds
    left = lambda: end - time.monotonic()
    for name, section in sections().items():
        if name not in names:
            continue
        found[name], start = [], time.monotonic()
        try:
            for lines in section(device, left) if left() > 5 else [[{"failed": "not run: the time was over"}]]:
                for line in lines[len(found[name]) :]:
                    print(f"{name}: {line}", file=sys.stderr)
                found[name] = list(lines)
                write(found)
        except Exception as error:
            traceback.print_exc()
            found[name].append({"failed": f"{type(error).__name__}: {error}"})
            write(found)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return not any("failed" in line for name in names for line in found.get(name, ()))


def markdown(where: dict, found: dict) -> str:
    """The results as tables, a column for each key of a section's lines."""
    lines = ["# One GPU", "", ", ".join(f"{key} {value}" for key, value in where.items()) + ".", ""]
    for name, section in sections().items():
        if rows := found.get(name):
            keys = list(dict.fromkeys(key for row in rows for key in row))
            lines += [f"## {name}", "", inspect.getdoc(section) or "", ""]
            lines += ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
            lines += ["| " + " | ".join(_cell(row.get(key, "")) for key in keys) + " |" for row in rows]
            lines.append("")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value).replace("|", "/")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(sections()), default=list(sections()))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py measures an NVIDIA GPU, and torch sees none here: nothing is measured or written.")
    where, file = card(), RESULTS / "gpu.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    found = before.pop("sections", {})

    def write(found: dict) -> None:
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps({**where, "sections": found}, indent=1) + "\n")
        (RESULTS / "gpu.md").write_text(markdown(where, found) + "\n")

    found = found if before == where else {}
    well = run(args.only, torch.device("cuda", 0), args.seconds, found, write)
    print(markdown(where, found))
    sys.exit(not well)


if __name__ == "__main__":
    main()
