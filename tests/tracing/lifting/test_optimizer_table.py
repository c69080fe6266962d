"""The table of optimizers in docs/coming-from.md: what it says of each is so after 20 steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_lift import everything, loop, make_matrices, make_model, of
from test_schedulers import data

import ztrans as zt
from tests.support.worlds import distance

PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"
ROWS = dict(re.findall(r"^\| `((?:torch\.optim|transformers)\.\w+(?:\(.*?\))?)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE))
OPTIONS = {"SGD": {"momentum": 0.9}}


def optimizer_of(name, model):
    name, _, options = name.partition("(")
    module, _, kind = name.rpartition(".")
    given = eval(f"dict({options or ')'}")
    if module == "transformers":
        return pytest.importorskip("transformers.optimization").Adafactor(model.parameters())
    return of(kind, **({} if kind == "LBFGS" else {"lr": 0.01}), **(given or OPTIONS.get(kind, {})))(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_an_optimizer_does_what_the_table_says(name):
    make = make_matrices if name.endswith("Muon") else make_model
    (model, optimizer), (lifted, lifted_optimizer) = ((m, optimizer_of(name, m)) for m in (make(), make()))
    if ROWS[name] == "refused":
        with pytest.raises(ValueError, match=r"(?s)lift: .*[Uu]se .*(optimizer|Adam)|chooses its update.*such as AdamW"):
            step, state = zt.lift(loop(lifted, lifted_optimizer), lifted, lifted_optimizer)
            zt.Step(step).trace(state, *data()[0])
        return
    plain = loop(model, optimizer)
    step, state = zt.lift(loop(lifted, lifted_optimizer), lifted, lifted_optimizer)
    run = zt.Step(step)
    state = run.shard(state)
    for batch in data():
        plain(*batch)
        state, _ = run(state, *batch)
    zt.restore(lifted, lifted_optimizer, run.unshard(state))
    mine, theirs = everything(lifted, lifted_optimizer), everything(model, optimizer)
    if ROWS[name] == "the same bits":
        assert [k for k in theirs if not torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k]))] == []
    else:
        assert ROWS[name] == "equal to 1e-6" and distance(mine, theirs) <= 1e-6


def test_the_table_has_every_optimizer_of_pytorch():
    kinds = {k for k, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)}
    assert kinds - {"Optimizer"} == {n.partition("(")[0].removeprefix("torch.optim.") for n in ROWS if n.startswith("torch")}
    assert len(ROWS) >= 30
