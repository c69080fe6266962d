"""On a GPU, updates read half-precision gradients themselves; other programs, and other readers, stay as they are."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn, optim

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.fusion import fused_anywhere
from tests.support.programs import CASES
from tests.support.worlds import clone, distance, on_ranks
from ztrans import backends
from ztrans.ir.interpreter import evaluate
from ztrans.ir.op_facts import CAST, op_facts
from ztrans.planning.cost import memory
from ztrans.runtime.cuda.half_gradients import half_gradients, inputs_on_gpu

MUL = torch.ops.aten.mul.Tensor
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
OPTIMIZERS = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "adam": lambda params: optim.Adam(params, lr=0.01, fused=True),
    "adam, rate on the device": lambda params: optim.Adam(
        params, lr=torch.tensor(0.01), fused=True
    ),
}
NOT_OURS = {
    "adam with an L2 penalty": lambda params: optim.Adam(params, weight_decay=0.1, fused=True),
    "amsgrad": lambda params: optim.Adam(params, amsgrad=True, fused=True),
    "maximize": lambda params: optim.AdamW(params, maximize=True, fused=True),
    "adagrad": lambda params: optim.Adagrad(params, fused=True),
    "foreach": lambda params: optim.AdamW(params, foreach=True, fused=False),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}


def lifted(make_optimizer, dtype=torch.bfloat16, change=None):
    """A step under autocast: three of the four gradients are half, and that of the norm's weight is fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16, bias=False), nn.Linear(16, 4, bias=False)
    )
    optimizer = make_optimizer(model.parameters())

    def loop_step(x):
        with torch.autocast("cpu", dtype):
            loss = model(x).float().square().mean()
        loss.backward()
        extra = change(model) if change is not None else None
        optimizer.step()
        grad = model[2].weight.grad
        optimizer.zero_grad()
        return loss, extra, grad if change is returned_after_the_step else None

    return zt.lift(loop_step, model, optimizer)


@functools.cache
def lowered(*args, **kwargs):
    """The step, and its first state: a test that takes steps clones it."""
    step, state = lifted(*args, **kwargs)
    step = zt.Step.of(step)
    return step.lower(state, X), state


def rewritten(graph):
    return half_gradients(graph, set(graph.inputs))


def updates(graph) -> list[str]:
    return sorted(op_facts(e.op).name for e in graph.eqns if op_facts(e.op).fused_update)


def casts_to_fp32(graph) -> int:
    return sum(e.op is CAST and e.out.dtype == torch.float32 for e in graph.eqns)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_casts_of_gradients_vanish(name, dtype):
    before = lowered(OPTIMIZERS[name], dtype)[0].graph
    after = rewritten(before)
    kind = "_fused_" + name.split()[0].rstrip(",")
    assert updates(before) == [kind] * 4
    assert updates(after) == [kind] + ["ztrans::fused_adamw"] * 3
    assert casts_to_fp32(before) - casts_to_fp32(after) == 3
    assert memory(after).peak <= memory(before).peak
    text = str(after)
    assert "= fused_adamw([params.0.weight], [t_" in text
    assert rewritten(after) is after, "there is nothing left to do"


def test_inductor_keeps_casts_that_it_fuses():
    """The gradient of a bias is a sum, and is cast to fp32 in the kernel of the sum."""
    before = lowered(OPTIMIZERS["adamw"])[0].graph
    after = half_gradients(before, set(before.inputs), of_products=True)
    halves = [e.args[0][0].name for e in after.eqns if op_facts(e.op).name == "ztrans::fused_adamw"]
    assert halves == ["params.0.weight", "params.2.weight"]


