"""ztrans and its peers, side by side: one model, one batch, one network of hosts in namespaces.

    make peers                                     # DeepSpeed and JAX; without them their lines say so
    python -m benchmarks.peers                     # two hosts at 1 Gbit/s: as root, with iproute2
    python -m benchmarks.peers --hosts 4 --rate 200mbit --only 'DDP|ztrans'
    python -m benchmarks.peers --beside ../before  # another checkout: what a change does to the step

Writes benchmarks/results/peers_HOSTS_RATE.md, .json and .png. Every subject has processes of its own,
one a host, each on one core. All stay in memory, 0.4 GB a process, and take turns, a few steps at a time,
while the others are stopped: what else the machine does meets all alike. Take the ratios within one run;
the seconds mean little elsewhere.
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
from .subjects import SUBJECTS, Subject, beside

PORT = 29511  # the first of those at which ranks meet
PROCESS = 0.4e9  # bytes that one takes while it waits for its turn


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it: 200mbit, 1gbit, 10gbit")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each subject has")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn, after one that is not timed")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression that names must contain")
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="ztrans of another checkout runs too")
    parser.add_argument("--timeout", type=int, default=400, help="seconds to be ready in, or for a turn")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    config = Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})
    chosen = [s for s in SUBJECTS if re.search(args.only, s.name)]
    if not chosen:
        sys.exit("\n  ".join([f"no subject has {args.only!r} in its name; there are:", *(s.name for s in SUBJECTS)]))
    if args.beside:
        chosen += [beside(s, args.beside) for s in chosen if s.of_ztrans]
    processes = args.hosts * max(sum(p in s.precisions for s in chosen) for p in args.precision)
    needed, free = processes * PROCESS, memory.available()
    if needed > free:
        sys.exit(f"{processes} processes need {needed / 1e9:.0f} GB, and {free / 1e9:.0f} are free: --only for fewer.")
    steps = args.warmup + args.rounds * (1 + args.steps)
    print(f"plain training on the whole batch, {steps} steps", flush=True)
    losses = truth(Task(config, args.hosts), steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["NETLAB"] = f"bench{os.getpid() % 10000}"
    try:
        subprocess.run([NETLAB, "up", str(args.hosts), args.rate], check=True)
        runs = {p: together(args, config, [s for s in chosen if p in s.precisions], p) for p in args.precision}
    finally:
        subprocess.run([NETLAB, "down"], check=False)
    print(report.write(args, config, losses, runs))


def together(args: argparse.Namespace, config: Config, subjects: list[Subject], precision: str) -> dict[str, list]:
    """Subjects by name, and what they took in each of their turns; of one that cannot run, why."""
    runs: dict[str, list[dict]] = {}
    running: dict[str, Running] = {}

    def say(when: str, name: str, run: dict) -> None:
        print(f"{when:<8}{precision}  {name:<32}{report.line(run)}", flush=True)

    try:
        for number, subject in enumerate(subjects):
            ask = {"subject": subject.as_listed, "precision": precision, "config": dataclasses.asdict(config)}
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
        for one in running.values():
            one.stop()
    return runs


def truth(task: Task, steps: int) -> list[float]:
    """The first and the last loss of plain training on the whole batch, in this process."""
    step = loop(task, task.model())
    losses = [step().item() for _ in range(steps)]
    memory.trim()
    return [losses[0], losses[-1]]


def missing(subject: Subject) -> dict | None:
    there = importlib.util.find_spec(subject.needs)
    return None if there else {"skipped": f"{subject.needs} is not installed: make peers"}


if __name__ == "__main__":
    main(parsed())
