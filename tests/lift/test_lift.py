"""`lift`: on the same data, the lifted step computes what the untouched loop computes."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.lifted import loop_of
from tests.support.worlds import ALL, clone, default_dtype, distance, slices

STEPS = 5


def make_model(norm=nn.LayerNorm, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16, bias=bias), norm(16), nn.Tanh(), nn.Linear(16, 4, bias=bias)
    )


def make_matrices():
    return make_model(nn.Identity, bias=False)


def data(n=12, steps=STEPS):
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randn(n, 4)) for _ in range(steps)]


def loop(model, optimizer):
    """The body of an ordinary training loop."""

    def loop_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return loop_step


def everything(model, optimizer):
    """All numbers of a training run by name: parameters, buffers, optimizer state and learning rates."""
    own = {f"param {n}": v for n, v in model.state_dict().items()}
    for n, p in model.named_parameters():
        for k, kept in optimizer.state.get(p, {}).items():
            values = [
                v for v in pytree.tree_leaves(kept) if isinstance(v, (torch.Tensor, int, float))
            ]
            own |= {f"{k} of {n}{i or ''}": v for i, v in enumerate(values)}
    own |= {f"lr {i}": float(g["lr"]) for i, g in enumerate(optimizer.param_groups)}
    return dict(sorted(own.items()))


def compare(make, make_optimizer, tolerance=1e-5, transforms=(), ranks=1, rates=None):
    """Run the loop, and the lifted step on a copy, and compare them.

    Returns the model and the optimizer of the lifted step, and the step.
    """
    model, lifted_model = make(), make()
    optimizer, lifted_optimizer = make_optimizer(model), make_optimizer(lifted_model)
    plain = loop(model, optimizer)
    step, state = zt.lift(loop(lifted_model, lifted_optimizer), lifted_model, lifted_optimizer)
    run = zt.chain(*transforms)(step) if transforms else zt.Step(step)
    if ranks > 1:
        lowered = run.lower(state, *slices(data()[0], ranks)[0])
        zt.ir.check(lowered.graph)
    state = run.shard(state) if ranks == 1 else clone(state)
    for i, (x, y) in enumerate(data()):
        if rates:
            optimizer.param_groups[0]["lr"] = lifted_optimizer.param_groups[0]["lr"] = rates[i]
        want = plain(x, y).detach()
        state, got = (
            run(state, x, y) if ranks == 1 else lowered.lockstep(state, slices((x, y), ranks))
        )
        assert all(distance(output, want) <= tolerance for output in (got if ranks > 1 else [got]))
    zt.write_back(lifted_model, lifted_optimizer, run.unshard(state))
    assert everything(lifted_model, lifted_optimizer).keys() == everything(model, optimizer).keys()
    assert (
        distance(everything(lifted_model, lifted_optimizer), everything(model, optimizer))
        <= tolerance
    )
    (
        plain(x, y),
        loop(lifted_model, lifted_optimizer)(x, y),
    )  # ordinary training can go on from the restored state
    assert (
        distance(everything(lifted_model, lifted_optimizer), everything(model, optimizer))
        <= tolerance
    )
    return lifted_model, lifted_optimizer, run


def of(kind, **how):
    return lambda model: getattr(optim, kind)(model.parameters(), **how)


OPTIMIZERS = {
    "sgd": of("SGD", lr=0.1), "momentum": of("SGD", lr=0.1, momentum=0.9), "sgd_fused": of("SGD", lr=0.1, momentum=0.9, fused=True),
    "nesterov": of("SGD", lr=0.1, momentum=0.9, nesterov=True), "decay": of("SGD", lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": of("Adam", lr=0.01, weight_decay=0.1), "amsgrad": of("Adam", lr=0.01, amsgrad=True), "adamw": of("AdamW", lr=0.01),
    "adamw_foreach": of("AdamW", lr=0.01, foreach=True), "adamw_fused": of("AdamW", lr=0.01, fused=True),
    "rmsprop": of("RMSprop", lr=0.01, momentum=0.9, centered=True), "adadelta": of("Adadelta", lr=1.0),
    "adagrad": of("Adagrad", lr=0.05), "adagrad_fused": of("Adagrad", lr=0.05, fused=True),
    "adagrad_initial": of("Adagrad", lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1),
    "asgd": of("ASGD", lr=0.05, t0=2), "rprop": of("Rprop", lr=0.01), "nadam": of("NAdam", lr=0.01), "radam": of("RAdam", lr=0.01), "adamax": of("Adamax", lr=0.01),
    "muon": of("Muon", lr=0.02, momentum=0.9), "tensor_lr": of("Adam", lr=torch.tensor(0.01)),
}  # fmt: skip


def started(make_optimizer):
    """An optimizer that has taken some ordinary steps."""

    def make(model):
        optimizer = make_optimizer(model)
        dtype = next(model.parameters()).dtype
        for x, y in data(steps=3):
            loop(model, optimizer)(x.to(dtype), y.to(dtype))
        return optimizer

    return make


class Turned(nn.Module):
    """A model whose gradients are transposed and expanded when autograd returns them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return torch.bmm(x.expand(3, *x.shape), self.w.transpose(1, 2)).sum(0) + self.b.sum(0)


