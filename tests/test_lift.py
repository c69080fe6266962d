"""lift: the untouched loop and the lifted step, on the same data, end in the same place."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from worlds import ALL, clone, distance, slices

import ztrans as zt

STEPS = 5


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def make_matrices():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


def data(n=12, steps=STEPS):
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randn(n, 4)) for _ in range(steps)]


def loop(model, optimizer):
    """A training loop's body, as people write it."""

    def loop_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return loop_step


def everything(model, optimizer):
    """The numbers that a training run consists of, by name."""
    own = {f"param {n}": v for n, v in model.state_dict().items()}
    for n, p in model.named_parameters():
        own |= {f"{k} of {n}": v for k, v in optimizer.state.get(p, {}).items() if v is not None}
    own |= {f"lr {i}": float(g["lr"]) for i, g in enumerate(optimizer.param_groups)}
    return dict(sorted(own.items()))


def compare(make, make_optimizer, tolerance=1e-5, transforms=(), ranks=1, rates=None):
    """Run the loop, and the lifted step on a copy; both worlds, and the lifted step."""
    model, other = make(), make()
    optimizer, twin = make_optimizer(model), make_optimizer(other)
    plain = loop(model, optimizer)
    step, state = zt.lift(loop(other, twin), other, twin)
    run = zt.chain(*transforms)(step) if transforms else zt.Step(step)
    if ranks > 1:
        lowered = run.lower(state, *slices(data()[0], ranks)[0])
        lowered.graph.check()
    state = run.shard(state) if ranks == 1 else clone(state)
    for i, (x, y) in enumerate(data()):
        if rates:
            state["lr"] = [rates[i]]
            optimizer.param_groups[0]["lr"] = rates[i]
        want = plain(x, y).detach()
        state, got = run(state, x, y) if ranks == 1 else lowered.lockstep(state, slices((x, y), ranks))
        assert all(distance(each, want) <= tolerance for each in (got if ranks > 1 else [got]))
    zt.restore(other, twin, run.unshard(state))
    assert everything(other, twin).keys() == everything(model, optimizer).keys()
    assert distance(everything(other, twin), everything(model, optimizer)) <= tolerance
    plain(x, y), loop(other, twin)(x, y)  # ordinary training goes on from what was restored
    assert distance(everything(other, twin), everything(model, optimizer)) <= tolerance
    return other, twin, run


OPTIMIZERS = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "nesterov": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "decay": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_fused": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adam": lambda m: optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "amsgrad": lambda m: optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: optim.AdamW(m.parameters(), lr=0.01),
    "adamw_foreach": lambda m: optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw_fused": lambda m: optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "rmsprop": lambda m: optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.05),
    "adagrad_fused": lambda m: optim.Adagrad(m.parameters(), lr=0.05, fused=True),
    "adagrad_initial": lambda m: optim.Adagrad(m.parameters(), lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1),
    "adadelta": lambda m: optim.Adadelta(m.parameters(), lr=1.0),
    "nadam": lambda m: optim.NAdam(m.parameters(), lr=0.01),
    "radam": lambda m: optim.RAdam(m.parameters(), lr=0.01),
    "adamax": lambda m: optim.Adamax(m.parameters(), lr=0.01),
    "muon": lambda m: optim.Muon(m.parameters(), lr=0.02, momentum=0.9),
}


def started(make_optimizer):
    """An optimizer that has taken some ordinary steps."""

    def make(model):
        optimizer = make_optimizer(model)
        for x, y in data(steps=3):
            loop(model, optimizer)(x, y)
        return optimizer

    return make


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    compare(make_matrices if name == "muon" else make_model, OPTIMIZERS[name])


def test_dampening_spares_the_first_gradient():
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ValueError, match="lift: SGD with dampening does not dampen its first gradient"):
        zt.lift(loop(model, optimizer), model, optimizer)
    compare(make_model, started(lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5)))


def test_numbers_in_the_state_are_traced_once():
    _, _, run = compare(make_model, OPTIMIZERS["sgd"])
    assert len(run._cache) == 1


def test_lift_in_the_middle_of_training():
    """The optimizer's state as it is, not as at first."""

    compare(make_model, started(OPTIMIZERS["adam"]))


def test_learning_rate_is_an_input():
    _, twin, run = compare(make_model, OPTIMIZERS["adamw"], rates=[0.01, 0.02, 0.005, 0.03, 0.002])
    assert len(run._cache) == 1
    assert twin.param_groups[0]["lr"] == 0.002


def test_a_scheduler_is_stepped_outside():
    def scheduled(model, optimizer):
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        step = loop(model, optimizer)
        return lambda x, y: (step(x, y), scheduler.step())[0]

    for lr in (0.1, torch.tensor(0.1)):
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=lr)
        step, state = zt.lift(scheduled(model, optimizer), model, optimizer)
        with pytest.raises(ValueError, match="changes a learning rate, which would happen once"):
            zt.Step(step).trace(state, *data()[0])


