"""Lift small builds of models of transformers, timm, diffusers and peft, and compare them with the untouched loop.

    OMP_NUM_THREADS=1 python -m benchmarks.models                  # from the project's root; about ten minutes
    OMP_NUM_THREADS=1 python -m benchmarks.models Llama peft       # builds whose names contain one of these texts
    OMP_NUM_THREADS=1 python -m benchmarks.models --processes 8    # the builds are divided among processes

Each build trains for two steps with AdamW, in fp64, on ranks in lock-step: on 2 and 3 ranks, at stages 2 and 3, with
four transforms. Mixtures of experts train in fp32, for which alone they have kernels. It must compute the losses and
the state of the untouched loop on the whole batch; or of data parallelism by hand, if the samples of a batch depend on
each other. Otherwise it must be refused, with a message that names the cause.

Needs the extra `models`. Prints each outcome, and writes benchmarks/results/models.md. Fails if a build is neither
equal nor refused.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
from collections.abc import Sequence
from datetime import date

from .. import RESULTS
from .compare import LIBRARIES, STAGES, STEPS, WORLDS, Outcome, all_builds, titled

PAGE = RESULTS / "models.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", help="parts of the titles of builds (default: all)")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    builds = []
    for build in all_builds():
        if not args.texts or any(text in build.title for text in args.texts):
            builds.append(build)
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        results = pool.imap(titled, [build.title for build in builds])
        for build, (kind, detail, seconds) in zip(builds, results):
            outcomes.append(Outcome(build, kind, detail, seconds))
            print(f"{build.title:60} {kind:10} {seconds:5.1f} s  {detail}", flush=True)
    if not args.texts:
        PAGE.write_text(report(outcomes))
    sys.exit(any(not each.is_good for each in outcomes))


def report(outcomes: Sequence[Outcome]) -> str:
    """The table of outcomes as Markdown."""
    counts = ", ".join(
        f"{sum(o.kind == kind for o in outcomes)} {kind}" for kind in ("equal", "refused")
    )
    rows = [f"| {o.build.title} | {o.kind} | {o.detail} |" for o in outcomes]
    built = [name for name in LIBRARIES if any(o.build.library == name for o in outcomes)]
    versions = ", ".join(
        f"{name} {importlib.import_module(name).__version__}" for name in ("torch", *built)
    )
    absent = [name for name in LIBRARIES if name not in built]
    without = f"\nWithout {', '.join(absent)}, which could not be imported." if absent else ""
    head = [
        "# Models of other libraries, lifted", "",
        f"{len(outcomes)} builds: {counts}. Each was trained for {STEPS} steps on {WORLDS[0]} and {WORLDS[1]} ranks,",
        f"at stages {STAGES[0]} and {STAGES[1]}, in lock-step, and compared with the untouched loop (`python -m",
        f"benchmarks.models`; {date.today()}; {versions}). The last column has the distance of the worst leaf",
        "from that of the loop, relative to how far the loop has moved it; or the first line of the error.",
        without, "",
        "| build | outcome | |", "|---|---|---|",
    ]  # fmt: skip
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    main()