@pytest.mark.parametrize("name", ["sgd_fused", "adam", "adamw_fused", "adagrad_fused"])
def test_gradients_have_the_strides_of_their_parameters(name):
    """Fused optimizers read both in memory order. PyTorch's `.backward()` ensures equal strides, too."""
    compare(Turned, OPTIMIZERS[name])


def test_an_optimizer_that_changes_its_parameter_groups_is_refused():
    class Counts(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = group["lr"] / 2
            super().step(closure)

    model = make_model()
    optimizer = Counts(model.parameters(), lr=0.1)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(
        ValueError, match="changes 'lr' of a parameter group, which would happen once"
    ):
        zt.Step(step)(state, *data()[0])


@pytest.mark.slow
def test_settings_that_change_between_steps_are_traced_anew():
    """Training mode, frozen parameters, hyperparameters: the lifted step notices each change, as the loop does."""

    def change(k, model, optimizer):
        if k == 1:
            model.train(False)
        if k == 2:
            model[0].weight.requires_grad_(False)
        if k == 3:
            optimizer.param_groups[0]["nesterov"] = True

    make = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    torch.manual_seed(0)
    model = make()
    lifted_model = copy.deepcopy(model)
    optimizer, lifted_optimizer = (
        optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, lifted_model)
    )
    plain, lifted_loop = loop(model, optimizer), loop(lifted_model, lifted_optimizer)
    step, state = zt.lift(lifted_loop, lifted_model, lifted_optimizer)
    run = zt.Step(step)
    state = run.shard(state)
    for k, batch in enumerate(data()):
        want = plain(*batch)
        state, got = run(state, *batch)
        assert distance(got, want.detach()) < 1e-6
        change(k, model, optimizer), change(k, lifted_model, lifted_optimizer)
    assert len(run._cache) == 4
    zt.write_back(lifted_model, lifted_optimizer, state)
    assert distance(everything(lifted_model, lifted_optimizer), everything(model, optimizer)) < 1e-6


