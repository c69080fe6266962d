"""Equal updates stand next to each other and become one call; values, messages and the peak stay what they were."""

from __future__ import annotations

import inspect
import operator

import pytest
import torch
from torch import nn, optim
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.lifted import loop_of
from tests.support.programs import CASES
from tests.support.worlds import ALL, on_ranks
from ztrans.ir.collectives import is_start, rules
from ztrans.ir.graph import Eqn, Var
from ztrans.ir.op_facts import op_facts
from ztrans.planning.cost import launches, memory
from ztrans.rewrites.number_operands import ARITHMETIC
from ztrans.rewrites.update_groups import group_updates, has_list_form, list_call

aten = torch.ops.aten


def lifted(make_optimizer, layers=3):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = make_optimizer(model.parameters())
    return zt.lift(loop_of(model, optimizer), model, optimizer)


def calls(make_optimizer, samples=64):
    """The calls of the update by operation, as the eager backend makes them."""
    step, state = lifted(make_optimizer)
    step = zt.Step.of(step)
    state = step.shard(state)
    compiled = step.compiled(state, torch.ones(samples, 4))
    compiled(state, torch.ones(samples, 4))
    program = compiled.binding.local_program.runner.executable.program
    return [n.target.__name__.partition(".")[0] for n in called_in_update(program)]


# What generated code calls, besides arithmetic of Python, without launching anything.
NO_CALLS = {operator.getitem, torch.unbind, torch.Tensor.item, torch.Tensor.tolist}


def called_in_update(program):
    """The nodes of the operations that generated code calls in its update."""
    for n in program.graph.nodes:
        if n.op != "call_function" or n.target in NO_CALLS or n.target in ARITHMETIC.values():
            continue
        notes_the_write = n.target.__name__ == "begin"
        if "eqn" in n.meta and n.meta["eqn"].region == "update" and not notes_the_write:
            yield n


def test_a_fused_optimizer_is_one_call_and_its_counters_another():
    assert calls(lambda params: optim.AdamW(params, fused=True)) == [
        "_foreach_add_",
        "_fused_adamw_",
    ]
    assert calls(lambda params: optim.SGD(params, lr=0.1, fused=True)) == ["_fused_sgd_"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"amsgrad": True}),
        ("AdamW", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {"maximize": True}),
    ],
)
def test_optimizers_with_a_fused_form_run_it_where_the_user_has_not_chosen(name, options):
    def make(**form):
        return lambda params: getattr(optim, name)(params, lr=0.1, **options, **form)

    fused = calls(make(fused=True))
    for form in ({}, {"foreach": True}, {"foreach": False}):
        assert calls(make(**form)) == fused
    assert not any("fused" in call for call in calls(make(fused=False)))


def test_the_fused_form_is_left_out_where_it_would_round_otherwise_or_was_not_asked_for():
    capturable = calls(lambda params: optim.AdamW(params, capturable=True))
    assert "_fused_adamw_" not in capturable
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = optim.AdamW(model.parameters())
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    x = torch.ones(8, 4, dtype=torch.bfloat16)
    ops = [str(e.op) for e in zt.Step.of(step).lower(state, x).graph.eqns]
    assert not any("fused" in op for op in ops)


# Every optimizer of torch.optim that can be lifted, with settings that change what it computes.
OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RAdam", {"weight_decay": 0.1}),
    ("Adamax", {}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adadelta", {}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("ASGD", {}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True}),
    ("Rprop", {}),
    ("Muon", {}),
]


def forms():
    """Each optimizer in its default form, and without further settings in the others that it has."""
    for name, options in OPTIMIZERS:
        yield name, options, {}
        for form in ("foreach", "fused"):
            has_form = form in inspect.signature(getattr(optim, name)).parameters
            if has_form and options.keys() <= {"lr"}:
                yield name, options, {form: True}
    for name, options in OPTIMIZERS:
        if "fused" in inspect.signature(getattr(optim, name)).parameters:
            yield name, options, {"fused": False}


