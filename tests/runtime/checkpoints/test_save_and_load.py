"""Checkpoints in one process: what is saved is loaded, saves do not tear, and errors say what is wrong."""

import re
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import batch, lifted
from tests.support.worlds import clone
from ztrans.runtime.channels import Channel
from ztrans.runtime.checkpoints.save import FolderWriter


def same(a, b) -> bool:
    """Whether two states have the same tree, dtypes and bits."""
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b))
    equal = all(
        type(x) is type(y) and torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs
    )
    return equal and pytree.tree_structure(a) == pytree.tree_structure(b)


def as_meta(state):
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), state)


@pytest.fixture
def trained():
    """A step, and its state after two steps."""
    *_, step, state = lifted()
    for i in range(2):
        state, _ = step(state, batch(i))
    return step, state


@pytest.mark.parametrize("blank", [as_meta, lambda state: pytree.tree_map(torch.zeros_like, state)])
def test_what_is_saved_is_loaded(trained, tmp_path, blank):
    step, state = trained
    assert zt.save(tmp_path / "a", state).result() == tmp_path / "a"
    like = blank(state)
    assert same(zt.load(tmp_path / "a", like, step), state)
    assert same(zt.load(str(tmp_path / "a"), like, zt.remat()(step)), state)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_loaded_zeros_are_written(tmp_path):
    """As those of a batch norm that has seen no batch: memory that nobody has written to has zeros too."""
    mesh = zt.make_mesh("cpu", dp=1)

    @zt.shard_params(mesh)
    def step(state, x):
        return {"count": state["count"] + 1, "seen": state["seen"]}, x.sum()

    state = step.shard({"count": torch.tensor(0), "seen": torch.zeros(4, dtype=torch.bool)})
    zt.save(tmp_path / "zeros", state).result()
    state = zt.load(tmp_path / "zeros", state, step)
    state, _ = step(state, torch.ones(2))
    assert step.unshard(state)["count"] == 1


def test_numbers_stay_numbers_without_a_mesh(tmp_path):
    state = {
        "w": torch.ones(3, dtype=torch.bfloat16),
        "lr": 0.1,
        "count": 3,
        "nested": [(torch.eye(2), 2.5)],
    }
    zt.save(tmp_path / "a", state).result()
    like = {
        "w": torch.zeros(3, dtype=torch.bfloat16),
        "lr": 0.0,
        "count": 0,
        "nested": [(torch.zeros(2, 2), 0.0)],
    }
    assert same(zt.load(tmp_path / "a", like, lambda state: state), state)
    assert like["lr"] == 0.0 and not like["w"].any(), "`like` does not change"


def test_a_part_of_a_checkpoint_can_be_loaded_in_another_dtype(trained, tmp_path):
    step, state = trained
    zt.save(tmp_path / "a", state).result()
    like = {"params": pytree.tree_map(lambda x: x.bfloat16(), state["params"])}
    half = zt.load(tmp_path / "a", like, step)
    assert same(half, {"params": pytree.tree_map(lambda x: x.bfloat16(), state["params"])})


def test_a_checkpoint_of_dcp_itself_can_be_loaded(trained, tmp_path):
    step, state = trained
    mesh = zt.make_mesh("cpu", dp=-1)
    sharded = zt.shard_params(mesh)(step)
    dcp.save(sharded.shard(state), checkpoint_id=tmp_path / "a")
    assert same(
        sharded.unshard(zt.load(tmp_path / "a", state, sharded)),
        sharded.unshard(sharded.shard(state)),
    )


@pytest.mark.parametrize("on_mesh", [False, True])
def test_steps_that_go_on_do_not_tear_a_save(trained, tmp_path, monkeypatch, on_mesh):
    """The thread that writes waits until the state has been overwritten."""
    step, state = trained
    if on_mesh:
        step = zt.shard_params(zt.make_mesh("cpu", dp=-1))(step)
        state = step.shard(state)
    overwritten, write = threading.Event(), FolderWriter.write
    monkeypatch.setattr(FolderWriter, "write", lambda *args: overwritten.wait(60) and write(*args))
    before = clone(step.unshard(state) if on_mesh else state)
    future = zt.save(tmp_path / "a", state)
    with torch.no_grad():
        for leaf in pytree.tree_leaves(state):
            if isinstance(leaf, torch.Tensor):
                leaf.add_(1)
    assert not future.done()
    overwritten.set()
    future.result()
    loaded = zt.load(tmp_path / "a", as_meta(before), step)
    assert same(step.unshard(loaded) if on_mesh else loaded, before)