def test_parameters_that_share_memory_are_refused():
    class Shares(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            if tied:
                self.second.weight = self.first.weight
            else:
                self.second.weight = nn.Parameter(self.first.weight.data)

    for tied in (True, False):
        model = Shares(tied)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if tied:
            zt.lift(lambda x: None, model, optimizer)
        else:
            with pytest.raises(
                ValueError, match=r"params\.first\.weight and params\.second\.weight share memory"
            ):
                zt.lift(lambda x: None, model, optimizer)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(6, 5, num_layers=2, **options)
        self.head = nn.Linear(5 * (1 + self.layer.bidirectional), 4)

    def forward(self, x):
        """The rows are three sequences: a trace has as many cells as a sequence has steps."""
        return self.head(self.layer(x.view(-1, 3, 6))[0].flatten(0, 1))


RECURRENT = {
    "lstm": Recurrent,
    "lstm in both directions": lambda: Recurrent(bidirectional=True, bias=False),
    "gru": lambda: Recurrent(nn.GRU),
    "gru in both directions": lambda: Recurrent(nn.GRU, bidirectional=True),
    "rnn": lambda: Recurrent(nn.RNN),
}


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_can_be_lifted(make):
    compare(make, OPTIMIZERS["adam"])


@pytest.mark.parametrize("keep", ["bias_ih_l0", "bias_hh_l0"])
def test_the_two_biases_of_an_lstm_have_gradients_of_their_own(keep):
    """The kernel returns one tensor for both, and the update of one writes over its gradient."""

    def clipped(model, optimizer):
        def loop_step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            getattr(model.layer, keep).grad.mul_(0.25).add_(1.0)
            optimizer.step()
            return loss

        return loop_step

    model = Recurrent()
    optimizer = OPTIMIZERS["sgd"](model)
    plain = clipped(model, optimizer)
    lifted_model = Recurrent()
    step, state = zt.lift(
        clipped(lifted_model, o := OPTIMIZERS["sgd"](lifted_model)), lifted_model, o
    )
    step = zt.Step.of(step)
    for _ in range(2):
        batch = data()[0]
        plain(*batch)
        state, _ = step(state, *batch)
    assert distance(state["params"], dict(model.named_parameters())) < 1e-6


def test_a_recurrent_layer_is_what_the_loop_runs():
    """An LSTM is one call of oneDNN, as in the loop. A GRU splits its gates once, and writes to parts of them."""

    def operations(kind):
        model = Recurrent(kind)
        optimizer = OPTIMIZERS["sgd"](model)
        step, state = zt.lift(loop(model, optimizer), model, optimizer)
        eqns = zt.Step.of(step).lower(state, *data()[0]).graph.eqns
        return Counter(str(e.op) for e in eqns)

    lstm = operations(nn.LSTM)
    assert lstm["aten.mkldnn_rnn_layer.default"] == 2
    assert lstm["aten.mkldnn_rnn_layer_backward.default"] == 2
    gru, steps = operations(nn.GRU), len(data()[0][0]) // 3
    assert gru["aten.unsafe_split.Tensor"] == 2 * 2 * steps
    assert not gru["aten.slice_scatter.default"]


def test_lift_in_the_middle_of_training():
    compare(make_model, started(OPTIMIZERS["adam"]))
    compare(
        make_model, started(of("SGD", lr=0.1, momentum=0.9, dampening=0.5))
    )  # it dampens all gradients but the first


def test_the_learning_rate_is_an_input():
    _, lifted_optimizer, run = compare(
        make_model, OPTIMIZERS["adamw"], rates=[0.01, 0.02, 0.005, 0.03, 0.002]
    )
    _, _, same = compare(make_model, OPTIMIZERS["sgd"])
    assert len(run._cache) == len(same._cache) == 1, "other numbers in the state need no new trace"
    assert lifted_optimizer.param_groups[0]["lr"] == 0.002


def test_a_scheduler_inside_the_loop_is_refused():
    for lr in (0.1, torch.tensor(0.1)):
        model = make_model()
        optimizer = of("SGD", lr=lr)(model)
        plain, scheduler = (
            loop(model, optimizer),
            optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        )
        step, state = zt.lift(lambda *xy: (plain(*xy), scheduler.step())[0], model, optimizer)  # noqa: B023
        with pytest.raises(
            ValueError,
            match=r"lift: the loop step uses a scheduler, CosineAnnealingLR \(step\),.*\n  at .*test_lift.py:\d+ .*\n.*after the lifted step, and read(?s:.)*param_groups\[0\]\['lr'\]",
        ):
            zt.Step(step).trace(state, *data()[0])


def test_hooks_of_parameters_run():
    def hooked():
        model = make_model()
        model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        model[3].weight.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(0.5)].clear())
        return model

    compare(hooked, OPTIMIZERS["momentum"])


