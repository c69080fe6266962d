"""Ranks as plain processes, which may be killed and stopped: no launcher ends the others when one fails."""

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
    """What a process left behind: its exit code, what it reported by name, what it wrote to stderr, seconds it took."""

    code: int
    said: dict[str, dict]
    errors: str
    seconds: float


def launch(scenario: str, ranks: int, seconds: float = 20.0, after_start=lambda processes: None) -> list[Rank]:
    """Run a scenario of `scenarios.py` on some ranks. A process that takes longer than `seconds` is killed (code -9)."""
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
    return [_ended(process, began, seconds) for process in processes]


def _ended(process: subprocess.Popen, began: float, seconds: float) -> Rank:
    try:
        out, errors = process.communicate(timeout=max(0.1, began + seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGCONT)
        process.kill()
        out, errors = process.communicate()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    said = {row.pop("name"): row for row in rows}
    return Rank(process.returncode, said, errors, time.monotonic() - began)
