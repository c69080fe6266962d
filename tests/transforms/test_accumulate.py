"""accumulate: a step runs in micro-batches, its program is written for one of them, and its results are those of a loop."""

import copy
import dataclasses
import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

import ztrans as zt
from benchmarks.peers.memory import Peak, lent
from tests.support.lifted import loop_of
from ztrans.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, is_start
from ztrans.ir.donation import first_write
from ztrans.runtime.codegen import to_fx

SIZES = (8, 16, 16, 4)


def loss_fn(params, x, y):
    for k, w in enumerate(params):
        x = torch.relu(x @ w) if k else x @ w
    return (x - y).square().mean()


def train(state, x, y):
    grads, loss = grad_and_value(loss_fn)(state["params"], x, y)
    return updated(state, grads), loss


def updated(state, grads):
    m = [0.9 * m + g for m, g in zip(state["m"], grads)]
    return {"params": [p - 0.1 * m for p, m in zip(state["params"], m)], "m": m}


def loop(state, x, y, micro):
    """The loop that a user writes."""
    total = None
    losses = []
    for part in zip(x.chunk(micro), y.chunk(micro)):
        grads, loss = grad_and_value(loss_fn)(state["params"], *part)
        total = grads if total is None else [t + g for t, g in zip(total, grads)]
        losses.append(loss)
    return updated(state, [t / micro for t in total]), sum(losses) / micro


def new_state():
    torch.manual_seed(0)
    params = [torch.randn(a, b) for a, b in itertools.pairwise(SIZES)]
    return {"params": params, "m": [torch.ones_like(p) for p in params]}


def batch(rows=24):
    torch.manual_seed(1)
    return torch.randn(rows, SIZES[0]), torch.randn(rows, SIZES[-1])


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    )


def lower(micro=3, stage=None, ranks=2, keep="auto", rows=12):
    schedules = zt.overlap_grads(), zt.prefetch()
    sharded = (
        ()
        if stage is None
        else (zt.shard_params(zt.AbstractMesh(dp=ranks), stage=stage), *schedules)
    )
    chain = zt.chain(zt.accumulate(micro, keep=keep), *sharded)(train)
    trace = traced(train, rows, zt.accumulate(micro))
    return dataclasses.replace(trace, transforms=chain.transforms).lower()


@functools.cache
def traced(step, rows, *micro):
    """A step of `rows`, or of a micro-batch of them, as it is traced once for all other transforms."""
    return zt.chain(*micro)(step).trace(new_state(), *batch(rows))


def in_three_parts(state, x, y):
    return loop(state, x, y, micro=3)


def extra_gradient(state, x, y):
    """A gradient that both a second forward and the update read."""
    first, _ = grad_and_value(loss_fn)(state["params"], x, y)
    ahead = [p - 1e-4 * g for p, g in zip(state["params"], first)]
    second, loss = grad_and_value(loss_fn)(ahead, x, y)
    m = [0.9 * m + g1 + g2 for m, g1, g2 in zip(state["m"], first, second)]
    return {"params": [p - 0.1 * m for p, m in zip(state["params"], m)], "m": m}, loss


