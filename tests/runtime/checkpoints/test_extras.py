"""What a checkpoint holds beside the state, in one process."""

import io
import random

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import lr_scheduler

import ztrans as zt
from tests.support import processes
from ztrans.runtime.checkpoints.extras import record_names, serialized

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"w": torch.ones(2)}


class Loader:
    """Such as StatefulDataLoader of torchdata."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict:
        return {"at": self.at, "seen": torch.arange(self.at)}

    def load_state_dict(self, state: dict) -> None:
        assert torch.equal(state["seen"], torch.arange(state["at"]))
        self.at = state["at"]


def save(path, **extras):
    zt.save(path, STATE, extras=extras).result()


def load(path, **extras):
    state = zt.load(path, STATE, lambda state: state, extras=extras)
    assert state["w"].tolist() == [1.0, 1.0]
    return extras


def test_objects_are_restored_in_place_and_values_in_the_dict(tmp_path):
    values = {"step": 7, "name": "run", "best": None, "seen": [torch.eye(2), (1.5, numpy.ones(2))]}
    save(tmp_path / "a", loader=Loader(5), **values)
    loader = Loader()
    loaded = load(tmp_path / "a", loader=loader, **dict.fromkeys(values))
    assert loaded["loader"] is loader and loader.at == 5
    eye, (number, ones) = loaded["seen"]
    assert torch.equal(eye, torch.eye(2)) and number == 1.5 and (ones == 1).all()
    assert [loaded[key] for key in ("step", "name", "best")] == [7, "run", None]


def test_equal_values_are_one_record_and_others_are_not():
    """A tensor too, whose pickle holds its address."""
    first, second = ({"loader": Loader(3), "x": torch.ones(2)} for _ in range(2))
    assert serialized(first) == serialized(second)
    assert serialized(first)["loader"] != serialized({"loader": Loader(4)})["loader"]


def test_values_are_those_of_the_call(tmp_path):
    """The thread writes later."""
    loader, progress = Loader(3), {"epoch": [1]}
    future = zt.save(tmp_path / "a", STATE, extras={"loader": loader, "progress": progress})
    loader.at, progress["epoch"][0] = 9, 9
    future.result()
    loaded = load(tmp_path / "a", loader=loader, progress=None)
    assert loader.at == 3 and loaded["progress"] == {"epoch": [1]}


def test_generators_go_on_where_they_were(tmp_path):
    own = torch.Generator().manual_seed(3)
    numbers, python = numpy.random.default_rng(3), random.Random(3)
    extras = {"global": zt.GlobalRng(), "own": own, "numbers": numbers, "python": python}

    def draws():
        return [
            *(random.random(), numpy.random.rand(), torch.rand(()).item()),
            *(torch.rand((), generator=own).item(), numbers.random(), python.random()),
        ]

    draws()
    save(tmp_path / "a", **extras)
    first = draws()
    assert draws() != first
    load(tmp_path / "a", **extras)
    assert draws() == first


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [3],
        ),
    ],
)
def test_schedulers_bring_the_settings_of_their_optimizers(tmp_path, make):
    """PyTorch saves the learning rate with the optimizer, and most schedulers compute the next one from it."""

    def schedule():
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, make(optimizer)

    def settings(optimizer, scheduler, steps):
        seen = []
        for _ in range(steps):
            optimizer.step()
            takes_loss = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*((1.0,) if takes_loss else ()))
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        return seen

    optimizer, scheduler = schedule()
    settings(optimizer, scheduler, 4)
    save(tmp_path / "a", scheduler=scheduler)
    rest = settings(optimizer, scheduler, 4)
    optimizer, scheduler = schedule()
    load(tmp_path / "a", scheduler=scheduler)
    assert settings(optimizer, scheduler, 4) == rest


def test_dcp_reads_an_extra(tmp_path):
    save(tmp_path / "a", step=7)
    read = {"extras/step": b""}
    dcp.load(read, checkpoint_id=tmp_path / "a")
    assert torch.load(io.BytesIO(read["extras/step"])) == 7


def test_what_cannot_be_saved_is_refused(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for extra, text in [
        (model, "the extra 'x' is a Linear, whose tensors are leaves of the state"),
        (optimizer, "A scheduler brings the settings of its optimizer"),
        (torch.amp.GradScaler("cpu"), "a GradScaler, whose(?s:.*)pass its state_dict()"),
        (iter([1]), "a list_iterator, which is neither a value(?s:.*)such as the epoch"),
        ([object()], "has a object, which is neither a value"),
    ]:
        with pytest.raises(TypeError, match=text):
            save(tmp_path / "a", x=extra)
    assert not (tmp_path / "a").exists()


def test_what_a_checkpoint_does_not_have_is_an_error(tmp_path):
    save(tmp_path / "a", step=7, rng=zt.GlobalRng())
    step = Loader()
    with pytest.raises(ValueError, match=r"does not have the extra 'epoch'. It has rng, step."):
        load(tmp_path / "a", epoch=0)
    with pytest.raises(
        ValueError, match=r"the extra 'step', a Loader, does not accept .*TypeError"
    ):
        load(tmp_path / "a", step=step)
    assert load(tmp_path / "a", step=0) == {"step": 7}, "rng is not read"


def test_values_of_each_rank_load_in_a_world_of_the_same_size_only():
    own = {f"extras/{name}/{rank} of 2" for name in ("rng", "data") for rank in range(2)}
    saved = {"extras/step", *own}
    assert record_names({"step": 0}, saved, "a", None) == {"step": "extras/step"}
    text = r"saved in a world of size 2; this one has size 1. .*: rng, data.\nLeave them out of `extras`"
    with pytest.raises(ValueError, match=text):
        record_names({"rng": 0, "step": 0, "data": 0}, saved, "a", None)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_loop_of_the_page_resumes_bit_for_bit(tmp_path):
    """Two ranks run the loop of docs/launch.md whole, and up to a signal. Two other processes go on from there."""
    begun = processes.run_ranks(2, "resumed_loop.py", str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["step-4", "step-5"]
    resumed = processes.run_ranks(2, "resumed_loop.py", str(tmp_path), "resumed")
    assert len(begun) == len(resumed) == 2
    for before, after in zip(begun, resumed):
        assert len(before["first"]) == 5 and len(after["rest"]) == 7
        assert before["whole"] == before["first"] + after["rest"]
        assert before["state"] == after["state"]
        assert before["draws"] == after["draws"], "the states of the generators at the end"
        assert after["kept"] == ["step-10", "step-12"]
        assert "rank 0 has all, only 0, and rank 1 has all, only 1.\n" in after["error"]
    assert begun[0]["draws"] != begun[1]["draws"]
    assert [row["extras"] for row in resumed] == [{"rank": k, "all": [5]} for k in range(2)]
    # On one rank, what was the same on both.
    nothing = lambda extras: zt.load(tmp_path / "c", {}, lambda state: state, extras=extras)
    shared = {"all": None}
    nothing(shared)
    assert shared == {"all": [5]}
    with pytest.raises(
        ValueError, match=r"saved in a world of size 2; this .* differ from rank to rank.*: rank.\n"
    ):
        nothing({"rank": None})