def test_each_parameter_group_has_its_learning_rate():
    def grouped(model):
        first, *rest = model.parameters()
        return optim.AdamW(
            [{"params": rest, "lr": 0.02, "weight_decay": 0.0}, {"params": [first], "lr": 0.003}]
        )

    _, lifted_optimizer, _ = compare(make_model, grouped)
    assert [g["lr"] for g in lifted_optimizer.param_groups] == [0.02, 0.003]


@pytest.mark.parametrize("given", ["all", "trained"])
def test_frozen_parameters_stay_and_have_no_optimizer_state(given):
    def frozen():
        model = make_model()
        model[0].requires_grad_(False)
        return model

    def optimizer(model):
        return optim.Adam(
            [p for p in model.parameters() if given == "all" or p.requires_grad], lr=0.01
        )

    lifted_model, lifted_optimizer, _ = compare(frozen, optimizer)
    assert torch.equal(lifted_model[0].weight, frozen()[0].weight)
    assert lifted_model[0].weight not in lifted_optimizer.state and len(lifted_optimizer.state) == 4


def test_batch_norm_buffers_are_restored():
    lifted_model, _, _ = compare(lambda: make_model(nn.BatchNorm1d, bias=False), OPTIMIZERS["adam"])
    assert lifted_model[1].num_batches_tracked == STEPS + 1
    assert not torch.equal(lifted_model[1].running_mean, torch.zeros(16))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode, self.head = (
            nn.Linear(6, 8),
            nn.Linear(6, 8, bias=False),
            nn.Linear(6, 4),
        )
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.head(torch.tanh(self.encode(x)) @ self.decode.weight)


def test_tied_weights_are_one_leaf():
    lifted_model, lifted_optimizer, run = compare(Tied, OPTIMIZERS["adam"])
    assert lifted_model.decode.weight is lifted_model.encode.weight
    graph = next(iter(run._cache.values())).lowered.graph
    assert not any("decode.weight" in v.name for v in graph.inputs)
    step, state = zt.lift(loop(lifted_model, lifted_optimizer), lifted_model, lifted_optimizer)
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=2)
    eqns = shard(step).lower(state, *data()[0]).graph.eqns
    uses = [
        e.provenance.role
        for e in eqns
        if e.provenance and e.provenance.paths == ("params.encode.weight",)
    ]
    assert uses == ["param", "grad"], "one gather and one reduction for both uses"


def test_lifting_and_tracing_change_nothing():
    model = make_model()
    optimizer = started(OPTIMIZERS["adam"])(model)
    before, grads = (
        copy.deepcopy(everything(model, optimizer)),
        [p.grad.clone() for p in model.parameters()],
    )

    def held():
        state = (v for s in optimizer.state.values() for v in s.values())
        return [
            id(x)
            for x in (
                *model.parameters(),
                *state,
                *(p for g in optimizer.param_groups for p in g["params"]),
            )
        ]

    ids = held()
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    zt.Step(step).trace(state, *data()[0])
    assert distance(everything(model, optimizer), before) == 0 and held() == ids
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_lifting_a_fresh_optimizer_takes_no_step():
    model = make_model()
    optimizer = of("AdamW", lr=0.01, weight_decay=0.5)(model)
    zt.lift(loop(model, optimizer), model, optimizer)
    assert distance(dict(model.state_dict()), dict(make_model().state_dict())) == 0
    assert optimizer.param_groups[0]["lr"] == 0.01 and all(
        p.grad is None for p in model.parameters()
    )
    assert all(not v.any() for s in optimizer.state.values() for v in s.values())


