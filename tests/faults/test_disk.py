"""If the disk is full or the process is killed while a plan is saved, the old file stays whole."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ztrans as zt

ROOT = Path(__file__).parents[2]
OLD = zt.Plan("old")

# No file may grow beyond a hundred bytes. So the write fails after a part of the file, as it does on a full disk.
FULL = """
import resource, sys, ztrans as zt
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    zt.Plan("new", notes=("a note " * 1000,)).save(sys.argv[1])
except OSError as error:
    sys.exit(f"failed: {type(error).__name__}")
"""

# The process is killed when the new file is written completely, but has not replaced the old one yet.
KILLED = """
import os, signal, sys, ztrans as zt
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
zt.Plan("new", notes=("a note " * 1000,)).save(sys.argv[1])
"""


def saved(script: str, path: Path) -> subprocess.CompletedProcess:
    """Run a script that saves a new plan over an old one."""
    OLD.save(path)
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_plan_whole(tmp_path):
    done = saved(FULL, tmp_path / "step.plan")
    assert done.returncode == 1 and "failed: OSError" in done.stderr
    assert zt.Plan.load(tmp_path / "step.plan") == OLD
    assert [file.name for file in tmp_path.iterdir()] == ["step.plan"], (
        "the incomplete new file is deleted"
    )


@pytest.mark.slow
def test_a_kill_leaves_the_old_plan_whole(tmp_path):
    done = saved(KILLED, tmp_path / "step.plan")
    assert done.returncode == -signal.SIGKILL
    assert zt.Plan.load(tmp_path / "step.plan") == OLD
