"""Tensors of modules: plain tensors in attributes are leaves of the state, and tensors from outside are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_lift import data, loop, make_model, of
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ztrans as zt
from tests.support.lifted import loop_of
from tests.support.worlds import ALL, clone, distance, slices


class Tables(nn.Module):
    """Plain tensors in an attribute, a list, a tuple and a dict, and a mean of the batch that every forward updates."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 4)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
        self.schedule = [torch.tensor(0.5), torch.tensor(2.0)]
        self.rotary = (torch.linspace(-1, 1, 6).cos(), torch.linspace(-1, 1, 6).sin())
        self.tables = {"bias": torch.randn(4)}
        self.count = torch.zeros(())

    def forward(self, x):
        x = x * self.mask * self.rotary[0] + self.rotary[1]
        self.count = self.count + 1
        return self.head(x * self.schedule[0]) * self.schedule[1] + self.tables["bias"] / self.count


NAMES = ["count", "mask", "rotary.0", "rotary.1", "schedule.0", "schedule.1", "tables.bias"]


def test_plain_tensors_in_attributes_are_leaves_of_the_state():
    plain, lifted = Tables(), Tables()
    optimizers = [of("SGD", lr=0.1)(m) for m in (plain, lifted)]
    tables = lifted.tables
    step, state = zt.lift(loop(lifted, optimizers[1]), lifted, optimizers[1])
    assert sorted(state["buffers"]) == NAMES
    run = zt.Step(step)
    state = run.shard(state)
    for batch in data():
        state, loss = run(state, *batch)
        assert torch.equal(loss, loop(plain, optimizers[0])(*batch))
    assert len(run._cache) == 1 and state["buffers"]["count"] == 5
    assert lifted.count == 0 and lifted.tables is tables and type(lifted.mask) is torch.Tensor
    zt.write_back(lifted, optimizers[1], state)
    assert lifted.count == 5 and distance(dict(lifted.state_dict()), dict(plain.state_dict())) == 0


def test_plain_tensors_are_not_trained_on_ranks():
    plain, lifted = Tables(), Tables()
    optimizers = [of("SGD", lr=0.1)(m) for m in (plain, lifted)]
    step, state = zt.lift(loop(lifted, optimizers[1]), lifted, optimizers[1])
    lowered = zt.chain(zt.shard_params(zt.AbstractMesh(dp=3)), *ALL)(step).lower(
        state, *slices(data()[0], 3)[0]
    )
    before, state = clone(state), clone(state)
    for batch in data():
        loop(plain, optimizers[0])(*batch)
        state, _ = lowered.lockstep(state, slices(batch, 3))
    assert distance(state["params"], dict(plain.named_parameters())) <= 1e-6
    assert all(
        torch.equal(state["buffers"][name], before["buffers"][name])
        for name in NAMES
        if name != "count"
    )


def test_a_tensor_that_modules_share_is_one_leaf():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].table = model[1].table = torch.ones(3)
    model[0].weights = [model[1].weight]  # as recurrent layers keep their parameters
    _, state = zt.lift(lambda x: None, model)
    assert list(state["buffers"]) == ["0.table"]


class Lazy(nn.Module):
    """Makes its positions in the first forward."""

    def __init__(self, compute):
        super().__init__()
        self.head, self.positions, self.compute = nn.Linear(6, 4), None, compute

    def forward(self, x):
        if self.positions is None:
            self.positions = self.compute(self.head, x)
        return self.head(x + self.positions)


def test_a_tensor_that_a_forward_makes_lazily_is_refused():
    model = Lazy(lambda head, x: torch.arange(6.0))
    optimizer = of("SGD", lr=0.1)(model)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    with pytest.raises(
        ValueError,
        match=r"makes a tensor in the attribute positions(?s:.)*Call the model once before lift",
    ):
        zt.Step(step).trace(state, *data()[0])
    model(data()[0][0])
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    zt.Step(step).trace(state, *data()[0])
    assert list(state["buffers"]) == ["positions"]


