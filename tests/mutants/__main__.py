"""Mutate the code, one small change at a time, and run the nearest tests: each change must make one fail.

    python -m tests.mutants                     about 160 mutations over all packages
    python -m tests.mutants --only planning     those of the modules whose names begin so
    python -m tests.mutants --list              the mutations and their tests; runs nothing

A mutation that changes no result is listed in `harmless.txt`, with the reason. The command fails if fewer than 95% of
all others are noticed. It works on copies of the project; nothing here is changed.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .mutations import ROOT, Mutation, draw
from .near import nearest_tests

HARMLESS = Path(__file__).with_name("harmless.txt")
REQUIRED = 0.95

# A test that a mutation makes hang fails after these seconds. The nearest tests of a mutation have these in all: what
# none of them has noticed by then has survived.
SECONDS_OF_A_TEST = 60
SECONDS_OF_A_MUTATION = 240


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--total", type=int, default=160, help="how many mutations (default: 160)")
    parser.add_argument("--only", default="", help="only modules whose names begin so")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    args = parser.parse_args()
    harmless = read_harmless()
    drawn = [m for m in draw(args.total) if m.module.startswith(args.only)]
    if args.list:
        for mutation in drawn:
            print(mutation.key, *nearest_tests(mutation.module), sep="\n    ")
        return 0
    outcomes: Counter[str] = Counter()
    with copies(args.jobs) as free, ThreadPoolExecutor(args.jobs) as threads:
        pending = [m for m in drawn if m.key not in harmless]
        outcomes["harmless"] = len(drawn) - len(pending)
        for mutation, killer in zip(
            pending, threads.map(lambda m: run_tests(m, free), pending), strict=True
        ):
            outcome = "killed" if killer else "survived"
            outcomes[outcome] += 1
            print(f"{outcome:9} {mutation.key}{f'   {killer}' if killer else ''}", flush=True)
    noticed = outcomes["killed"] / max(1, len(pending))
    print(
        f"{len(drawn)} mutations: {outcomes['killed']} killed, {outcomes['survived']} survived, "
        f"{outcomes['harmless']} listed as harmless. {noticed:.1%} of the others are noticed."
    )
    return noticed < REQUIRED


def read_harmless() -> dict[str, str]:
    """The mutations that change no result, with the reasons: two lines for each, the second one indented."""
    lines = [line for line in HARMLESS.read_text().splitlines() if line and line[0] != "#"]
    return {key: reason.strip() for key, reason in zip(lines[::2], lines[1::2], strict=True)}


@contextmanager
def copies(count: int) -> Iterator[queue.Queue[Path]]:
    """Copies of the project, one for each job."""
    with tempfile.TemporaryDirectory() as folder:
        free: queue.Queue[Path] = queue.Queue()
        for job in range(count):
            copy = Path(folder) / str(job)
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "out", ".*_cache")
            shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
            free.put(copy)
        yield free


def run_tests(mutation: Mutation, free: queue.Queue[Path]) -> str | None:
    """The test that notices a mutation, or None."""
    copy = free.get()
    path = copy / mutation.path
    source = path.read_text()
    try:
        path.write_text(mutation.code())
        return first_failure(copy, nearest_tests(mutation.module))
    finally:
        path.write_text(source)
        free.put(copy)


def first_failure(copy: Path, tests: list[str]) -> str | None:
    """The first test that fails, as pytest names it."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"),
        *("-m", "not exhaustive", "-o", f"faulthandler_timeout={SECONDS_OF_A_TEST}", *tests),
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_OF_A_MUTATION,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
