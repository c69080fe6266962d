"""`delay_weight_grads`: matmuls of weight gradients run while a collective of the step itself is under way."""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value

import ztrans as zt
from tests.support.parallel import copied, summed
from tests.support.programs import CASES
from tests.support.worlds import ALL, on_ranks
from ztrans.ir.graph import Graph
from ztrans.ir.op_facts import is_matmul
from ztrans.ir.user_collectives import is_user_start, is_user_wait
from ztrans.planning.formulate import formulate
from ztrans.planning.skeleton import skeleton

MESH = zt.AbstractMesh(dp=2, tp=2)
SHARD = zt.shard_params(MESH, axis="dp")
LAYERS = 3


def loss(params, x):
    for i in range(LAYERS):
        x = x + summed(F.gelu(copied(x) @ params[f"up{i}"]) @ params[f"down{i}"])
    return x.square().mean()


def step(state, x):
    grads, value = grad_and_value(loss)(state, x)
    return {k: p - 0.1 * grads[k] for k, p in state.items()}, value


@functools.cache
def traced():
    state = {}
    for i in range(LAYERS):
        state[f"up{i}"] = torch.zeros(4, 6)
        state[f"down{i}"] = torch.zeros(6, 4)
    return zt.Step.of(step).trace(state, torch.zeros(8, 4))


@functools.cache
def lower(*transforms):
    return traced().with_transforms(zt.chain(*transforms)(step).transforms).lower()


def matmuls_during_collectives(graph: Graph) -> list[int]:
    """For each of the step's own collectives in backward, how many matmuls run between its start and its wait."""
    counts = []
    count = None
    for e in graph.eqns:
        if is_user_wait(e) and count is not None:
            counts.append(count)
            count = None
        elif is_user_start(e) and e.region == "backward":
            count = 0
        elif count is not None:
            count += is_matmul(e)
    return counts


def test_the_difference_prints(golden):
    assert zt.ir.diff(lower(SHARD), lower(SHARD, zt.delay_weight_grads())) == golden


def test_at_most_the_given_number_of_matmuls_runs_during_each_collective():
    """Each layer has two weight gradients. The first layer has no collective, as its input needs no gradient."""
    assert matmuls_during_collectives(lower(SHARD).graph) == [0, 0]
    assert matmuls_during_collectives(lower(SHARD, zt.delay_weight_grads(most=1)).graph) == [1, 1]
    assert matmuls_during_collectives(lower(SHARD, zt.delay_weight_grads()).graph) == [2, 2]
    assert matmuls_during_collectives(lower(SHARD, *ALL, zt.delay_weight_grads()).graph) == [2, 2]


def test_only_the_order_of_equations_changes():
    before = lower(SHARD).graph
    after = zt.ir.check(lower(SHARD, zt.delay_weight_grads()).graph)
    text = [Counter(str((e.op, e.args, e.outs)) for e in g.eqns) for g in (before, after)]
    assert text[0] == text[1] and str(before) != str(after)


def test_a_gradient_that_an_operation_reads_stays_in_place():
    """As of a weight that two products share: the sum of its two gradients reads them."""

    def step(state, x):
        def loss(params):
            h = x @ params["in"]
            h = copied(h)
            return summed(torch.relu(h @ params["w"]) @ params["w"]).square().mean()

        grads, value = grad_and_value(loss)(state)
        return {k: p - 0.1 * grads[k] for k, p in state.items()}, value

    state = {k: torch.zeros(4, 4) for k in ("in", "w")}
    lowered = [
        zt.chain(SHARD, *more)(step).lower(state, torch.zeros(8, 4))
        for more in ((), (zt.delay_weight_grads(),))
    ]
    assert [matmuls_during_collectives(x.graph) for x in lowered] == [[0], [0]]


@pytest.mark.slow
def test_a_step_without_collectives_of_its_own_does_not_change():
    case, shard = CASES["gpt_adam"], zt.shard_params(zt.AbstractMesh(dp=2))
    before = on_ranks(case, 2, shard).graph.eqns
    after = on_ranks(case, 2, shard, zt.delay_weight_grads()).graph.eqns
    assert list(map(str, before)) == list(map(str, after))


@pytest.mark.slow
def test_the_transform_may_be_anywhere_in_a_chain():
    chain = [SHARD, *ALL]
    orders = [[*chain[:k], zt.delay_weight_grads(), *chain[k:]] for k in range(len(chain) + 1)]
    assert len({str(lower(*order)).split("\n", 1)[1] for order in orders}) == 1


def test_the_transform_commutes_with_remat():
    """An activation that is recomputed for a delayed matmul is recomputed just before it."""
    remat = zt.remat(at_least=0)
    delay = zt.delay_weight_grads()
    a = lower(SHARD, remat, delay)
    b = lower(SHARD, delay, remat)
    assert list(map(str, a.graph.eqns)) == list(map(str, b.graph.eqns))
    assert a.memory_analysis().peak == b.memory_analysis().peak
    eqns = a.graph.eqns
    gelus = [
        k
        for k, e in enumerate(eqns)
        if e.outs[0].name.startswith("gelu") and ".again" in e.outs[0].name
    ]
    assert len(gelus) == LAYERS and all(eqns[k].outs[0] in eqns[k + 1].ins for k in gelus)
    assert matmuls_during_collectives(a.graph) == [2, 2]


def test_the_plan_counts_matmuls_that_hide_a_collective_only_once():
    """At the wait for one of the step's own collectives, compute stalls only for the time that is not hidden."""
    before = lower(SHARD, *ALL)
    after = lower(SHARD, *ALL, zt.delay_weight_grads())
    posed = [formulate(skeleton(x.unordered), x.cluster, 1 << 40) for x in (before, after)]
    assert posed[1].clock[-1] < posed[0].clock[-1] and len(posed[1].clock) == len(posed[0].clock)
    assert [len(p.fixed_messages) for p in posed] == [
        len(matmuls_during_collectives(before.graph))
    ] * 2 or all(p.fixed_messages for p in posed)
    for lowered in (before, after):
        least, _ = lowered.timeline().bound
        assert least <= lowered.timeline().seconds


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "two"])
def test_a_wrong_number_of_matmuls_is_refused(most):
    with pytest.raises(
        ValueError,
        match=f"delay_weight_grads: most={most!r}; it is a number of matmuls, at least 1.",
    ):
        zt.delay_weight_grads(most=most)
