"""One rank of one subject, in a process of its own: builds, warms up, times, and leaves what it measured in a file."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from . import memory
from .model import Config, Task
from .subjects import SUBJECTS, Skip


def measured(ask: dict, rank: int) -> dict:
    subject = next(s for s in SUBJECTS if s.name == ask["subject"])
    task = Task(Config(**ask["config"]), ask["ranks"], rank, ask["precision"] == "bf16")
    resident, lent = memory.resident(), memory.lent()
    step = subject.make(task)
    said = step.said() if hasattr(step, "said") else {}
    result = said | timed(step, ask["steps"], ask["warmup"])
    result["resident"] = memory.resident_peak() - resident
    with memory.Peak() as peak:
        step()
    return result | {"lent": peak.bytes - lent}


def timed(step: Callable, steps: int, warmup: int) -> dict:
    """Seconds of each step after the warm-up; the first loss and the last; bytes sent, a step."""
    losses = [float(step()) for _ in range(warmup)]
    memory.forget_peak()
    seconds, sent = [], bytes_sent()
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(float(step()))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "losses": [losses[0], losses[-1]], "sent": (bytes_sent() - sent) / steps}


def bytes_sent() -> int:
    """Of this host, headers included."""
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")


def main(ask: dict, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        result = measured(ask, int(os.environ["RANK"]))
    except Skip as reason:
        result = {"skipped": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}"}
    mine = folder / f"{os.environ['RANK']}.json"
    mine.with_suffix(".part").write_text(json.dumps(result))
    mine.with_suffix(".part").rename(mine)
    # Who leaves first takes its connections along; and some frameworks wait for each other at exit, for minutes.
    deadline = time.monotonic() + 20 * ("seconds" in result)
    while len(list(folder.glob("*.json"))) < ask["ranks"] and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.stderr.flush()
    os._exit("failed" in result)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