# Settings of an optimizer of which another one is among the tested ones.
ALIKE = ("sgd", "momentum", "decay", "adam", "adamw_foreach", "adagrad")


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters_of(OPTIMIZERS, OPTIMIZERS.keys() - ALIKE))
def test_the_sharded_step_agrees_with_the_loop_for_each_optimizer(name):
    transforms = (zt.shard_params(zt.AbstractMesh(dp=4)), *ALL)
    make, tolerance = (
        (make_matrices, 5e-3) if name == "muon" else (make_model, 1e-5)
    )  # Muon works in bf16
    compare(make, OPTIMIZERS[name], tolerance, transforms, ranks=4)


def test_a_lifted_step_runs_on_a_mesh_of_one():
    compare(
        make_model,
        OPTIMIZERS["adamw"],
        transforms=(zt.shard_params(zt.make_mesh("cpu", dp=1)), *ALL),
    )
    torch.distributed.destroy_process_group()


ERRORS = {
    "foreign": (lambda m: optim.SGD([*m.parameters(), nn.Linear(2, 3).weight], lr=0.1), r"a parameter \[3, 2\] that is not"),
    "dampening": (of("SGD", momentum=0.9, dampening=0.5), "SGD makes its state in its first step, 'momentum_buffer' without dampening.*\n.*Take one step before lift"),
    "closure": (of("LBFGS"), "LBFGS runs the loss several times in a closure; use an optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("make, message", ERRORS.values(), ids=ERRORS)
def test_lift_refuses_some_optimizers(make, message):
    model = make_model()
    optimizer = make(model)
    with pytest.raises(ValueError, match=f"lift: .*{message}"):
        zt.lift(loop(model, optimizer), model, optimizer)
    assert distance(dict(model.state_dict()), dict(make_model().state_dict())) == 0


def trace_of(loop_step, model, optimizer):
    step, state = zt.lift(loop_step, model, optimizer)
    return lambda: zt.Step(step).trace(state, *data()[0])


def test_an_optimizer_that_is_not_lifted_is_refused():
    model = make_model()
    optimizer, second_optimizer = of("SGD", lr=0.1)(model), optim.SGD(model[3].parameters(), lr=0.1)
    plain = loop(model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"lift: the loop step calls step.. of another optimizer, SGD, which would train nothing",
    ):
        trace_of(lambda *xy: (plain(*xy), second_optimizer.step())[0], model, optimizer)()
    plain(*data()[0]), second_optimizer.step()


def adversaries():
    """A generator and a discriminator, each with its optimizer. The generator's loss uses the updated discriminator."""
    torch.manual_seed(0)
    nets = nn.ModuleDict(
        {"G": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), "D": nn.Linear(4, 1)}
    )
    optimizers = [
        optim.AdamW(nets["G"].parameters(), lr=0.02),
        optim.SGD(nets["D"].parameters(), lr=0.05, momentum=0.9),
    ]
    (g, d), (for_g, for_d) = nets.values(), optimizers

    def loop_step(real, noise):
        for_d.zero_grad()
        judged = F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean()
        judged.backward()
        for_d.step()
        for_g.zero_grad()
        fooled = F.softplus(-d(g(noise))).mean()
        fooled.backward()
        for_g.step()
        return judged, fooled

    return nets, optimizers, loop_step


@pytest.fixture
def doubles():
    with default_dtype(torch.float64):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_a_loop_may_have_several_optimizers(stage, doubles):
    draw = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 4, generator=draw), torch.randn(4, 3, generator=draw)) for _ in range(3)
    ]
    plain, plain_optimizers, plain_loop = adversaries()
    wanted = [torch.stack(plain_loop(*batch)).detach() for batch in batches]

    nets, optimizers, loop_step = adversaries()
    step, state = zt.lift(loop_step, nets, optimizers)
    assert {*state["optimizer"]} == {*state["params"]}
    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *ALL)(step)
    parts = [slices(batch, 2) for batch in batches]
    lowered = step.lower(state, *parts[0][0])
    for part, losses in zip(parts, wanted):
        state, outputs = lowered.lockstep(state, part)
        assert distance(torch.stack([torch.stack(o) for o in outputs]).mean(0), losses) <= 1e-9
    zt.write_back(nets, optimizers, state)
    assert distance(dict(nets.state_dict()), dict(plain.state_dict())) <= 1e-9
    for mine, theirs in zip(optimizers, plain_optimizers):
        assert distance(mine.state_dict()["state"], theirs.state_dict()["state"]) <= 1e-9


