"""On a GPU, updates of state in bf16 read and round it themselves; other programs stay as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.ir.donation import donation
from ztrans.ir.op_facts import CAST, op_facts
from ztrans.ir.rewriter import Rewriter
from ztrans.rewrites.update_groups import group_updates
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda.half_gradients import by_kernel, half_gradients
from ztrans.runtime.cuda.stored_updates import stored_updates

STORE = zt.store(torch.bfloat16)
ROUND = torch.ops.ztrans.stochastic_round.default
X = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))


def lowered(*transforms, rows=6, half=False, **options):
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 5))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True, **options)

    def loop_step(x):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.chain(*transforms)(step)
    return step.lower(step.init(state), X[:rows]), step.init(state)


def by_pytorch_kernel(graph):
    """The program with PyTorch's updates by our kernel, on fp32: what it computes on a GPU."""
    new = Rewriter(graph)
    for e in graph.eqns:
        if op_facts(e.op).name == "_fused_adamw":
            new.replace(e, by_kernel(e))
    return new.applied()


def run(program, graph, state, batches) -> list[torch.Tensor]:
    """The state after two steps of a program in lock-step, with other equations."""
    program = dataclasses.replace(program, graph=graph)
    for _ in range(2):
        state, _ = program.lockstep(state, batches)
    return pytree.tree_leaves(state)


def names(graph) -> list[str]:
    return [op_facts(e.op).name for e in graph.eqns if op_facts(e.op).fused_update]


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "autocast"])
def test_the_kernel_computes_the_bits_of_casts_updates_and_roundings(half):
    program, state = lowered(STORE, half=half)
    graph = program.graph
    after = stored_updates(graph, set(graph.inputs))
    assert names(after) == ["ztrans::fused_adamw"] * 6
    assert not any(e.op is ROUND for e in after.eqns)
    update_casts = [e for e in after.eqns if e.op is CAST and e.ins[0] in after.state]
    assert not [e for e in update_casts if e.region == "update"]
    batch = [(X,)]
    expected = run(program, by_pytorch_kernel(graph), state, batch)
    assert all(map(torch.equal, run(program, after, state, batch), expected))

    with_half = half_gradients(after, set(graph.inputs))
    wide = {v for e in with_half.eqns if op_facts(e.op).fused_update for v in e.args[1]}
    assert {v.dtype for v in wide} == ({torch.bfloat16} if half else {torch.float32})
    assert all(map(torch.equal, run(program, with_half, state, batch), expected))


def test_parts_are_rounded_at_their_places_in_place_and_one_call_updates_equal_shapes():
    program, state = lowered(zt.shard_params(zt.AbstractMesh(dp=2), stage=1), STORE, rows=3)
    graph = program.graph
    after = stored_updates(graph, set(graph.inputs))
    assert names(after) == ["ztrans::fused_adamw"] * 6
    batches = [(X[:3],), (X[3:],)]
    expected = run(program, by_pytorch_kernel(graph), state, batches)
    assert all(map(torch.equal, run(program, after, state, batches), expected))
    grouped, groups = group_updates(after)
    in_place = donation(grouped).in_place_ops
    updates = [e for e in grouped.eqns if op_facts(e.op).fused_update]
    assert all(in_place.get(e) is torch.ops.ztrans.fused_adamw_.default for e in updates)
    fused = [group for group in groups if op_facts(group[0].op).fused_update]
    assert sorted(map(len, fused)) == [2, 3]  # two matrices and three vectors of 5


@pytest.mark.parametrize(
    ("transforms", "options"),
    [
        ((zt.store(torch.bfloat16, where="optimizer.*"),), {}),
        ((zt.store(torch.bfloat16, rounding="nearest"),), {}),
        ((zt.store(torch.bfloat16, first_moments="*.exp_avg"),), {}),
        ((STORE, zt.ema(0.9)), {}),
        ((STORE,), {"amsgrad": True}),
        ((), {}),
    ],
    ids=["moments", "nearest", "8 bits", "an average reads it", "amsgrad", "fp32"],
)
def test_other_updates_stay(transforms, options):
    program, _ = lowered(*transforms, **options)
    assert stored_updates(program.graph, set(program.graph.inputs)) is program.graph


def test_nothing_changes_on_a_cpu():
    program, _ = lowered(STORE)
    assert stored_updates(program.graph, set()) is program.graph


def test_generated_code_calls_the_kernel_once_for_equal_shapes():
    program, _ = lowered(STORE)
    after = stored_updates(program.graph, set(program.graph.inputs))
    graph, groups = group_updates(after)
    assert to_fx(graph, None, True, groups).code.count("ztrans.fused_adamw_") == 3
