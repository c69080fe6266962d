"""Train one model with ztrans and with other libraries, on hosts that are network namespaces of one machine.

    make peers                                      # installs DeepSpeed and JAX; without them their rows say so
    python -m benchmarks.peers                      # two hosts at 1 Gbit/s; needs root and iproute2
    python -m benchmarks.peers --hosts 4 --rate 200mbit --only 'DDP|ztrans'
    python -m benchmarks.peers --compare ../before  # also runs the ztrans of another checkout

Writes benchmarks/results/peers_HOSTS_RATE.md, .json and .png. Each subject has one process on each host, and each
process has one core. All processes stay in memory, with 0.4 GB each. They take turns of a few steps, while the others
are stopped, so noise of the machine affects all subjects. Compare the ratios within one run: the seconds depend on the
machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from . import memory, report
from .model import Config, Task
from .native import loop
from .running import NETLAB, ROOT, Running
from .subjects import SUBJECTS, Subject, with_checkout

PORT = 29511  # the rendezvous port of the first subject; each subject has the next one
PROCESS = 0.4e9  # bytes that a process takes while it waits for its turn


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--rate",
        default="1gbit",
        help="rate of each link, in tc's notation: 200mbit, 1gbit, 10gbit",
    )
    parser.add_argument("--rounds", type=int, default=5, help="how many turns each subject has")
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps in a turn, after one that is not timed"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="regular expression that a name must contain"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"]
    )
    parser.add_argument(
        "--compare", type=Path, metavar="CHECKOUT", help="also run the ztrans of this checkout"
    )
    parser.add_argument(
        "--timeout", type=int, default=400, help="seconds for the start, and for each turn"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    config = Config(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)}
    )
    chosen = [s for s in SUBJECTS if re.search(args.only, s.name)]
    if not chosen:
        sys.exit(
            "\n  ".join(
                [
                    f"no subject's name contains {args.only!r}. There are:",
                    *(s.name for s in SUBJECTS),
                ]
            )
        )
    if args.compare:
        chosen += [with_checkout(s, args.compare) for s in chosen if s.of_ztrans]
    processes = args.hosts * max(sum(p in s.precisions for s in chosen) for p in args.precision)
    needed, free = processes * PROCESS, memory.available()
    if needed > free:
        sys.exit(
            f"{processes} processes need {needed / 1e9:.0f} GB; {free / 1e9:.0f} GB are free. Use --only."
        )
    steps = args.warmup + args.rounds * (1 + args.steps)
    print(f"plain training on the whole batch, {steps} steps", flush=True)
    losses = truth(Task(config, args.hosts), steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["NETLAB"] = f"bench{os.getpid() % 10000}"
    try:
        subprocess.run([NETLAB, "up", str(args.hosts), args.rate], check=True)
        runs = {
            p: together(args, config, [s for s in chosen if p in s.precisions], p)
            for p in args.precision
        }
    finally:
        subprocess.run([NETLAB, "down"], check=False)
    print(report.write(args, config, losses, runs))


def together(
    args: argparse.Namespace, config: Config, subjects: list[Subject], precision: str
) -> dict[str, list]:
    """The results of each turn by subject, or the reason why a subject cannot run."""
    runs: dict[str, list[dict]] = {}
    running: dict[str, Running] = {}

    def say(when: str, name: str, run: dict) -> None:
        print(f"{when:<8}{precision}  {name:<32}{report.line(run)}", flush=True)

    try:
        for number, subject in enumerate(subjects):
            ask = {
                "subject": subject.as_listed,
                "precision": precision,
                "config": dataclasses.asdict(config),
            }
            ask |= {"ranks": args.hosts, "steps": args.steps, "warmup": args.warmup}
            answer = missing(subject)
            if answer is None:
                running[subject.name] = Running(ask, PORT + number, args.timeout, subject.checkout)
                answer = running[subject.name].answer
            runs[subject.name] = [] if "ready" in answer else [answer]
            say("", subject.name, answer)
        for number in range(args.rounds):
            for name in (name for name in running if all("seconds" in run for run in runs[name])):
                runs[name].append(running[name].turn())
                say(f"{number + 1}/{args.rounds}", name, runs[name][-1])
    finally:
        for subject_processes in running.values():
            subject_processes.stop()
    return runs


def truth(task: Task, steps: int) -> list[float]:
    """The first and the last loss of plain training on the whole batch, computed in this process."""
    step = loop(task, task.model())
    losses = [step().item() for _ in range(steps)]
    memory.trim()
    return [losses[0], losses[-1]]


def missing(subject: Subject) -> dict | None:
    there = importlib.util.find_spec(subject.needs)
    return None if there else {"skipped": f"{subject.needs} is not installed: make peers"}


if __name__ == "__main__":
    main(parsed())
