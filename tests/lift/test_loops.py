"""What ordinary loops do besides a step of an optimizer: averages of the model, scaled losses, hooks, unfreezing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_lift import data, everything, loop, make_model, of
from torch import nn

import ztrans as zt
from tests.support import optimizers
from tests.support.worlds import ALL, clone, distance, slices

RANKS = 3
SHARDED = zt.chain(zt.shard_params(zt.AbstractMesh(dp=RANKS)), *ALL)


def differing(mine, theirs):
    """The names of the tensors that differ."""
    return [
        k for k in theirs if not torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k]))
    ]


# ---- losses that are scaled


def scaled(make_optimizer, unscale, growth_interval=2):
    """A model, its optimizer and its scaler, and the body of a loop whose batch has a factor for the loss."""
    model = make_model()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=1024.0,
        growth_interval=growth_interval,
        growth_factor=1.7,
        backoff_factor=0.3,
    )

    def loop_step(x, y, factor):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * factor
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return model, optimizer, scaler, loop_step


FACTORS = [
    1.0,
    1.0,
    1.0,
    float("inf"),
    1.0,
    float("nan"),
    float("inf"),
    1.0,
    1.0,
    1.0,
]  # infinite ones are skipped
SCALED = {
    "sgd": of("SGD", lr=0.1, momentum=0.9),
    "adamw": of("AdamW", lr=0.01),
    "adamw_fused": of("AdamW", lr=0.01, fused=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("make_optimizer", SCALED.values(), ids=SCALED)
def test_a_scaler_skips_steps_and_changes_its_scale(make_optimizer, unscale):
    model, optimizer, scaler, plain_loop = scaled(make_optimizer, unscale)
    lifted, lifted_optimizer, lifted_scaler, loop_step = scaled(make_optimizer, unscale)
    step, state = zt.lift(loop_step, lifted, lifted_optimizer, scaler=lifted_scaler)
    run = zt.Step(step)
    state = run.shard(state)
    for factor, batch in zip(FACTORS, data(steps=len(FACTORS))):
        plain_loop(*batch, torch.tensor(factor))
        state, _ = run(state, *batch, torch.tensor(factor))
        assert (
            state["scaler"]["scale"] == scaler._scale
            and state["scaler"]["growth"] == scaler._growth_tracker
        )
    zt.write_back(lifted, lifted_optimizer, run.unshard(state), scaler=lifted_scaler)
    mine, theirs = everything(lifted, lifted_optimizer), everything(model, optimizer)
    assert distance(mine, theirs) <= 1e-6
    if optimizer.param_groups[0]["fused"]:
        assert differing(mine, theirs) == []
    assert lifted_scaler.state_dict() == scaler.state_dict() and scaler.get_scale() != 1024
    assert len(run._cache) == 1 and "_maybe_opt_step" not in vars(lifted_scaler)


@pytest.mark.parametrize("name", ["adamw", "adamw_fused"])
def test_a_scaler_works_on_every_rank(name):
    """A gradient that is not finite on one rank is skipped by all."""
    model, optimizer, scaler, plain_loop = scaled(SCALED[name], True)
    lifted, lifted_optimizer, lifted_scaler, loop_step = scaled(SCALED[name], True)
    step, state = zt.lift(loop_step, lifted, lifted_optimizer, scaler=lifted_scaler)
    one, infinite = torch.tensor(1.0), torch.tensor(float("inf"))
    lowered, state = SHARDED(step).lower(state, *slices(data()[0], RANKS)[0], one), clone(state)
    for k, batch in enumerate(data()):
        plain_loop(*batch, infinite if k == 2 else one)
        parts = [
            (*part, infinite if k == 2 and rank == 1 else one)
            for rank, part in enumerate(slices(batch, RANKS))
        ]
        state, _ = lowered.lockstep(state, parts)
    zt.write_back(lifted, lifted_optimizer, state, scaler=lifted_scaler)
    assert lifted_scaler.state_dict() == scaler.state_dict()
    assert distance(everything(lifted, lifted_optimizer), everything(model, optimizer)) <= 1e-5


def test_settings_of_a_scaler_are_noticed():
    (_, _, scaler, plain_loop), (*lifted, lifted_scaler, loop_step) = (
        scaled(SCALED["sgd"], False) for _ in range(2)
    )
    step, state = zt.lift(loop_step, *lifted, scaler=lifted_scaler)
    run = zt.Step(step)
    state = run.shard(state)
    for batch in data():
        plain_loop(*batch, torch.tensor(1.0))
        state, _ = run(state, *batch, torch.tensor(1.0))
        assert state["scaler"]["scale"] == scaler._scale
        scaler.set_growth_interval(1), lifted_scaler.set_growth_interval(1)
    assert len(run._cache) == 2


def test_a_scaler_that_is_not_given_to_lift_is_refused():
    model, optimizer, _, loop_step = scaled(SCALED["sgd"], True)
    step, state = zt.lift(loop_step, model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"a GradScaler whose scale is not part(?s:.)*test_loops.py:\d+(?s:.)*scaler=scaler\), and to write_back",
    ):
        zt.Step(step).trace(state, *data()[0], torch.tensor(1.0))


def test_a_scaler_beside_the_lifted_one_is_refused():
    model, optimizer, _, loop_step = scaled(SCALED["sgd"], False)
    lifted = torch.amp.GradScaler("cpu")
    step, state = zt.lift(loop_step, model, optimizer, scaler=lifted)
    with pytest.raises(
        ValueError, match=r"a GradScaler whose scale is not part(?s:.)*test_loops.py:\d+"
    ):
        zt.Step(step).trace(state, *data()[0], torch.tensor(1.0))


# ---- hooks


def hooked():
    """A model with hooks of every kind, its optimizer, and the body of their loop."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model[1].register_forward_hook(lambda module, args, output: output + 0.1)
    model[3].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.7,))
    model[3].register_full_backward_hook(
        lambda module, before, after: (before[0].clamp(-0.05, 0.05),)
    )
    model[0].weight.register_hook(lambda g: g * 0.9)
    model[0].bias.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(0.5)].clear())
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: (
            [p.grad.mul_(0.8) for g in o.param_groups for p in g["params"]] and None
        )
    )
    optimizer.register_step_post_hook(
        lambda o, args, kwargs: (
            [p.data.mul_(0.99) for g in o.param_groups for p in g["params"]] and None
        )
    )
    return model, optimizer, loop(model, optimizer)


