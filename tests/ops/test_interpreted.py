"""Run the tests in `interpreted/` in a process of their own, which switches Triton's interpreter on from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "marked", ["not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive)]
)
def test_kernels_pass_their_tests_in_the_interpreter(marked):
    pytest.importorskip("triton", reason="kernels need Triton")
    folder = Path(__file__).parent / "interpreted"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        str(folder),
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
