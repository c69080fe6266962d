"""A plan that is saved while the disk is full, or the process is killed, leaves the old file whole."""

import signal
import subprocess
import sys
from pathlib import Path

import ztrans as zt

ROOT = Path(__file__).parents[2]
OLD = zt.Plan("old")

# No file may grow beyond a hundred bytes: the write fails as on a full disk, when some of it is written.
FULL = """
import resource, sys, ztrans as zt
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    zt.Plan("new", notes=("a note " * 1000,)).save(sys.argv[1])
except OSError as error:
    sys.exit(f"failed: {type(error).__name__}")
"""

# It is killed when all is written, before the new file takes the old one's place.
KILLED = """
import os, signal, sys, ztrans as zt
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
zt.Plan("new", notes=("a note " * 1000,)).save(sys.argv[1])
"""


def saved(script: str, path: Path) -> subprocess.CompletedProcess:
    """Run a script that saves another plan where one is."""
    OLD.save(path)
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, cwd=ROOT, timeout=120, capture_output=True, text=True)


def test_a_full_disk_leaves_the_old_plan_whole(tmp_path):
    done = saved(FULL, tmp_path / "step.plan")
    assert done.returncode == 1 and "failed: OSError" in done.stderr
    assert zt.Plan.load(tmp_path / "step.plan") == OLD
    assert [each.name for each in tmp_path.iterdir()] == ["step.plan"], "what was written of the new one is gone"


def test_a_kill_leaves_the_old_plan_whole(tmp_path):
    done = saved(KILLED, tmp_path / "step.plan")
    assert done.returncode == -signal.SIGKILL
    assert zt.Plan.load(tmp_path / "step.plan") == OLD
