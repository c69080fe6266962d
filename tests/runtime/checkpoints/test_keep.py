"""`save(keep=k)`: the last k checkpoints of a series stay, and nothing else is deleted, whenever the save is killed."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ztrans as zt
from tests.runtime.checkpoints.test_folder import names, state, value_of
from ztrans.runtime.checkpoints import folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path, value: float = 0.0, keep: int | None = None) -> None:
    zt.save(path, state(value), keep=keep).result()


def test_the_last_checkpoints_of_a_series_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path / f"step-{step}", float(step), keep=2)
    assert names(tmp_path) == ["step-10", "step-11"], "by number, and not by text"
    assert [value_of(tmp_path / f"step-{step}") for step in (10, 11)] == [10.0, 11.0]
    assert zt.last_checkpoint(tmp_path / "step-") == tmp_path / "step-11"


def test_only_what_a_save_has_made_under_its_name_is_deleted(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    save(tmp_path / "elsewhere" / "step-1")
    for name in ("step-2", "step-3", "other-4", "best", "step-5"):
        save(tmp_path / name)
    (tmp_path / "step-3").rename(tmp_path / "step-4")  # the user keeps it under another number
    (tmp_path / "step-5" / "notes").write_text("keep")
    (tmp_path / "step-6").symlink_to("elsewhere/step-1")
    dcp.save(state(7.0), checkpoint_id=tmp_path / "step-7")
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8" / "model.pt").write_text("keep")
    (tmp_path / "step-9").write_text("a file")
    save(tmp_path / "step-10")
    (tmp_path / "step-10" / "ztrans.json").write_text("not what save wrote")
    save(tmp_path / "step-12")  # a run that began again from an earlier step
    (tmp_path / "step-1.ztrans-01234567.partial").mkdir()
    (tmp_path / "step-1.ztrans-01234567.partial" / "notes").write_text("of another program")
    before = names(tmp_path)
    save(tmp_path / "step-11", keep=1)
    assert names(tmp_path) == sorted({*before, "step-11"} - {"step-2"})
    assert names(tmp_path / "elsewhere") == ["step-1"]


def test_what_killed_saves_and_deletions_have_left_is_deleted(tmp_path):
    save(tmp_path / "step-1")
    (tmp_path / "step-1").rename(tmp_path / "step-1.ztrans-01234567.partial")
    save(tmp_path / "step-2", keep=3)
    assert names(tmp_path) == ["step-2"]


def test_a_name_without_a_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"called run, which has no number at its end(?s:.*)run-"):
        save(tmp_path / "run", keep=2)
    for keep in (0, True, 1.5):
        with pytest.raises(ValueError, match="it is a number of checkpoints, at least 1"):
            zt.save(tmp_path / "step-1", state(1.0), keep=keep)
    assert not names(tmp_path)


class Killed(BaseException):
    """The process ends here."""


def whole(path: Path) -> list[str]:
    """The names of the checkpoints that can be loaded, in their order."""
    steps = []
    for step in range(5):
        if folder.committed(path / f"step-{step}") is not None:
            assert value_of(path / f"step-{step}") == step
            steps.append(f"step-{step}")
    return steps


def test_a_process_that_is_killed_leaves_the_last_checkpoints_whole(tmp_path, monkeypatch):
    """Before each rename and deletion of a save that deletes two checkpoints."""
    for step in range(4):
        save(tmp_path / "first" / f"step-{step}", float(step))
    operations = 0
    while True:
        runs = tmp_path / f"run {operations}"
        shutil.copytree(tmp_path / "first", runs)
        with monkeypatch.context() as patch:
            left = [operations]
            for name in ("rename", "unlink", "rmdir"):
                patch.setattr(os, name, killing(getattr(os, name), left))
            try:
                save(runs / "step-4", 4.0, keep=3)
            except (Killed, RuntimeError):
                assert len(whole(runs)) >= 3
                last = whole(runs)[-1]
                assert zt.last_checkpoint(runs / "step-") == runs / last
            else:
                break
        save(runs / "step-4", 4.0, keep=3)
        assert names(runs) == ["step-2", "step-3", "step-4"]
        operations += 1
    assert names(runs) == ["step-2", "step-3", "step-4"]
    assert operations > 8


def killing(call, left):
    """A function that raises, instead of its call, once `left` has been counted down to 0."""

    def counted(*args, **options):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return call(*args, **options)

    return counted


def test_no_checkpoint_is_the_last_of_an_empty_series(tmp_path):
    assert zt.last_checkpoint(tmp_path / "absent" / "step-") is None
    assert zt.last_checkpoint(tmp_path / "step-") is None
    save(tmp_path / "7")
    save(tmp_path / "step-x")
    assert zt.last_checkpoint(tmp_path / "step-") is None
    assert zt.last_checkpoint(f"{tmp_path}/") == tmp_path / "7"
    assert torch.equal(zt.load(tmp_path / "7", state(1.0), lambda x: x)["w"], state(0.0)["w"])
