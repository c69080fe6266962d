"""Profiles: the measured timeline of a real run, the costs of its operations and links, and new plans from them."""

import dataclasses
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad_and_value
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.programs import CASES
from tests.support.worlds import ALL, batches, on_ranks, slices
from ztrans import compiled as bound
from ztrans.ir.collectives import is_start, rules
from ztrans.ir.graph import Eqn, Graph, Var
from ztrans.planning.cluster import Device, Link
from ztrans.planning.durations import equation_seconds, signature
from ztrans.planning.formulate import formulate
from ztrans.planning.skeleton import skeleton
from ztrans.planning.solver.messages import message_of
from ztrans.profiling.link_fit import Observed
from ztrans.profiling.profile import Profile, Record, profile, recorded
from ztrans.profiling.tuning import MeasuredPlan, Tuning
from ztrans.report.event import COMPUTE, Event
from ztrans.report.timeline import Timeline
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.executable import executable

CASE = CASES["gpt_adam"]
CHAIN = (zt.overlap_grads(), zt.prefetch())


@pytest.fixture(scope="module")
def alone():
    """A mesh of one rank."""
    mesh = zt.make_mesh("cpu", dp=1)
    yield mesh
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_profile_runs_real_steps_and_has_a_bar_for_each_equation(alone):
    step = zt.chain(zt.shard_params(alone), *ALL)(CASE.step)
    batch, untouched = batches(CASE, 1)[0], step.shard(CASE.state())
    state = step.shard(CASE.state())
    compiled = step.compiled(state, *batch)
    measured = compiled.profile(state, *batch, steps=2)
    for _ in range(2):
        untouched, _ = step(untouched, *batch)
    same = zip(pytree.tree_leaves(step.unshard(state)), pytree.tree_leaves(step.unshard(untouched)))
    assert all(torch.equal(a, b) for a, b in same), "the state advances as in ordinary steps"

    t, graph = measured.timeline, compiled.graph
    assert t.name.endswith(", measured") and t.lanes == [COMPUTE] and t.stalled == 0
    assert [e.eqn for e in t.events] == list(graph.eqns), "a bar for each equation, in order"
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(t.events))
    assert 0 < t.compute <= t.seconds < 10
    programs = graph, compiled.lowered.graph  # as it runs, and as it was planned
    assert set(measured.seconds_by_signature) == {signature(e, g) for g in programs for e in g.eqns}
    assert measured.messages == ((), ()) and measured.agreed(alone) is measured
    assert str(measured) == str(t)


@pytest.mark.slow
def test_a_replanned_step_is_simulated_with_the_measured_seconds(alone):
    step = zt.chain(zt.shard_params(alone), *ALL)(CASE.step)
    state, batch = step.shard(CASE.state()), batches(CASE, 1)[0]
    compiled = step.compiled(state, *batch)
    measured = compiled.profile(state, *batch, steps=3)
    lowered = compiled.lowered.replan(measured)
    assert lowered.cluster.measured == tuple(sorted(measured.seconds_by_signature.items()))
    graph, durations = lowered.graph, dict(lowered.cluster.measured)
    expected = [durations[signature(e, graph)] for e in graph.eqns]
    assert list(equation_seconds(graph, lowered.cluster)) == expected
    assert lowered.timeline().seconds == pytest.approx(sum(expected))


def test_a_delay_that_hits_another_equation_in_each_step_counts(monkeypatch):
    """In each step one of three equations of 1 s takes 12 s more. The median of each equation alone would be 1 s."""
    xs = [Var(f"x{n}", torch.float32, (n + 1,)) for n in range(3)]
    ys = [Var(f"y{n}", torch.float32, (n + 1,)) for n in range(3)]
    eqns = tuple(Eqn(torch.ops.aten.relu.default, (x,), (y,)) for x, y in zip(xs, ys))
    graph = Graph("f", tuple(xs), eqns, tuple(ys), 0)
    per_step = len(eqns) + 2  # before the first, after each, and the end
    late = lambda k: 12.0 if k < 3 * per_step and k % per_step == k // per_step + 1 else 0.0
    clock = itertools.accumulate(1.0 + late(k) for k in itertools.count())
    monkeypatch.setattr("ztrans.profiling.profile.time.perf_counter", lambda: next(clock))
    measured = profile(graph, to_fx(graph), [torch.ones(n + 1) for n in range(3)], steps=3)
    assert measured.seconds_by_signature == {
        f"relu(f32[{n + 1}])": pytest.approx(5.0) for n in range(3)
    }


