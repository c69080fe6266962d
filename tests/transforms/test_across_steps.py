"""`prefetch(across_steps=True)`: the first gathers of the next step start in the update of this one."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.net import lower
from tests.support.programs import CASES
from tests.support.worlds import batches, distance, fake_mesh, on_ranks, plain, slices
from ztrans.all_ranks import inputs_of_rank
from ztrans.ir.collectives import is_start
from ztrans.ir.donation import donation, first_write
from ztrans.ir.interpreter import join_state, lockstep, split_state
from ztrans.ir.printer import format_bytes
from ztrans.ir.verifier import ProgramError, check
from ztrans.planning.cluster import Link
from ztrans.planning.limit import DoesNotFit, check_peak
from ztrans.report.event import COMPUTE
from ztrans.rewrites.across_steps import gathers_before

ACROSS = zt.prefetch(across_steps=True)
MESH = zt.AbstractMesh(dp=4)


def test_the_program_prints(golden):
    assert str(lower(zt.overlap_grads(), ACROSS)) == golden


def test_the_difference_prints(golden):
    without = lower(zt.overlap_grads(), zt.prefetch())
    assert zt.ir.diff(without, lower(zt.overlap_grads(), ACROSS)) == golden


def trained(lowered, case, ranks: int, steps: int):
    """The full state after some steps in lock-step, in which each step passes its gathers to the next."""
    graph = lowered.graph
    data = [
        [
            inputs_of_rank(lowered.recording, graph.name, rank, case.state(), part)
            for rank, part in enumerate(slices(batch, ranks))
        ]
        for batch in batches(case, steps)
    ]
    n = graph.num_state
    state = split_state(graph, [x.contiguous() for x in data[0][0][:n]])
    carried = lockstep(gathers_before(graph), [a + b[n:] for a, b in zip(state, data[0])])
    for inputs in data:
        outs = lockstep(graph, [a + b[n:] + c for a, b, c in zip(state, inputs, carried)])
        state = [out[:n] for out in outs]
        carried = [out[len(graph.outputs) - graph.carried :] for out in outs]
    return join_state(graph, state)


def test_a_new_value_of_two_leaves_is_gathered_from_the_right_one():
    """In lock-step every step gathers from the old state: of `w`, which `last` does not equal before the first step."""

    def step(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        loss = (torch.tanh(x @ params["w"]) @ params["head"]).square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        new = {k: p - 0.1 * g for (k, p), g in zip(state["params"].items(), grads)}
        return {"params": new, "last": new["w"]}, loss

    params = {"w": torch.ones(8, 4), "head": torch.ones(4, 4)}
    state, x = {"params": params, "last": torch.zeros(8, 4)}, torch.full((8, 8), 0.1)
    lowered = zt.chain(zt.shard_params(MESH), ACROSS)(step).lower(state, x[:2])
    new, _ = lowered.lockstep(state, [(part,) for part in x.chunk(4)])
    expected, _ = step(state, x)
    torch.testing.assert_close(new["params"]["w"], expected["params"]["w"])


@pytest.mark.parametrize(
    ("name", "stage", "update"),
    [
        ("mlp_momentum", 1, "eager"),
        ("mlp_momentum", 2, "last"),
        ("mlp_momentum", 3, "eager"),
        ("clipped", 3, "last"),
        pytest.param("gpt_adam", 3, "eager", marks=pytest.mark.slow),
    ],
)
def test_carried_gathers_change_no_bit(name, stage, update):
    """Five steps that pass gathers to each other compute what separate steps compute, and what the plain step does."""
    case = CASES[name]
    shard = zt.shard_params(MESH, stage=stage)
    others = (zt.overlap_grads(update=update), zt.fuse_cast_gather())
    lowered = on_ranks(case, 4, shard, ACROSS, *others)
    assert lowered.graph.carried
    passed = trained(lowered, case, 4, steps=5)
    alone = on_ranks(case, 4, shard, zt.prefetch(), *others)
    states = {"alone": case.state(), "anew": case.state()}
    for batch in batches(case, 5):
        for key, each in (("alone", alone), ("anew", lowered)):
            states[key], _ = each.lockstep(states[key], slices(batch, 4))
    for state in states.values():
        assert all(map(torch.equal, passed, map(torch.as_tensor, pytree.tree_leaves(state))))
    truth, _ = plain(case)
    assert distance(states["alone"], truth) <= 1e-5


def test_a_gather_starts_when_its_parameters_are_written_and_not_before_backward_has_ended():
    graph = lower(zt.overlap_grads(), ACROSS).graph
    regions = [e.region for e in graph.eqns]
    index = {v: i for i, e in enumerate(graph.eqns) for v in e.results}
    starts = {graph.eqns[index[v]] for v in graph.carried_outputs}
    for start in starts:
        here = index[start.out]
        assert set(regions[here:]) <= {"update", "forward"} and "backward" not in regions[here:]
        assert max(index[v] for v in start.ins) == here - 1


def test_with_update_last_nothing_is_written_before_all_messages_that_the_step_waits_for():
    """The gathers for the next step follow: they read the new state, which is written in place."""
    graph = lower(zt.overlap_grads(update="last"), ACROSS).graph
    index = {v: i for i, e in enumerate(graph.eqns) for v in e.results}
    begin = first_write(graph)
    carried = {graph.eqns[index[v]] for v in graph.carried_outputs}
    assert all(i >= begin or not is_start(e) or e not in carried for i, e in enumerate(graph.eqns))
    in_place = donation(graph).in_place_ops
    assert all(graph.eqns[index[v]] in in_place for v in graph.outputs[:2])


def test_programs_for_other_sizes_of_the_batch_carry_the_same_gathers():
    case = CASES["mlp_momentum"]
    step = zt.chain(zt.shard_params(MESH), zt.overlap_grads(), ACROSS)(case.step)
    first = step.lower(case.state(), *case.batch(6))
    other = step.trace(case.state(), *case.batch(3)).lower(plan=first.plan, follow=True)
    names = [[repr(v) for v in x.graph.carried_inputs] for x in (first, other)]
    assert names[0] == names[1] != []


def test_one_rank_carries_nothing():
    assert lower(ACROSS, mesh=zt.AbstractMesh(dp=1)).graph.carried == 0


def test_a_step_that_begins_with_arrived_gathers_waits_for_none_of_them():
    """Over a link with latency alone: the first gather is exposed in a step of its own, and not in the second of two."""
    cluster = zt.cluster("h100", dp=Link("slow", 2e-5, 1e12))
    case = CASES["mlp_momentum"]
    shard = zt.shard_params(MESH)
    exposed = {}
    for prefetch in (zt.prefetch(), ACROSS):
        timeline = on_ranks(
            case, 4, shard, zt.overlap_grads(), prefetch, cluster=cluster
        ).timeline()
        exposed[prefetch] = timeline.exposed["dp", "param"]
        assert timeline.bound[0] <= timeline.seconds
        assert all(0 <= e.start <= e.end <= timeline.seconds * (1 + 1e-9) for e in timeline.events)
    assert exposed[ACROSS] < exposed[zt.prefetch()]


def test_what_a_carried_gather_takes_from_compute_is_shown_where_it_is_waited_for():
    """On a GPU a gather takes compute while it is under way. The bar of that time is in forward, as its wait is."""
    schedules = zt.overlap_grads(), ACROSS
    lowered = zt.chain(zt.shard_params(MESH), *schedules)(CASES["mlp_momentum"].step).lower(
        CASES["mlp_momentum"].state(),
        *CASES["mlp_momentum"].batch(4),
        cluster=zt.cluster("h100", dp="infiniband"),
    )
    bars = [bar for bar in lowered.timeline().events if bar.lane == COMPUTE]
    bars.sort(key=lambda bar: bar.start)
    regions = [bar.eqn.region for bar in bars]
    assert "update" not in regions[: regions.index("backward")]


def broken(graph, change: str):
    """A program that carries gathers wrongly."""
    if change == "a future that is no input of the next step":
        return graph.replace(carried=0)
    if change == "a gather of the old state":
        eqns = []
        for e in graph.eqns:
            is_carried = graph.carried_outputs[0] in e.results
            eqns.append(e.replace(args=(list(graph.inputs[:2]),)) if is_carried else e)
        return graph.replace(eqns=tuple(eqns))
    return graph.replace(outputs=(*graph.outputs[:-2], *reversed(graph.outputs[-2:])))


@pytest.mark.parametrize(("change", "message"), [
    ("a future that is no input of the next step", "output params.up.full.next': f32[16,8]! is still a future"),
    ("a gather of the old state", "params.up.full.next': f32[16,8]! is carried but is not a gather of the new state"),
    ("another order", "the step before has started params.up.full': f32[16,8]!, and this one starts "
                      "params.down.full.next': f32[6,16]!"),
])  # fmt: skip
def test_the_verifier_refuses_what_the_next_step_does_not_wait_for(change, message):
    graph = lower(zt.overlap_grads(), ACROSS).graph
    with pytest.raises(ProgramError) as caught:
        check(broken(graph, change))
    assert str(caught.value) == message


def test_micro_batches_are_refused():
    with pytest.raises(ValueError) as caught:
        lower(zt.accumulate(2), ACROSS)
    assert str(caught.value) == (
        "prefetch: across_steps=True, and step has 2 micro-batches, each of which gathers parameters. Only the first "
        "of them could begin with gathers that the step before has started.\n"
        "Leave out accumulate, or across_steps."
    )


def test_a_cuda_graph_is_refused():
    with fake_mesh() as mesh, pytest.raises(ValueError) as caught:
        lower(ACROSS, mesh=mesh).compile(cuda_graph=True)
    assert str(caught.value) == (
        "compile: step begins with gathers that the step before has started, as prefetch(across_steps=True) says, and "
        "a CUDA graph contains all messages of its step.\n"
        "Compile without cuda_graph, or leave across_steps out."
    )


def test_a_bucket_behind_a_copy_that_another_size_does_not_need_is_not_carried():
    """One row is contiguous, three are copied first. All ranks must carry the same gathers, whatever their batch."""

    def step(state, x):
        weights = {k: p.detach().requires_grad_() for k, p in state.items()}
        y = torch.tanh(x.contiguous() @ weights["a"]) @ weights["b"]
        grads = torch.autograd.grad(y.square().mean(), list(weights.values()))
        return {k: p - g for (k, p), g in zip(state.items(), grads)}, y.mean()

    state, data = {"a": torch.ones(8, 8), "b": torch.ones(8, 8)}, torch.ones(3, 16)[:, :8]
    sharded = zt.chain(zt.shard_params(MESH, stage=1), ACROSS)(step)
    first = sharded.lower(state, data)
    gathers = []
    for names, place in first.plan.gathers:
        for name in names:
            gathers.append(((name,), "the start + 1" if name == "b.full" else place))
    first = first.with_plan(dataclasses.replace(first.plan, gathers=tuple(gathers)))
    other = sharded.trace(state, data[:1]).lower(plan=first.plan, follow=True)
    assert [len(x.graph.carried_inputs) for x in (first, other)] == [1, 1]


def test_micro_batches_are_refused_before_the_step_is_planned():
    """A step that does not fit says so after that: ways to fit have micro-batches, too."""
    tight = zt.prefetch(memory=1, across_steps=True)
    with pytest.raises(
        ValueError, match="across_steps=True, and step has 2 micro-batches"
    ) as caught:
        lower(tight, zt.accumulate(2))
    assert not isinstance(caught.value, DoesNotFit)


def test_an_option_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(TypeError) as caught:
        zt.prefetch(across_steps=2)
    assert str(caught.value) == "prefetch: across_steps=2; it is True or False."


def test_a_limit_holds_for_the_end_of_the_step_too():
    """The gathers for the next step are live there."""
    lowered = lower(ACROSS)
    peak = lowered.memory_analysis().peak
    limited = lowered.graph.with_memory_limit(peak - 1, "prefetch")
    with pytest.raises(DoesNotFit) as caught:
        check_peak(limited, lowered.cluster.device)
    assert str(caught.value) == (
        f"prefetch(memory={peak - 1}): {format_bytes(peak - 1)} is less than the step needs with the gathers that it "
        f"starts for the next one: {peak} bytes ({format_bytes(peak)}).\n"
        f"Leave out across_steps, or give the step that much."
    )


@pytest.mark.parametrize("cluster", [
    zt.cluster("cpu", dp="ethernet-10g"), zt.cluster("h100", dp="infiniband"),
])  # fmt: skip
def test_the_timeline_counts_a_carried_gather_once(cluster):
    """It has a bar in the step that starts it, and one in the step in which it arrives."""
    lowered = on_ranks(CASES["mlp_momentum"], 4, zt.shard_params(MESH), ACROSS, cluster=cluster)
    assert lowered.graph.carried
    timeline = lowered.timeline()
    assert sum(event.bytes for event in timeline.events) == lowered.cost_analysis().wire_bytes
    sent = [event for event in timeline.events if event.lane != "compute" and event.arrives]
    assert len(sent) == sum(is_start(e) for e in lowered.graph.eqns)