def ahead_in_part(state, x, y):
    """A second forward reads the gradient of the first layer, and only the update reads the others."""
    params = state["params"]
    first, _ = grad_and_value(loss_fn)(params, x, y)
    ahead = [params[0] - 1e-4 * first[0], *params[1:]]
    second, loss = grad_and_value(loss_fn)(ahead, x, y)
    return updated(state, [second[0], *first[1:]]), loss


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("step", [extra_gradient, ahead_in_part])
def test_a_gradient_that_forward_reads_too_is_that_of_each_micro_batch(step, stage):
    """Each micro-batch looks ahead along its own mean gradient, whether sums are kept whole or as shards.

    Its reduction runs in each micro-batch, so it shares no bucket with the reduction of a whole sum.
    """
    state = pytree.tree_map(torch.Tensor.double, new_state())
    data = tuple(x.double() for x in batch(16))
    micro_batches = [[x[r::2][k * 4 :][:4] for x in data] for k in range(2) for r in range(2)]
    slices = [tuple(torch.cat(x) for x in zip(*micro_batches[r::2])) for r in range(2)]
    grads = []
    for k in range(2):
        both = [torch.cat(x) for x in zip(*micro_batches[2 * k : 2 * k + 2])]
        new, _ = step(state, *both)
        grads.append([b - 0.9 * a for a, b in zip(state["m"], new["m"])])
    expected = updated(state, [(a + b) / 2 for a, b in zip(*grads)])

    traced = zt.accumulate(2)(step).trace(state, *slices[0])
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage)
    planned = zt.overlap_grads(), zt.prefetch()
    cluster = zt.cluster("h100", dp="ethernet-1g")  # a message costs more than this backward
    for keep, schedules in itertools.product(("whole", "shard"), ((), planned)):
        chain = zt.chain(zt.accumulate(2, keep=keep), shard, *schedules)(step)
        lowered = dataclasses.replace(traced, transforms=chain.transforms).lower(cluster=cluster)
        result, _ = lowered.lockstep(state, slices)
        for a, b in zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True):
            far = (a - b).abs().max()
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12), (keep, schedules, far)


def with_means(state, x):
    """One mean changes a statistic in each micro-batch. Only the update reads the other: its average over all."""
    running = 0.9 * state["running"] + 0.1 * zt.pmean(x.mean(0), "dp")
    squares = zt.pmean(x.square().mean(0), "dp")
    grad, loss = grad_and_value(lambda w: ((x - running) * w).sum(1).square().mean())(state["w"])
    average = 0.9 * state["average"] + 0.1 * squares
    return {"w": state["w"] - 0.1 * grad, "running": running, "average": average}, loss


def test_a_mean_of_each_micro_batch_and_one_of_all_share_no_bucket():
    state = {name: torch.ones(8).double() for name in ("w", "running", "average")}
    micro_batches = torch.arange(128.0).double().sin().view(2, 2, 4, 8)  # each for two ranks
    slices = [(micro_batches[:, rank].flatten(0, 1),) for rank in range(2)]
    running = state["running"]
    for both in micro_batches.flatten(1, 2):
        running = 0.9 * running + 0.1 * both.mean(0)
    average = 0.9 * state["average"] + 0.1 * micro_batches.square().mean((0, 1, 2))

    schedules = zt.shard_params(zt.AbstractMesh(dp=2), stage=0), zt.overlap_grads()
    step = zt.chain(zt.accumulate(2), *schedules)(with_means)
    lowered = step.lower(state, *slices[0], cluster=zt.cluster("h100", dp="ethernet-1g"))
    result, _ = lowered.lockstep(state, slices)
    assert torch.allclose(result["running"], running, rtol=1e-12)
    assert torch.allclose(result["average"], average, rtol=1e-12)

    (first, _), (second, place), *others = lowered.plan.reductions
    assert first + second == ("pmean", "pmean_1")
    edited = dataclasses.replace(lowered.plan, reductions=((first + second, place), *others))
    with pytest.raises(ValueError, match=r"share a bucket: micro-batches each and all\."):
        lowered.with_plan(edited)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_on_one_rank_it_has_the_bits_of_the_loop(micro):
    step = zt.accumulate(micro)(train)
    state = step.shard(new_state())
    wanted = new_state()
    for _ in range(3):
        state, loss = step(state, *batch())
        wanted, wanted_loss = loop(wanted, *batch(), micro)
        assert same(state, wanted) and torch.equal(loss, wanted_loss)