def test_ranks_start_each_recorded_step_together(alone, monkeypatch):
    step = zt.shard_params(alone)(CASE.step)
    state, batch = step.shard(CASE.state()), batches(CASE, 1)[0]
    compiled, met = step.compiled(state, *batch), []
    monkeypatch.setattr("ztrans.profiling.profile.everywhere", lambda _, mesh: met.append(mesh))
    compiled.profile(state, *batch, steps=3)
    assert met == [alone] * 3


def test_a_recorded_program_has_all_attributes_of_the_program():
    """A constant of two equations, and an output that code cannot write, are attributes of the module."""
    x, y, z = (Var(name, torch.float32, (2,)) for name in ("x", "y", "z"))
    constant = torch.tensor([1.0, 2.0])
    eqns = [Eqn(torch.ops.aten.add.Tensor, (v, constant), (w,)) for v, w in ((x, y), (y, z))]
    module = recorded(to_fx(Graph("f", (x,), tuple(eqns), (z, torch.float32), 0)))
    module.record = SimpleNamespace(mark=lambda weights=(1,): None)
    result, dtype = module(torch.zeros(2))
    assert result.tolist() == [2.0, 4.0] and dtype is torch.float32


def test_a_profile_of_no_steps_is_refused(alone):
    step = zt.shard_params(alone)(CASE.step)
    state, batch = step.shard(CASE.state()), batches(CASE, 1)[0]
    with pytest.raises(ValueError) as caught:
        step.compiled(state, *batch).profile(state, *batch, steps=0)
    assert str(caught.value) == "profile: 0 steps; at least one is needed."


@pytest.mark.slow
def test_after_tune_the_step_runs_another_program(alone):
    step = zt.chain(zt.shard_params(alone), *ALL)(CASE.step)
    state, batch = step.shard(CASE.state()), batches(CASE, 1)[0]
    before = step.compiled(state, *batch)
    measured = step.tune(state, *batch, steps=1).before.profile
    after = step.compiled(state, *batch)
    assert after is not before and dict(after.lowered.cluster.measured) == dict(
        measured.seconds_by_signature
    )
    assert after.lowered.plan.notes[-1].startswith("measured: ")
    state, loss = step(state, *batch)
    assert torch.isfinite(loss)


@pytest.mark.slow
@pytest.mark.parametrize("second", [1.0, 3.0], ids=["faster", "slower"])
def test_tune_keeps_the_faster_plan(alone, monkeypatch, second):
    """The measured time of the new plan decides, not the expected one."""
    step = zt.chain(zt.shard_params(alone), *ALL)(CASE.step)
    state, batch = step.shard(CASE.state()), batches(CASE, 1)[0]
    compiled, real, took = step.compiled(state, *batch), bound.profile_step, iter([2.0, second])

    def with_given_seconds(*args):
        measured = real(*args)
        return dataclasses.replace(
            measured, timeline=dataclasses.replace(measured.timeline, seconds=next(took))
        )

    monkeypatch.setattr(bound, "profile_step", with_given_seconds)
    kept, tuning = compiled.tune(state, *batch, steps=1)
    assert tuning.kept is (tuning.after if second < 2 else tuning.before)
    assert tuning.kept.plan == kept.lowered.plan and tuning.kept.seconds == min(2.0, second)
    # One rank has nothing to plan.
    verdict = f"the measured times lead to the same plan, whose steps took 2.00 s, and then {second:.2f} s"
    assert kept.lowered.plan.notes[-1] == f"measured: {verdict}"
    assert tuning.verdict == verdict
    assert any(n.startswith("expected ") for n in kept.lowered.plan.notes) == (second < 2)
    assert (kept.binding.local_program.runner is compiled.binding.local_program.runner) == (
        second > 2
    )
    assert torch.isfinite(kept(state, *batch)[1])


