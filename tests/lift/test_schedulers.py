"""Schedulers: a lifted loop whose scheduler steps after the lifted step computes what the untouched loop computes."""

import copy

import pytest
import torch
from test_lift import everything, loop, make_model, of
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.worlds import ALL, clone, distance, slices

STEPS = 20
SCHEDULERS = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda k: 1 / (1 + k)),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.9),
    "step": lambda o: schedulers.StepLR(o, 3),
    "multi_step": lambda o: schedulers.MultiStepLR(o, [2, 9]),
    "constant": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "linear": lambda o: schedulers.LinearLR(o, 0.1, total_iters=8),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.8),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 10, 2.0),  # ends at a rate of 0
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "sequential": lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o, 0.0001, total_iters=3), schedulers.CosineAnnealingLR(o, 9)], [3]),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)], o),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "swa": lambda o: SWALR(o, 0.05, 4),
}  # fmt: skip
OPTIMIZERS = {
    "sgd": of("SGD", lr=0.1, momentum=0.9),
    "nesterov": of("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_fused": of("SGD", lr=0.1, momentum=0.9, fused=True),
    "adamw": of("AdamW", lr=0.01),
    "adamw_fused": of("AdamW", lr=0.01, fused=True),
    "tensor_lr": of("Adam", lr=torch.tensor(0.01), weight_decay=0.1),
}


def data(steps=STEPS):
    torch.manual_seed(1)
    return [(torch.randn(12, 6), torch.randn(12, 4)) for _ in range(steps)]


class Scheduled:
    """A model, its optimizer and its scheduler, and the body of their loop."""

    def __init__(self, make_optimizer, make_scheduler, make=make_model):
        self.model = make()
        self.optimizer = make_optimizer(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = copy.deepcopy(group["lr"])  # a tensor, which a scheduler changes in place
        self.scheduler = make_scheduler(self.optimizer)
        self.loop_step = loop(self.model, self.optimizer)

    def advance(self, loss):
        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()


# Every scheduler writes the rate. Two of them write the momentum of SGD and a beta of Adam, too.
PAIRS = [(s, "adamw_fused") for s in SCHEDULERS] + [
    ("cyclic", "sgd_fused"),
    *(("one_cycle", o) for o in OPTIMIZERS if o != "adamw_fused"),
]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler, optimizer", PAIRS)
def test_a_scheduler_steps_after_the_lifted_step(scheduler, optimizer):
    """The numbers of the untouched loop, its bits with a fused optimizer, with one program. To restore the module
    changes no rate."""
    is_exact = optimizer.endswith("_fused")
    plain, lifted = (Scheduled(OPTIMIZERS[optimizer], SCHEDULERS[scheduler]) for _ in range(2))
    step, state = zt.lift(lifted.loop_step, lifted.model, lifted.optimizer)
    run = zt.Step(step)
    state = run.shard(state)
    for k, batch in enumerate(data()):
        wanted = plain.loop_step(*batch).detach()
        state, got = run(state, *batch)
        assert torch.equal(got, wanted) or (not is_exact and distance(got, wanted) <= 1e-6), k
        plain.advance(wanted), lifted.advance(got)
        if k == 7:
            zt.write_back(lifted.model, lifted.optimizer, run.unshard(state))
    zt.write_back(lifted.model, lifted.optimizer, run.unshard(state))
    mine, theirs = (
        everything(lifted.model, lifted.optimizer),
        everything(plain.model, plain.optimizer),
    )
    differ = [
        k for k in theirs if not torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k]))
    ]
    assert differ == [] or (not is_exact and distance(mine, theirs) <= 1e-6)
    assert len(run._cache) == 1


def lifted_with(scheduler, optimizer, *transforms, make=make_model):
    """A scheduled loop, its step with `transforms`, and its state."""
    lifted = Scheduled(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], make)
    step, state = zt.lift(lifted.loop_step, lifted.model, lifted.optimizer)
    return lifted, zt.chain(*transforms)(step) if transforms else zt.Step(step), state


