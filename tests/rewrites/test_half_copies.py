"""Copies of leaves in half precision on the host: forward copies half the bytes, and no bit changes."""

from __future__ import annotations

import pytest
import torch

import ztrans as zt
from tests.support.worlds import ALL, clone, slices
from tests.transforms.test_offload_parameters import EVERYTHING, WIDTH, X, layers_state, layers_step
from ztrans.ir.copies import is_copy
from ztrans.ir.verifier import ProgramError, check
from ztrans.planning.cost import memory
from ztrans.planning.place_copies import copied_when_needed

SLOW = zt.cluster("h100", host_link=zt.Link("slow", latency=1e-6, bandwidth=1e8), dp="nvlink4")
MICRO = zt.accumulate(4)


def lower(*transforms: zt.Transform, step=layers_step, state=None, cluster=SLOW):
    chain = zt.chain(*transforms)(step)
    return chain.lower(state or layers_state(), X, cluster=cluster)


def arriving(graph) -> list[str]:
    """The values on the host that forward and backward copy to the device."""
    copies = [e for e in graph.eqns if is_copy(e) and e.out.memory == "device"]
    return [e.ins[0].name for e in copies if e.region != "update"]


def trained(*transforms: zt.Transform, step=layers_step, between=None, steps: int = 3):
    step = zt.chain(*transforms)(step).lower(layers_state(), X, cluster=SLOW).compile()
    state = clone(layers_state())
    for k in range(steps):
        if between is not None and k:
            state = between(state)
        state, loss = step(state, X)
    return state, loss


def same(a, b) -> bool:
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    return True


# The program.


def test_forward_and_backward_copy_half_the_bytes_where_micro_batches_read_leaves_often(golden):
    low = lower(MICRO, EVERYTHING, state=layers_state(2))
    assert arriving(low.graph) == ["params.w0.half", "params.w1.half", "params.w1.half"]
    assert str(low) == golden


def test_a_step_with_one_backward_has_none():
    graph = lower(EVERYTHING).graph
    assert not graph.hidden
    assert not any(name.endswith(".half") for name in arriving(graph))


def test_a_leaf_that_does_not_change_has_a_copy_that_does_not_change():
    def step(state, x):
        """Weights that are frozen, and one that is trained."""
        w = state["w"].detach().requires_grad_()
        y = torch.tanh(x.bfloat16() @ state["frozen"].bfloat16()).float()
        (g,) = torch.autograd.grad((y @ w).square().mean(), [w])
        return {"frozen": state["frozen"], "w": state["w"] - g}, y.sum()

    state = {"frozen": torch.randn(WIDTH, WIDTH), "w": torch.ones(WIDTH, WIDTH)}
    moved = zt.offload(where="frozen", at_least=0)
    graph = lower(moved, step=step, state=state).graph
    assert graph.hidden == (0,)
    assert graph.hidden_inputs == graph.hidden_outputs
    assert not any(is_copy(e) and e.out.memory == "host" for e in graph.eqns)


def test_a_host_without_room_for_copies_has_none():
    needed = lower(MICRO, EVERYTHING).memory_analysis().host_peak
    for host_memory, has_copies in ((needed, True), (needed - 1, False)):
        cluster = zt.cluster("h100", host_link=SLOW.host_link, host_memory=host_memory)
        assert bool(lower(MICRO, EVERYTHING, cluster=cluster).graph.hidden) == has_copies


def test_an_evaluation_has_none():
    def evaluation(state, x):
        return state, torch.tanh(x.bfloat16() @ state["w"].bfloat16()).float().sum()

    assert not lower(
        EVERYTHING, step=evaluation, state={"w": torch.ones(WIDTH, WIDTH)}
    ).graph.hidden


def test_a_leaf_that_is_also_read_whole_comes_in_whole():
    def step(state, x):
        w = state["w"].detach().requires_grad_()
        y = (x.bfloat16() @ w.bfloat16()).float() + w.sum()
        (g,) = torch.autograd.grad(y.square().mean(), [w])
        return {"w": state["w"] - g}, y.sum()

    graph = lower(MICRO, EVERYTHING, step=step, state={"w": torch.ones(WIDTH, WIDTH)}).graph
    assert "w.half" not in arriving(graph)[:1]


def test_the_verifier_refuses_a_copy_that_comes_back_with_another_type():
    graph = lower(MICRO, EVERYTHING).graph
    outputs = (*graph.outputs[:-1], graph.new_state[0])
    with pytest.raises(ProgramError, match=r"a copy of a leaf, comes back as"):
        check(graph.replace(outputs=outputs))


def test_the_peak_on_the_device_does_not_rise_and_the_host_has_the_copies():
    low = lower(MICRO, EVERYTHING)
    assert len(low.graph.hidden) == 4
    found = low.memory_analysis()
    assert found.peak <= memory(copied_when_needed(dict(low.history)["plan"])).peak
    assert found.host_peak == 2 * 4 * WIDTH * WIDTH * 4 + 4 * WIDTH * WIDTH * 2


# Bits.


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_ranks_have_the_same_bits(stage, micro):
    x = torch.linspace(-1, 1, 2 * 6 * WIDTH).view(12, WIDTH)
    results = []
    for moved in ((), (EVERYTHING,)):
        shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
        step = zt.chain(zt.accumulate(micro), shard, *moved, *ALL)(layers_step)
        low = step.lower(layers_state(), x[:6], cluster=SLOW)
        state = layers_state()
        for _ in range(3):
            state, outputs = low.lockstep(state, slices((x,), 2))
        results.append((state, outputs))
    # At stages 1 and 2 all micro-batches read one gather.
    assert low.graph.hidden or micro == 1 or stage in (1, 2)
    assert same(*results)


def test_steps_have_the_same_bits_whatever_happens_to_the_state_in_between():
    def changed(state):
        state["params"]["w1"].mul_(2)
        return state

    def replaced(state):
        return {**state, "params": {k: w.clone() + 1 for k, w in state["params"].items()}}

    for between in (None, changed, replaced):
        moved = trained(MICRO, EVERYTHING, between=between)
        assert same(moved, trained(MICRO, between=between))


def test_a_failed_step_casts_the_parameters_again():
    """The failed step may have written copies of parameters that it did not return."""

    def step(state, x, index):
        w = state["w"].detach().requires_grad_()
        y = (x.bfloat16() @ w.bfloat16()).float()[index].square().mean()
        (g,) = torch.autograd.grad(y, [w])
        return {"w": state["w"] - 0.1 * g}, y

    x, good = torch.linspace(0, 1, 8 * WIDTH).view(8, WIDTH), torch.arange(8) % 2
    results = []
    for moved in ((), (EVERYTHING,)):
        chain = zt.chain(MICRO, *moved)(step)
        state = {"w": torch.ones(WIDTH, WIDTH)}
        compiled = chain.lower(state, x, good, cluster=SLOW).compile()
        state, _ = compiled(state, x, good)
        with pytest.raises(Exception, match="index"):
            compiled(state, x, good + 7)
        results.append(compiled(state, x, good))
    assert compiled.graph.hidden
    assert same(*results)


def test_a_step_with_copies_can_be_checked_and_recorded():
    results = []
    for moved in ((), (EVERYTHING,)):
        compiled = lower(MICRO, *moved).compile()
        state = clone(layers_state())
        assert compiled.check_finite(state, X) is None
        compiled.profile(state, X, steps=1)
        results.append(compiled(state, X))
    assert compiled.graph.hidden
    assert same(*results)
