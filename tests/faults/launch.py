"""Start ranks as plain processes. A test may kill or stop one of them: no launcher then ends the others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass
class Rank:
    """The result of one process: exit code, its reports by name, its stderr, and how many seconds it took."""

    code: int
    reports: dict[str, dict]
    errors: str
    seconds: float


def launch(scenario: str, ranks: int, seconds: float = 40.0, after_start=lambda processes: None) -> list[Rank]:
    """Run a scenario of `scenarios.py` on `ranks` ranks.

    A process is killed (code -9) if it runs longer than `seconds`, or if it is stopped when the ranks before it have
    ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "scenarios.py"), scenario],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    after_start(processes)
    return [_collect(process, began, seconds) for process in processes]


def _collect(process: subprocess.Popen, began: float, seconds: float) -> Rank:
    end = began if _is_stopped(process) else began + seconds
    try:
        out, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGCONT)
        process.kill()
        out, errors = process.communicate()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    reports = {row.pop("name"): row for row in rows}
    return Rank(process.returncode, reports, errors, time.monotonic() - began)


def _is_stopped(process: subprocess.Popen) -> bool:
    """Whether a process is stopped by a signal."""
    if process.poll() is not None:
        return False
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