def test_wrong_uses_of_several_optimizers_are_refused():
    nets, optimizers, loop_step = adversaries()
    with pytest.raises(
        TypeError,
        match=r"lift: expected an nn.Module, got list.\nCombine several modules in one, nn.ModuleList",
    ):
        zt.lift(loop_step, [*nets.values()], optimizers)
    for wrong in (loop_step, optimizers[0].param_groups, StepLR(optimizers[0], 1)):
        with pytest.raises(
            TypeError, match="expected an optimizer, or a sequence of optimizers, got "
        ):
            zt.lift(loop_step, nets, wrong)
    with pytest.raises(
        ValueError,
        match=r"lift: G.0.weight is held by two optimizers; every parameter may have one",
    ):
        zt.lift(loop_step, nets, [*optimizers, optimizers[0]])
    optimizers[0].step, data = lambda: None, (torch.randn(2, 4), torch.randn(2, 3))
    step, state = zt.lift(loop_step, nets, optimizers)
    with pytest.raises(
        ValueError,
        match=r"lift: the loop step did not call step\(\) of optimizer 0, AdamW while it was traced, and leaves",
    ):
        zt.Step(step).trace(state, *data)


def delayed(seed=0):
    """Two networks, and an update that steps the second optimizer in some calls only, as TD3, SAC and WGANs do."""
    torch.manual_seed(seed)
    nets = nn.ModuleDict({"critic": nn.Linear(8, 1), "policy": nn.Linear(4, 4)})
    critic = optim.AdamW(nets.critic.parameters(), lr=0.01, fused=True)
    policy = optim.AdamW(nets.policy.parameters(), lr=0.01, fused=True)

    def update(x, reward, updates_policy):
        action = nets.policy(x).detach()
        loss = F.mse_loss(nets.critic(torch.cat([x, action], 1)), reward)
        critic.zero_grad()
        loss.backward()
        critic.step()
        if updates_policy:
            policy.zero_grad()
            (-nets.critic(torch.cat([x, nets.policy(x)], 1)).mean()).backward()
            policy.step()
        return loss

    return nets, [critic, policy], update


def test_an_optimizer_that_steps_in_some_calls_has_the_bits_of_the_loop():
    plain, _, update = delayed()
    nets, optimizers, lifted_update = delayed()
    step, state = zt.lift(lifted_update, nets, optimizers)
    step = zt.Step(step)
    for i in range(6):
        torch.manual_seed(i)
        x, reward = torch.randn(8, 4), torch.randn(8, 1)
        state, loss = step(state, x, reward, i % 3 == 0)
        assert torch.equal(loss, update(x, reward, i % 3 == 0).detach())
    zt.write_back(nets, optimizers, state)
    assert distance(dict(nets.state_dict()), dict(plain.state_dict())) == 0
    assert len(step._cache) == 2