@pytest.mark.parametrize("keep", ["whole", "shard"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_one_rank_every_stage_has_the_bits_of_the_loop(stage, keep):
    lowered = lower(3, stage, ranks=1, keep=keep, rows=24)
    state, (loss,) = lowered.lockstep(new_state(), [batch()])
    assert same((state, loss), loop(new_state(), *batch(), 3))


@pytest.mark.parametrize("stage, keep, gathered, reduced", [
    (0, "auto", 0, 1), (0, "shard", 0, 3), (1, "auto", 1, 1), (1, "shard", 1, 3),
    (2, "auto", 1, 3), (2, "whole", 1, 1), (3, "auto", 3, 3), (3, "whole", 3, 1),
])  # fmt: skip
def test_gradients_are_kept_whole_or_cut_and_parameters_gathered_once_or_each_time(
    stage, keep, gathered, reduced
):
    lowered = lower(3, stage, keep=keep)
    starts = [
        e
        for part in zt.ir.micro_batch_programs(lowered.graph).in_order
        for e in part.eqns
        if is_start(e)
    ]

    def count(role, *ops):
        return sum(len(e.outs) for e in starts if e.op in ops and e.provenance.role == role)

    assert count("grad", REDUCE_SCATTER, ALL_REDUCE) == 3 * reduced
    assert count("param", ALL_GATHER) in (
        3 * gathered,
        (3 + 2) * gathered,
    )  # at stage 3 two of them again in backward
    assert count("output", ALL_REDUCE) == 1
    assert lowered.cost_analysis().over("dp", "grad") == sum(
        t.bytes for (_, role), t in lowered.plan.traffic if role == "grad"
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_as_written_it_sends_what_the_loop_sends_and_a_plan_drops_fewer_gathers(stage):
    def sent(trace, *transforms):
        chain = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2), stage=stage), *transforms)(train)
        lowered = dataclasses.replace(trace, transforms=chain.transforms).lower()
        cost = lowered.cost_analysis()
        return {role: cost.over("dp", role) for role in ("param", "grad", "output")}

    micro = zt.accumulate(3)
    accumulated = traced(train, 12, micro)
    in_step = traced(in_three_parts, 12)
    assert sent(accumulated, micro) == sent(in_step)
    planned = sent(accumulated, micro, zt.prefetch())
    unrolled = sent(in_step, zt.prefetch())
    assert {**planned, "param": 0} == {**unrolled, "param": 0}
    assert (
        planned["param"] > unrolled["param"]
        if stage == 3
        else planned["param"] == unrolled["param"]
    )


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_program_is_as_long_for_sixteen_micro_batches_as_for_two(stage):
    few = lower(2, stage, rows=16)
    many = lower(16, stage, rows=128)
    assert len(few.unordered.eqns) == len(many.unordered.eqns)
    # The plan then makes buckets, so it has no more messages.
    assert len(many.graph.eqns) <= len(many.unordered.eqns)
    lengths = [
        [len(part.eqns) for part in zt.ir.micro_batch_programs(each.unordered).different]
        for each in (few, many)
    ]
    assert lengths[0] == [lengths[1][0], lengths[1][2]]
    peaks = [
        dataclasses.replace(each, graph=each.unordered).memory_analysis().peak
        for each in (few, many)
    ]
    assert peaks[1] - peaks[0] == 14 * 8 * 12 * 4  # the batch


@pytest.mark.parametrize("stage, keep, whole", [
    (None, "shard", True), (1, "auto", True), (1, "shard", False), (3, "auto", False), (3, "whole", True),
])  # fmt: skip
def test_a_gradient_is_summed_before_its_mark_or_after_it(stage, keep, whole):
    graph = dict(lower(3, stage, keep=keep).history)["accumulate"]
    makers = zt.ir.producers(graph.eqns)
    marks = [e for e in graph.eqns if e.op is zt.ir.GRADIENT]
    assert len(marks) == 3
    for mark in marks:
        assert (makers[mark.args[0]].op is zt.ir.ACCUMULATE) == whole


