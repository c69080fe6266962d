"""The kernels on a GPU, if there is one: the checks that `python -m benchmarks.gpu` runs before it measures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import nccl, numerics, ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_kernels_agree_with_their_references():

    *_, lines = numerics.checks(torch.device("cuda"), lambda: 600.0)
    assert not any("failed" in line for line in lines)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_collectives_are_right_with_all_ranks_in_one_launch(world):

    assert ranks.barriers(world, torch.device("cuda"))["result"] == "right"
    assert all(
        line["result"] == "right" for line in ranks.collectives(world, 2**20, torch.device("cuda"))
    )
    assert ranks.replayed(world, torch.device("cuda"), times=20)["result"] == "right"


def test_collectives_are_right_between_processes_on_one_gpu():

    *_, lines = ranks.processes(torch.device("cuda"))
    assert [line.get("result") for line in lines] == ["right", "right"]


def test_a_train_step_on_one_gpu_has_the_bits_of_the_plain_step():
    """The state is DTensors on a mesh of one GPU. Collectives are sent all the same, eagerly and in a CUDA graph."""

    *_, lines = nccl.collectives(torch.device("cuda"))
    assert [line["result"] for line in lines] == ["bits of the plain step"] * 3 + ["right"]
