"""Start the ranks of `rank.py`, and check that all of them succeed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")


def run_ranks(*worlds: int, **environment: str) -> None:
    """Run `rank.py` for one world size after the other, on as many processes as the largest has, over shared memory."""
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as folder:
        command = [sys.executable, "-m", "tests.ops.rank", folder]
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        started = [
            subprocess.Popen(
                [*command, *map(str, (r, *worlds))],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for r in range(max(worlds))
        ]
        try:
            output = [process.communicate(timeout=120)[0].decode() for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(process.returncode for process in started), "\n".join(output)