def test_gradients_that_the_step_adds_itself_have_one_sum():
    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=1)
    graph = zt.chain(shard, zt.accumulate(2))(in_three_parts).lower(new_state(), *batch()).graph
    sums = [e for e in graph.eqns if e.op is zt.ir.ACCUMULATE and e.out.shape]
    assert len(sums) == 3


@pytest.mark.parametrize("stage", [None, 2])
def test_sums_are_added_up_where_their_first_terms_are(stage):
    programs = zt.ir.micro_batch_programs(lower(3, stage, rows=24).unordered)
    assert programs.sums > 0
    for program in programs.different[1:]:
        makers = {out: e for e in program.eqns for out in e.results}
        adds = [makers[total] for _, total in program.donated]
        assert [e.args[0] for e in adds] == [earlier for earlier, _ in program.donated]
        assert len(adds) == programs.sums


def test_costs_are_those_of_all_micro_batches():
    lowered = lower(5, 2, rows=20)
    first, middle, last = zt.ir.micro_batch_programs(lowered.graph).different

    def flops(graph):
        return dataclasses.replace(lowered, graph=graph).cost_analysis().flops

    assert lowered.cost_analysis().flops == flops(first) + 3 * flops(middle) + flops(last)
    seconds = [
        dataclasses.replace(lowered, graph=part).timeline().seconds
        for part in (first, middle, last)
    ]
    timeline = lowered.timeline()
    assert timeline.seconds == pytest.approx(seconds[0] + 3 * seconds[1] + seconds[2])
    assert timeline.bound[0] <= timeline.seconds * (1 + 1e-9)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_last_micro_batch_reduces_while_backward_runs(stage):
    cluster = dataclasses.replace(zt.cluster("cpu", dp="ethernet-1g"))
    step = zt.chain(
        zt.shard_params(zt.AbstractMesh(dp=2), stage=stage),
        zt.overlap_grads(bucket=0),
        zt.accumulate(3),
    )(train)
    last = zt.ir.micro_batch_programs(
        step.lower(new_state(), *batch(12), cluster=cluster).graph
    ).last
    reduces = [k for k, e in enumerate(last.eqns) if is_start(e) and e.provenance.role == "grad"]
    matmuls = [k for k, e in enumerate(last.eqns) if "mm" in str(e.op)]
    assert len(reduces) == 3 and reduces[0] < matmuls[-1]


def test_scalars_are_averaged_and_other_outputs_joined():
    def step(state, x, y):
        new, loss = train(state, x, y)
        return new, {
            "loss": loss,
            "x": x * 2,
            "rows": (x > 0).sum(1),
            "worst": loss.detach() * 3,
            "const": 7,
            "none": None,
        }

    x, y = batch()
    _, out = zt.accumulate(4)(step)(zt.accumulate(4)(step).shard(new_state()), x, y)
    _, loss = loop(new_state(), x, y, 4)
    assert torch.equal(out["loss"], loss) and torch.allclose(out["worst"], 3 * loss)
    assert torch.equal(out["x"], x * 2) and torch.equal(out["rows"], (x > 0).sum(1))
    assert out["const"] == 7 and out["none"] is None


@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_of_ranks_are_joined(stage):
    def step(state, x, y):
        new, loss = train(state, x, y)
        return new, (loss, x @ state["params"][0])

    local = zt.shard_params(zt.AbstractMesh(dp=2), stage=stage, outputs="local")
    lowered = zt.chain(local, zt.accumulate(3))(step).lower(new_state(), *batch(12))
    x, y = batch(24)
    _, outs = lowered.lockstep(new_state(), list(zip(x.chunk(2), y.chunk(2))))
    for (_, shown), rows in zip(outs, x.chunk(2)):
        assert torch.allclose(shown, rows @ new_state()["params"][0], atol=1e-5)