@pytest.mark.parametrize("second, verdict", [
    (1.0, "the new plan is kept: 1.00 s a step, and 2.00 s before (-50.0%)"),
    (3.0, "the plan before is kept: 2.00 s a step, and 3.00 s with the new one (+50.0%)"),
])  # fmt: skip
def test_a_tuning_prints_which_plan_is_kept_how_much_faster_it_is_and_where_they_differ(
    second, verdict
):
    start = next(
        e
        for e in on_ranks(CASE, 2, zt.shard_params(zt.AbstractMesh(dp=2))).graph.eqns
        if is_start(e)
    )

    def measured(plan, seconds, stall):
        gather = Event("dp gather", 0.0, 1.0, start, stall)
        timeline = Timeline("train, measured", seconds, (gather,), ())
        return MeasuredPlan(plan, Profile(timeline, {}, ()), seconds)

    old = zt.Plan("p", gathers=((("w",), "the start"),))
    new = zt.Plan("p", gathers=((("w",), "matmul 1"),), notes=("expected 1.50 s a step",))
    tuning = Tuning("train", measured(old, 2.0, 0.5), measured(new, second, 0.25))
    assert repr(tuning) == f"Tuning(train: {verdict})"
    assert [" ".join(line.split()) for line in str(tuning).splitlines()] == [
        f"train: {verdict}",
        "before new",
        f"step, slowest rank 2.00 s {second:.2f} s",
        "exposed 500.00 ms 250.00 ms",
        "dp param 500.00 ms 250.00 ms",
        "expected 1.50 s a step",
        "from the plan before (-) to the new one (+):",
        "gather [w] starts at matmul 1, not at the start",
    ]


@pytest.mark.slow
def test_replan_starts_gathers_earlier_when_the_wire_was_slow():
    """The link is fitted to the measured messages, and the new plan is made for that link."""
    shard, cluster = zt.shard_params(zt.AbstractMesh(dp=4)), zt.cluster("h100", dp="nvlink4")
    lowered = on_ranks(CASE, 4, shard, *CHAIN, cluster=cluster)
    slow = tuple(Observed("dp", 4, kind, n, f"dp {kind}", k, k + 1e-3 + n / 1e6)
                 for k, (kind, n) in enumerate([("all_gather", 10**4), ("reduce_scatter", 10**5), ("all_gather", 10**6)]))  # fmt: skip
    replanned = lowered.replan(zt.Profile(lowered.timeline(), {}, (slow,)))
    assert replanned.cluster.link("dp").bandwidth == pytest.approx(1e6, rel=0.1)
    assert replanned.plan.program == lowered.plan.program and replanned.plan != lowered.plan
    note = replanned.plan.notes[-1]
    assert note.startswith("expected ") and note.endswith("%)")
    assert replanned.timeline().seconds <= lowered.timeline(replanned.cluster).seconds


def test_the_link_of_a_joint_axis_is_fitted_to_its_own_messages():
    """A cluster that knows only its axes begins with the slowest of them; an axis of the step itself has no link."""
    base = zt.cluster("h100", dp="nvlink4", cp="infiniband")
    slow = [
        Observed("dp*cp", 8, "all_gather", n, "dp*cp gather", k, k + 1e-3 + n / 1e6)
        for k, n in enumerate((10**4, 10**6))
    ]
    own = Observed("tp", 2, "all_reduce", 10**6, "tp", 5.0, 5.1)
    profiled = zt.Profile(zt.Timeline("f", 1.0, (), ()), {}, ((*slow, own),))
    fitted = profiled.cluster(base)
    assert [axis for axis, _ in fitted.links] == ["dp", "cp", "dp*cp"]
    assert fitted.link("dp*cp").bandwidth == pytest.approx(1e6, rel=0.1)
    assert (fitted.link("dp"), fitted.link("cp")) == (base.link("dp"), base.link("cp"))
    only_joint = dataclasses.replace(base, links=(("dp*cp", base.link("dp")),))
    assert profiled.cluster(only_joint).link("dp*cp").bandwidth == pytest.approx(1e6, rel=0.1)


