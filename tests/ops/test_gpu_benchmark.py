"""benchmarks/gpu.py without a GPU: its sections run on small tensors, and the command writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_numerics(monkeypatch):
    import gpu_numerics

    monkeypatch.setattr(gpu_numerics, "NUMELS", (5003, 3, 0, 4096, 1, 537))
    for check in (gpu_numerics.moves, gpu_numerics.casts, gpu_numerics.adamw, gpu_numerics.quantised, gpu_numerics.late):
        assert check(CPU)


def test_table():
    import gpu
    import gpu_kernels

    rows = gpu_kernels.table(CPU, sizes=(2**17,))
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    assert list(kernels) == ["packing", "scattering", "unpacking", "updating", "quantising", "dequantising", "rounding"]
    assert all(row["us"] > 0 and row["moved, MiB"] > 0 for row in rows)
    text = gpu.markdown({"card": "none"}, {"kernels": rows, "ranks": "failed: so"})
    assert "| packing | 0 | torch._foreach_copy_ |" in text and "failed: so" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written():
    results = BENCHMARKS / "results"
    before = {path: path.stat().st_mtime_ns for path in results.glob("gpu*")}
    run = subprocess.run([sys.executable, BENCHMARKS / "gpu.py"], capture_output=True, text=True)
    assert run.returncode == 1 and "torch sees none here: nothing is written" in run.stderr
    assert {path: path.stat().st_mtime_ns for path in results.glob("gpu*")} == before


def test_the_kernel_of_rounds_compiles(tmp_path):
    pytest.importorskip("triton", reason="kernels need Triton")
    import gpu_ranks
    from compiled import compiled

    types = {"buffers": "*i64", "pads": "*i64", "error": "*i32", "wrong": "*i32", "rounds": "i32", "spins": "i32"}
    options = {"num_warps": 4, "launch_cooperative_grid": True}
    assert compiled(gpu_ranks._rounds, 90, tmp_path, types, {"WORLD": 8, "BLOCK": 256}, **options).stack == 0