def test_numbers_and_scalars_are_passed_to_every_micro_batch():
    def step(state, x, y, scale, *, rate=1.0):
        grads, loss = grad_and_value(lambda p: loss_fn(p, x, y) * scale)(state["params"])
        return {**state, "params": [p - rate * g for p, g in zip(state["params"], grads)]}, loss

    (x, y), scaled = batch(), zt.accumulate(4)(step)
    state, _ = scaled(scaled.shard(new_state()), x, y, torch.tensor(2.0), rate=0.1)
    wanted, _ = zt.Step.of(step)(
        zt.Step.of(step).shard(new_state()), x, y, torch.tensor(2.0), rate=0.1
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(state["params"], wanted["params"]))


def test_random_draws_are_those_of_the_loop():
    def loss_fn(w, x):
        return (F.dropout(x, 0.5) @ w).square().mean()

    def step(state, x):
        g, loss = grad_and_value(loss_fn)(state["w"], x)
        return {
            "w": state["w"] - g - 0.01 * torch.randn_like(g)
        }, loss  # the update draws too, once

    w, (x, _) = torch.randn(SIZES[0], 3), batch()
    torch.manual_seed(5)
    grads, losses = zip(*(grad_and_value(loss_fn)(w, part) for part in x.chunk(3)))
    wanted = w - sum(grads[1:], grads[0]) / 3 - 0.01 * torch.randn_like(w)
    torch.manual_seed(5)
    state, loss = zt.accumulate(3)(step)({"w": w.clone()}, x)
    assert torch.equal(state["w"], wanted) and torch.equal(loss, sum(losses) / 3)


