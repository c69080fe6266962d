"""The table of optimizers in docs/evidence.md: what it says of each is so after 20 steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_lift import everything, loop, make_matrices, make_model, of
from test_schedulers import data

import ztrans as zt
from tests.support import optimizers, published_optimizers
from tests.support.worlds import ALL, distance, slices
from ztrans.lift.optimizer_state import is_of_torch

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
TABLE = PAGE.read_text().partition("\n## Optimizers\n")[2]
ROWS = dict(re.findall(r"^\| `([\w.]+(?:\(.*?\))?)` \| (.*?) \|", TABLE, re.MULTILINE))
WRITTEN = {
    k: v
    for module in (optimizers, published_optimizers)
    for k, v in vars(module).items()
    if k in ROWS
}
REFUSALS = (
    r"lift: .*[Uu]se .*(optimizer|Adam)",
    r"reads it as a Python number.*such as AdamW",
    r"an optimizer changes in every step must be a tensor in its state",
    r"Keep what lives from step to step in the state",
)
OPTIONS = {"SGD": {"momentum": 0.9}}


def optimizer_of(name, model):
    name, _, options = name.partition("(")
    module, _, kind = name.rpartition(".")
    given = eval(f"dict({options or ')'}")
    if not module:
        return WRITTEN[kind](model.parameters())
    if module == "transformers":
        return pytest.importorskip("transformers.optimization").Adafactor(
            model.parameters(), **given
        )
    return of(
        kind, **({} if kind == "LBFGS" else {"lr": 0.01}), **(given or OPTIONS.get(kind, {}))
    )(model)


def start(model, optimizer) -> None:
    """Take the step that an optimizer from outside of PyTorch takes before `lift`."""
    if not is_of_torch(optimizer):
        loop(model, optimizer)(*data()[0])


def assert_refused(model, optimizer) -> None:
    """Assert that `lift` or a trace refuses the optimizer, and says what to do."""
    start(model, optimizer)
    with pytest.raises(ValueError, match=f"(?s){'|'.join(REFUSALS)}"):
        step, state = zt.lift(loop(model, optimizer), model, optimizer)
        zt.Step(step).trace(state, *data()[0])


def train_both(plain, lifted) -> None:
    """Train two pairs of a model and its optimizer: by the untouched loop, and by the lifted one."""
    start(*plain)
    start(*lifted)
    step, state = zt.lift(loop(*lifted), *lifted)
    run, loop_step = zt.Step(step), loop(*plain)
    state = run.shard(state)
    for batch in data():
        loop_step(*batch)
        state, _ = run(state, *batch)
    zt.write_back(*lifted, run.unshard(state))


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_an_optimizer_does_what_the_table_says(name):
    make = make_matrices if name.endswith("Muon") else make_model
    (model, optimizer), (lifted, lifted_optimizer) = (
        (m, optimizer_of(name, m)) for m in (make(), make())
    )
    if ROWS[name] == "refused":
        assert_refused(lifted, lifted_optimizer)
        return
    train_both((model, optimizer), (lifted, lifted_optimizer))
    mine, theirs = everything(lifted, lifted_optimizer), everything(model, optimizer)
    if ROWS[name] == "the same bits":
        assert [
            k
            for k in theirs
            if not torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k]))
        ] == []
    else:
        assert distance(mine, theirs) <= float(ROWS[name].removeprefix("equal to "))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRITTEN if ROWS[name] != "refused"])
def test_an_optimizer_from_a_paper_trains_equally_on_ranks(name):
    (model, optimizer), (lifted, lifted_optimizer) = (
        (m, optimizer_of(name, m)) for m in (make_model(), make_model())
    )
    start(model, optimizer)
    start(lifted, lifted_optimizer)
    step, state = zt.lift(loop(lifted, lifted_optimizer), lifted, lifted_optimizer)
    run = zt.chain(zt.shard_params(zt.AbstractMesh(dp=4)), *ALL)(step)
    lowered = run.lower(state, *slices(data()[0], 4)[0])
    for batch in data()[:5]:
        loop(model, optimizer)(*batch)
        state, _ = lowered.lockstep(state, slices(batch, 4))
    zt.write_back(lifted, lifted_optimizer, state)
    assert distance(everything(lifted, lifted_optimizer), everything(model, optimizer)) <= 1e-5


def test_the_table_has_every_optimizer_of_pytorch():
    kinds = {
        k
        for k, v in vars(torch.optim).items()
        if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)
    }
    assert kinds - {"Optimizer"} == {
        n.partition("(")[0].removeprefix("torch.optim.") for n in ROWS if n.startswith("torch")
    }
    papers = {
        k
        for k, v in vars(published_optimizers).items()
        if getattr(v, "__module__", "") == published_optimizers.__name__
    }
    assert {name for name in papers if name[0].isupper()} <= {*WRITTEN} and len(ROWS) >= 48
