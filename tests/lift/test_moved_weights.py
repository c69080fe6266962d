"""Weights live in one place: the module before `shard`, then the state, and the module again after `write_back`."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import ztrans as zt
from tests.support.lifted import loop_of
from tests.support.worlds import ALL
from ztrans.lift.moved_weights import WeightsInState


def trained(**options):
    """A model, its optimizer, a lifted step and its state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loop_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, *zt.lift(loop_step, model, optimizer, **options)


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 4)


@pytest.fixture(scope="module")
def mesh():
    return zt.make_mesh("cpu", dp=1)


USES = {
    "call": lambda model: model(batch()[0]),
    "part": lambda model: model[0](batch()[0]),
    "state_dict": lambda model: model.state_dict(),
    "save": lambda model: torch.save(model, io.BytesIO()),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "load": lambda model: model.load_state_dict(
        {name: p.detach() for name, p in model.named_parameters()}
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_module_whose_weights_are_in_a_state_says_what_to_write(mesh, use):
    model, _, step, state = trained()
    use(model)  # the module has its weights until shard
    step = zt.shard_params(mesh)(step)
    state = step.shard(state)
    with pytest.raises(WeightsInState) as error:
        use(model)
    assert str(error.value) == (
        "the weights of Sequential are in the state of a step, and the module has none.\n"
        "  1. To evaluate or to generate with them: step.eval(fn)(state, *batch), where fn(*batch) uses the module.\n"
        "  2. To save them: zt.save(path, state), or as safetensors zt.export(path, zt.state_dict(model, state)).\n"
        "  3. To use the module until the next step: zt.write_back(model, optimizer, step.unshard(state))."
    )


def test_an_optimizer_whose_moments_are_in_a_state_has_no_state_dict(mesh):
    """It would hold NaN for each moment, and a loop that loads these trains to NaN."""
    model, optimizer, lifted, state = trained()
    optimizer.state_dict()
    step = zt.shard_params(mesh)(lifted)
    state = step.shard(state)
    with pytest.raises(WeightsInState) as error:
        optimizer.state_dict()
    assert str(error.value) == (
        "the moments of AdamW are in the state of a step, and the optimizer has none.\n"
        "  1. To save them: zt.save(path, state). Its extras hold the scheduler.\n"
        "  2. To read the settings: optimizer.param_groups.\n"
        "  3. To use the optimizer until the next step: zt.write_back(model, optimizer, step.unshard(state))."
    )
    zt.write_back(model, optimizer, step.unshard(state))
    assert optimizer.state_dict()["state"][0]["exp_avg"].eq(0).all()
    step(state, *batch())
    with pytest.raises(WeightsInState):
        optimizer.state_dict()


def test_a_step_that_trains_without_shard_moves_the_weights_too():
    model, _, lifted, state = trained()
    zt.Step.of(lifted)(state, *batch())
    with pytest.raises(WeightsInState):
        model(batch()[0])


def test_a_module_is_whole_after_write_back_until_the_next_step(mesh):
    model, optimizer, lifted, state = trained()
    reference, reference_optimizer, *_ = trained()
    step = zt.chain(zt.shard_params(mesh), *ALL)(lifted)
    state = step.shard(state)
    for _ in range(2):
        state, _ = step(state, *batch())
        x, y = batch()
        reference_optimizer.zero_grad()
        F.mse_loss(reference(x), y).backward()
        reference_optimizer.step()
        zt.write_back(model, optimizer, step.unshard(state))
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, reference.get_parameter(name), rtol=1e-5, atol=1e-6)
            own, expected = (
                optimizer.state[p],
                reference_optimizer.state[reference.get_parameter(name)],
            )
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
        use = copy.deepcopy(model)
        torch.testing.assert_close(use(x), reference(x), rtol=1e-5, atol=1e-6)
    assert len(step._cache) == 1  # nothing was traced again
    step(state, *batch())
    with pytest.raises(WeightsInState):
        model.state_dict()


def test_a_write_back_that_fails_leaves_the_module_refused(mesh):
    """It has given the module memory, but not all values."""
    model, optimizer, lifted, state = trained()
    step = zt.shard_params(mesh)(lifted)
    state = step.shard(state)
    with pytest.raises(TypeError, match="the state has the parts of this rank"):
        zt.write_back(model, optimizer, state)
    with pytest.raises(WeightsInState):
        model(batch()[0])
    zt.write_back(model, optimizer, step.unshard(state))
    assert torch.equal(model[0].weight, state["params"]["0.weight"].full_tensor())


@pytest.fixture
def new_objects_alone():
    """`gc.get_objects` returns what the test makes, and not the objects that the tests before it have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes():
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        local = x._local_tensor if type(x) is DTensor else x
        # The parts of a DTensor may be fake tensors, which have no memory.
        if type(local) in (torch.Tensor, nn.Parameter) and local.device.type == "cpu":
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def test_after_shard_only_the_parts_are_live(mesh, new_objects_alone):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    lifted, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    parts = 3 * 4 * 256 * 256 * 4
    assert live_bytes() >= parts
    step = zt.shard_params(mesh)(lifted)
    state = step.shard(state)
    assert live_bytes() <= 1.02 * parts
    state, _ = step(state, torch.ones(2, 256))
    assert live_bytes() <= 1.02 * parts


def test_a_module_that_is_lifted_again_takes_the_states_of_the_first_step(mesh):
    model, optimizer, lifted, state = trained()
    step = zt.shard_params(mesh)(lifted)
    state = step.shard(state)
    second, second_state = zt.lift(loop_of(model, optimizer), model, optimizer)
    assert all(x.is_meta for x in second_state["params"].values())
    second = zt.shard_params(mesh)(second)
    state, first_loss = step(state, *batch())
    state, second_loss = second(state, batch()[0])
    assert first_loss.isfinite() and second_loss.isfinite()
    with pytest.raises(ValueError, match="nobody has written to"):
        second(second.shard(second_state), batch()[0])


def test_a_lifted_function_that_trains_nothing_leaves_the_weights_in_the_module():
    model, _, _, state = trained()
    evaluate, _ = zt.lift(torch.no_grad()(lambda x: model(x)), model)
    zt.Step.of(evaluate)(state, batch()[0])
    assert model(batch()[0]).isfinite().all()
