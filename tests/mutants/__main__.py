"""Mutate the code, one small change at a time, and run the nearest tests: each change must make one fail.

    python -m tests.mutants                     about 160 mutations over all packages
    python -m tests.mutants --only planning     those whose names begin so, with the module and its function
    python -m tests.mutants --results FILE      adds each result to FILE, and runs only what has none there
    python -m tests.mutants --list              the mutations and their tests; runs nothing

A mutation that changes no result is listed in `harmless.txt`, with the reason. The command fails if fewer than 95% of
all others are noticed. It works on copies of the project; nothing here is changed.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from .mutations import ROOT, Mutation, draw
from .near import nearest_tests

HARMLESS = Path(__file__).with_name("harmless.txt")
REQUIRED = 0.95

# A test that hangs fails after 90 s. The nearest tests of a mutation have 240 s in all: a mutation that none of them
# notices within these has survived.
SECONDS_OF_A_TEST = 90
SECONDS_OF_A_MUTATION = 240

INTERPRETED = "tests/ops/interpreted/"
STARTED = re.compile(r"((?:tests|ztrans)/\S+\.py::.+?)(?: [A-Z]+ .*| Timeout .*|\s*)$")
NO_TESTS = 5  # pytest's exit code if it collects no test


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--total", type=int, default=160, help="how many mutations (default: 160)")
    parser.add_argument("--only", default="", help="only mutations whose names begin so")
    parser.add_argument(
        "--results", type=Path, help="a file of results of the same code: a run goes on from there"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutations, run nothing")
    args = parser.parse_args()
    harmless = read_harmless()
    drawn = [m for m in draw(args.total) if m.key.startswith(args.only)]
    if args.list:
        for mutation in drawn:
            print(mutation.key, *nearest_tests(mutation.module), sep="\n    ")
        return 0
    if not args.only:
        for key in harmless.keys() - {m.key for m in drawn}:
            print(f"no longer drawn, so not needed in {HARMLESS.name}: {key}")
    checked = [m for m in drawn if m.key not in harmless]
    killers = read_results(args.results)
    pending = [m for m in checked if m.key not in killers]
    with copies(args.jobs) as free, ThreadPoolExecutor(args.jobs) as threads:
        results = threads.map(lambda m: run_tests(m, free), pending)
        for mutation, (killer, seconds) in zip(pending, results, strict=True):
            killers[mutation.key] = killer
            outcome = "killed" if killer else "survived"
            by = f"   {killer}" if killer else ""
            print(f"{outcome:9}{seconds:4.0f} s  {mutation.key}{by}", flush=True)
            if args.results:
                with args.results.open("a") as file:
                    file.write(f"{mutation.key}\t{killer or ''}\n")
        killer_tests = [killers[m.key] for m in checked]
        always_fail = tests_that_fail(free.get(), [test for test in killer_tests if test])
    for test in always_fail:
        print(f"fails without any mutation: {test}")
    killed = sum(killer is not None and killer not in always_fail for killer in killer_tests)
    noticed = killed / max(1, len(checked))
    print(
        f"{len(drawn)} mutations: {killed} killed, {len(checked) - killed} survived, "
        f"{len(drawn) - len(checked)} listed as harmless. {noticed:.1%} of the others are noticed."
    )
    return noticed < REQUIRED


def read_harmless() -> dict[str, str]:
    """The mutations that change no result, with the reasons: two lines for each, the second one indented."""
    lines = [line for line in HARMLESS.read_text().splitlines() if line and line[0] != "#"]
    return {key: reason.strip() for key, reason in zip(lines[::2], lines[1::2], strict=True)}


def read_results(path: Path | None) -> dict[str, str | None]:
    """The results of earlier runs: for each mutation the test that notices it, or None."""
    if path is None or not path.exists():
        return {}
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    return {key: killer or None for key, killer in lines}


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


def run_tests(mutation: Mutation, free: queue.Queue[Path]) -> tuple[str | None, float]:
    """The test that notices a mutation, or None, and the seconds until then."""
    copy = free.get()
    path = copy / mutation.path
    source = path.read_text()
    begin = time.monotonic()
    try:
        path.write_text(mutation.code())
        return first_failure(copy, nearest_tests(mutation.module)), time.monotonic() - begin
    finally:
        path.write_text(source)
        free.put(copy)


def first_failure(copy: Path, tests: list[str]) -> str | None:
    """The first test that fails or does not end, or how pytest itself ended."""
    begin = time.monotonic()
    for group in split_by_interpreter(tests):
        seconds_left = begin + SECONDS_OF_A_MUTATION - time.monotonic()
        options = ("-v", "-x", "-p", "tests.mutants.nearest_first")
        try:
            code, lines = run_pytest(copy, *options, *group, seconds=seconds_left)
        except subprocess.TimeoutExpired:
            return None
        if code not in (0, NO_TESTS):
            named = failed_tests(lines) or started_tests(lines)[-1:]
            return next(iter(named), f"pytest ended with {code}")
    return None


def tests_that_fail(copy: Path, tests: list[str]) -> set[str]:
    """Which of these tests fail, or do not end, without any mutation, so that they prove nothing."""
    failed: set[str] = set()
    for group in split_by_interpreter(sorted({test for test in tests if "::" in test})):
        pending = group
        while pending:
            code, lines = run_pytest(copy, "-v", "-p", "tests.mutants.nearest_first", *pending)
            failed.update(failed_tests(lines))
            started = started_tests(lines)
            if code == 0 or failed_tests(lines) or not started:
                break
            failed.add(started[-1])  # it was ended, and with it pytest
            pending = [test for test in pending if test not in started]
    return failed


def split_by_interpreter(tests: list[str]) -> list[list[str]]:
    """The tests of each run of pytest: tests of kernels need Triton's interpreter from the start."""
    interpreted = [test for test in tests if INTERPRETED in test]
    others = [test for test in tests if INTERPRETED not in test]
    return [group for group in (others, interpreted) if group]


def started_tests(lines: list[str]) -> list[str]:
    """The tests that have started, in their order, by the lines of `pytest -v`."""
    return [match[1] for line in lines if (match := STARTED.match(line))]


def failed_tests(lines: list[str]) -> list[str]:
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return [line.split(" - ")[0].split(" ", 1)[1] for line in failed]


def run_pytest(copy: Path, *arguments: str, seconds: float | None = None) -> tuple[int, list[str]]:
    """The exit code and the lines of pytest in a copy of the project. The processes of its tests are ended with it."""
    command = [
        *(sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider"),
        *("-m", "not exhaustive", "-o", f"faulthandler_timeout={SECONDS_OF_A_TEST}", *arguments),
    ]
    interpreted = {"TRITON_INTERPRET": "1"} if INTERPRETED in arguments[-1] else {}
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", **interpreted}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output.splitlines()


if __name__ == "__main__":
    sys.exit(main())