class Leaves(nn.Module):
    """Leaves the last output in an attribute, with its gradient."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.last = None

    def forward(self, x):
        self.last = self.head(x)
        return self.last


def test_an_output_that_a_forward_leaves_behind_is_not_part_of_the_state():
    model = Leaves()
    optimizer = of("SGD", lr=0.1)(model)
    for _ in range(2):
        step, state = zt.lift(loop(model, optimizer), model, optimizer)
        zt.Step(step).trace(state, *data()[0])
        assert state["buffers"] == {}
        loop(model, optimizer)(*data()[0])  # leaves an output of other sizes
        assert not isinstance(model.last, torch._subclasses.FakeTensor)


def test_a_tensor_that_a_forward_takes_away_is_refused():
    class Forgets(Leaves):
        def forward(self, x):
            self.mask = None
            return self.head(x)

    model = Forgets()
    model.mask = torch.ones(6)
    optimizer = of("SGD", lr=0.1)(model)
    step, state = zt.lift(loop(model, optimizer), model, optimizer)
    for _ in range(2):  # the module has its tensor again after the error
        with pytest.raises(ValueError, match=r"takes the tensor mask from the module"):
            zt.Step(step).trace(state, *data()[0])
        assert torch.equal(model.mask, torch.ones(6))


def distilled(model, optimizer, find_teacher):
    def loop_step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), find_teacher()(x).detach())
        loss.backward()
        optimizer.step()
        return loss

    return loop_step


def test_a_module_outside_of_the_lifted_one_is_named():
    model, teacher = make_model(), make_model()
    optimizer = of("SGD", lr=0.1)(model)
    step, state = zt.lift(distilled(model, optimizer, lambda: teacher), model, optimizer)
    message = r"uses teacher, a module that is not a part of the lifted one.\n  at .*\nLift both in one: .*ModuleDict\(\{\"model\": model, \"teacher\": teacher\}\)"
    with pytest.raises(ValueError, match=message):
        zt.Step(step).trace(state, *data()[0])


def test_a_module_in_an_attribute_is_named():
    class Trainer:
        def __init__(self):
            self.model, self.teacher = make_model(), make_model()
            self.optimizer = of("SGD", lr=0.1)(self.model)

        def loop_step(self, x, y):
            return distilled(self.model, self.optimizer, lambda: self.teacher)(x, y)

    trainer = Trainer()
    step, state = zt.lift(trainer.loop_step, trainer.model, trainer.optimizer)
    with pytest.raises(
        ValueError,
        match=r"uses self.teacher, a module that is not a part(?s:.)*\"teacher\": self.teacher",
    ):
        zt.Step(step).trace(state, *data()[0])


def test_two_modules_in_a_dict_are_lifted_together():
    plain, lifted = (
        nn.ModuleDict({"model": make_model(), "teacher": make_model()}) for _ in range(2)
    )
    optimizers = [of("SGD", lr=0.1)(both["model"]) for both in (plain, lifted)]
    loops = [
        distilled(both["model"], o, lambda both=both: both["teacher"])
        for both, o in zip((plain, lifted), optimizers)
    ]
    step, state = zt.lift(loops[1], lifted, optimizers[1])
    run = zt.Step(step)
    for batch in data():
        state, loss = run(state, *batch)
        assert torch.equal(loss, loops[0](*batch))


def averaged(model, average, optimizer):
    plain = loop(model, optimizer)

    def loop_step(x, y):
        loss = plain(x, y)
        average.update_parameters(model)
        return loss

    return loop_step


def test_an_averaged_model_is_refused():
    model = make_model()
    average, optimizer = AveragedModel(model), of("SGD", lr=0.1)(model)
    step, state = zt.lift(averaged(model, average, optimizer), model, optimizer)
    with pytest.raises(
        ValueError, match=r"uses average, a module that is not a part(?s:.)*\"average\": average"
    ):
        zt.Step(step).trace(state, *data()[0])
    both = nn.ModuleDict({"model": model, "average": average})
    message = r"average is an AveragedModel(?s:.)*copy.deepcopy\(model\)(?s:.)*a.data.lerp_\(p.data, 0.1\)"
    with pytest.raises(ValueError, match=message):
        zt.lift(averaged(model, average, optimizer), both, optimizer)


def test_an_averaged_model_is_evaluated():
    average = AveragedModel(make_model())
    step, state = zt.lift(lambda x: average(x), average)
    x = data()[0][0]
    assert torch.equal(zt.Step(step)(state, x)[1], average(x))


def test_the_lines_that_do_the_work_of_an_averaged_model():
    """As the error for one says."""
    plain = make_model()
    model, average = copy.deepcopy(plain), copy.deepcopy(plain)
    wanted, optimizer = copy.deepcopy(plain), of("SGD", lr=0.1)(plain)
    lifted_optimizer = of("SGD", lr=0.1)(model)
    lifted_loop = loop(model, lifted_optimizer)

    def loop_step(x, y):
        loss = lifted_loop(x, y)
        for a, p in zip(average.parameters(), model.parameters()):
            a.data.lerp_(p.data, 0.1)
        return loss

    step, state = zt.lift(
        loop_step, nn.ModuleDict({"model": model, "average": average}), lifted_optimizer
    )
    run = zt.Step(step)
    state = run.shard(state)
    for batch in data():
        loop(plain, optimizer)(*batch)
        for a, p in zip(wanted.parameters(), plain.parameters()):
            a.data.lerp_(p.data, 0.1)
        state, _ = run(state, *batch)
    mine = {
        name.removeprefix("average."): x
        for name, x in state["params"].items()
        if name.startswith("average.")
    }
    assert distance(mine, dict(wanted.named_parameters())) <= 1e-6


def test_a_dict_of_optimizers_by_parameter_is_refused():
    """As in PyTorch's tutorial on steps during backward."""
    model = nn.Linear(3, 2)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def loop_step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    step, state = zt.lift(loop_step, model, [*optimizers.values()])
    with pytest.raises(
        ValueError,
        match=r"looks (weight|bias) up in a dict whose keys are parameters(?s:.)*functools.partial\(hook, optimizer\)",
    ):
        zt.Step(step).trace(state, torch.ones(4, 3))