def test_statistics_change_with_every_micro_batch_and_counts_once():
    model = nn.Sequential(nn.Linear(SIZES[0], 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = copy.deepcopy(model)
    step, state = zt.lift(loop_of(model, optimizer), model, optimizer)
    state, _ = zt.accumulate(3)(step)(state, batch()[0])
    norm = wanted[1]
    for part in batch()[0].chunk(3):
        wanted(part)
    stats = pytree.tree_leaves_with_path(state)
    named = {str(path[-1].key): leaf for path, leaf in stats if hasattr(path[-1], "key")}
    assert torch.equal(named["1.running_mean"], norm.running_mean) and torch.equal(
        named["1.running_var"], norm.running_var
    )
    assert named["1.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__
)
def test_a_lifted_loop_has_the_bits_of_the_loop_over_micro_batches(optimizer):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        return model, optimizer(
            model.parameters(), lr=0.01, **({} if optimizer is torch.optim.SGD else {"fused": True})
        )

    model, opt = build()

    def body(x, y):
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return loss

    lifted, state = zt.lift(body, model, opt)
    step = zt.accumulate(4)(lifted)
    for _ in range(3):
        state, _ = step(state, *batch())
    zt.write_back(model, opt, state)

    wanted, opt = build()
    for _ in range(3):
        opt.zero_grad()
        for x, y in zip(*(t.chunk(4) for t in batch())):
            (
                F.mse_loss(wanted(x), y) / 4
            ).backward()  # 4 is a power of two: no bit depends on where it divides
        opt.step()
    assert same(list(model.parameters()), list(wanted.parameters()))


def test_a_leaf_that_cannot_be_cut_is_named():
    def step(state, x, targets):
        return train(state, x, targets["y"])

    x, y = batch()
    with pytest.raises(
        ValueError,
        match=re.escape(
            "accumulate: targets.y has 22 rows, which cannot be cut into 4 equal parts"
        ),
    ):
        zt.accumulate(4)(step)(new_state(), x, {"y": y[:22]})
    compiled = zt.accumulate(4)(train).lower(new_state(), x, y).compile()
    with pytest.raises(TypeError, match=re.escape("x was f32[24,8] and is f32[20,8]")):
        compiled(new_state(), x[:20], y[:20])
    with pytest.raises(
        ValueError,
        match=re.escape("x has 12 rows, and the program is for 4 micro-batches of 6 rows"),
    ):
        zt.ir.evaluate(compiled.graph, *pytree.tree_leaves(new_state()), x[:12], y[:12])


def test_options_are_checked():
    with pytest.raises(
        ValueError, match=r"accumulate: micro=0; it is the number of micro-batches, at least 1"
    ):
        zt.accumulate(0)
    with pytest.raises(
        ValueError, match=r"accumulate: keep='both'; use 'whole', 'shard' or 'auto'"
    ):
        zt.accumulate(2, keep="both")
    with pytest.raises(ValueError, match=r"accumulate: applied twice with different options"):
        zt.chain(zt.accumulate(2), zt.accumulate(4))(train)
    with pytest.raises(ValueError, match=r"to_fx: train runs for 3 micro-batches"):
        to_fx(lower(3).graph)


def test_a_value_of_one_micro_batch_in_the_update_is_an_error():
    def step(state, x, y):
        new, loss = train(state, x, y)
        return {
            **new,
            "m": [m + x.mean(0).sum() + x[:1].T for m in new["m"][:1]] + new["m"][1:],
        }, loss

    with pytest.raises(
        ValueError,
        match=r"accumulate: the update reads .* is not a gradient: it has no mean.\n  at .*test_accumulate.py",
    ):
        zt.accumulate(2)(step).lower(new_state(), *batch())

    def count(state, x, y):
        new, loss = train(state, x, y)
        return new, (loss, (x > 0).sum())

    with pytest.raises(
        ValueError,
        match=r"accumulate: the step returns sum.*is a scalar that is not a float(.|\n)*Return a mean, such as an accuracy, as a float",
    ):
        zt.accumulate(2)(count).lower(new_state(), *batch())

    def averaged_count(state, x, y):
        new, loss = train(state, x, y)
        return new, (loss, zt.pmean((x > 0).sum()))

    with pytest.raises(
        ValueError,
        match=r"the step returns pmean.*is not a float: it has no mean(.|\n)*zt.pmean\(x.float\(\)\)",
    ):
        zt.accumulate(2)(averaged_count).lower(new_state(), *batch())


def test_a_scalar_of_the_forward_enters_the_update_as_its_mean():
    def step(state, x, y):
        new, loss = train({k: state[k] for k in ("params", "m")}, x, y)
        return {**new, "ema": 0.9 * state["ema"] + 0.1 * loss}, loss

    state, loss = zt.accumulate(3)(step)({**new_state(), "ema": torch.tensor(1.0)}, *batch())
    assert torch.equal(state["ema"], 0.9 * torch.tensor(1.0) + 0.1 * loss)


def test_parameters_that_are_updated_between_two_backwards_are_an_error():
    def gan(state, x, y):
        grads, _ = grad_and_value(loss_fn)(state["params"], x, y)
        params = [p - 0.1 * g for p, g in zip(state["params"], grads)]
        more, loss = grad_and_value(lambda m: loss_fn(params, x @ m[0][:, :8], y))(state["m"])
        return {"params": params, "m": [m - g for m, g in zip(state["m"], more)]}, loss

    with pytest.raises(
        ValueError, match=r"accumulate: state params.0: .* is updated before the last backward"
    ):
        zt.accumulate(2)(gan).lower(new_state(), *batch())


def test_half_precision_gradients_are_rounded_when_they_are_sent_and_not_when_they_are_summed():
    def half(state, x, y):
        grads, loss = grad_and_value(lambda p: loss_fn([w.bfloat16() for w in p], x.bfloat16(), y))(
            state["params"]
        )
        return updated(state, grads), loss

    shard = zt.shard_params(zt.AbstractMesh(dp=2), stage=1, reduce_dtype=torch.bfloat16)
    graph = zt.chain(shard, zt.accumulate(4))(half).lower(new_state(), *batch()).graph
    sums = [e for e in graph.eqns if e.op is zt.ir.ACCUMULATE and len(e.out.shape) == 2]
    assert len(sums) == 3 and all(e.out.dtype == torch.float32 for e in sums)
    starts = [e for e in graph.eqns if is_start(e) and e.provenance.role == "grad"]
    assert all(e.kwargs["dtype"] == torch.bfloat16 for e in starts)


def test_a_step_without_gradients_runs_in_micro_batches():
    def evaluate(state, x, y):
        return state, (loss_fn(state["params"], x, y), x @ state["params"][0])

    x, y = batch()
    _, (loss, hidden) = zt.accumulate(4)(evaluate)(new_state(), x, y)
    assert torch.allclose(loss, loss_fn(new_state()["params"], x, y))
    assert torch.allclose(hidden, x @ new_state()["params"][0], atol=1e-5)


def test_a_plan_is_saved_and_used_again(tmp_path):
    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), zt.overlap_grads(), zt.accumulate(3))(
        train
    )
    first = step.lower(new_state(), *batch(12))
    first.plan.save(tmp_path / "plan.json")
    again = step.with_plan(zt.Plan.load(tmp_path / "plan.json")).lower(new_state(), *batch(12))
    assert str(again.graph) == str(first.graph)


