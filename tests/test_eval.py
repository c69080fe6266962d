"""`Step.eval`: a function of the weights of a state, where they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt
from tests.lift.test_moved_weights import batch, trained
from tests.support.lifted import loop_of
from tests.support.worlds import ALL
from ztrans.tracing.errors import TraceError

TRANSFORMS = {
    "stage 0": lambda mesh: (zt.shard_params(mesh, stage=0),),
    "stage 1": lambda mesh: (zt.shard_params(mesh, stage=1),),
    "stage 2": lambda mesh: (zt.shard_params(mesh, stage=2), *ALL),
    "stage 3": lambda mesh: (zt.shard_params(mesh), *ALL),
    "micro-batches": lambda mesh: (zt.shard_params(mesh), zt.accumulate(2)),
    "moments on the host": lambda mesh: (
        zt.shard_params(mesh),
        zt.offload(where="optimizer.*.exp_avg*", at_least=0),
    ),
    "none": lambda mesh: (),
}


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
def test_an_evaluation_reads_the_weights_of_the_state(transforms):
    model, optimizer, lifted, state = trained()
    step = zt.chain(*transforms(zt.make_mesh("cpu", dp=1)))(lifted)
    state = step.shard(state)
    evaluate = step.eval(lambda x, y: {"loss": F.mse_loss(model(x), y), "best": model(x).argmax(1)})
    x, y = batch()
    for _ in range(2):
        state, _ = step(state, x, y)
        before = {name: p.clone() for name, p in state["params"].items()}
        output = evaluate(state, x, y)
        for name, p in state["params"].items():
            assert torch.equal(p, before[name])
    zt.write_back(model, optimizer, step.unshard(state))
    torch.testing.assert_close(output["loss"], F.mse_loss(model(x), y).detach())
    assert torch.equal(output["best"], model(x).argmax(1))


def test_an_evaluation_of_a_pure_step_takes_its_state():
    mesh = zt.make_mesh("cpu", dp=1)

    @zt.shard_params(mesh)
    def step(state, x):
        gradient = torch.func.grad(lambda w: (x @ w).square().mean())(state["w"])
        return {"w": state["w"] - 0.1 * gradient}, None

    state = step.shard({"w": torch.ones(4, 2)})
    state, _ = step(state, torch.ones(3, 4))
    output = step.eval(lambda state, x: x @ state["w"])(state, torch.ones(3, 4))
    assert torch.equal(output, torch.ones(3, 4) @ state["w"].full_tensor())


@pytest.mark.parametrize("kind", ["module", "lambda", "pure"])
def test_errors_call_an_evaluation_without_a_name_evaluate(kind):
    """A lambda has no name, nor has a module. Errors about ranks that do not do the same name it too."""
    model, _, lifted, state = trained()
    step = zt.Step.of(lifted)
    if kind == "pure":
        step = zt.Step.of(lambda state, x: (state, x))
        evaluate = step.eval(lambda state, x: x @ state["params"]["0.weight"])
    else:
        evaluate = step.eval(model if kind == "module" else lambda x: model(x))
    with pytest.raises(RuntimeError, match=r"^trace: evaluate: \w+ failed"):
        evaluate(state, torch.ones(3, 77))


def test_an_evaluation_refuses_to_change_the_state():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lifted, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    step = zt.Step.of(lifted)
    state, _ = step(state, batch()[0])
    evaluate = step.eval(lambda x: model(x))
    with pytest.raises(TraceError) as error:
        evaluate(state, batch()[0])
    assert str(error.value) == (
        "eval: evaluate changes buffers.1.num_batches_tracked of the state.\n"
        "Batch norms update their statistics in training mode: call model.eval() before, and model.train() after."
    )
    model.eval()
    assert evaluate(state, batch()[0]).shape == (8, 4)
    model.train()
    step(state, batch()[0])
