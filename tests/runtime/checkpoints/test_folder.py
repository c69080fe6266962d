"""The folder of a checkpoint: what a save deletes, where it writes, what it checks before it commits, and damage."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ztrans as zt
from ztrans.runtime.checkpoints.folder import index_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value: float) -> dict:
    return {"w": torch.full((3,), value), "m": torch.full((2, 2), -value)}


def value_of(path: Path) -> float:
    return zt.load(path, state(0.0), lambda x: x)["w"][0].item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(path: Path, value: float = 9.0) -> str:
    """The error of a save that fails."""
    with pytest.raises(RuntimeError) as e:
        zt.save(path, state(value)).result()
    return str(e.value)


def test_folders_that_look_like_leftovers_are_not_deleted(tmp_path):
    zt.save(tmp_path / "run", state(1.0)).result()
    zt.save(tmp_path / "run.old", state(2.0)).result()
    zt.save(tmp_path / "run.partial", state(3.0)).result()
    theirs = tmp_path / "run.ztrans-01234567.partial"  # somebody else's, of such a name
    theirs.mkdir()
    (theirs / "notes").write_text("keep")
    zt.save(tmp_path / "run", state(4.0)).result()
    paths = [tmp_path / name for name in ("run", "run.old", "run.partial")]
    assert [value_of(path) for path in paths] == [4.0, 2.0, 3.0]
    assert (theirs / "notes").read_text() == "keep"


def test_a_checkpoint_that_was_renamed_is_not_deleted(tmp_path):
    zt.save(tmp_path / "run", state(1.0)).result()
    (tmp_path / "run").rename(tmp_path / "best")
    zt.save(tmp_path / "run", state(2.0)).result()
    zt.save(tmp_path / "run", state(3.0)).result()
    assert value_of(tmp_path / "best") == 1.0
    assert names(tmp_path) == ["best", "run"]


def test_other_files_are_not_deleted(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes").write_text("keep")
    assert "runs exists and is not a checkpoint; choose a new name" in refused(tmp_path / "runs")
    (tmp_path / "file").write_text("keep")
    assert "file is a file; choose a new name" in refused(tmp_path / "file")
    zt.save(tmp_path / "run", state(1.0)).result()
    (tmp_path / "run" / "tokenizer.json").write_text("keep")
    assert "has files that are not part of a checkpoint, such as tokenizer.json" in refused(
        tmp_path / "run"
    )
    assert value_of(tmp_path / "run") == 1.0
    assert names(tmp_path) == ["file", "run", "runs"] and names(tmp_path / "runs") == ["notes"]


def test_an_empty_folder_and_a_checkpoint_of_dcp_are_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    dcp.save(state(1.0), checkpoint_id=tmp_path / "dcp")
    assert value_of(tmp_path / "dcp") == 1.0
    for name in ("empty", "dcp"):
        zt.save(tmp_path / name, state(2.0)).result()
        assert value_of(tmp_path / name) == 2.0
    assert names(tmp_path) == ["dcp", "empty"]


def test_dcp_reads_what_save_writes(tmp_path):
    zt.save(tmp_path / "run", state(1.0)).result()
    loaded = state(0.0)
    dcp.load(loaded, checkpoint_id=tmp_path / "run")
    assert loaded["w"].tolist() == [1.0] * 3


def test_links_are_followed(tmp_path):
    """So the new folder is made on the disk of the checkpoint, and the link stays."""
    (tmp_path / "scratch" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("scratch/deep/run")
    (tmp_path / "disk").symlink_to("scratch")
    for value in (1.0, 2.0):
        assert zt.save(tmp_path / "link", state(value)).result() == tmp_path / "link"
        assert value_of(tmp_path / "link") == value_of(tmp_path / "scratch/deep/run") == value
    zt.save(tmp_path / "disk" / "other", state(3.0)).result()
    assert value_of(tmp_path / "scratch" / "other") == 3.0
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path) == ["disk", "link", "scratch"]
    assert names(tmp_path / "scratch") == ["deep", "other"]
    assert names(tmp_path / "scratch/deep") == ["run"]


def test_the_root_of_a_disk_is_refused(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    assert "disk is the root of a disk, which cannot be renamed" in refused(tmp_path / "disk")


def test_a_relative_path_begins_at_the_working_folder_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = zt.save("run", {"w": torch.ones(1_000_000)})
    os.chdir("elsewhere")
    assert saving.result() == tmp_path / "run"
    assert names(tmp_path) == ["elsewhere", "run"] and not names(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes() + b"more"),
        lambda file: file.write_bytes(b"\0" * file.stat().st_size),
    ],
    ids=["missing", "short", "long", "zeros"],
)
def test_a_save_whose_files_are_not_there_replaces_nothing(tmp_path, monkeypatch, harm):
    """As if another rank had written them elsewhere, or they had not reached this host."""
    zt.save(tmp_path / "run", state(1.0)).result()
    finish = dcp.FileSystemWriter.finish

    def harmed(self, metadata, results):
        harm(Path(self.path) / "__0_0.distcp")
        return finish(self, metadata, results)

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", harmed)
    assert "__0_0.distcp" in refused(tmp_path / "run")
    assert value_of(tmp_path / "run") == 1.0
    assert names(tmp_path) == ["run"]


def test_each_save_writes_into_a_new_folder(tmp_path, monkeypatch):
    finish, folders = dcp.FileSystemWriter.finish, []

    def seen(self, metadata, results):
        folders.append(self.path)
        return finish(self, metadata, results)

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", seen)
    for value in (1.0, 2.0, 3.0):
        zt.save(tmp_path / "run", state(value)).result()
    assert len(set(folders)) == 3


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "ztrans.json"])
def test_a_flipped_bit_is_an_error_that_names_the_file(tmp_path, name):
    zt.save(tmp_path / "run", {"w": torch.ones(2)}).result()
    file = tmp_path / "run" / name
    written = file.read_bytes()
    for place in range(0, len(written), 3):
        flipped = bytearray(written)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match=f"load: {file} ") as e:
            zt.load(tmp_path / "run", {"w": torch.zeros(2)}, lambda x: x)
        assert str(e.value).endswith("Load another checkpoint.")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_of_dcp_that_cannot_be_read_is_named(tmp_path, name):
    """It has no checksums."""
    dcp.save(state(1.0), checkpoint_id=tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"load: {file} cannot be read: \w+: "):
        value_of(tmp_path / "run")


def test_damage_in_a_leaf_that_is_not_read_is_no_error(tmp_path):
    zt.save(tmp_path / "run", state(1.0)).result()
    metadata = dcp.FileSystemReader(tmp_path / "run").read_metadata()
    (record,) = (x for index, x in metadata.storage_data.items() if index.fqn == "m")
    file = tmp_path / "run" / record.relative_path
    written = bytearray(file.read_bytes())
    written[record.offset + record.length // 2] ^= 1
    file.write_bytes(written)
    assert zt.load(tmp_path / "run", {"w": torch.zeros(3)}, lambda x: x)["w"].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="is damaged"):
        value_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("saved", "like", "text"),
    [
        (torch.tensor([1 + 2j]), torch.zeros(1), r"w is torch.complex64 in .*, and torch.float32"),
        (torch.tensor([0.1]), torch.zeros(1, dtype=torch.int64), r"w is torch.float32 in .*int64"),
        (0.1, 0, r"w is torch.float64 in .*, and torch.int64 in the state"),
        (torch.tensor([2]), torch.zeros(1, dtype=torch.bool), r"w is torch.int64 .* torch.bool"),
    ],
)
def test_a_dtype_that_cannot_hold_the_values_is_refused(tmp_path, saved, like, text):
    zt.save(tmp_path / "run", {"w": saved}).result()
    with pytest.raises(ValueError, match=text + r"(?s:.*)Give `like` a leaf of"):
        zt.load(tmp_path / "run", {"w": like}, lambda x: x)


def test_dtypes_of_one_kind_and_wider_kinds_are_converted(tmp_path):
    zt.save(tmp_path / "run", {"a": torch.ones(1), "b": 3, "c": torch.tensor([True])}).result()
    like = {"a": torch.zeros(1, dtype=torch.complex64), "b": 0.0, "c": torch.zeros(1).bfloat16()}
    loaded = zt.load(tmp_path / "run", like, lambda x: x)
    assert [loaded["a"].item(), loaded["b"], loaded["c"].item()] == [1.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        (torch.tensor([3, 300]), torch.int8),
        (torch.tensor([-1]), torch.uint8),
        (torch.tensor([2**31]), torch.int32),
        (torch.tensor([-1]), torch.uint64),
        (torch.tensor([200], dtype=torch.uint8), torch.int8),
    ],
)
def test_a_whole_number_that_does_not_fit_is_refused(tmp_path, saved, dtype):
    """A copy into the narrower dtype would drop its upper bits."""
    zt.save(tmp_path / "run", {"w": saved}).result()
    with pytest.raises(ValueError, match=r"load: w has integers from .*(?s:.*)Give `like`"):
        zt.load(tmp_path / "run", {"w": torch.zeros(len(saved), dtype=dtype)}, lambda x: x)


def test_whole_numbers_that_fit_are_converted(tmp_path):
    values = torch.tensor([[-128, 127]]), torch.zeros(0, dtype=torch.int64)
    zt.save(tmp_path / "run", {"w": values[0], "none": values[1]}).result()
    like = {name: x.to(torch.int8) * 0 for name, x in zip(("w", "none"), values)}
    loaded = zt.load(tmp_path / "run", like, lambda x: x)
    assert loaded["w"].tolist() == [[-128, 127]] and loaded["w"].dtype == torch.int8


def test_a_checkpoint_without_its_new_folder_is_found(tmp_path):
    """A save was killed between its two renames; the next save deletes what is left."""
    zt.save(tmp_path / "run", state(1.0)).result()
    (tmp_path / "run").rename(tmp_path / "run.ztrans-01234567.old")
    assert value_of(tmp_path / "run") == 1.0
    zt.save(tmp_path / "run", state(2.0)).result()
    assert value_of(tmp_path / "run") == 2.0 and names(tmp_path) == ["run"]
    assert index_of(tmp_path / "run").is_file()
