"""On one rank, where nothing is reduced, updates run during backward: the same bits, and fewer gradients at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.programs import CASES
from tests.support.worlds import batches, clone, on_ranks
from ztrans.ir.donation import donation
from ztrans.ir.op_facts import op_facts
from ztrans.runtime.executable import executable

ALONE = zt.AbstractMesh(dp=1)
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
WIDTH, LAYERS = 64, 5
ADAMW = lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True)


def lifted(make_optimizer=ADAMW, change=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = make_optimizer(model.parameters())

    def loop_step(x):
        loss = model(x).square().mean()
        loss.backward()
        extra = change(model) if change is not None else None
        optimizer.step()
        optimizer.zero_grad()
        return loss if extra is None else (loss, extra)

    return zt.lift(loop_step, model, optimizer)


def lowered(step, state, bucket: int | str = 0, update="eager", *transforms, **options):
    overlap = zt.overlap_grads(bucket=bucket, update=update)
    chain = zt.chain(zt.shard_params(ALONE), overlap, *transforms)
    return chain(zt.Step.of(step)).lower(state, X, **options)


def updates(graph) -> list[int]:
    """The places of the fused updates among the matrix products."""
    places, products = [], 0
    for e in graph.eqns:
        products += op_facts(e.op).matmul
        if op_facts(e.op).fused_update:
            places.append(products)
    return places


def test_updates_follow_their_gradients():
    """Forward has 5 products, and backward 9: each layer's gradient comes before what the layer below needs."""
    step, state = lifted()
    last, early = (lowered(step, state, update=update) for update in ("last", "eager"))
    assert updates(last.graph) == [14] * 5 and last.plan.update == "last"
    assert updates(early.graph) == [7, 9, 11, 13, 14] and early.plan.update == "eager"
    size = 4 * WIDTH**2
    fall = last.memory_analysis().peak - early.memory_analysis().peak
    assert (LAYERS - 2) * size <= fall < LAYERS * size
    assert sorted(map(str, last.graph.eqns)) == sorted(map(str, early.graph.eqns))


def test_updates_wait_for_each_other():
    """Their gradients have the bytes of a bucket together; by default that is 32 MiB."""
    step, state = lifted()
    two = lowered(step, state, 4 * WIDTH**2 + 1)
    assert updates(two.graph) == [9, 9, 13, 13, 14]
    assert updates(lowered(step, state, "auto").graph) == [14] * 5
    assert lowered(step, state, "auto").plan.update == "last"


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters_of(CASES))
def test_no_bit_changes(name):
    """In lock-step, and by generated code, which writes in place what it wrote in place at the end."""
    case = CASES[name]
    last, early = (
        on_ranks(case, 1, zt.shard_params(ALONE), zt.overlap_grads(bucket=0, update=update))
        for update in ("last", "eager")
    )
    states = [case.state(), case.state()]
    for batch in batches(case, 3):
        outputs = []
        for k, program in enumerate((last, early)):
            states[k], output = program.lockstep(states[k], [batch])
            outputs += [pytree.tree_leaves((states[k], output))]
        assert all(map(same, *outputs))
    assert early.memory_analysis().peak <= last.memory_analysis().peak
    results = []
    for program in (last, early):
        graph = (
            zt.ir.micro_batch_programs(program.graph).last
            if program.graph.micro > 1
            else program.graph
        )
        flat = pytree.tree_leaves((clone(case.state()), batches(case, 1)[0]))
        inputs = [torch.as_tensor(x) for x in flat]
        results.append((graph, executable(graph, None)(inputs)))
    (_, a), (_, b) = results
    assert all(map(same, a, b))


def same(a, b) -> bool:
    return torch.equal(torch.nan_to_num(torch.as_tensor(a)), torch.nan_to_num(torch.as_tensor(b)))


def test_updates_stay_in_place():
    step, state = lifted()
    last, early = (lowered(step, state, update=update).graph for update in ("last", "eager"))
    in_place = [sorted(str(e.out) for e in donation(g).in_place_ops) for g in (last, early)]
    assert in_place[0] == in_place[1] and len(in_place[0]) >= 2 * LAYERS


def clipped(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def test_an_update_that_needs_all_gradients_stays_at_the_end():
    step, state = lifted(change=clipped)
    assert updates(lowered(step, state).graph) == [14] * 5


def penalised(model):
    """The gradient of each layer reads the weights of the next one, which its update must not overwrite before."""
    with torch.no_grad():
        for layer, other in pairwise(model):
            layer.weight.grad.add_(other.weight, alpha=0.1)


OPTIMIZERS = {
    "adamw": ADAMW,
    "foreach": lambda params: optim.AdamW(params, lr=0.01, foreach=True, fused=False),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [None, clipped, penalised], ids=["plain", "clipped", "penalised"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lifted_loops_have_the_same_bits(name, change):
    step, state = lifted(OPTIMIZERS[name], change)
    results = []
    for update in ("last", "eager"):
        program = lowered(step, state, update=update)
        mine = clone(state)
        for _ in range(3):
            mine, output = program.lockstep(mine, [(X,)])
        results.append(pytree.tree_leaves((mine, output)))
    assert all(map(torch.equal, *results))


def test_a_plan_is_followed():
    """By the same program, and by one for another batch size; it says when updates run."""
    step, state = lifted()
    early = lowered(step, state)
    again = lowered(step, state, plan=early.plan)
    assert str(again.graph) == str(early.graph)
    overlap = zt.chain(zt.shard_params(ALONE), zt.overlap_grads(bucket=0))(zt.Step.of(step))
    small = overlap.trace(state, X[:2]).lower(cluster=early.cluster, plan=early.plan, follow=True)
    assert updates(small.graph) == updates(early.graph)


@pytest.mark.slow
def test_a_budget_that_only_early_updates_fit():
    step, state = lifted()
    peaks = [lowered(step, state, update=u).memory_analysis().peak for u in ("last", "eager")]
    budget = sum(peaks) // 2
    fits = lowered(step, state, 0, "eager", zt.prefetch(memory=budget))
    assert fits.memory_analysis().peak <= budget
    with pytest.raises(ValueError, match="is less than the step needs in any order tried"):
        lowered(step, state, 0, "last", zt.prefetch(memory=budget))


def test_sums_over_micro_batches_are_read_at_the_end():
    """They live through all micro-batches anyway."""
    step, state = lifted()
    accumulated = lowered(zt.accumulate(4)(zt.Step.of(step)), state)
    assert updates(accumulated.graph) == [14] * 5 and accumulated.plan.update == "last"
