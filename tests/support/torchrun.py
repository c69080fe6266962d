"""Run a script of `tests/support` on several gloo processes, and read the lines of JSON that they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, script: str, *arguments: str) -> list[dict]:
    """Run the script, and return the reports of the ranks. If it fails, the end of its stderr is shown."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(ROOT / "tests/support" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
