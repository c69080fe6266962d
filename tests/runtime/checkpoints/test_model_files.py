"""Files of ordinary models, in both directions: torch.save, and safetensors where it is installed."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.runtime.checkpoints.test_save_and_load import as_meta, same
from tests.support.lifted import batch, lifted


def write(model: nn.Module, path) -> None:
    """The file, as a program without ztrans writes it."""
    if path.suffix == ".safetensors":
        importlib.import_module("safetensors.torch").save_model(model, str(path))
    else:
        torch.save(model.state_dict(), path)


def read(model: nn.Module, path) -> None:
    """Read the file, as a program without ztrans does. `scale` is no part of `model.state_dict()`, so it is left over."""
    if path.suffix == ".safetensors":
        importlib.import_module("safetensors.torch").load_model(model, str(path), strict=False)
    else:
        assert model.load_state_dict(torch.load(path), strict=False).unexpected_keys == ["scale"]


@pytest.fixture(params=["pt", "bin", "safetensors"])
def path(request, tmp_path):
    if request.param == "safetensors":
        pytest.importorskip("safetensors")
    return tmp_path / f"model.{request.param}"


def test_the_file_of_an_ordinary_model_fills_parameters_and_buffers(path):
    model, *_ = lifted(seed=1)
    model.norm.running_mean.fill_(3.0)
    write(model, path)
    *_, step, state = lifted()
    loaded = zt.load(path, step, state)
    assert same(loaded["params"], {k: p.detach() for k, p in model.named_parameters()})
    assert same(loaded["buffers"], dict(model.named_buffers()))
    assert same(loaded["optimizer"], state["optimizer"])
    step(loaded, batch(0))
    assert not state["optimizer"]["norm.weight"]["exp_avg"].any(), "`like` does not change"


def test_an_ordinary_model_reads_what_is_saved(path):
    *_, step, state = lifted(seed=1)
    state, _ = step(state, batch(0))
    zt.save(path, {**state["params"], **state["buffers"]}).result()
    model, *_ = lifted()
    read(model, path)
    assert same({k: p.detach() for k, p in model.named_parameters()}, state["params"])
    assert same({k: b for k, b in model.named_buffers() if k != "scale"},
                {k: b for k, b in state["buffers"].items() if k != "scale"})  # fmt: skip
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_whole_state_may_be_in_one_file(path):
    *_, step, state = lifted(seed=1)
    state, _ = step(state, batch(0))
    zt.save(path, state).result()
    assert same(zt.load(path, step, as_meta(state)), state)


def test_a_folder_of_safetensors_is_one_model(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    model, *_ = lifted(seed=1)
    tensors = {k: p.detach() for k, p in model.named_parameters()}
    names = list(tensors)
    save_file({k: tensors[k] for k in names[:2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({k: tensors[k] for k in names[2:]}, tmp_path / "model-00002-of-00002.safetensors")
    *_, step, state = lifted()
    assert same(zt.load(tmp_path, step, state)["params"], tensors)


def test_a_resumed_optimizer_passes_both_ways(tmp_path):
    """A checkpoint of model and optimizer is loaded into these before `lift`, and written from them after `restore`."""
    model, optimizer, step, state = lifted(seed=1)
    state, _ = step(state, batch(0))
    zt.restore(model, optimizer, state)
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


def test_a_file_that_does_not_fit_is_an_error(tmp_path):
    model, *_, step, state = lifted()
    names = {f"module.{k}": x for k, x in model.state_dict().items()}
    torch.save(names, tmp_path / "model.pt")
    with pytest.raises(ValueError) as error:
        zt.load(tmp_path / "model.pt", step, state)
    assert (
        "The checkpoint does not have params.first.weight, params.first.bias, params.second.bias"
        in str(error.value)
    )
    assert "The state does not have module.first.weight, module.first.bias" in str(error.value)
    assert "model.load_state_dict(...)" in str(error.value)


def test_what_a_file_does_not_have_needs_a_value(tmp_path):
    model, *_, step, state = lifted()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    meta = {**state, "optimizer": as_meta(state["optimizer"])}
    with pytest.raises(
        ValueError, match=r"does not have optimizer.first.weight.step, so .* but that is on meta"
    ):
        zt.load(tmp_path / "model.pt", step, meta)
    loaded = zt.load(tmp_path / "model.pt", step, {**state, "params": as_meta(state["params"])})
    assert same(loaded["params"], state["params"])


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    zt.save(path, {"w": torch.ones(2)}).result()
    monkeypatch.setattr(torch, "save", lambda tensors, part: part.write_text("half") and 1 / 0)
    with pytest.raises(
        RuntimeError,
        match=r"save: .*model.pt was not written. ZeroDivisionError: division by zero.",
    ):
        zt.save(path, {"w": torch.zeros(2)})
    monkeypatch.undo()
    assert pytree.tree_all(lambda x: bool(x.all()), torch.load(path))
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