def test_two_lifted_steps_train_parts_of_one_state():
    plain, (critic, policy), _ = delayed()
    nets, optimizers, _ = delayed()

    def loops(nets, critic, policy):
        def update_critic(x, reward):
            action = nets.policy(x).detach()
            loss = F.mse_loss(nets.critic(torch.cat([x, action], 1)), reward)
            critic.zero_grad()
            loss.backward()
            critic.step()
            return loss

        def update_policy(x):
            loss = -nets.critic(torch.cat([x, nets.policy(x)], 1)).mean()
            policy.zero_grad()
            loss.backward()
            policy.step()
            return loss

        return update_critic, update_policy

    plain_loops = loops(plain, critic, policy)
    lifted = loops(nets, *optimizers)
    critic_step, state = zt.lift(lifted[0], nets, optimizers[0])
    policy_step, policy_state = zt.lift(lifted[1], nets, optimizers[1])
    state["optimizer"] |= policy_state["optimizer"]
    critic_step, policy_step = zt.Step(critic_step), zt.Step(policy_step)
    state = critic_step.shard(state)
    for i in range(6):
        torch.manual_seed(i)
        x, reward = torch.randn(8, 4), torch.randn(8, 1)
        state, loss = critic_step(state, x, reward)
        assert torch.equal(loss, plain_loops[0](x, reward).detach())
        if i % 3 == 0:
            state, loss = policy_step(state, x)
            assert torch.equal(loss, plain_loops[1](x).detach())
    zt.write_back(nets, optimizers, state)
    assert distance(dict(nets.state_dict()), dict(plain.state_dict())) == 0


def test_a_loop_that_takes_no_step_is_refused():
    model = make_model()
    optimizer = of("SGD", lr=0.1)(model)
    with pytest.raises(ValueError, match=r"lift: the loop step did not call optimizer.step"):
        trace_of(lambda x, y: F.mse_loss(model(x), y).backward(), model, optimizer)()


def test_a_parameter_that_is_unfrozen_after_lift_is_refused():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = of("Adam", lr=0.1)(model)
    traced = trace_of(loop(model, optimizer), model, optimizer)
    model[0].requires_grad_(True)
    with pytest.raises(
        ValueError,
        match=r"lift: the optimizer made step, exp_avg, exp_avg_sq for 0.weight.*\n.*write the state back and lift again",
    ):
        traced()


class _Checked(torch.optim.SGD):
    """Its groups are a property, as in optimizers that check them or share those of another."""

    @property
    def param_groups(self):
        return self._groups

    @param_groups.setter
    def param_groups(self, groups):
        self._groups = groups


def test_groups_that_are_a_property_are_put_back():
    compare(make_model, lambda m: _Checked(m.parameters(), lr=0.1))
    model = make_model()
    optimizer = _Checked(model.parameters(), lr=0.1)
    trace_of(loop(model, optimizer), model, optimizer)()
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


def test_a_state_without_an_entry_for_buffers_is_restored():
    model = make_model()
    optimizer = of("SGD", lr=0.1)(model)
    _, state = zt.lift(loop(model, optimizer), model, optimizer)
    zeros = {name: torch.zeros_like(p) for name, p in state["params"].items()}
    zt.write_back(model, optimizer, {"params": zeros, "optimizer": state["optimizer"]})
    assert all(not p.any() for p in model.parameters())