def test_hooks_of_modules_tensors_and_optimizers_run():
    (model, optimizer, plain_loop), (lifted, lifted_optimizer, loop_step) = hooked(), hooked()
    step, state = zt.lift(loop_step, lifted, lifted_optimizer)
    run = zt.Step(step)
    state = run.shard(state)
    for batch in data():
        wanted = plain_loop(*batch).detach()
        state, got = run(state, *batch)
        assert torch.equal(got, wanted)
    zt.write_back(lifted, lifted_optimizer, run.unshard(state))
    assert differing(everything(lifted, lifted_optimizer), everything(model, optimizer)) == []


class Signed(torch.optim.SGD):
    """An optimizer with a choice and a mode that are neither numbers nor in its parameter groups."""

    signed, mode = False, None

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.signed or self.mode == "sign":
                p.grad = p.grad.sign()
        return super().step(closure)


@pytest.mark.parametrize("change", [{"signed": True}, {"mode": "sign"}])
def test_a_choice_of_an_own_optimizer_is_noticed(change):
    model, lifted = make_model().double(), make_model().double()
    optimizers = [Signed(m.parameters(), lr=0.1) for m in (model, lifted)]
    step, state = zt.lift(loop(lifted, optimizers[1]), lifted, optimizers[1])
    run = zt.Step(step)
    for k, batch in enumerate(data(steps=4)):
        batch = [x.double() for x in batch]
        wanted = loop(model, optimizers[0])(*batch)
        state, got = run(state, *batch)
        assert torch.equal(got, wanted.detach()), k
        if k == 1:
            [setattr(o, name, value) for o in optimizers for name, value in change.items()]
    assert len(run._cache) == 2


# ---- parameters that are trained later


def frozen(given):
    """A model whose first layer is frozen, and an optimizer that has all its parameters, or the others only."""
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if given == "all" or p.requires_grad], lr=0.01, fused=True
    )
    return model, optimizer, loop(model, optimizer)


def unfreeze(given, model, optimizer):
    model[0].requires_grad_(True)
    if given == "trained":
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.003})


