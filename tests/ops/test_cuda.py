"""The kernels on a GPU, if there is one: the checks that `benchmarks/gpu.py` runs before it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


def test_kernels_agree_with_their_references():
    import gpu_numerics

    *_, lines = gpu_numerics.checks(torch.device("cuda"), lambda: 600.0)
    assert not any("failed" in line for line in lines)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_are_right_with_all_ranks_in_one_launch(ranks):
    import gpu_ranks

    assert gpu_ranks.barriers(ranks, torch.device("cuda"))["result"] == "right"
    assert all(
        line["result"] == "right"
        for line in gpu_ranks.collectives(ranks, 2**20, torch.device("cuda"))
    )
    assert gpu_ranks.replayed(ranks, torch.device("cuda"), times=20)["result"] == "right"


def test_collectives_are_right_between_processes_on_one_gpu():
    import gpu_ranks

    *_, lines = gpu_ranks.processes(torch.device("cuda"))
    assert [line.get("result") for line in lines] == ["right", "right"]


def test_a_train_step_on_one_gpu_has_the_bits_of_the_plain_step():
    """The state is DTensors on a mesh of one GPU. Collectives are sent all the same, eagerly and in a CUDA graph."""
    import gpu_nccl

    *_, lines = gpu_nccl.collectives(torch.device("cuda"))
    assert [line["result"] for line in lines] == ["bits of the plain step"] * 3 + ["right"]