@pytest.mark.slow
def test_dropout_behind_attention_has_the_masks_of_the_loop():
    """Its argument is not contiguous, so PyTorch does not draw for its elements in their order."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True), nn.Linear(6, 4)
    )
    lifted, (x, y) = copy.deepcopy(model), (torch.randn(5, 3, 6), torch.randn(5, 3, 4))
    optimizer, lifted_optimizer = of("SGD", lr=0.1)(model), of("SGD", lr=0.1)(lifted)
    step, state = zt.lift(loop(lifted, lifted_optimizer), lifted, lifted_optimizer)
    for seed in range(2):
        torch.manual_seed(seed)
        want = loop(model, optimizer)(x, y)
        torch.manual_seed(seed)
        state, loss = zt.Step(step)(state, x, y)
        assert torch.equal(loss, want)


def test_an_optimizer_without_a_state_gets_a_copy_of_the_restored_one():
    lifted, model = make_model(), make_model()
    lifted_optimizer, optimizer = of("AdamW", lr=0.1)(lifted), of("AdamW", lr=0.1)(model)
    _, state = zt.lift(loop(lifted, lifted_optimizer), lifted, lifted_optimizer)
    zt.write_back(model, optimizer, state)
    loop(model, optimizer)(*data()[0])
    assert not any(x.any() for entries in state["optimizer"].values() for x in entries.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_parameters_may_move_between_groups(kind):
    """Between two calls, to the group of another rate, and out of the optimizer, as in training layer by layer."""

    def run(is_lifted):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        first, second = ([*layer.parameters()] for layer in model)
        optimizer = getattr(optim, kind)(
            [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01}]
        )
        step, losses = loop_of(model, optimizer), []
        if is_lifted:
            step, state = zt.lift(step, model, optimizer)
            step = zt.Step.of(step)
            state = step.shard(state)
        for i in range(6):
            if i == 2:
                optimizer.param_groups[0]["params"].append(
                    optimizer.param_groups[1]["params"].pop()
                )
            if i == 4:
                del optimizer.param_groups[0]["params"][0]
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
            state, loss = step(state, x) if is_lifted else (None, step(x))
            losses.append(loss.item())
        return losses

    assert run(True) == pytest.approx(run(False), rel=1e-6)


def test_an_argument_of_a_loop_may_be_called_state():
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def loop_step(state, scale=1.0):
        optimizer.zero_grad()
        loss = model(state).square().mean() * scale
        loss.backward()
        optimizer.step()
        return loss

    step, lifted_state = zt.lift(loop_step, model, optimizer)
    x = torch.ones(4, 3)
    want = (model(x).square().mean() * 2).item()
    assert zt.Step.of(step)(lifted_state, state=x, scale=2.0)[1].item() == pytest.approx(want)


def test_a_table_outside_of_the_module_is_refused_and_a_buffer_is_read():
    table, model = torch.rand(5), make_model()
    optimizer = of("SGD", lr=0.1)(model)
    read = lambda: model.table if hasattr(model, "table") else table

    def loop_step(x, y):
        optimizer.zero_grad()
        loss = (F.mse_loss(model(x), y) * read()[: len(x)]).mean()
        loss.backward()
        optimizer.step()
        return loss

    (x, y), *_ = data()
    with pytest.raises(
        ValueError,
        match=r"lift: the loop step reads table, a tensor \[5\] that the lifted module does not have(?s:.)*an attribute of the module before lift",
    ):
        zt.Step(zt.lift(loop_step, model, optimizer)[0]).trace(
            zt.lift(loop_step, model, optimizer)[1], x, y
        )
    model.register_buffer("table", table)
    step, state = zt.lift(loop_step, model, optimizer)
    run = zt.Step(step)
    expected = (F.mse_loss(model(x), y) * table[: len(x)]).mean()
    assert torch.allclose(run(run.shard(state), x, y)[1], expected)


def closure_of(model, optimizer):
    def loop_step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return loop_step


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_optimizer_is_given_a_closure(kind):
    model, lifted = make_model(), make_model()
    optimizer, lifted_optimizer = (of(kind, lr=0.1, fused=True)(m) for m in (model, lifted))
    step, state = zt.lift(closure_of(lifted, lifted_optimizer), lifted, lifted_optimizer)
    run, plain = zt.Step(step), closure_of(model, optimizer)
    for batch in data():
        state, loss = run(state, *batch)
        assert torch.equal(loss, plain(*batch))
    assert not distance(state["params"], dict(model.named_parameters()))


def test_a_step_without_its_state_is_refused():
    model = make_model()
    optimizer = of("SGD", lr=0.1)(model)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    x, y = data()[0]
    for given, what in (
        ((x, y), "a Tensor"),
        (((state, 0.0), x, y), "a tuple, as the step returns it"),
    ):
        with pytest.raises(
            TypeError,
            match=rf"lift: the first argument of .* is {what}.*\nCall it as state, output = ",
        ):
            zt.Step(step)(*given)
    with pytest.raises(
        TypeError,
        match=r"this is a tuple\.\nUnpack what lift returns: step, state = zt.lift\(...\)",
    ):
        zt.overlap_grads()(zt.lift(loop(model, optimizer), model, optimizer))
