"""One rank of one subject, in a process of its own: builds and warms up, and is measured when it is its turn."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path

import torch

from . import memory
from .model import Config, Task
from .subjects import SUBJECTS, Skip


def turns(ask: dict, rank: int) -> Iterator[dict]:
    """First that it is ready; then, whenever asked on, what its steps took."""
    subject = next(s for s in SUBJECTS if s.name == ask["subject"])
    task = Task(Config(**ask["config"]), ask["ranks"], rank, ask["precision"] == "bf16")
    resident, lent = memory.resident(), memory.lent()
    step = subject.make(task)
    losses = [float(step()) for _ in range(ask["warmup"])]
    memory.trim()
    said = getattr(step, "said", dict)  # what only ztrans can say of a step
    yield {"ready": True}
    while True:
        before = said()
        memory.trim()
        memory.forget_peak()
        with memory.Peak() as peak:
            losses.append(float(step()))
        seconds, sent = [], bytes_sent()
        for _ in range(ask["steps"]):
            start = time.perf_counter()
            losses.append(float(step()))
            seconds.append(time.perf_counter() - start)
        found = {"seconds": seconds, "losses": [losses[0], losses[-1]], "sent": (bytes_sent() - sent) / ask["steps"]}
        found |= {"lent": peak.bytes - lent, "resident": memory.resident_peak() - resident}
        found |= {"said": [before, said()]}
        memory.trim()
        yield found


def bytes_sent() -> int:
    """Of this host, headers included."""
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")


def main(address: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with Client(address, "AF_UNIX") as runner:
        runner.send(rank)
        try:
            for found in turns(runner.recv(), rank):
                runner.send(found)
                runner.recv()
        except Skip as reason:
            runner.send({"skipped": str(reason)})
        except EOFError:  # there are no more turns
            pass
        except Exception as error:
            traceback.print_exc()
            runner.send({"failed": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # some frameworks wait for each other at exit, for minutes


if __name__ == "__main__":
    main(sys.argv[1])