def test_inductor_reads_halves_in_elementwise_updates():
    """Of weights, whose gradients are products: the cast is in the kernel of the update, on CPUs too."""
    graph, groups = fused_anywhere(lowered(NOT_OURS["foreach"])[0].graph)
    read = {v.name: {x.dtype for x in group.ins} for group in groups for v in group.ins}
    for name in ("params.0.weight", "params.2.weight"):
        assert torch.bfloat16 in read[name]
    fused = {eqn for group in groups for eqn in group.eqns}
    casts = [e for e in graph.eqns if e.op is CAST and e.out.dtype == torch.float32]
    assert casts and fused.issuperset(casts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # to compile imports Inductor
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_trains_alike(name, backend, monkeypatch):
    """As if the state were on a GPU: two calls update all parameters, in place."""

    def trained(is_on_gpu):
        program, state = lowered(OPTIMIZERS[name])
        if is_on_gpu:
            monkeypatch.setattr(backends, "inputs_on_gpu", lambda graph, inputs: set(graph.inputs))
        run = program.compile(backend=backend)
        tensors = clone(state)
        for _ in range(3):
            tensors, output = run(tensors, X)
        return tensors, output, run

    *before, plain = trained(False)
    *after, run = trained(True)
    assert distance(after[0], before[0]) < 1e-4 and distance(after[1][0], before[1][0]) < 1e-4
    assert updates(plain.graph) != updates(run.graph)
    kind = "_fused_" + name.split()[0].rstrip(",")
    code = run.binding.local_program.runner.executable.program.code
    assert code.count("ztrans.fused_adamw") == 1, code
    assert code.count(f"aten.{kind}") == 1, code


def test_the_interpreter_has_the_values_of_the_cast():
    graph = lowered(OPTIMIZERS["adamw"])[0].graph
    tensors = [
        torch.rand(v.shape, generator=torch.Generator().manual_seed(k)).to(v.dtype)
        for k, v in enumerate(graph.inputs)
    ]
    true, ours = (evaluate(each, *tensors)[:-2] for each in (graph, rewritten(graph)))
    assert distance(list(ours), list(true)) < 1e-4


def clipped(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def measured(model):
    return nn.utils.get_total_norm([p.grad for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("change", [clipped, measured])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_norm_reads_halves_and_an_update_scales(name, change, monkeypatch):
    """So nothing reads the casts, and there is no scaled copy; only the norm's weight has a gradient of fp32."""
    program, state = lowered(OPTIMIZERS[name], change=change)
    before = program.graph
    after = rewritten(before)
    assert casts_to_fp32(before) - casts_to_fp32(after) == 3
    products = [sum(e.op is MUL and e.region == "update" for e in g.eqns) for g in (before, after)]
    assert products[0] - products[1] == (3 if change is clipped else 0)
    ours = [e for e in after.eqns if op_facts(e.op).name.startswith("ztrans::fused")]
    assert len(ours) == 3 and all(("scale" in e.kwargs) == (change is clipped) for e in ours)
    results = []
    for is_on_gpu in (False, True):
        if is_on_gpu:
            monkeypatch.setattr(backends, "inputs_on_gpu", lambda graph, inputs: set(graph.inputs))
        tensors, run = clone(state), program.compile()
        for _ in range(3):
            tensors, output = run(tensors, X)
        results.append((tensors, output[:2]))
    assert distance(*results) < 1e-4
    calls = [
        n
        for n in run.binding.local_program.runner.executable.program.graph.nodes
        if "fused_" in str(n.target)
    ]
    assert len(calls) == 2, "one for halves, and one for fp32"


def returned(model):
    return [p.grad for p in model.parameters()]


def returned_after_the_step(model):
    return None


def halved(model):
    """The gradient that is multiplied is returned too."""
    grad = model[0].weight.grad
    grad.mul_(grad.norm())
    return grad


def logged(model):
    return model[0].weight.grad.abs().max()


def normed_in_double(model):
    return torch.linalg.vector_norm(model[0].weight.grad, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "halves"), [
    (returned, 0), (logged, 2), (returned_after_the_step, 2), (halved, 2), (normed_in_double, 2),
])  # fmt: skip
def test_a_gradient_that_is_read_elsewhere_is_left_alone(change, halves):
    graph = lowered(OPTIMIZERS["adamw"], change=change)[0].graph
    after = rewritten(graph)
    assert updates(after).count("ztrans::fused_adamw") == halves
    assert halves or after is graph


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_OURS)
def test_other_updates_are_left_alone(name):
    graph = lowered(NOT_OURS[name])[0].graph
    assert rewritten(graph) is graph


def test_only_state_on_a_gpu_is_rewritten():
    program, _ = lowered(OPTIMIZERS["adamw"])
    graph = program.graph
    tensors = [torch.empty(v.shape, dtype=v.dtype) for v in graph.inputs]
    assert inputs_on_gpu(graph, tensors) == set() and half_gradients(graph, set()) is graph
    weight = next(v for v in graph.inputs if v.name == "params.0.weight")
    after = half_gradients(graph, set(graph.inputs) - {weight})
    assert updates(after).count("ztrans::fused_adamw") == 2
    moment = next(v for v in graph.inputs if v.name == "optimizer.2.weight.exp_avg")
    after = half_gradients(graph, set(graph.inputs) - {moment})
    assert updates(after).count("ztrans::fused_adamw") == 2


CASTING = ("adamw_fused", "autocast", "cast_outside", "muon")  # they cast, or their update is fused


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters_of(CASES, CASTING))
def test_no_other_program_changes(name):
    graph = on_ranks(CASES[name], 1).graph
    assert rewritten(graph) is graph


@pytest.mark.parametrize("stage", [0, 3])
def test_shards_of_gradients_are_read_as_they_are_received(stage):
    """A reduction returns the gradient in fp32, so there is no cast. On a mesh the program is that of before."""
    step, state = lifted(OPTIMIZERS["adamw"])
    mesh = zt.AbstractMesh(dp=2)
    graph = zt.shard_params(mesh, stage=stage)(zt.Step.of(step)).lower(state, X).graph
    assert rewritten(graph) is graph