@pytest.mark.parametrize("given", ["all", "trained"])
def test_a_loop_is_lifted_again_when_a_layer_is_unfrozen(given):
    """Its optimizer state begins there, as in the untouched loop. If it is frozen again, its state stays."""
    (model, optimizer, plain_loop), (lifted, lifted_optimizer, loop_step) = (
        frozen(given),
        frozen(given),
    )
    step, state = zt.lift(loop_step, lifted, lifted_optimizer)
    run = zt.Step(step)
    state = run.shard(state)
    for k, batch in enumerate(data(steps=6)):
        if k == 2:
            unfreeze(given, model, optimizer), unfreeze(given, lifted, lifted_optimizer)
            with pytest.raises(ValueError, match=r"write the state back and lift again"):
                run(state, *batch)
            zt.write_back(lifted, lifted_optimizer, run.unshard(state))
            step, state = zt.lift(loop_step, lifted, lifted_optimizer)
            run = zt.Step(step)
            state = run.shard(state)
        if k == 4:
            model[0].requires_grad_(False), lifted[0].requires_grad_(False)
        wanted = plain_loop(*batch).detach()
        state, got = run(state, *batch)
        assert torch.equal(got, wanted), k
        for parameter in (*model.parameters(), *lifted.parameters()):
            parameter.grad = None
    assert len(run._cache) == 2 and state["optimizer"]["0.weight"]["step"] == 2
    zt.write_back(lifted, lifted_optimizer, run.unshard(state))
    assert differing(everything(lifted, lifted_optimizer), everything(model, optimizer)) == []


def test_a_layer_that_is_unfrozen_for_an_optimizer_from_outside_of_pytorch_is_refused():
    """Its state before the first step is not known."""
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = optimizers.Counting([*model.parameters()])
    loop(model, optimizer)(*data()[0])
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    run = zt.Step(step)
    state, _ = run(run.shard(state), *data()[0])
    model[0].requires_grad_(True)
    with pytest.raises(
        ValueError,
        match=r"Counting makes its state in its first step, 'count', 'm', 'v' for 0\.weight",
    ):
        run(state, *data()[0])


class Scaling(torch.nn.Module):
    """A module that is false, because its length is 0."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(6))
        self.register_module("none", None)

    def __len__(self):
        return 0

    def forward(self, x):
        return x * self.factor


def test_a_module_without_a_length_is_frozen():
    model = torch.nn.Sequential(Scaling(), torch.nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    run = zt.Step(step)
    state, _ = run(run.shard(state), *data()[0])
    before = state["params"]["0.factor"].clone()
    model[0].requires_grad_(False)
    state, _ = run(state, *data()[1])
    assert torch.equal(state["params"]["0.factor"], before) and len(run._cache) == 2


def test_a_parameter_of_another_module_is_refused_later_too():
    model, optimizer, loop_step = frozen("all")
    step, state = zt.lift(loop_step, model, optimizer)
    run = zt.Step(step)
    state, _ = run(run.shard(state), *data()[0])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match=r"a parameter \[3\] that is not the model's"):
        run(state, *data()[0])


# ---- parameters in one memory


def lookahead(copies):
    """A loop step that moves slow weights towards fast ones, and gives these to the fast ones."""
    model = nn.ModuleDict({"fast": nn.Linear(4, 2), "slow": nn.Linear(4, 2)})
    sgd = torch.optim.SGD(model["fast"].parameters(), 0.1)

    def loop_step(x):
        sgd.zero_grad()
        loss = model["fast"](x).square().mean()
        loss.backward()
        sgd.step()
        for p, q in zip(model["fast"].parameters(), model["slow"].parameters()):
            q.data.lerp_(p.data, 0.5)
            if copies:
                p.data.copy_(q.data)
            else:
                p.data = q.data
        return loss

    return model, sgd, loop_step


def test_a_loop_that_leaves_two_parameters_in_one_memory_is_refused_at_its_line():
    model, sgd, loop_step = lookahead(copies=False)
    step, state = zt.lift(loop_step, model, sgd)
    text = "params.fast.weight and params.slow.weight share memory"
    with pytest.raises(ValueError, match=text) as e:
        zt.Step.of(step).trace(state, torch.ones(2, 4))
    assert "test_loops.py:" in str(e.value) and "p.data.copy_(q.data)" in str(e.value)


def test_a_loop_that_copies_one_parameter_into_another_is_lifted():
    torch.manual_seed(0)
    model, sgd, loop_step = lookahead(copies=True)
    torch.manual_seed(0)
    _, _, plain = lookahead(copies=True)
    step, state = zt.lift(loop_step, model, sgd)
    run = zt.Step.of(step)
    state = run.shard(state)
    for _ in range(3):
        state, loss = run(state, torch.ones(2, 4))
        assert torch.equal(loss, plain(torch.ones(2, 4)))


def test_parameters_that_become_parts_of_one_tensor_are_lifted():
    """They share a storage, and no memory."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), 0.1)

    def loop_step(x):
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
        sgd.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        sgd.step()
        return loss

    step, state = zt.lift(loop_step, model, sgd)
    zt.Step.of(step).trace(state, data()[0][0])
