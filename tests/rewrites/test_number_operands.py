"""Scalars on the host are numbers where operations take them by value, and no result has other bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import loop_of
from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.ir.op_facts import CAST
from ztrans.planning.cost import launches
from ztrans.planning.durations import signature
from ztrans.rewrites.number_operands import ARITHMETIC, ITEM, Number, settings, with_number_operands

aten = torch.ops.aten
OPTIMIZERS = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": False}),
    ("Adam", {"amsgrad": True, "fused": False}),
    ("AdamW", {"maximize": True, "fused": False}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("ASGD", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
]


def scalar(name, dtype=torch.float64):
    return Var(name, dtype, ())


def tensor(name):
    return Var(name, torch.float32, (7,))


def program(make, *, on_host=None):
    """The update that `make` writes from x, y, z of a state and a setting s, with numbers."""
    x, y, z, s = tensor("x"), tensor("y"), tensor("z"), scalar("s")
    eqns: list[Eqn] = []

    def call(op, *args, result=(torch.float32, (7,)), **kwargs):
        out = Var(f"v{len(eqns)}", *result)
        eqns.append(Eqn(op, args, (out,), kwargs, region="update"))
        return out

    result = make(call, x, y, z, s)
    graph = Graph("step", (x, y, z, s), tuple(eqns), (result, y, z), num_state=3)
    return with_number_operands(graph, [s] if on_host is None else on_host)


def text(graph):
    return [
        f"{e.op}({', '.join(str(getattr(a, 'name', a)) for a in (*e.args, *e.kwargs.values()))})"
        for e in graph.eqns
    ]


def test_the_factor_of_a_product_that_is_added_is_its_value():
    graph = program(
        lambda call, x, y, z, s: call(aten.addcmul.default, x, call(aten.mul.Tensor, y, s), z)
    )
    assert [e.op for e in graph.eqns] == [ITEM, aten.addcmul.default]
    assert text(graph)[1] == "aten.addcmul.default(x, y, z, s.number)"


def test_a_quotient_of_a_scaled_tensor_that_is_added_is_one_call():
    def make(call, x, y, z, s):
        return call(aten.add.Tensor, x, call(aten.div.Tensor, call(aten.mul.Tensor, y, s), z))

    assert text(program(make))[1:] == ["aten.addcdiv.default(x, y, z, s.number)"]


def test_arithmetic_on_settings_is_arithmetic_of_python():
    def make(call, x, y, z, s):
        rest = call(aten.rsub.Scalar, s, 1, result=(torch.float64, ()))
        rate = call(CAST, rest, result=(torch.float32, ()), dtype=torch.float32)
        return call(aten.addcmul.default, x, y, rate)

    # The sum rounds its factor itself.
    assert text(program(make))[1:] == [
        "aten.rsub.Scalar(s.number, 1)",
        "aten.add.Tensor(x, y, v0.number)",
    ]


@pytest.mark.parametrize(
    "make",
    [
        # No scalar.
        lambda call, x, y, z, s: call(aten.mul.Tensor, call(aten.mul.Tensor, y, z), z),
        # Of fp16, which PyTorch computes in fp32.
        lambda call, x, y, z, s: call(aten.mul.Tensor, x, s, result=(torch.float16, (7,))),
    ],
)
def test_what_takes_no_number_stays(make):
    assert not any(isinstance(v, Number) for e in program(make).eqns for v in e.results)


def test_a_product_that_is_read_twice_stays():
    def make(call, x, y, z, s):
        scaled = call(aten.mul.Tensor, y, s)
        return call(aten.add.Tensor, call(aten.addcmul.default, x, scaled, z), scaled)

    ops = [e.op for e in program(make).eqns]
    assert ops == [ITEM, aten.mul.Tensor, aten.addcmul.default, aten.add.Tensor]


def test_without_scalars_on_the_host_a_program_stays_as_it_is():
    graph = program(lambda call, x, y, z, s: call(aten.mul.Tensor, x, s), on_host=[])
    assert [e.op for e in graph.eqns] == [aten.mul.Tensor]
    assert settings(graph) == {graph.inputs[3]}


@pytest.mark.parametrize("op", ARITHMETIC)
def test_arithmetic_of_python_has_the_bits_of_pytorch(op):
    values = [0.0, -0.0, 0.1, 1e308, -3.7, 5e-324, math.inf, math.nan]
    takes_tensor = op._overloadname == "Tensor"
    for x, y in itertools.product(values, [*values, 3]):
        numbers = [x] if op is aten.neg.default else [x, float(y) if takes_tensor else y]
        first, *rest = numbers
        if takes_tensor:
            rest = [torch.tensor(number, dtype=torch.float64) for number in rest]
        expected = op(torch.tensor(first, dtype=torch.float64), *rest).item()
        # As text, because -0.0 equals 0.0, and nan does not equal nan.
        assert repr(ARITHMETIC[op](*numbers)) == repr(expected)


@pytest.mark.parametrize("n", [1, 7, 8, 17, 33, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operations_with_a_number_have_the_bits_of_those_with_a_scalar(n, dtype):
    generator = torch.Generator().manual_seed(n)
    x, y, z = (torch.randn(n, generator=generator, dtype=dtype) for _ in range(3))
    s = torch.randn((), generator=generator, dtype=torch.float64)
    rounded, number = s.to(dtype), s.item()
    same = [
        (torch.addcmul(x, y * s, z), torch.addcmul(x, y, z, value=number)),
        (torch.addcmul(x, y, rounded), torch.add(x, y, alpha=number)),
        (x + y * s / z, torch.addcdiv(x, y, z, value=number)),
        (torch.addcdiv(x, y * s, z), torch.addcdiv(x, y, z, value=number)),
        (torch.lerp(x, y, rounded), torch.lerp(x, y, number)),
        (x * s, x * number),
        (x / s, x / number),
        (x - s, torch._foreach_sub([x], [number])[0]),
        (x + y * s / z, torch._foreach_addcdiv([x], [y], [z], [number])[0]),
    ]
    for expected, result in same:
        assert torch.equal(expected, result)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_a_step_has_the_bits_of_its_program_and_the_numbers_of_its_loop(name, options):
    """Groups with settings of their own, counts that differ, and a rate that changes."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
        params = [*model.parameters()]
        groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.02}]
        optimizer = getattr(optim, name)(groups, lr=0.01, **options)
        return model, optimizer, loop_of(model, optimizer)

    model, optimizer, loop_step = made()
    twin, twin_optimizer, twin_step = made()
    step, state = zt.lift(loop_step, model, optimizer)
    step, x = zt.Step.of(step), torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    single = step.lower(state, x)
    mine, expected = step.shard(state), step.shard(state)
    for _ in range(8):
        mine, loss = step(mine, x)
        expected, _ = single.lockstep(expected, [(x,)])
        assert loss.item() == pytest.approx(twin_step(x).item(), rel=1e-5)
        for each in (optimizer, twin_optimizer):
            for group in each.param_groups:
                group["lr"] *= 0.9
    for leaf, expected_leaf in zip(pytree.tree_leaves(mine), pytree.tree_leaves(expected)):
        assert torch.equal(leaf, expected_leaf)
    for path, p in twin.named_parameters():
        torch.testing.assert_close(mine["params"][path], p, rtol=1e-5, atol=1e-6)


def test_a_plan_counts_no_launches_for_arithmetic_on_settings():
    model = nn.Linear(4, 4)
    optimizer = optim.RMSprop(model.parameters(), momentum=0.9)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    graph = zt.Step.of(step).lower(state, torch.ones(8, 4)).graph
    made = launches(graph)
    on_settings = [e for e in graph.eqns if e.ins and settings(graph).issuperset(e.ins)]
    assert on_settings and all(made[e] == (0, 0) for e in on_settings)


@pytest.mark.slow
def test_a_profile_has_a_duration_for_each_equation_of_the_plan():
    model = nn.Linear(4, 4)
    optimizer = optim.RMSprop(model.parameters(), momentum=0.9)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    step, x = zt.Step.of(step), torch.ones(8, 4)
    state = step.shard(state)
    compiled = step.compiled(state, x)
    measured = compiled.profile(state, x).seconds_by_signature
    planned = compiled.lowered.graph
    assert {signature(e, planned) for e in planned.eqns} <= measured.keys()
    scaled = next(e for e in planned.eqns if e.op is aten.addcmul.default)
    factor = next(e for e in planned.eqns if e.out is scaled.args[1])
    assert measured[signature(scaled, planned)] > 0 == measured[signature(factor, planned)]
