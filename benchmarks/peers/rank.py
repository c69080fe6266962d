"""The process of one rank of one subject. It builds the step and warms up, and then runs and measures its turns."""

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
    """Yields once when the step is ready, and then the results of a turn each time."""
    subject = next(s for s in SUBJECTS if s.name == ask["subject"])
    task = Task(Config(**ask["config"]), ask["ranks"], rank, ask["precision"] == "bf16")
    resident, lent = memory.resident(), memory.lent()
    step = subject.make(task)
    losses = [float(step()) for _ in range(ask["warmup"])]
    memory.trim()
    predictions = getattr(
        step, "predictions", dict
    )  # only ztrans can predict the seconds of a step
    yield {"ready": True}
    while True:
        before = predictions()
        memory.trim()
        memory.forget_peak()
        with memory.Peak() as peak:
            losses.append(float(step()))
        seconds, sent = [], bytes_sent()
        for _ in range(ask["steps"]):
            start = time.perf_counter()
            losses.append(float(step()))
            seconds.append(time.perf_counter() - start)
        figures = {
            "seconds": seconds,
            "losses": [losses[0], losses[-1]],
            "sent": (bytes_sent() - sent) / ask["steps"],
        }
        figures |= {"lent": peak.bytes - lent, "resident": memory.resident_peak() - resident}
        figures |= {
            "said": [before, predictions()]
        }  # the key that `report` reads, also in other checkouts
        memory.trim()
        yield figures


def bytes_sent() -> int:
    """The bytes that this host has sent, headers included."""
    lines = [line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")


def main(address: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with Client(address, "AF_UNIX") as runner:
        runner.send(rank)
        try:
            for answer in turns(runner.recv(), rank):
                runner.send(answer)
                runner.recv()
        except Skip as reason:
            runner.send({"skipped": str(reason)})
        except EOFError:  # the runner has closed the connection: there are no more turns
            pass
        except Exception as error:
            traceback.print_exc()
            runner.send({"failed": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # some frameworks wait for each other at exit, for minutes


if __name__ == "__main__":
    main(sys.argv[1])
