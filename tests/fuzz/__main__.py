"""The command line: run many seeds, or one of them."""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from .check import Case, failure

RESULTS = Path(__file__).parent / "RESULTS.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="how many seeds (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--only", type=int, help="run this seed alone, and print the whole failure")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the counts to {RESULTS.name}")
    args = parser.parse_args()
    if args.only is not None:
        text = failure(args.only, whole=True)
        print(Case.of(args.only).name, text or "no failure", sep="\n")
        return bool(text)
    seeds, began, failures = range(args.seed, args.seed + args.runs), time.time(), []
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for done, text in enumerate(pool.imap(failure, seeds), 1):
            if text:
                failures.append(text)
                print(text, flush=True)
            if done % 100 == 0:
                print(
                    f"{done} of {args.runs}, {len(failures)} failures", file=sys.stderr, flush=True
                )
    text = report(seeds, failures, time.time() - began)
    print(text)
    if args.write:
        RESULTS.write_text(text)
    return bool(failures)


def report(seeds: range, failures: list[str], seconds: float) -> str:
    """The contents of RESULTS.md: how many cases ran, and how many had each optimizer, layer and option."""
    cases = [Case.of(seed) for seed in seeds]
    optimizers = Counter(case.program.optimizer.name.split(" ")[0] for case in cases)
    layers = Counter(
        layer.name.rstrip("0123456789-/x.[], ") for case in cases for layer in case.program.layers
    )
    options = Counter(
        f"{k}={getattr(v, '__name__', v)}" for case in cases for k, v in case.options.shard
    )
    options.update(t.name for case in cases for t in case.options.others)
    options.update(f"dp={case.options.ranks}" for case in cases)
    options.update("prefetch" for case in cases if case.options.prefetch is not None)
    options.update(
        "prefetch, with a budget" for case in cases if case.options.prefetch and case.options.budget
    )
    lines = [
        "# Random programs",
        "",
        f"`python -m tests.fuzz --runs {len(seeds)} --seed {seeds.start}`: {len(failures)} failures in {len(seeds)} cases",
        f"({seconds / 60:.0f} minutes, torch {torch.__version__}, {platform.machine()}).",
        "",
        *(f"    {line}" for text in failures for line in text.splitlines()),
    ]
    for title, counts in (("Options", options), ("Optimizers", optimizers), ("Layers", layers)):
        lines += [
            f"{title}: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) + ".",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