class Launches(TorchDispatchMode):
    """Counts the operations that are called, but for views and for what a profiler is told."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not op_facts(func).view and "record_function" not in str(func)
        return func(*args, **(kwargs or {}))


def net(name):
    # Muon takes matrices alone. With four layers RAdam has 55 launches, and foreach 50, as it computes in Python numbers.
    return nn.Sequential(*(nn.Linear(4, 4, bias=name != "Muon") for _ in range(6)))


def launches_of_foreach(name, options):
    """The operations that PyTorch calls in a step of an optimizer in its foreach form; Muon has one form."""
    model = net(name)
    form = {"foreach": True} if name != "Muon" else {}
    optimizer = getattr(optim, name)(model.parameters(), **options, **form)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        with Launches() as launches:
            optimizer.step()
    return launches.count


def has_a_form_of_its_own(name, options, form):
    """Whether a form is more than the list operations of foreach, which these two optimizers stand for."""
    return form != {"foreach": True} or name in ("NAdam", "Adagrad")


FORMS = [*forms()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "form"),
    parameters_of(FORMS, [each for each in FORMS if has_a_form_of_its_own(*each)]),
)
def test_an_update_has_no_more_launches_than_that_of_foreach(name, options, form):
    model = net(name)
    optimizer = getattr(optim, name)(model.parameters(), **options, **form)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    step, x = zt.Step.of(step), torch.ones(256, 4)
    compiled = step.compiled(step.shard(state), x)
    compiled(step.shard(state), x)
    most = launches_of_foreach(name, options)
    run = called_in_update(compiled.binding.local_program.runner.executable.program)
    assert sum(not op_facts(n.meta["eqn"].op).view for n in run) <= most
    planned = [made.kernels for e, made in launches(compiled.graph).items() if e.region == "update"]
    assert sum(planned) <= most
    lowered = compiled.lowered.graph
    planned = [made.kernels for e, made in launches(lowered).items() if e.region == "update"]
    assert sum(planned) <= most


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "ASGD", "Adagrad", "Adam"])
def test_scalars_in_a_vector_have_the_bits_of_single_ones(name):
    """Also where the counts of steps differ, as after a part of the model was trained alone."""
    options = {"fused": False} if name == "Adam" else {}
    step, state = lifted(lambda params: getattr(optim, name)(params, lr=0.1, **options), layers=4)
    step, x = zt.Step.of(step), torch.ones(256, 4)
    for k, entries in enumerate(state["optimizer"].values()):
        entries["step"].fill_(k)
    single = step.lower(state, x)
    mine, expected = step.shard(state), step.shard(state)
    for _ in range(3):
        mine, _ = step(mine, x)
        expected, _ = single.lockstep(expected, [(x,)])
    code = step.compiled(mine, x).binding.local_program.runner.executable.program.code
    assert "torch.stack" in code
    for leaf, expected_leaf in zip(pytree.tree_leaves(mine), pytree.tree_leaves(expected)):
        assert torch.equal(leaf, expected_leaf)


RATES = [{"lr": 0.1}, {"lr": 0.001}]
GROUPS = [(name, RATES) for name in ("AdamW", "Adam", "SGD", "Adagrad")] + [
    ("AdamW", [{"betas": (0.9, 0.99)}, {"betas": (0.5, 0.9)}]),
    ("Adam", [{"weight_decay": 0.1}, {"weight_decay": 0.01}]),
    ("SGD", [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.5}]),
]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused", "foreach", "plain"])
@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize(("name", "own"), GROUPS)
def test_each_parameter_group_keeps_its_own_settings(name, own, form, changing):
    """Groups of one parameter each, whose updates differ in settings that are numbers or, if they change, tensors."""
    forms = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}[
        form
    ]

    def run(is_lifted):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        groups = [{"params": [p], **settings} for p, settings in zip(model.parameters(), own)]
        optimizer = getattr(optim, name)(groups, **forms)
        loop_step, losses = loop_of(model, optimizer), []
        if is_lifted:
            loop_step, state = zt.lift(loop_step, model, optimizer)
            loop_step = zt.Step.of(loop_step)
        for step in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            if is_lifted:
                state, loss = loop_step(state, x)
            else:
                loss = loop_step(x)
            losses.append(loss.item())
            for number, group in enumerate(optimizer.param_groups):
                for setting in own[number] if changing else ():
                    old = group[setting]
                    group[setting] = (
                        (old[0] * 0.9, old[1] * 0.8)
                        if isinstance(old, tuple)
                        else old * (0.7 + number / 10)
                    )
        return losses, (state["params"] if is_lifted else dict(model.named_parameters()))

    (losses, params), (lifted_losses, lifted_params) = run(False), run(True)
    bits = form == "fused" and not changing
    assert lifted_losses == (losses if bits else pytest.approx(losses, rel=1e-5))
    for path, p in params.items():
        torch.testing.assert_close(
            lifted_params[path], p, rtol=0 if bits else 1e-5, atol=0 if bits else 1e-6
        )


@pytest.mark.slow
def test_other_optimizers_are_calls_over_lists():
    sgd = lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=False)
    assert calls(sgd) == ["_foreach_mul_", "_foreach_add_", "_foreach_add_"]
    adam = lambda params: optim.Adam(params, fused=False)
    assert len(calls(adam)) <= 18
    assert len(calls(adam)) < len(calls(adam, samples=1)) < 6 * len(calls(adam)), (
        "where memory is short, some groups"
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("name", parameters_of(CASES))
def test_only_updates_move_and_values_stay(name, ranks):
    lowered = on_ranks(CASES[name], ranks, zt.shard_params(zt.AbstractMesh(dp=ranks)), *ALL)
    grouped, groups = group_updates(lowered.graph)
    zt.ir.check(grouped)
    assert {*grouped.eqns} == {*lowered.graph.eqns}
    fixed = lambda graph: [
        e for e in graph.eqns if e.region != "update" or is_start(e) or rules(e).waits
    ]
    assert fixed(grouped) == fixed(lowered.graph)
    place = {e: i for i, e in enumerate(grouped.eqns)}
    for group in groups:
        assert len({e.op for e in group}) == 1
        assert [place[e] for e in group] == list(
            range(place[group[0]], place[group[0]] + len(group))
        )
        results = {v for e in group for v in e.results}
        assert not any(v in results for e in group for v in e.ins), (
            "equal equations do not depend on each other"
        )


@pytest.mark.slow
def test_where_groups_would_raise_the_peak_updates_stay_apart():
    step, state = lifted(lambda params: optim.Adam(params, fused=False), layers=12)
    step = zt.Step.of(step)
    state = step.shard(state)
    compiled = step.compiled(state, torch.ones(1, 4))
    compiled(state, torch.ones(1, 4))
    assert memory(compiled.graph).peak <= compiled.lowered.memory_analysis().peak


def test_list_calls():
    x, y = (Var(name, torch.float32, (2,)) for name in "xy")
    u, v = (Var(name, torch.float32, (2,)) for name in "uv")
    rate = Var("rate", torch.float32, ())

    def of(op, *rows, **kwargs):
        call = list_call([Eqn(op, row, (row[0],), kwargs) for row in rows], in_place=True)
        return None if call is None else (str(call[0]), *call[1:])

    assert of(aten.mul.Tensor, (x, u), (y, v)) == ("aten._foreach_mul_.List", ([x, y], [u, v]), {})
    assert of(aten.mul.Tensor, (x, rate), (y, rate)) == (
        "aten._foreach_mul_.Tensor",
        ([x, y], rate),
        {},
    )
    assert of(aten.mul.Tensor, (x, 2.0), (y, 2.0)) == (
        "aten._foreach_mul_.Scalar",
        ([x, y], 2.0),
        {},
    )
    assert of(aten.add.Tensor, (x, u), (y, v), alpha=-1) == (
        "aten._foreach_add_.List",
        ([x, y], [u, v]),
        {"alpha": -1},
    )
    assert of(aten.addcmul.default, (x, u, u), (y, v, v), value=0.1)[1] == (
        [x, y],
        [u, v],
        [u, v],
        0.1,
    )
    assert of(aten.addcmul.default, (x, u, u), (y, v, v))[1] == ([x, y], [u, v], [u, v])
    assert of(aten.addcmul.default, (x, u, rate), (y, v, rate))[1] == ([x, y], [u, v], [rate, rate])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_has_no_list_form(dtype):
    """On GPUs an operation over lists rounds a number to half precision first, and a single operation does not."""
    x, new = Var("x", dtype, (2,)), Var("new", dtype, (2,))
    wide = Var("wide", torch.float32, (2,))
    has_form = dtype == torch.float32
    assert has_list_form(Eqn(aten.mul.Tensor, (x, 2.0), (new,))) == has_form
    assert has_list_form(Eqn(aten.add.Tensor, (wide, x), (wide,))) == has_form