def test_the_time_of_a_message_is_counted_from_the_rank_that_starts_it_last(pretended, monkeypatch):
    """A rank that starts a message later than the other may find that its bytes have already arrived."""
    took = [1e-4, 0.02, 0.01, 0.03, 0.015]
    later = [0.0, 0.01, -0.005, 0.025, -0.01]  # seconds by which rank 1 is later than rank 0
    here, there = [], []
    for k, (moving, by) in enumerate(zip(took, later)):
        first, second = 0.1 * k, 0.1 * k + by
        message = Observed("dp", 2, "all_gather", 10**6, "dp gather", 0.0, 0.0)
        here.append(message._replace(issued=first, done=max(first, second + moving)))
        there.append(message._replace(issued=second, done=max(second, first + moving)))
    timeline = zt.Timeline("f", 1.0, (), ())
    monkeypatch.setattr(
        "ztrans.profiling.profile.everywhere",
        lambda *_: [(1.0, {"f": 1.0}, (here,)), (2.0, {"f": 0.5}, (there,))],
    )
    agreed = zt.Profile(timeline, {"f": 1.0}, (tuple(here),)).agreed(pretended)
    assert agreed.seconds_by_signature == {"f": 0.5} and agreed.timeline is timeline, (
        "operations are those of the rank that computes longest"
    )
    assert [m.done - m.issued for m in agreed.messages[0]] == pytest.approx(took, abs=1e-9)
    assert [m.issued for m in agreed.messages[0]] == pytest.approx(
        [0.1 * k + max(by, 0) for k, by in enumerate(later)]
    )


@pytest.fixture
def pretended():
    """A mesh of two ranks in one process. The other rank is only simulated: messages arrive at once."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.mark.slow
def test_messages_are_recorded_with_their_lanes_and_bytes(pretended, tmp_path):
    step = zt.chain(zt.shard_params(pretended), *CHAIN)(CASE.step)
    state = step.shard(CASE.state())
    lowered = step.lower(state, *slices(batches(CASE, 1)[0], 2)[0])
    leaves = pytree.tree_leaves((state, *slices(batches(CASE, 1)[0], 2)[0]))
    local = [x.to_local() if hasattr(x, "to_local") else x for x in leaves]
    waited = []
    program = executable(lowered.graph, pretended).program
    prepare = lambda inputs: waited.append(None) or inputs
    measured = profile(lowered.graph, program, local, steps=2, prepare=prepare)
    simulated = lowered.timeline()
    assert measured.timeline.lanes == simulated.lanes == [COMPUTE, "dp gather", "dp reduce"]
    counted = lambda t: {
        lane: (
            sum(e.lane == lane for e in t.events),
            sum(e.bytes for e in t.events if e.lane == lane),
        )
        for lane in t.lanes[1:]
    }
    assert counted(measured.timeline) == counted(simulated)
    for messages in measured.messages:
        assert sum(m.received for m in messages) == lowered.cost_analysis().wire_bytes
        assert all(0 <= m.issued <= m.done and m.spent > 0 and m.unpacked > 0 for m in messages)
    ((_, link),) = measured.cluster(lowered.cluster).links
    assert link.overhead > 0 and link.byte_overhead > 0
    assert [kind for kind, each in link.unpack if each > 0] == [
        "all_gather",
        "all_reduce",
        "reduce_scatter",
    ]
    assert len(measured.messages) == len(waited) == 2, "ranks start each step together"
    for lane in measured.timeline.lanes:
        bars = sorted(
            (e for e in measured.timeline.events if e.lane == lane), key=lambda e: e.start
        )
        assert all(e.seconds >= 0 for e in bars)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(bars)), lane
    simulated.compare(measured.timeline).to_perfetto(tmp_path / "both.json")
    assert (
        len({e["pid"] for e in json.loads((tmp_path / "both.json").read_text())["traceEvents"]})
        == 2
    )
    rows = str(simulated.compare(measured.timeline)).splitlines()
    assert rows[0].split() == ["simulated", "measured", "ratio"] and rows[1].startswith("step")


@pytest.mark.compiles
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch"
)  # Inductor's own modules use torch.jit
def test_kernels_of_values_that_are_equal_on_all_ranks_are_deterministic(pretended):
    """If each rank chose its kernel by measurement, ranks could add in different orders."""

    def step(state, x):
        grads, value = grad_and_value(lambda w: (x @ w).sin().exp().mean())(state["w"])
        return {"w": state["w"] - grads / (grads.square().sum().sqrt() + 1)}, value

    step = zt.shard_params(pretended, stage=0)(step)
    state, x = step.shard({"w": torch.randn(8, 4)}), torch.randn(6, 8)
    compiled = step.lower(state, x).compile(backend="inductor")
    compiled(state, x)
    kernels = [*compiled.binding.local_program.runner.executable.last.kernels]
    assert {("sin" in str(computed), deterministic) for computed, *_, deterministic in kernels} == {
        (True, False),
        (False, True),
    }


@pytest.mark.slow
def test_a_compiled_step_can_be_tuned_with_a_fake_process_group(pretended):
    """The other rank is not there, and every exchange between ranks returns this rank's values."""
    step = zt.chain(zt.shard_params(pretended), *CHAIN)(CASE.step)
    batch = slices(batches(CASE, 1)[0], 2)[0]
    compiled, _ = (
        step.lower(step.shard(CASE.state()), *batch)
        .compile()
        .tune(step.shard(CASE.state()), *batch)
    )
    assert "measured" in compiled.lowered.plan.notes[-1]
    compiled(step.shard(CASE.state()), *batch)


