"""Checkpoints of several processes: `tests/support/checkpoints.py` saves on four ranks and loads on three and two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ztrans as zt
from tests.faults.launch import launch
from tests.runtime.checkpoints.test_save_and_load import same
from tests.support.lifted import lifted
from tests.support.processes import run_ranks

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(folder) -> list[dict]:
    return run_ranks(4, "checkpoints.py", str(folder))


def of(reports: list[dict], check: str) -> list[dict]:
    return [report for report in reports if report["check"] == check]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_state_is_loaded_by_other_worlds_stages_and_axes(four):
    """What four ranks saved at stages 3 and 0 and on two hosts, while they went on, is loaded by three and by two."""
    assert [(report["name"], report["moved"]) for report in of(four, "saved")] == [
        ("three", True), ("zero", True), ("hosts", True)
    ]  # fmt: skip
    loads = of(four, "loaded")
    assert sorted(report["ranks"] for report in loads) == [2] * 2 + [3] * 9
    assert all(report["equal"] and report["placed"] and report["finite"] for report in loads)


@pytest.mark.distributed
@pytest.mark.slow
def test_one_process_loads_what_four_have_saved(four, folder):
    *_, step, state = lifted()
    whole = torch.load(folder / "whole.pt")
    loaded = zt.load(folder / "three", state, step)
    assert same(loaded, whole)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_load_that_is_interrupted_on_one_rank_ends_on_all(four):
    """The others learn why, without waiting for the time-out, and load again afterwards."""
    reports = of(four, "interrupted")
    assert sorted(report["kind"] for report in reports) == ["KeyboardInterrupt"] + ["LostRank"] * 3
    for report in reports:
        if report["kind"] == "LostRank":
            assert "Rank 1 failed in load with KeyboardInterrupt" in report["error"]


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_that_save_to_different_paths_are_told(four, folder):
    """These differ only before their last 200 bytes."""
    (report,) = of(four, "paths")
    assert "save: the ranks of the mesh do not do the same" in report["error"]
    for half, ranks in enumerate(["ranks 0, 1", "ranks 2, 3"]):
        assert f"{ranks}: save to {folder}/half-{half}/" in report["error"]


@pytest.mark.distributed
@pytest.mark.slow
def test_copies_that_differ_are_not_saved(four):
    """A checkpoint would hold the values of one rank only."""
    (report,) = of(four, "copies")
    assert "\n  w has other values on rank 1 than on rank 0, although" in report["error"]
    assert not [name for name in report["rest"] if name.startswith("tp")]


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_checkpoint_or_the_new_one():
    """A save, or an export, is killed before each of its file operations. A later one deletes what it has left."""
    command = [sys.executable, str(ROOT / "tests/support/killed_saves.py")]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert [report["call"] for report in reports] == ["save", "export"]
    for report in reports:
        assert len(report["loaded"]) >= 10 and report["loaded"] == sorted(report["loaded"])
        assert {*report["loaded"]} == {"1", "2"} and report["at_the_end"] == "2"
        assert all(later == ["3", ["checkpoint"]] for later in report["later"])


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_that_is_killed_in_mid_save_leaves_the_old_checkpoint_whole():
    first, second = launch("killed_while_saving", 2, seconds=60)
    assert second.code == -9
    assert first.code == 0, first.errors
    report = first.reports["save"]
    assert "was not written" in report["text"] and "is intact" in report["text"]
    assert report["whole"]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_save_that_one_rank_cannot_begin_or_end_fails_on_all_and_harms_no_later_one():
    """Messages of two saves would be taken for each other's, and a checkpoint would have parts of two steps."""
    first, second = launch("failed_saves", 2, seconds=90)
    for rank in first, second:
        assert rank.code == 0, rank.errors
        copied = rank.reports["copied"]
        assert copied["after"] < 5, "long before the time-out"
        assert "MemoryError: no memory is left" in copied["text"] or copied["kind"] == "MemoryError"
        assert rank.reports["after a copy"]["rows"] == [2.0] * 8
        assert "was not written" in rank.reports["late"]["text"]
        assert rank.reports["after a late one"]["rows"] == [4.0] * 8
        elsewhere = rank.reports["elsewhere"]["text"]
        assert "was not written. Rank 0: Damaged: " in elsewhere and "is missing." in elsewhere
        assert rank.reports["after one elsewhere"]["rows"] == [4.0] * 8
        flipped = rank.reports["flipped"]
        assert "__1_0.distcp is damaged: bytes " in flipped["text"]
        assert flipped["kind"] == ("ValueError" if rank is second else "RuntimeError")
        assert "is not a checkpoint" in rank.reports["absent"]["text"]
        text = rank.reports["load"]["text"]
        assert "load: the ranks of the mesh do not do the same" in text
        assert "\n  They have found different checkpoints:\n  rank 0 found " in text
        assert "file system of all ranks" in text
