"""`offload(across_steps=True)`: copies of new moments to the host go on under the next step, and no bit changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import Net, batch, loop_of
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, distance, on_ranks, slices
from tests.transforms.test_offload import adam_by_rows, adam_state, failing
from ztrans.ir.copies import TO_DEVICE, TO_HOST
from ztrans.ir.donation import donation
from ztrans.ir.verifier import ProgramError, check
from ztrans.planning.buffers import storages
from ztrans.planning.cluster import HOST_LINKS
from ztrans.planning.cost import memory

ALONE = zt.offload(where="[mv].*", at_least=0)
ACROSS = zt.offload(where="[mv].*", at_least=0, across_steps=True)
STEPS = 20
SLOW = zt.cluster("h100", host_link=zt.Link("slow", latency=1e-4, bandwidth=1e8))


def same(a, b) -> bool:
    pairs = zip(*map(pytree.tree_leaves, (a, b)), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def carried(graph) -> list[str]:
    """The leaves of a program whose copies to the host go on after the step."""
    return [v.name for v in graph.state if v.future]


def lower(*transforms: zt.Transform, name: str = "clipped", cluster=SLOW):
    case = CASES[name]
    return zt.chain(*transforms)(case.step).lower(
        case.state(), *batches(case, 1)[0], cluster=cluster
    )


def trained(case, *transforms: zt.Transform, steps: int = STEPS):
    step = zt.chain(*transforms)(case.step)
    state = step.shard(case.state())
    outputs = []
    for each in batches(case, steps):
        state, output = step(state, *each)
        outputs.append(pytree.tree_map(torch.clone, output))
    return state, outputs


# The program.


def test_the_difference_prints(golden):
    cluster = zt.cluster("h100", host_link=zt.Link("slow", latency=5e-5, bandwidth=1e9))
    alone, across = (
        lower(
            zt.offload(where="m.0.*", at_least=0, across_steps=flag),
            name="mlp_momentum",
            cluster=cluster,
        )
        for flag in (False, True)
    )
    assert zt.ir.diff(alone, across) == golden


def test_each_leaf_is_waited_for_before_it_is_read_and_left_when_it_is_written():
    graph = lower(ACROSS).graph
    index = {v: i for i, e in enumerate(graph.eqns) for v in e.results}
    assert len(carried(graph)) == 8
    for leaf, new in graph.leaves:
        if leaf.future:
            (wait,) = [e for e in graph.eqns if leaf in e.ins]
            (copy,) = [e for e in graph.eqns if e.op is TO_DEVICE and wait.out in e.ins]
            assert index[wait.out] < index[copy.out] < index[new]
            assert graph.eqns[index[new]].op is TO_HOST


def test_a_copy_that_ends_within_the_step_does_not_go_on():
    """The moment of the last layer is updated while backward goes on."""
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    link = zt.Link("fast", latency=0.0, bandwidth=1e15)
    moved = zt.offload(where="m.4.*", at_least=0, across_steps=True)
    cluster = zt.cluster("h100", dp="nvlink4", host_link=link)
    low = lower(shard, moved, zt.overlap_grads(), name="mlp_momentum", cluster=cluster)
    assert not carried(low.graph)


@pytest.mark.parametrize("room", [1, 2, 4])
def test_where_there_is_little_room_the_last_copies_of_the_queue_go_on(room):
    """An earlier one has ended when the step waits for a later one, so it would only take room."""

    def step(state, x):
        params = [w.detach().requires_grad_() for w in state["w"]]
        y = x
        for w in params:
            y = torch.tanh(y @ w)
        grads = torch.autograd.grad(y.sum(), params)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        m = [0.9 * m + g / norm for m, g in zip(state["m"], grads)]
        return {"w": [w - m for w, m in zip(state["w"], m)], "m": m}, y.sum()

    state = {key: [torch.zeros(64, 64) for _ in range(8)] for key in "wm"}
    moved = zt.offload(where="*", at_least=0, across_steps=True)
    args = state, torch.ones(2, 64)
    least = memory(moved(step).lower(*args, cluster=SLOW).graph).peak
    limit = zt.prefetch(memory=least + room * 64 * 64 * 4)
    graph = zt.chain(moved, limit)(step).lower(*args, cluster=SLOW).graph
    copied = [e.kwargs["over"].name for e in graph.eqns if e.op is TO_HOST]
    waited_for = {e.out.name: e.ins[0].name for e in graph.eqns if e.ins and e.ins[0].future}
    go_on = [waited_for.get(name) in carried(graph) for name in copied]
    assert 0 < sum(go_on) < len(go_on)
    assert go_on == sorted(go_on)


@pytest.mark.parametrize("leaf", ["returned twice", "returned as an output", "the batch", "a view"])
def test_what_the_caller_may_write_over_is_not_read_after_the_step(leaf):
    """The caller may write over the new weights, the outputs and the batch at once, while a copy still read them."""

    def step(state, x):
        w = state["w"] + x
        m = {
            "returned twice": w,
            "returned as an output": state["m"] + x,
            "the batch": x,
            "a view": w.t(),
        }[leaf]
        return {"w": w, "m": m}, m if leaf == "returned as an output" else x.sum()

    moved = zt.offload(where="m", at_least=0, across_steps=True)(step)
    state = {"w": torch.ones(4, 4), "m": torch.zeros(4, 4)}
    assert not carried(moved.lower(state, torch.ones(4, 4), cluster=SLOW).graph)


def test_no_copy_reads_the_storage_of_a_leaf_after_the_step():
    """The new moment could be written over the old weight, which nothing else needs. The caller may write there."""

    def step(state, x):
        w = state["w"].detach().requires_grad_()
        (g,) = torch.autograd.grad(torch.tanh(x @ w).square().mean(), [w])
        return {"w": g * 2.0, "m": state["w"] + g.square()}, x.sum()

    state = {"w": torch.ones(4, 4), "m": torch.zeros(4, 4)}
    owners = []
    for across in (False, True):
        moved = zt.offload(where="m", at_least=0, across_steps=across)(step)
        graph = moved.lower(state, torch.ones(64, 4), cluster=SLOW).graph
        (copy,) = [e for e in graph.eqns if e.op is TO_HOST]
        owners.append(donation(graph).owner[copy.ins[0]].name)
    assert carried(graph) == ["m"]
    assert owners[0] == "w" != owners[1]


def without_wait_before(graph, leaf):
    return graph.replace(eqns=tuple(e for e in graph.eqns if leaf not in e.ins))


def test_the_verifier_refuses_a_leaf_that_the_next_step_does_not_take_as_a_future():
    across = lower(
        zt.offload(where="m.0.weight", at_least=0, across_steps=True), name="mlp_momentum"
    ).graph
    place = next(i for i, v in enumerate(across.inputs) if v.future)
    leaf = across.inputs[place]
    with pytest.raises(ProgramError, match=r"m.0.weight.host: .* is read before it is bound"):
        check(without_wait_before(across, leaf))
    alone = lower(zt.offload(where="m.0.weight", at_least=0), name="mlp_momentum").graph
    returned = alone.outputs[place]
    (wait,) = [e for e in alone.eqns if returned in e.results]
    outputs = tuple(wait.ins[0] if v is returned else v for v in alone.outputs)
    wrong = alone.replace(eqns=tuple(e for e in alone.eqns if e is not wait), outputs=outputs)
    with pytest.raises(ProgramError) as caught:
        check(wrong)
    assert str(caught.value) == (
        "state m.0.weight: f32<host>[16,6] comes back as add.host': f32<host>[16,6]!"
    )


# Bits.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_momentum", "clipped", "adamw_fused", "adamw_foreach"])
def test_twenty_steps_have_the_same_bits(name):
    case = CASES[name]
    assert carried(lower(ACROSS, name=name, cluster=None).graph)
    assert same(trained(case, ACROSS), trained(case))


@pytest.mark.parametrize("name, stage", [("mlp_momentum", 0), ("clipped", 3)])
@pytest.mark.parametrize(
    "prefetch", [zt.prefetch(memory=1 << 20, across_steps=x) for x in (False, True)]
)
def test_ranks_have_the_same_bits(name, stage, prefetch):
    """With gathers that pass from step to step too."""
    case = CASES[name]
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    results = []
    for transforms in ((), (ACROSS,)):
        low = on_ranks(case, 2, shard, *transforms, zt.overlap_grads(), prefetch)
        state = case.state()
        for each in batches(case, 3):
            state, outputs = low.lockstep(state, slices(each, 2))
        results.append((state, outputs))
    assert carried(low.graph)
    assert same(*results)


def test_schedules_commute_with_it():
    case = CASES["clipped"]
    shard = zt.shard_params(zt.AbstractMesh(dp=2))
    texts = set()
    for transforms in ((ACROSS, *ALL), (*ALL, ACROSS), (ALL[0], ACROSS, *ALL[1:])):
        texts.add(str(on_ranks(case, 2, shard, *transforms)).split("\n", 1)[1])
    assert len(texts) == 1


@pytest.mark.slow
def test_other_states_and_batches_of_other_sizes_have_the_same_bits():
    case = CASES["clipped"]
    results = []
    for transform in (zt.chain(), ACROSS):
        step = zt.chain(transform)(case.step)
        states = [step.shard(case.state()) for _ in range(2)]
        torch.manual_seed(1)
        for k, turn in enumerate((0, 0, 1, 1, 0, 1)):
            states[turn], _ = step(states[turn], *case.batch(6 - k % 3))
        results.append(states)
    assert same(*results)


def test_a_lifted_loop_with_a_scheduler_and_a_checkpoint_has_the_same_bits(tmp_path):
    results = []
    for across in (None, False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
        if across is not None:
            step = zt.offload(where="optimizer.*.exp_avg*", at_least=0, across_steps=across)(step)
            state = step.shard(state)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        for k in range(STEPS):
            state, _ = step(state, batch(k))
            scheduler.step()
            if across and k == 7:
                zt.save(tmp_path / "checkpoint", state).result()
                state = zt.load(tmp_path / "checkpoint", state, step)
        zt.write_back(model, optimizer, state)
        results.append([*model.state_dict().values(), optimizer.state_dict()["state"]])
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_after_a_failed_step_steps_go_on():
    x = torch.arange(8.0).view(2, 4)
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 7])
    results = []
    for transform in (zt.chain(), zt.offload(where="m", at_least=0, across_steps=True)):
        step = failing(transform)
        state = step.shard({"w": torch.ones(4, 4), "m": torch.zeros(4, 4)})
        state, _ = step(state, x, good)
        with pytest.raises(Exception, match="index"):
            step(state, x, bad)
        results.append(step(state, x, good))
    assert carried(step.lower(state, x, good).graph) == ["m"]
    assert same(*results)


def test_steps_update_the_state_in_place():
    case = CASES["mlp_momentum"]
    step = ACROSS(case.step)
    state = step.shard(case.state())
    addresses = [x.data_ptr() for x in state["m"].values()]
    for each in batches(case, 3):
        state, _ = step(state, *each)
    assert [x.data_ptr() for x in state["m"].values()] == addresses


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_inductor_compiles_it():
    case = CASES["clipped"]
    low = lower(ACROSS, cluster=None)
    assert carried(low.graph)
    compiled = low.compile(backend="inductor")
    state = ACROSS(case.step).shard(case.state())
    for each in batches(case, 3):
        state, _ = compiled(state, *each)
    assert distance(state, trained(case, steps=3)[0]) < 1e-5


# Time and memory.

LAYERS = 8
WIDTH = 256


def clipped(state, x):
    """Each layer has a weight and a momentum. Their updates follow backward, because gradients are clipped."""
    weights = {k: w.detach().requires_grad_() for k, w in state["weights"].items()}
    y = x
    for w in weights.values():
        y = torch.tanh(y @ w)
    grads = torch.autograd.grad(y.square().mean(), list(weights.values()))
    norm = sum(g.square().sum() for g in grads).sqrt()
    moments = {k: 0.9 * state["moments"][k] + g / norm for k, g in zip(weights, grads)}
    return {
        "weights": {k: w - moments[k] for k, w in state["weights"].items()},
        "moments": moments,
    }, y.mean()


def of_layers(across_steps: bool, bandwidth: float = 14e9, rows: int = 4096):
    weights = {f"w{i:02}": torch.zeros(WIDTH, WIDTH) for i in range(LAYERS)}
    link = dataclasses.replace(HOST_LINKS["pcie5"], bandwidth=bandwidth)
    moved = zt.offload(where="moments.*", at_least=0, across_steps=across_steps)(clipped)
    state = {"weights": weights, "moments": dict(weights)}
    return moved.lower(state, torch.zeros(rows, WIDTH), cluster=zt.cluster("h100", host_link=link))


def test_the_timeline_shows_the_copies_under_the_next_forward():
    alone, across = (of_layers(flag).timeline() for flag in (False, True))
    out = [e for e in across.events if e.lane == "host out"]
    assert out[0].start == 0.0, "a copy of the step before is under way when the step begins"
    assert alone.exposed["host", "offload"] > 0.1 * alone.seconds
    assert across.exposed.get(("host", "offload"), 0.0) < 0.01 * across.seconds
    assert across.seconds < 0.85 * alone.seconds
    assert all(0 <= e.start <= e.end <= across.seconds * (1 + 1e-9) for e in across.events)


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [1e9, 5e9, 50e9])
def test_the_peak_does_not_rise(bandwidth):
    across = of_layers(True, bandwidth)
    assert memory(across.graph).peak <= memory(of_layers(False, bandwidth).graph).peak


def test_with_too_little_room_copies_end_within_the_step():
    """With a small batch the peak is in the update: two moments of each leaf would take the place of its gradient."""
    alone, across = (
        zt.offload(where="[mv].*", at_least=0, across_steps=flag)(adam_by_rows)
        .lower(adam_state(), torch.ones(2, 64), cluster=SLOW)
        .graph
        for flag in (False, True)
    )
    assert memory(across).peak <= memory(alone).peak
    assert len(carried(across)) < 16


def test_what_a_copy_reads_is_counted_at_both_ends_of_the_step():
    graph = of_layers(True).graph
    counted = memory(graph)
    leaf = WIDTH * WIDTH * 4
    state = LAYERS * leaf
    batch_bytes = 4096 * WIDTH * 4
    count = len(carried(graph))
    assert count > 1
    assert counted.live[-1] >= state + batch_bytes + count * leaf
    assert counted.live[0] >= state + batch_bytes + count * leaf
    waits = [
        i
        for i, e in enumerate(graph.eqns)
        if e.ins and e.ins[0] in graph.inputs and e.ins[0].future
    ]
    read = [s for s in storages(graph, donation(graph)) if s.first == 0 and s.last in waits]
    assert [s.bytes for s in read] == [leaf] * count


def test_a_measured_timeline_has_the_copies_too():
    case = CASES["mlp_momentum"]
    step = ACROSS(case.step)
    state, each = step.shard(case.state()), batches(case, 1)[0]
    measured = step.compiled(state, *each).profile(state, *each, steps=2).timeline
    assert {"host in", "host out"} <= set(measured.lanes)
    assert measured.host_peak == sum(x.nbytes for x in state["m"].values())


# Mistakes.


def test_micro_batches_are_refused():
    with pytest.raises(ValueError) as caught:
        lower(zt.accumulate(2), ACROSS)
    assert str(caught.value).startswith(
        "offload: across_steps=True, and step has 2 micro-batches. Forward runs once for each of them, and the copies "
        "of the step before could go on under the first one only.\n"
        "Leave out accumulate, or across_steps."
    )


def test_without_leaves_of_the_state_it_is_refused():
    with pytest.raises(TypeError) as caught:
        zt.offload(memory="auto", across_steps=True)
    assert str(caught.value) == (
        "offload: across_steps=True is for leaves of the state, and `where` chooses none.\n"
        "Pass where='optimizer.*.exp_avg*', or leave out across_steps."
    )


def test_an_option_that_is_neither_true_nor_false_is_refused():
    with pytest.raises(TypeError) as caught:
        zt.offload(where="m", at_least=0, across_steps=2)
    assert str(caught.value) == "offload: across_steps=2; it is True or False."