@pytest.mark.parametrize("gloo", [True, False])
def test_what_a_profile_has_measured_of_packing_is_not_added_to_it(gloo):
    """Compute packs for gloo, which is part of the seconds that sending took; a GPU packs while a message is on its way."""
    lowered = on_ranks(CASE, 4, zt.shard_params(zt.AbstractMesh(dp=4)), *CHAIN)
    slow_memory = Device(
        "slow",
        (("f32", 1e11),),
        bandwidth=1e6,
        kernel_gap=0.0,
        gloo=gloo,
        lost_beside=(("nccl", 0.2),),
    )
    base = zt.cluster(slow_memory, dp=Link("wire", 1e-4, 1e9))
    messages = []
    for k, (kind, received) in enumerate(
        product(("all_gather", "reduce_scatter"), (1e3, 1e4, 1e5))
    ):
        done = k + 1e-3 + received / 1e8
        spent = 1e-3 + received / 1e6
        lane = f"dp {kind}"
        messages.append(Observed("dp", 4, kind, int(received), lane, k, done, spent))
    measured = Profile(lowered.timeline(), {}, (tuple(messages),))
    cluster = measured.cluster(base)
    problem = formulate(skeleton(lowered.unordered), cluster, float("inf"))
    for member in (*problem.gathers, *problem.reductions):
        message = message_of(problem, [member], 0, 0)
        assert message.overhead == pytest.approx(1e-3 + member.wire / 1e6, rel=0.1)
        assert message.pack_beside == message.unpack_beside == 0.0
    sent = equation_seconds(lowered.graph, cluster)
    for eqn, took in zip(lowered.graph.eqns, sent):
        if is_start(eqn):
            received = rules(eqn).wire_bytes(eqn, lowered.graph.axes)
            assert took == pytest.approx(1e-3 + received / 1e6, rel=0.1)


def test_a_message_that_fails_or_has_no_work_ends_a_record():
    """It waited for the end of such a message for ever."""

    class Fails:
        def wait(self):
            raise RuntimeError("connection reset")

    def record(work):
        with ThreadPoolExecutor(1) as watcher:
            readings = Record("cpu", {"gathers": watcher})
            readings.mark()
            readings.watch((SimpleNamespace(future=SimpleNamespace(work=work)),), "gathers")
            return readings.times()

    with pytest.raises(RuntimeError, match="connection reset"):
        record(Fails())
    times = record(None)
    assert times.done == times.started