def test_a_recorded_step_advances_the_state_and_tunes_the_plan():
    step = zt.accumulate(3)(train)
    state = new_state()
    wanted = new_state()
    profile = step.tune(state, *batch(), steps=2).before.profile
    for _ in range(4):
        wanted, _ = loop(wanted, *batch(), 3)
    assert same(state, wanted)
    assert any("mm" in signature for signature in profile.seconds_by_signature)


@pytest.mark.exhaustive
@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch"
)  # Inductor's own modules use torch.jit
def test_compiled_kernels_sum_in_place_and_agree():
    compiled = zt.accumulate(3)(train).lower(new_state(), *batch()).compile(backend="inductor")
    state, loss = compiled(new_state(), *batch())
    wanted, wanted_loss = loop(new_state(), *batch(), 3)
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-5)
        for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(wanted))
    )
    assert torch.allclose(loss, wanted_loss)


@pytest.mark.slow
def test_the_peak_is_the_one_that_was_predicted():
    layers = 4
    width = 256
    rows = 512

    def step(state, x):
        def loss(params):
            h = x
            for w in params:
                h = torch.relu(h @ w)
            return h.square().mean()

        grads, value = grad_and_value(loss)(state)
        return [p - 0.01 * g for p, g in zip(state, grads)], value

    state = [torch.randn(width, width) * 0.05 for _ in range(layers)]
    x = torch.randn(rows, width)
    compiled = zt.accumulate(4)(step).lower(state, x).compile()
    state, _ = compiled(state, x)
    memory = compiled.lowered.memory_analysis()
    before = lent()
    with Peak() as peak:
        for _ in range(8):
            state, _ = compiled(state, x)
    predicted = memory.peak - memory.state - x.nbytes
    assert predicted >= layers * width * width * 4  # the sums
    assert peak.bytes - before <= predicted * 1.05 + (64 << 10)


def test_a_failure_before_the_update_leaves_the_state_whole():
    step = zt.chain(
        zt.shard_params(zt.AbstractMesh(dp=2), stage=0),
        zt.overlap_grads(update="last"),
        zt.accumulate(3),
    )(train)
    last = zt.ir.micro_batch_programs(step.lower(new_state(), *batch(12)).graph).last
    begin = first_write(last)
    assert all("add" in str(e.op) or e.region == "update" for e in last.eqns[begin:])
    assert begin > max(k for k, e in enumerate(last.eqns) if is_start(e))


def test_a_table_among_the_leaves_of_the_batch_is_refused():
    """It would be cut into micro-batches, and a step would read other rows."""
    step = zt.accumulate(2)(lambda state, x, table: (state, (x * table[:4].sum()).mean()))
    with pytest.raises(
        ValueError,
        match=r"accumulate: table has 100 rows and x has 8,.*\n.*make it a leaf of the state",
    ):
        step.lower({"w": torch.ones(1)}, torch.ones(8), torch.ones(100))