def test_hooks_of_parameters_run():
    def halved(p):
        p.grad.mul_(0.5)

    def hooked():
        model = make_model()
        model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        model[3].weight.register_post_accumulate_grad_hook(halved)
        return model

    compare(hooked, OPTIMIZERS["momentum"])


def test_learning_rates_of_groups():
    def grouped(model):
        first, *rest = model.parameters()
        return optim.AdamW([{"params": rest, "lr": 0.02, "weight_decay": 0.0}, {"params": [first], "lr": 0.003}])

    _, twin, _ = compare(make_model, grouped)
    assert [g["lr"] for g in twin.param_groups] == [0.02, 0.003]


@pytest.mark.parametrize("given", ["all", "trained"])
def test_frozen_parameters(given):
    def frozen():
        model = make_model()
        model[0].requires_grad_(False)
        return model

    def optimizer(model):
        return optim.Adam([p for p in model.parameters() if given == "all" or p.requires_grad], lr=0.01)

    other, twin, _ = compare(frozen, optimizer)
    assert torch.equal(other[0].weight, frozen()[0].weight)
    assert other[0].weight not in twin.state and len(twin.state) == 4


def test_batch_norm():
    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    other, _, _ = compare(normed, OPTIMIZERS["adam"])
    assert other[1].num_batches_tracked == STEPS + 1
    assert not torch.equal(other[1].running_mean, torch.zeros(16))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode, self.head = nn.Linear(6, 8), nn.Linear(6, 8, bias=False), nn.Linear(6, 4)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.head(torch.tanh(self.encode(x)) @ self.decode.weight)


def test_tied_weights():
    other, _, run = compare(Tied, OPTIMIZERS["adam"])
    assert other.decode.weight is other.encode.weight
    graph = next(iter(run._cache.values())).lowered.graph
    assert not any("decode.weight" in v.name for v in graph.inputs)


def test_nothing_is_changed_by_lifting_and_tracing():
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model)
    for x, y in data(steps=1):
        loop(model, optimizer)(x, y)
    before, grads = copy.deepcopy(everything(model, optimizer)), [p.grad.clone() for p in model.parameters()]
    held = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    groups = [list(g["params"]) for g in optimizer.param_groups]
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    zt.Step(step).trace(state, x, y)
    assert distance(everything(model, optimizer), before) == 0
    now = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert all(p is q for g, old in zip(optimizer.param_groups, groups) for p, q in zip(g["params"], old))
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_a_fresh_optimizer_keeps_its_parameters():
    model = make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    zt.lift(loop(model, optimizer), model, optimizer)
    assert distance(dict(model.state_dict()), dict(make_model().state_dict())) == 0
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(p.grad is None for p in model.parameters())
    assert all(not v.any() for s in optimizer.state.values() for v in s.values())


# ---- under transforms


@pytest.mark.parametrize(
    "name", ["momentum", "sgd_fused", "adamw", "adamw_foreach", "adamw_fused", "adagrad_fused", "muon"]
)
def test_sharded_in_lockstep(name):
    transforms = (zt.shard_params(zt.AbstractMesh(dp=4)), *ALL)
    make, tolerance = (make_matrices, 5e-3) if name == "muon" else (make_model, 1e-5)  # Muon works in bf16
    compare(make, OPTIMIZERS[name], tolerance, transforms, ranks=4)


@pytest.fixture
def mesh():
    yield zt.make_mesh(dp=1)
    torch.distributed.destroy_process_group()


def test_on_a_mesh_of_one(mesh):
    compare(make_model, OPTIMIZERS["adamw"], transforms=(zt.shard_params(mesh), *ALL))


# ---- errors


def test_a_foreign_parameter():
    model, stranger = make_model(), nn.Linear(2, 3)
    optimizer = optim.SGD([*model.parameters(), stranger.weight], lr=0.1)
    with pytest.raises(
        ValueError, match=r"lift: the optimizer holds a parameter \[3, 2\] that is not the model's"
    ) as e:
        zt.lift(loop(model, optimizer), model, optimizer)
    assert "Build the optimizer from model.parameters()" in str(e.value)


def test_a_closure():
    model = make_model()
    optimizer = optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="lift: LBFGS runs the loss several times in a closure; use an optimizer"):
        zt.lift(loop(model, optimizer), model, optimizer)


@pytest.mark.parametrize("make, key", [(optim.ASGD, "eta"), (optim.Rprop, "prev")], ids=["asgd", "rprop"])
def test_a_first_state_that_lift_does_not_know(make, key):
    model = make_model()
    optimizer = make(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match=f"lift: {make.__name__} keeps '{key}' for 0.weight") as e:
        zt.lift(loop(model, optimizer), model, optimizer)
    assert "Take one ordinary step first" in str(e.value)
    assert distance(dict(model.state_dict()), dict(make_model().state_dict())) == 0
