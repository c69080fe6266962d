"""The state of an optimizer before its first step: lift knows it, or raises an error whose advice works."""

import copy
import json
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from test_lift import compare, data, everything, loop, make_model, started
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support import optimizers as written
from tests.support.lifted import loop_of
from tests.support.processes import run_ranks
from tests.support.worlds import ALL, distance
from ztrans.calling.leaf_records import RECORDS
from ztrans.lift.optimizer_state import lifted_entries

WRITTEN = {
    "ones": lambda m: written.RMSpropTF(m.parameters(), lr=0.01),
    "python count": lambda m: written.Counting(m.parameters()),
    "subclass": lambda m: type("Mine", (optim.AdamW,), {})(m.parameters(), lr=0.01),
    "subclass with momentum": lambda m: type("Mine", (optim.SGD,), {})(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", WRITTEN.values(), ids=WRITTEN)
def test_optimizers_outside_of_pytorch_are_lifted_after_their_first_step(make_optimizer):
    compare(make_model, started(make_optimizer), tolerance=1e-6)
    compare(
        make_model,
        started(make_optimizer),
        transforms=(zt.shard_params(zt.AbstractMesh(dp=4)), *ALL),
        ranks=4,
    )


class WithNone(optim.Optimizer):
    """Momentum, in a list whose second entry is None."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            momenta = self.state[p].setdefault("momenta", [torch.zeros_like(p), None])
            p.sub_(momenta[0].mul_(0.9).add_(p.grad), alpha=0.1)


def test_none_among_the_tensors_of_a_state_is_refused():
    with pytest.raises(
        ValueError,
        match=r"keeps None among the tensors of its state 'momenta'.*\nKeep it under a key",
    ):
        compare(make_model, started(lambda m: WithNone(m.parameters())))


FRESH = {
    "Adadelta": {"step": 0, "square_avg": 0, "acc_delta": 0},
    "Adagrad": {"step": 0, "sum": 0},
    "Adam": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0},
    "AdamW": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0},
    "Adamax": {"step": 0, "exp_avg": 0, "exp_inf": 0},
    "ASGD": {"step": 0, "eta": 0.25, "mu": 1, "ax": 0},
    "NAdam": {"step": 0, "mu_product": 1, "exp_avg": 0, "exp_avg_sq": 0},
    "RAdam": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0},
    "RMSprop": {"step": 0, "square_avg": 0},
    "Rprop": {"step": 0, "prev": 0, "step_size": 0.25},
    "SGD": {},
}


@pytest.mark.parametrize("kind", FRESH)
def test_an_optimizer_of_pytorch_has_the_state_before_its_first_step(kind):
    model = make_model()
    optimizer = getattr(optim, kind)(model.parameters(), lr=0.25)
    optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # replaces `optimizer.step` by a wrapper
    before, attributes = dict(make_model().state_dict()), set(vars(optimizer))
    _, state = zt.lift(loop(model, optimizer), model, optimizer)
    assert distance(dict(model.state_dict()), before) == 0 and set(vars(optimizer)) == attributes
    assert all(p.grad is None for p in model.parameters())
    entries = state["optimizer"].get("0.weight", {})
    assert entries.keys() == FRESH[kind].keys()
    assert all((entries[key] == value).all() for key, value in FRESH[kind].items())


def test_a_count_of_steps_is_on_the_gpu_where_a_fused_kernel_reads_it():
    """Where the user has not chosen a form, PyTorch has the count on the CPU."""
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(4, 4, device="cuda"))
        for kind, device in (("AdamW", "cuda"), ("NAdam", "cpu")):
            optimizer = getattr(optim, kind)([p])
            optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": torch.empty_like(p)}
            assert lifted_entries(optimizer, p)["step"].device.type == device
            assert optimizer.state[p]["step"].device.type == "cpu", "that of the user stays"


def test_existing_optimizer_state_is_kept():
    """Also if only some parameters have been trained before."""
    model = make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    model[0].requires_grad_(False)
    for batch in data():
        loop(model, optimizer)(*batch)
    present = copy.deepcopy(everything(model, optimizer))
    model[0].requires_grad_(True)
    _, state = zt.lift(loop(model, optimizer), model, optimizer)
    assert distance({k: everything(model, optimizer)[k] for k in present}, present) == 0
    assert (
        state["optimizer"]["3.weight"]["step"] == 5 and state["optimizer"]["0.weight"]["step"] == 0
    )


@pytest.mark.parametrize("make_optimizer", [
    lambda m: written.Adopt(m.parameters()),
    lambda m: written.Dampened(m.parameters(), lr=0.1, momentum=0.9),
    lambda m: written.Unseen(m.parameters()),
    lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
])  # fmt: skip
def test_an_optimizer_with_a_special_first_step_must_take_it_before_lift(make_optimizer):
    model = make_model()
    optimizer = make_optimizer(model)
    with pytest.raises(
        ValueError,
        match=r"makes its state in its first step(?s:.)*one step before lift, on every rank(?s:.)*source=0",
    ):
        step, state = zt.lift(loop(model, optimizer), model, optimizer)
        zt.Step(step).trace(state, *data()[0])
    assert (
        not any(optimizer.state.values())
        and distance(dict(model.state_dict()), dict(make_model().state_dict())) == 0
    )


def test_after_its_first_step_such_an_optimizer_is_lifted():
    def started(model):
        optimizer = written.Adopt(model.parameters())
        loop(model, optimizer)(*data()[0])
        return optimizer

    compare(make_model, started, tolerance=1e-6)


def test_an_optimizer_of_meta_parameters_has_a_state_on_the_meta_device():
    model = make_model().to("meta")
    adam = optim.AdamW(model.parameters())
    _, state = zt.lift(loop(model, adam), model, adam)
    assert (
        state["optimizer"]["0.weight"]["exp_avg"].is_meta
        and state["optimizer"]["0.weight"]["step"] == 0
    )


@pytest.fixture
def mesh_of_one():
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield zt.make_mesh("cpu", dp=1)
    dist.destroy_process_group()


OF_META = {
    "adamw": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "capturable": lambda p: optim.NAdam(p, lr=0.01, capturable=True, foreach=True),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "rprop": lambda p: optim.Rprop(p, lr=0.02),
    "centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
}


@pytest.mark.parametrize("make_optimizer", OF_META.values(), ids=OF_META)
def test_shard_fills_the_state_of_a_new_optimizer_of_meta_parameters(mesh_of_one, make_optimizer):
    """With the values that the optimizer gives it on a CPU."""
    on_cpu = make_model()
    _, wanted = zt.lift(loop(on_cpu, (adam := make_optimizer(on_cpu.parameters()))), on_cpu, adam)
    model = make_model().to("meta")
    optimizer = make_optimizer(model.parameters())
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    sharded = zt.shard_params(mesh_of_one)(step)
    state = sharded.shard(state)
    assert distance(sharded.unshard(state)["optimizer"], wanted["optimizer"]) == 0


def test_a_step_refuses_meta_leaves_to_which_nobody_has_written(mesh_of_one):
    """It names them; a write in place, also through `.data`, is enough. Later steps ask nothing."""
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)).to("meta")
    optimizer = optim.AdamW(model.parameters())
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    step = zt.shard_params(mesh_of_one)(step)
    state = step.shard(state)
    assert all(p.to_local().isnan().all() for p in state["params"].values())
    message = r"nobody has written to state.params.0.weight, .*, and 6 more (?s:.*)torch.nn.init.normal_\(leaf\)"
    with pytest.raises(ValueError, match=message):
        step(state, *data()[0])
    first, *others = state["params"].values()
    first.data.fill_(0.5)
    for p in others:
        nn.init.constant_(p, 0.5)
    with pytest.raises(
        ValueError, match=r"1\.running_mean, .*1\.running_var, .*num_batches_tracked"
    ):
        step(state, *data()[0])
    state["buffers"]["1.running_mean"].zero_()
    state["buffers"]["1.running_var"].fill_(1.0)
    state["buffers"]["1.num_batches_tracked"].to_local().zero_()
    for _ in range(2):
        state, loss = step(state, *data()[0])
        assert loss.isfinite()
    records = map(RECORDS.of, pytree.tree_leaves(state))
    assert all(record.fill_version is None for record in records)


def test_optimizer_state_that_is_neither_tensor_nor_number_is_refused():
    class Mixed(optim.SGD):
        def step(self, closure=None):
            for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
                self.state[p]["pair"] = [torch.zeros_like(p), "zeros"]
            return super().step(closure)

    model = make_model()
    optimizer = Mixed(model.parameters(), lr=0.1)
    loop(model, optimizer)(*data()[0])
    with pytest.raises(
        ValueError, match=r"lift: the optimizer keeps 'zeros' among the tensors of its state 'pair'"
    ):
        zt.lift(loop(model, optimizer), model, optimizer)


class CountsInState(optim.SGD):
    """The count of its steps is not in the state of a parameter."""

    def step(self, closure=None):
        self.state["all"] = {"step": self.state["all"].get("step", 0) + 1}
        return super().step(closure)


@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_no_parameter_is_refused(steps):
    model = make_model()
    optimizer = CountsInState(model.parameters(), lr=0.1)
    for _ in range(steps):
        loop(model, optimizer)(*data()[0])
    with pytest.raises(
        ValueError, match=r"CountsInState has an entry for 'all', which is not a parameter"
    ):
        step, state = zt.lift(loop(model, optimizer), model, optimizer)
        zt.Step(step).trace(state, *data()[0])


class Loose(optim.Optimizer):
    """Descent by a rate that is a tensor in some place of the optimizer."""

    def __init__(self, params, place):
        super().__init__(params, {"lr": 0.1})
        self.place = place
        rate = torch.tensor(0.5)
        if place == "self.d":
            self.d = rate
        elif place == "self.averages['all'][1]":
            self.averages = {"all": (None, rate)}
        else:
            self.param_groups[0]["running"] = {"d": rate}

    def rate(self):
        if self.place == "self.d":
            return self.d
        if self.place == "self.averages['all'][1]":
            return self.averages["all"][1]
        return self.param_groups[0]["running"]["d"]

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.rate().mul_(0.9)
        for p in self.param_groups[0]["params"]:
            p.sub_(rate * p.grad)


@pytest.mark.parametrize(
    "place", ["self.d", "self.averages['all'][1]", "self.param_groups[0]['running']['d']"]
)
def test_a_tensor_that_an_optimizer_keeps_outside_of_its_state_is_named(place):
    model = make_model()
    optimizer = Loose(model.parameters(), place)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(ValueError) as e:
        zt.Step(step).trace(state, *data()[0])
    first, use, lifted, advice, *_ = str(e.value).splitlines()
    assert first == (
        f"lift: Loose keeps {place}, a tensor [] (float32), which is not in the state of a parameter, so the lifted "
        f"state does not have it."
    )
    assert re.fullmatch(r"  at .*test_optimizer_state.py:\d+ in Loose.step", use)
    assert re.fullmatch(
        r"  lifted at .*test_optimizer_state.py:\d+ in test_a_tensor_that_.*", lifted
    )
    assert "self.state[p][key]" in advice and "one step before lift" in advice
    assert optimizer.rate() == 0.5


class LooseLater(optim.SGD):
    """Momentum in a list that its first step makes."""

    momenta = ()

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        if not self.momenta:
            self.momenta = [torch.zeros_like(p) for p in params]
        for p, momentum in zip(params, self.momenta):
            p.grad.copy_(momentum.mul_(0.9).add_(p.grad))
        return super().step(closure)


def test_tensors_that_an_optimizer_makes_in_an_attribute_are_named():
    model = make_model()
    optimizer = LooseLater(model.parameters(), lr=0.1)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"LooseLater keeps self.momenta\[0\], a tensor \[16, 6\] \(float32\), which is not",
    ):
        zt.Step(step)(state, *data()[0])


def test_a_tensor_of_a_parameter_group_that_an_optimizer_changes_is_named():
    class Doubles(optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["d"].mul_(2)
            return super().step(closure)

    model = make_model()
    optimizer = Doubles([{"params": [*model.parameters()], "d": torch.ones(())}], lr=0.1)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"its optimizer Doubles, changes 'd' of a parameter group(?s:.)*its state of",
    ):
        zt.Step(step).trace(state, *data()[0])


def test_a_tensor_that_an_optimizer_trains_beside_the_model_is_named():
    """As the temperature of SAC. The advice of the error works."""
    model, log_alpha = make_model(), nn.Parameter(torch.zeros(1))
    adam = optim.Adam([*model.parameters(), log_alpha], lr=0.1)

    def loop_step(x, y):
        adam.zero_grad()
        loss = (model(x) - y).square().mean() * log_alpha.exp().sum()
        loss.backward()
        adam.step()
        return loss

    with pytest.raises(
        ValueError,
        match=r"Adam holds a parameter \[1\] that is not the model's(?s:.)*ParameterList",
    ):
        zt.lift(loop_step, model, adam)
    models = nn.ModuleList([model, nn.ParameterList([log_alpha])])
    step, state = zt.lift(loop_step, models, adam)
    state, _ = zt.Step.of(step)(state, *data()[0])
    assert state["params"]["1.0"] == pytest.approx(-0.1, rel=1e-3)


def test_of_several_optimizers_the_one_that_makes_its_state_is_named():
    model = make_model()
    first, *others = model.parameters()
    optimizers = [written.Stateless([first], lr=0.1), written.Adopt(others)]

    def loop_step(x, y):
        model.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizers)
    with pytest.raises(ValueError, match=r"lift: Adopt makes its state in its first step"):
        zt.Step(step).trace(state, *data()[0])


def test_an_optimizer_that_counts_in_an_attribute_is_refused():
    class Counts(optim.SGD):
        count = 0

        def step(self, closure=None):
            self.count += 1
            return super().step(closure)

    model = make_model()
    optimizer = Counts(model.parameters(), lr=0.1)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"optimizer\.count was 1 and is 2(?s:.)*Keep what lives from step to step in the state",
    ):
        zt.Step(step).trace(state, *data()[0])


@pytest.mark.distributed
def test_the_advice_works_on_two_ranks():
    """Each rank takes its first step on its own batch, and then all ranks start from rank 0's state."""
    rows = run_ranks(2, __file__)
    assert [row["stage"] for row in rows] == [0, 3]
    for row in rows:
        assert row["apart before"] > 1e-3, (
            "the first steps must differ, else source=0 has nothing to do"
        )
        assert row["apart after"] == 0 and row["from plain"] < 1e-5, row


def follow_the_advice() -> None:
    """On each rank: take the first step on every rank, shard with `source=0`, train, and report distances."""
    rank, mesh = int(os.environ["RANK"]), zt.make_mesh("cpu", dp=2)

    def gathered(x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(2)]
        torch.distributed.all_gather(parts, x.contiguous())
        return parts

    apart = lambda x: (torch.sub(*gathered(x)).norm() / x.norm()).item()
    for stage in (0, 3):
        model, (first, *batches) = make_model(), data()
        optimizer = written.Adopt(model.parameters(), lr=0.1)
        plain = loop(model, optimizer)
        plain(*(x.chunk(2)[rank] for x in first)), plain(*(x.chunk(2)[rank] for x in first))
        before = apart(nn.utils.parameters_to_vector(model.parameters()).detach())
        step, state = zt.lift(plain, model, optimizer)
        step = zt.chain(zt.shard_params(mesh, stage=stage), *ALL)(step)
        state = step.shard(state, source=0)
        for batch in batches:
            state, _ = step(state, *(x.chunk(2)[rank] for x in batch))
        zt.write_back(model, optimizer, step.unshard(state))
        trained = nn.utils.parameters_to_vector(model.parameters()).detach()
        truth = make_model()
        reference = written.Adopt(truth.parameters(), lr=0.1)
        for batch in ([x.chunk(2)[0] for x in first], [x.chunk(2)[0] for x in first], *batches):
            loop(truth, reference)(*batch)
        wanted = nn.utils.parameters_to_vector(truth.parameters()).detach()
        figures = {
            "apart before": before,
            "apart after": apart(trained),
            "from plain": distance(trained, wanted),
        }
        if rank == 0:
            sys.stdout.write(json.dumps({"stage": stage, **figures}) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    follow_the_advice()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_lift_runs_no_hooks_of_an_optimizer(kind):
    """The state before the first step is found by steps on copies, and a hook may change the module itself."""
    model, calls = nn.Linear(2, 2), []
    optimizer = getattr(optim, kind)(model.parameters(), lr=0.1)
    everywhere = register_optimizer_step_post_hook(lambda *_: calls.append("of all"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    try:
        zt.lift(lambda x: optimizer.step(), model, optimizer)
    finally:
        everywhere.remove()
    assert calls == []


def test_a_checkpoint_that_is_loaded_into_the_optimizer_after_lift_is_refused():
    model = nn.Linear(3, 2)
    adam = optim.Adam(model.parameters(), lr=0.1)
    step, state = zt.lift(loop_of(model, adam), model, adam)
    run = zt.Step.of(step)
    state, _ = run(run.shard(state), torch.ones(4, 3))
    zt.write_back(model, adam, state)
    checkpoint = copy.deepcopy(adam.state_dict())
    state, _ = run(state, torch.ones(4, 3))
    adam.load_state_dict(checkpoint)
    with pytest.raises(ValueError, match="the state of Adam was replaced after lift"):
        run(state, torch.ones(4, 3))
