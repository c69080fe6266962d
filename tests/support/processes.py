"""Scripts as processes that start in a fraction of the time that `import torch` takes.

Python's fork server, which starts once, has imported torch and ztrans. Every process is forked from it, with its own
arguments and environment, and what it prints is kept in files.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELOADED = [
    "ztrans",
    "torch._dynamo",
    "torch.distributed.checkpoint",
]  # the first trace imports dynamo


@dataclass(frozen=True)
class Ended:
    """The result of a process: its exit code, what it printed, and how many seconds it took."""

    code: int
    output: str
    errors: str
    seconds: float

    @property
    def rows(self) -> list[dict]:
        """The lines of JSON among its output."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]


class Running:
    """A script that runs as a process of its own."""

    def __init__(
        self, script: Path, arguments: tuple[str, ...], environment: dict[str, str]
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.printed = Path(self.folder.name, "output"), Path(self.folder.name, "errors")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        command = str(script), *arguments
        self.process = context.Process(
            target=_run, args=(command, environment, *map(str, self.printed))
        )
        self.began = time.monotonic()
        self.process.start()
        self.pid = self.process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (
            FileNotFoundError,
            ProcessLookupError,
        ):  # it has ended, before or while its file was read
            return False

    def end(self, seconds: float) -> Ended:
        """Wait until the process ends. It is killed if it still runs that many seconds after its start."""
        self.process.join(max(0.1, self.began + seconds - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        took = time.monotonic() - self.began
        output, errors = (path.read_text() if path.exists() else "" for path in self.printed)
        self.folder.cleanup()
        return Ended(self.process.exitcode, output, errors, took)


def start_ranks(ranks: int, script: Path, *arguments: str) -> list[Running]:
    """Start a script on several ranks, with the environment that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    world = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        **address,
    }
    environment = {**os.environ, **world, "PYTHONPATH": str(ROOT)}
    return [
        Running(script, arguments, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def run_ranks(ranks: int, script: str, *arguments: str) -> list[dict]:
    """Run a script of this folder on several ranks, and return the rows of all. If a rank fails, the others are ended."""
    running = start_ranks(ranks, Path(__file__).parent / script, *arguments)
    waited = {process.process.sentinel: process for process in running}
    while waited:
        ready = multiprocessing.connection.wait(list(waited), timeout=280)
        failed = not ready or any(waited.pop(sentinel).process.exitcode for sentinel in ready)
        for process in waited.values() if failed else ():
            process.process.kill()
    ended = [process.end(0) for process in running]
    assert not any(rank.code for rank in ended), "\n".join(
        rank.errors[-4000:] for rank in ended if rank.code
    )
    return [row for rank in ended for row in rank.rows]


def _run(command: tuple[str, ...], environment: dict[str, str], *printed: str) -> None:
    """In the new process: run the script as Python does."""
    os.environ.clear()
    os.environ.update(environment)
    gc.set_threshold(20_000, 20, 20)  # as in conftest.py
    gc.freeze()  # the modules that the fork server has imported
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv, sys.path[:0] = [*command], [os.path.dirname(command[0])]
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