def test_an_expanded_tensor_is_restored():
    model = nn.Linear(3, 2)
    model.mask = torch.ones(1, 3).expand(2, 3)
    sgd = of("SGD", lr=0.1)(model)
    step, state = zt.lift(loop_of(model, sgd), model, sgd)
    run = zt.Step(step)
    state, _ = run(run.shard(state), torch.ones(4, 3))
    zt.write_back(model, sgd, state)
    assert torch.equal(model.mask, torch.ones(2, 3))


class Views(nn.Module):
    """A buffer, and a view of it in an attribute. `write` changes one of them in a forward."""

    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("stats", torch.zeros(2, 4))
        self.mean = self.stats[0]
        self.write = write

    @torch.no_grad()
    def update(self, x):
        if self.write == "the view":
            self.mean.lerp_(x.mean(0), 0.5)
        if self.write == "the data of the view":
            self.mean.data.lerp_(x.mean(0), 0.5)
        if self.write == "the buffer":
            self.stats[0].lerp_(x.mean(0), 0.5)

    def forward(self, x):
        self.update(x)
        return (x - self.stats[0] - self.mean) * self.weight


WRITES = {
    "the view": "buffers.mean",
    "the data of the view": "buffers.mean",
    "the buffer": "buffers.stats",
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_one_of_two_buffers_that_share_memory_is_refused(write):
    model = Views(write)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step, state = zt.lift(loop_of(model, sgd), model, sgd)
    run = zt.Step.of(step)
    shared = "buffers.mean and buffers.stats share memory, and the loop step changes"
    with pytest.raises(ValueError, match=f"{shared} {WRITES[write]}.*\n.*self.table"):
        run(run.shard(state), torch.arange(8.0).view(2, 4))


def test_buffers_that_share_memory_may_be_read():
    plain, lifted = Views(""), Views("")
    sgds = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, lifted)]
    step, state = zt.lift(loop_of(lifted, sgds[1]), lifted, sgds[1])
    run = zt.Step.of(step)
    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(run(run.shard(state), x)[1], loop_of(plain, sgds[0])(x))


class Remembers(nn.Module):
    """It keeps its last activation."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        y = self.head(x)
        self.last = y.detach()
        return y


def test_an_activation_in_an_attribute_whose_shape_changes_is_refused_by_its_name():
    model = Remembers()
    model(torch.ones(8, 4))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step, state = zt.lift(loop_of(model, sgd), model, sgd)
    with pytest.raises(
        ValueError, match=r"in the attribute last of the module, which had \[8, 2\]"
    ) as e:
        zt.Step.of(step).trace(state, torch.ones(4, 4))
    assert "delete the attribute before lift" in str(e.value)


def test_spectral_norm_before_its_first_forward_is_refused():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 2)))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="Call the model once before lift"):
        zt.lift(loop_of(model, sgd), model, sgd)
    model(torch.ones(2, 4))
    zt.lift(loop_of(model, sgd), model, sgd)


def test_a_sparse_buffer_is_refused_by_its_name():
    model = nn.Linear(3, 3)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="the buffer adjacency is a sparse tensor"):
        zt.lift(lambda x: model(x), model)
