"""ztrans and its peers, side by side: one model, one batch, one network of hosts in namespaces.

    make peers                                     # DeepSpeed and JAX; without them their lines say so
    python -m benchmarks.peers                     # two hosts at 1 Gbit/s: as root, with iproute2
    python -m benchmarks.peers --hosts 4 --rate 200mbit --only 'DDP|ztrans'

Writes benchmarks/results/peers_HOSTS_RATE.md, .json and .png. Every subject runs in fresh processes,
one a host, each on one core. Take the ratios within one run; the seconds mean little elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import report
from .model import Config, Task
from .native import loop
from .subjects import SUBJECTS, Subject

ROOT = Path(__file__).parents[2]
NETLAB = ROOT / "benchmarks" / "netlab"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it: 200mbit, 1gbit, 10gbit")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="times that all subjects run; their steps are pooled")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression that names must contain")
    parser.add_argument("--precision", choices=("fp32", "bf16"), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--timeout", type=int, default=400, help="seconds that one subject may take")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    config = Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})
    chosen = [s for s in SUBJECTS if re.search(args.only, s.name)]
    if not chosen:
        sys.exit(f"no subject has {args.only!r} in its name; there are: {', '.join(s.name for s in SUBJECTS)}")
    jobs = [(s, precision) for precision in args.precision for s in chosen if precision in s.precisions]
    runs: dict[tuple[str, str], list[dict]] = {(s.name, precision): [] for s, precision in jobs}
    print(f"plain training on the whole batch, {args.warmup + args.steps} steps", flush=True)
    losses = truth(Task(config, args.hosts), args.warmup + args.steps)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["NETLAB"] = f"bench{os.getpid() % 10000}"
    try:
        subprocess.run([NETLAB, "up", str(args.hosts), args.rate], check=True)
        for number in range(args.rounds):
            for subject, precision in jobs:
                ask = {"subject": subject.name, "precision": precision, "config": dataclasses.asdict(config)}
                ask |= {"ranks": args.hosts, "steps": args.steps, "warmup": args.warmup}
                run = missing(subject) or one(ask, args.timeout)
                runs[subject.name, precision].append(run)
                print(f"{number + 1}/{args.rounds}  {precision}  {subject.name:<30}{report.line(run)}", flush=True)
    finally:
        subprocess.run([NETLAB, "down"], check=False)
    print(report.write(args, config, losses, runs))


def truth(task: Task, steps: int) -> list[float]:
    """The first and the last loss of plain training on the whole batch, in this process."""
    step = loop(task, task.model())
    losses = [step().item() for _ in range(steps)]
    return [losses[0], losses[-1]]


def missing(subject: Subject) -> dict | None:
    there = importlib.util.find_spec(subject.needs)
    return None if there else {"skipped": f"{subject.needs} is not installed: make peers"}


def one(ask: dict, timeout: int) -> dict:
    """Run one subject on all hosts; what rank 0 measured, with the loss of all ranks."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as log:
        folder = Path(name)
        command = [NETLAB, "run", sys.executable, "-W", "ignore", "-m", "benchmarks.peers.rank", json.dumps(ask), name]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done in {timeout} s"}
        finally:
            process.terminate()  # netlab ends what it started
            process.wait()
        ranks = [json.loads(p.read_text()) for r in range(ask["ranks"]) if (p := folder / f"{r}.json").exists()]
        bad = next((r for r in ranks if "seconds" not in r), None)
        if bad is None and len(ranks) < ask["ranks"]:
            bad = {"failed": "a rank died without a word"}
        if bad and "failed" in bad:
            log.seek(0)
            print(log.read().decode(errors="replace")[-2000:])
        means = [sum(r["losses"][i] for r in ranks) / len(ranks) for i in (0, 1)] if not bad else []
        return bad or ranks[0] | {"losses": means}


if __name__ == "__main__":
    main(parsed())