RANKS = [(s, "adamw_fused", 3) for s in SCHEDULERS if s != "one_cycle"] + [
    ("one_cycle", o, stage) for o in ("adamw", "tensor_lr", "adamw_fused") for stage in (0, 3)
]
# Ranks read the groups, whoever has written them. These read other schedulers, read the loss, and write betas.
READ_ON_RANKS = [
    *((s, "adamw_fused", 3) for s in ("lambda", "sequential", "plateau", "swa")),
    *(("one_cycle", "adamw", 3), ("one_cycle", "tensor_lr", 0), ("one_cycle", "adamw_fused", 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler, optimizer, stage", parameters_of(RANKS, READ_ON_RANKS))
def test_every_rank_reads_its_scheduler(scheduler, optimizer, stage):
    """The numbers of the untouched loop on three ranks, in fp64: the ranks sum gradients in another order."""
    make = lambda: make_model().double()
    plain = Scheduled(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], make)
    transforms = zt.shard_params(zt.AbstractMesh(dp=3), stage=stage), *ALL
    lifted, run, state = lifted_with(scheduler, optimizer, *transforms, make=make)
    batches = [tuple(x.double() for x in batch) for batch in data()]
    lowered, state = run.lower(state, *slices(batches[0], 3)[0]), clone(state)
    for batch in batches:
        plain.advance(plain.loop_step(*batch).detach())
        state, outputs = lowered.lockstep(state, slices(batch, 3))
        lifted.advance(outputs[0])
    zt.write_back(lifted.model, lifted.optimizer, state)
    mine, theirs = (
        everything(lifted.model, lifted.optimizer),
        everything(plain.model, plain.optimizer),
    )
    assert distance(mine, theirs) <= (1e-7 if optimizer == "tensor_lr" else 1e-10)  # a rate in fp32


@pytest.mark.slow
@pytest.mark.parametrize(
    "key, values",
    [
        ("weight_decay", [0.1, 0.2, 0.3]),
        ("eps", [1e-8, 1e-6, 1e-4]),
        ("betas", [(0.9, 0.99), (0.8, 0.99), (0.8, 0.9)]),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_a_float_of_a_group_is_an_input(optimizer, key, values):
    """A term that is left out at zero has a program of its own."""
    plain, (lifted, run, state) = (
        Scheduled(OPTIMIZERS[optimizer], SCHEDULERS["constant"]),
        lifted_with("constant", optimizer),
    )
    state = run.shard(state)
    for k, batch in enumerate(data(6)):
        for optimizer_ in (plain.optimizer, lifted.optimizer):
            optimizer_.param_groups[0][key] = values[k % len(values)]
        wanted = plain.loop_step(*batch).detach()
        state, got = run(state, *batch)
        assert torch.equal(got, wanted) or (
            optimizer == "adamw" and distance(got, wanted) <= 1e-6
        ), k
    assert len(run._cache) == 1
    if key == "weight_decay":
        lifted.optimizer.param_groups[0][key] = 0.0
        run(state, *batch)
        assert len(run._cache) == 2


def test_a_compiled_step_reads_rates_and_refuses_other_changes():
    lifted, run, state = lifted_with("step", "adamw_fused")
    compiled, batch = run.compiled(state, *data(1)[0]), data(1)[0]
    lifted.optimizer.param_groups[0]["lr"] = 0.0
    before = {k: p.clone() for k, p in state["params"].items()}
    state, _ = compiled(state, *batch)
    assert all(torch.equal(p, before[k]) for k, p in state["params"].items())
    lifted.optimizer.param_groups[0]["weight_decay"] = 0.0
    with pytest.raises(TypeError, match="a setting of an optimizer has changed"):
        compiled(state, *batch)


def test_the_program_names_the_inputs_of_groups():
    _, run, state = lifted_with("one_cycle", "adamw_fused")
    graph = run.trace(state, *data(1)[0]).graph
    names = [v.name for v in graph.inputs if v.name.startswith("param_groups.")]
    keys = [
        "lr",
        "betas.0",
        "betas.1",
        "eps",
        "weight_decay",
        "initial_lr",
        "max_lr",
        "min_lr",
        "max_momentum",
        "base_momentum",
    ]
    assert names == [f"param_groups.0.{key}" for key in keys]
    assert "beta1=param_groups.0.betas.0" in str(graph)


def test_a_branch_on_an_input_is_refused():
    """All but comparisons with 0, which decide whether a term is left out."""

    class Chooses(optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["momentum"] > 0.5:
                super().step()

    model = nn.Linear(6, 4)
    optimizer = Chooses(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=9)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(ValueError, match="reads a tensor's value"):
        zt.Step(step).trace(state, *data(1)[0])
    scheduler.step()


class Halves(schedulers.LRScheduler):
    """A scheduler of the user."""

    def get_lr(self):
        return [group["lr"] / 2 for group in self.optimizer.param_groups]


class InPlace(Halves):
    """A scheduler that keeps one list of its rates."""

    def step(self, epoch=None):
        rates = getattr(self, "_last_lr", [])
        super().step(epoch)
        rates[:] = self._last_lr
        self._last_lr = rates


USES = {
    "last rate": (lambda s: s.get_last_lr(), r"ExponentialLR \(get_last_lr\)"),
    "epoch": (lambda s: s.last_epoch, r"ExponentialLR \(last_epoch\)"),
    "state": (lambda s: s.state_dict(), r"ExponentialLR \(state_dict\)"),
    "attributes": (vars, r"ExponentialLR \(__dict__\)"),
    "step": (lambda s: s.step(), r"ExponentialLR \(step\)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("use, message", USES.values(), ids=USES)
def test_a_scheduler_in_the_loop_is_refused(use, message):
    """Whatever the loop reads there would be a constant of its program. The scheduler stays as it was."""
    lifted, _, _ = lifted_with("exponential", "sgd")
    step, state = zt.lift(
        lambda *xy: (lifted.loop_step(*xy), use(lifted.scheduler))[0],
        lifted.model,
        lifted.optimizer,
    )
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=message + r"(?s:.)*test_schedulers.py:\d+(?s:.)*param_groups\[0\]\['lr'\]",
        ):
            zt.Step(step).trace(state, *data(1)[0])
    assert (lifted.scheduler.last_epoch, lifted.scheduler._step_count) == (0, 1)


def test_a_scheduler_of_the_user_is_refused_too():
    class Halves(schedulers.LRScheduler):
        def get_lr(self):
            return [group["lr"] / 2 for group in self.optimizer.param_groups]

    lifted = Scheduled(OPTIMIZERS["sgd"], Halves)
    step, state = zt.lift(
        lambda *xy: (lifted.loop_step(*xy), lifted.scheduler.step())[0],
        lifted.model,
        lifted.optimizer,
    )
    with pytest.raises(ValueError, match=r"uses a scheduler, Halves \(step\)"):
        zt.Step(step).trace(state, *data(1)[0])


def test_a_loop_reads_the_rate_of_the_call_in_the_group():
    lifted, _, _ = lifted_with("exponential", "sgd")

    def loop_step(x, y):
        return lifted.loop_step(x, y), lifted.optimizer.param_groups[0]["lr"] * 10

    step, state = zt.lift(loop_step, lifted.model, lifted.optimizer)
    run = zt.Step(step)
    for batch in data(3):
        wanted = lifted.optimizer.param_groups[0]["lr"] * 10
        state, (_, rate) = run(state, *batch)
        assert float(rate) == wanted
        lifted.scheduler.step()
    assert len(run._cache) == 1
