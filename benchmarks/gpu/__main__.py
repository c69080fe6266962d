"""Kernels, collectives and a training step on one GPU: checked for correctness, then timed beside their peers.

    python -m benchmarks.gpu                  # under 8 minutes; results/gpu.json and results/gpu.md
    python -m benchmarks.gpu --only kernels   # of: numerics kernels ranks streams processes collectives jitter
                                              #     sanitizer contention nccl step variants largest host offload
    python -m benchmarks.gpu --only step --tokens 1024 2048 --clipped no
    python -m benchmarks.gpu --next           # what is open (next_gpu.py): expected and seen, results/gpu_next.md

Without a GPU the command says so, and writes no file. The files are rewritten after each result. They keep the results
of other sections, and of other tables of steps, if those are from the same card, with the same versions, on the same
day. All sections share one time limit, and the report also lists sections that failed or did not run. This process
launches nothing on the GPU itself: each section has a process of its own, so a crash or a hang does not stop the
others. Each row has the commit that it was measured at, and the report says which rows are older than their code.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .. import RESULTS
from . import ages

SECONDS = 450
NEXT_SECONDS = 540
Section = Callable[..., Iterator[list[dict]]]


def sections() -> dict[str, Section]:
    """The sections by name, in the order in which they run.

    A section is called with a device, a function that returns the seconds left, and options, if it has any. It yields
    the list of its results whenever that has grown. Its docstring is printed above its table in the report.
    """
    from . import (
        contention,
        jitter,
        kernels,
        largest,
        nccl,
        numerics,
        offload,
        ranks,
        rounds,
        small_steps,
        streams,
        two_ranks,
    )

    return {
        "numerics": rounds.apart(numerics.checks),
        "kernels": rounds.apart(kernels.table),
        "ranks": rounds.apart(ranks.one_launch),
        "streams": rounds.apart(streams.streams),
        "processes": ranks.processes,
        "collectives": nccl.collectives,
        "jitter": rounds.apart(jitter.jitter),
        "sanitizer": rounds.apart(jitter.sanitizer),
        "contention": rounds.apart(contention.contention),
        "nccl": two_ranks.two_ranks,
        "step": rounds.steps,
        "variants": rounds.variants,
        "largest": rounds.apart(largest.largest),
        "host": rounds.apart(small_steps.table),
        "offload": rounds.apart(offload.table),
    }


def card() -> dict:
    """The card and the versions of the software, for the head of the report."""
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
    names: Sequence[str],
    device: torch.device,
    seconds: float,
    results: dict,
    write: Callable[[dict], None],
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> bool:
    """Run the sections `names` with their `options`, and write `results` after each result.

    Returns whether nothing failed.
    """
    end = time.monotonic() + seconds
    left = lambda: end - time.monotonic()
    commit = ages.commit_now()
    for name, section in sections().items():
        if name not in names:
            continue
        results[name], start = [], time.monotonic()
        try:
            for lines in (
                section(device, left, **options.get(name, {}))
                if left() > 5
                else [[{"failed": "not run: the time was over"}]]
            ):
                for line in lines[len(results[name]) :]:
                    print(f"{name}: {line}", file=sys.stderr)
                results[name] = [{**line, "commit": line.get("commit", commit)} for line in lines]
                write(results)
        except Exception as error:
            traceback.print_exc()
            results[name].append({"failed": f"{type(error).__name__}: {error}"})
            write(results)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return not any("failed" in line for name in names for line in results.get(name, ()))


def markdown(where: dict, results: dict) -> str:
    """The results as Markdown tables, with a column for each key of a section's results."""
    lines = ["# One GPU", "", ", ".join(f"{key} {value}" for key, value in where.items()) + ".", ""]
    for name, section in sections().items():
        if rows := results.get(name):
            keys = list(dict.fromkeys(key for row in rows for key in row if key != "commit"))
            keys.append("commit")
            lines += [f"## {name}", "", inspect.getdoc(section) or "", ""]
            lines += [ages.age(name, rows), ""]
            lines += ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
            lines += [
                "| " + " | ".join(_cell(row.get(key, "")) for key in keys) + " |" for row in rows
            ]
            lines.append("")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value).replace("|", "/")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _chosen_tables(tokens: Sequence[int] | None, clipped: str, earlier: list[dict]) -> dict:
    """The options of the section `step`: the tables to measure, and earlier results, of which those of others stay."""
    from . import rounds

    return {"tables": rounds.tables_of(tokens, clipped), "earlier": earlier}


def main() -> None:
    """Parse the arguments, run the sections, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(sections()), default=list(sections()))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--tokens", type=int, nargs="+", help="the tables of `step` to measure")
    parser.add_argument("--clipped", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--next", action="store_true", help="what is open, in at most 9 minutes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the files")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "python -m benchmarks.gpu measures an NVIDIA GPU, and torch sees none here: nothing is measured or written."
        )
    if args.next:
        from . import next_gpu

        target = args.results / "gpu_next.md"
        args.results.mkdir(exist_ok=True)
        went_well = next_gpu.run(torch.device("cuda", 0), NEXT_SECONDS, target.write_text)
        print(target.read_text())
        sys.exit(not went_well)
    where = card()
    file = args.results / "gpu.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    results = old.pop("sections", {})

    def write(results: dict) -> None:
        args.results.mkdir(exist_ok=True)
        file.write_text(json.dumps({**where, "sections": results}, indent=1) + "\n")
        (args.results / "gpu.md").write_text(markdown(where, results) + "\n")

    results = results if old == where else {}
    device = torch.device("cuda", 0)
    options = {"step": _chosen_tables(args.tokens, args.clipped, results.get("step", []))}
    well = run(args.only, device, args.seconds, results, write, options)
    print(markdown(where, results))
    sys.exit(not well)


if __name__ == "__main__":
    main()
