"""Start the ranks of `rank.py`, and check that all of them succeed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.support.processes import Running

SHARED = Path("/dev/shm")
SCRIPT = Path(__file__).with_name("rank.py")


def run_ranks(*worlds: int, **environment: str) -> None:
    """Run `rank.py` for one world size after the other, on as many processes as the largest has, over shared memory.

    They are forked, so Triton's interpreter must have been on when this process started.
    """
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        started = [
            Running(SCRIPT, (folder, *map(str, (rank, *worlds))), env)
            for rank in range(max(worlds))
        ]
        ended = [process.end(120) for process in started]
    assert not any(rank.code for rank in ended), "\n".join(rank.errors for rank in ended)