def test_a_save_replaces_the_one_before_and_waits_for_it(trained, tmp_path):
    step, state = trained
    futures = []
    for i in range(3):
        state["buffers"]["scale"].fill_(i)
        futures.append(zt.save(tmp_path / "a", state))
        assert all(future.done() for future in futures[:-1])
    futures[-1].result()
    assert zt.load(tmp_path / "a", state, step)["buffers"]["scale"].tolist() == [2.0] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_failed_save_says_so_at_once_and_leaves_the_checkpoint_whole(
    trained, tmp_path, monkeypatch, caplog
):
    step, state = trained
    zt.save(tmp_path / "a", state).result()

    def fails(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(FolderWriter, "write_data", fails)
    for k in range(1, 4):  # each failure is told, also one like that before
        future = zt.save(tmp_path / "a", pytree.tree_map(lambda x: x + 1, state))
        with pytest.raises(RuntimeError, match=r"An earlier checkpoint at this path is intact."):
            future.result()
        text = f"save: {tmp_path / 'a'} was not written. OSError: No space left on device."
        assert [record.message.startswith(text) for record in caplog.records] == [True] * k
        assert {record.levelname for record in caplog.records} == {"ERROR"}
    assert same(zt.load(tmp_path / "a", as_meta(state), step), state)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_load_waits_for_the_save_that_runs(trained, tmp_path, monkeypatch):
    step, state = trained
    zt.save(tmp_path / "a", state).result()
    loads, write = threading.Event(), FolderWriter.write
    monkeypatch.setattr(FolderWriter, "write", lambda *args: loads.wait(60) and write(*args))
    newer = pytree.tree_map(lambda x: x + 1, state)
    saving = zt.save(tmp_path / "a", newer)
    threading.Timer(0.2, loads.set).start()
    assert same(zt.load(tmp_path / "a", as_meta(newer), step), newer)
    assert saving.done()


def test_leaves_that_are_no_tensors_are_refused(tmp_path):
    with pytest.raises(
        TypeError, match=r"save: state name is 'net'; a state holds tensors and numbers."
    ):
        zt.save(tmp_path / "a", {"name": "net"})
    with pytest.raises(ValueError, match=r"two leaves of the state are called 'a.b'"):
        zt.save(tmp_path / "a", {"a": {"b": 1}, "a.b": 2})


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"load: .*a is not a checkpoint.\nzt.save writes one."
    ):
        zt.load(tmp_path / "a", {}, lambda state: state)
    (tmp_path / "a.ztrans-01234567.partial").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"The first save to it has failed, was killed, or runs in another"
    ):
        zt.load(tmp_path / "a", {}, lambda state: state)


def test_a_state_that_does_not_fit_is_an_error(trained, tmp_path):
    step, state = trained
    zt.save(tmp_path / "a", state).result()
    more = {**state, "ema": {"first.weight": torch.zeros(7, 7)}}
    with pytest.raises(
        ValueError,
        match=r"load: .*a does not fit.*\n  The checkpoint does not have ema.first.weight.",
    ):
        zt.load(tmp_path / "a", more, step)
    state["params"]["first.weight"] = torch.zeros(8, 7)
    message = "load: params.first.weight has shape [7, 7] in "
    with pytest.raises(ValueError, match=re.escape(message) + r".*a, and \[8, 7\] in the state"):
        zt.load(tmp_path / "a", state, step)


@pytest.mark.slow
@pytest.mark.parametrize("blank", [lambda state: state, as_meta])
def test_a_state_that_is_sharded_may_say_what_is_read(tmp_path, blank):
    """As in a loop that resumes: the state of its own step, with or without values."""
    *_, step, state = lifted()
    step = zt.shard_params(zt.make_mesh("cpu", dp=-1))(step)
    state, _ = step(step.shard(state), batch(0))
    zt.save(tmp_path / "a", state).result()
    saved = step.unshard(state)
    loaded = zt.load(tmp_path / "a", blank(step.shard(lifted(seed=1)[-1])), step)
    assert all(isinstance(x, DTensor) and not x.is_meta for x in pytree.tree_leaves(loaded))
    assert same(step.unshard(loaded), saved)
    loaded, _ = step(loaded, batch(1))


def test_a_resumed_optimizer_passes_both_ways(tmp_path):
    """A checkpoint of model and optimizer is loaded into these before `lift`, and written from them after `write_back`."""
    model, optimizer, step, state = lifted(seed=1)
    state, _ = step(state, batch(0))
    zt.write_back(model, optimizer, state)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt"
    )
    model, optimizer, *_ = lifted()
    both = torch.load(tmp_path / "all.pt")
    model.load_state_dict(both["model"])
    optimizer.load_state_dict(both["optimizer"])
    resumed = zt.lift(lambda x: None, model, optimizer)[1]
    assert same(resumed["params"], state["params"])
    assert same(resumed["optimizer"], state["optimizer"])


@pytest.mark.parametrize(
    "name, advice",
    [
        ("model.pt", r"model.load_state_dict\(\.\.\.\).*source=0"),
        ("model.safetensors", r"zt.load_weights\(zt.state_dict\(model, state\), path\)"),
    ],
)
def test_the_file_of_an_ordinary_model_is_refused(tmp_path, name, advice):
    *_, step, state = lifted()
    with pytest.raises(ValueError, match=r"(?s)save: .* save writes a folder.*zt.export\(folder, "):
        zt.save(tmp_path / name, state)
    with pytest.raises(ValueError, match=f"(?s)load: .*{advice}"):
        zt.load(tmp_path / name, state, step)


def test_a_rank_that_cannot_tell_the_others_that_its_save_fails_logs_why(
    tmp_path, monkeypatch, caplog
):
    writer = FolderWriter(tmp_path / "state", "nonce")

    def connection_ends(copies, channel):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(writer, "_write_together", connection_ends)
    writer.fail_on_all_ranks(OSError("No space left on device"), Channel(None, "saves"))
    (record,) = caplog.records
    assert record.getMessage() == (
        "save: the other ranks may not know that this rank cannot write: Connection closed by peer"
    )
