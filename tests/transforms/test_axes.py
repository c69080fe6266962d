"""Schedules of random programs over several mesh axes keep the step's own collectives in order, and change no bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad_and_value
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.parallel import TP, Parallel, parallel, parallel_steps
from tests.support.parallel import own as c10d
from ztrans.ir.collectives import ALL_GATHER, WAIT, buffer_bytes, is_start, lane
from ztrans.ir.graph import Eqn, Graph
from ztrans.ir.interpreter import coordinates, lockstep, split_state
from ztrans.ir.op_facts import is_matmul
from ztrans.ir.user_collectives import is_user_collective

# A drawn step may leave an axis of its mesh alone.
pytestmark = pytest.mark.filterwarnings("ignore:shard_params. .* reduces nothing over")

MESHES = (
    {"dp": 2, "tp": TP},
    {"dp": 3, "tp": TP},
    {"host": 2, "dp": 2, "tp": TP},
    {"tp": TP, "host": 2, "dp": 3},
)
SIZES = st.sampled_from([0, 40, 200, 1000, 10**6])


@st.composite
def schedules(draw) -> tuple[zt.Transform, ...]:
    """`overlap_grads`, `prefetch` or both, in any order, with random limits."""
    bucket = draw(st.one_of(st.just("auto"), SIZES))
    between = draw(st.sampled_from([None, 1, 2, 8]))
    flight = st.one_of(st.none(), SIZES)
    overlap = zt.overlap_grads(bucket=bucket, max_matmuls_between=between, max_in_flight=draw(flight),
                               update=draw(st.sampled_from(["eager", "last"])))  # fmt: skip
    memory = draw(st.sampled_from(["auto", 1 << 30]))
    ahead = zt.prefetch(memory=memory, max_in_flight=draw(flight))
    return draw(
        st.sampled_from(
            [(overlap,), (ahead,), (overlap, ahead), (ahead, zt.fuse_cast_gather(), overlap)]
        )
    )


def shard(mesh: dict[str, int], **options) -> zt.Transform:
    hosts = {"replicate_axis": "host"} if "host" in mesh else {}
    return zt.shard_params(zt.AbstractMesh(**mesh), **hosts, **options)


def trace(step: Parallel) -> zt.stages.Traced:
    return zt.Step.of(step.step).trace(step.state(0), step.batch(0))


def lower(traced: zt.stages.Traced, *transforms: zt.Transform) -> zt.stages.Lowered:
    return dataclasses.replace(traced, transforms=transforms).lower()


def results(step: Parallel, lowered: zt.stages.Lowered) -> list[list[torch.Tensor]]:
    """The outputs of every rank. Each rank of tp has its own weights, each rank of host and dp its own batch."""
    places = coordinates(lowered.graph.mesh)
    parts = [split_state(lowered.graph, pytree.tree_leaves(step.state(tp))) for tp in range(TP)]
    batch = [step.batch(at.get("host", 0) * 8 + at["dp"]) for at in places]
    return lockstep(lowered.graph, [[*parts[at["tp"]][r], batch[r]] for r, at in enumerate(places)])


def own(graph: Graph) -> list[str]:
    """The step's own collectives with their arguments, as text, in order."""
    return [str((e.op, e.ins, e.outs)) for e in graph.eqns if is_user_collective(e)]


FEW = settings(
    max_examples=settings.default.max_examples // 6
)  # each example plans several programs


@pytest.mark.slow
@FEW
@given(
    parallel_steps(),
    st.sampled_from(MESHES),
    st.integers(0, 3),
    st.sampled_from(["auto", "always"]),
    schedules(),
)
def test_schedules_change_no_bit_and_leave_the_steps_own_collectives_alone(
    step, mesh, stage, reshard, transforms
):
    if not step.state(0)["params"]:
        return
    traced = trace(step)
    first = shard(mesh, stage=stage, reshard=reshard)
    if stage == 0 and not any(isinstance(t, type(zt.overlap_grads())) for t in transforms):
        return  # nothing to gather
    plain = lower(traced, first)
    planned = lower(traced, first, *transforms)
    graph = zt.ir.check(planned.graph)
    assert own(graph) == own(plain.graph)
    each_future_is_waited_for_once(graph)
    within_what_was_asked(graph, transforms)
    for a, b in zip(results(step, plain), results(step, planned), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    # Lowering is deterministic. It depends on nothing that differs between ranks or runs, such as addresses of objects.
    second = lower(trace(step), first, *transforms)
    assert str(second) == str(planned)
    assert lanes(second.graph) == lanes(graph)


@pytest.mark.slow
@pytest.mark.parametrize("norms", ["none", "each", "global"])
def test_a_limit_on_gathers_holds_while_eager_updates_run(norms):
    """Updates of the last layer run between the gathers of other layers."""
    step = parallel(("column_row",) * 5 + ("linear",), frozenset(), micro=1, norms=norms)
    transforms = (zt.overlap_grads(max_in_flight=0), zt.prefetch(memory=1 << 30, max_in_flight=200))
    planned = lower(trace(step), shard(MESHES[0], reshard="always"), *transforms)
    within_what_was_asked(zt.ir.check(planned.graph), transforms)


@pytest.mark.slow
@FEW
@given(parallel_steps(), st.integers(0, 3), st.integers(1, 5))
def test_delayed_weight_gradients_change_no_bit(step, stage, most):
    if not step.state(0)["params"]:
        return
    traced = trace(step)
    first = shard(MESHES[0], stage=stage)
    plain = lower(traced, first)
    planned = lower(
        traced, zt.delay_weight_grads(most=most), first, zt.overlap_grads(), zt.prefetch()
    )
    assert own(zt.ir.check(planned.graph)) == own(plain.graph)
    for a, b in zip(results(step, plain), results(step, planned), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def lanes(graph: Graph) -> dict[str, list[str]]:
    """The collectives of each lane, as text, in order."""
    messages: dict[str, list[str]] = {}
    for e in graph.eqns:
        if is_start(e) or (is_user_collective(e) and "wait" not in str(e.op)):
            messages.setdefault(lane(e), []).append(str((e.op, e.ins)))
    return messages


def each_future_is_waited_for_once(graph: Graph) -> None:
    """As `check` verifies for our collectives; here it is checked independently, and for the step's own too."""
    waited: Counter = Counter()
    started = {}
    for e in graph.eqns:
        waits = e.op is WAIT or str(e.op) == "_c10d_functional.wait_tensor.default"
        for v in e.ins:
            assert not (v in started and not waits and not waited[v]), (
                f"{v} is read before its wait"
            )
            waited[v] += waits
        if is_start(e) or (is_user_collective(e) and not waits):
            started.update(dict.fromkeys(e.outs))
    assert all(waited[v] == 1 for v in started)


def within_what_was_asked(graph: Graph, transforms: tuple) -> None:
    producer = {out: e for e in graph.eqns for out in e.outs}
    # A reduction over the replicated axis follows another reduction at once, whatever the limits are.
    reductions = [
        e
        for e in graph.eqns
        if is_start(e) and e.provenance.role == "grad" and producer[e.ins[0]].op is not WAIT
    ]
    gathers = [e for e in graph.eqns if e.op is ALL_GATHER and e.provenance.role == "param"]
    for t in transforms:
        starts = {"overlap_grads": reductions, "prefetch": gathers}.get(t.name)
        most = getattr(t, "max_in_flight", None)
        if most is not None and starts:
            for e in starts:
                most = max(most, *in_flight(graph, e))
            assert under_way(graph, starts) <= most
        if t.name == "overlap_grads" and t.bucket != "auto":
            assert all(len(e.ins) == 1 or size(e.ins) <= t.bucket for e in reductions)
        if t.name == "overlap_grads" and t.max_matmuls_between is not None:
            assert matmuls_between(graph, reductions) <= t.max_matmuls_between


def size(values) -> int:
    return sum(v.numel * v.dtype.itemsize for v in values)


def in_flight(graph: Graph, e: Eqn) -> list[int]:
    """The bytes of each member while it is in flight. A gather receives padded shards."""
    return [
        buffer_bytes(e, k, graph.axes) if e.op is ALL_GATHER else size([v])
        for k, v in enumerate(e.outs)
    ]


def under_way(graph: Graph, starts: list[Eqn]) -> int:
    """The most bytes of `starts` that are under way while an operation runs."""
    now = {}
    most = 0
    for e in graph.eqns:
        if e in starts:
            now[e.outs[0]] = sum(in_flight(graph, e))
        elif e.op is WAIT:
            now.pop(e.args[0], None)
        elif not is_start(e):
            most = max(most, sum(now.values()))
    return most


def matmuls_between(graph: Graph, reductions: list[Eqn]) -> int:
    """The most matmuls between two reductions. Only gaps in which a gradient is born count."""
    passed = 0
    births_at = {}
    starts = []
    for e in graph.eqns:
        passed += is_matmul(e)
        births_at.update(dict.fromkeys(e.outs, passed))
        if e in reductions:
            starts.append(passed)
    births = set()
    for e in reductions:
        births.update(births_at[v] for v in e.ins)
    starts = [min(births, default=0), *starts]
    most = 0
    for earlier, later in pairwise(starts):
        if any(earlier < birth < later for birth in births):
            most = max(most, later - earlier)
    return most


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_steps_own_collectives_in_the_update_keep_their_order(stage):
    """Gradients are born from the last layer to the first; the step's collectives go from the first to the last."""

    def step(state, x):
        def loss(params):
            h = x
            for w in params.values():
                h = torch.tanh(h @ w)
            return h.square().mean()

        grads, value = grad_and_value(loss)(state)
        whole = {k: c10d.wait_tensor(c10d.all_reduce(g, "sum", "tp")) for k, g in grads.items()}
        return {k: w - 0.1 * whole[k] for k, w in state.items()}, value

    traced = zt.Step.of(step).trace({k: torch.ones(4, 4) for k in "abc"}, torch.ones(2, 4))
    first = shard({"dp": 2, "tp": 2}, stage=stage)
    plain = lower(traced, first)
    planned = lower(traced, first, zt.overlap_grads(bucket=0))
    assert own(zt.ir.check(planned.graph)) == own(plain.graph) and len(own(plain.graph)) == 6
    sums = [e for e in planned.graph.eqns if is_user_collective(e)]
    for e in sums:
        for v in e.ins:
            assert v.split == e.outs[0].split and bool(v.split) == (stage > 0), "they run on shards"


def megatron(group: str) -> Callable:
    """A step with two layers, which are cut over the tensor-parallel group of this rank."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))

        @staticmethod
        def backward(ctx, g):
            return g

    def step(state, x):
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        for i in "01":
            x = x + Summed.apply(torch.relu(x @ params[f"up{i}"]) @ params[f"down{i}"])
        value = x.square().mean()
        grads = torch.autograd.grad(value, list(params.values()))
        return {k: p - 0.1 * g for (k, p), g in zip(state.items(), grads)}, value.detach()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[::2])
def test_every_rank_hands_each_communicator_the_same_messages(mesh):
    """Each rank lowers its own program on a real mesh. With different orders the ranks would wait for ever."""
    world = torch.Size(mesh.values()).numel()
    lowerings = []
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            device = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            hosts = {"replicate_axis": "host"} if "host" in mesh else {}
            chained = zt.chain(zt.shard_params(device, **hosts), zt.overlap_grads(), zt.prefetch())
            state = {
                "up0": torch.ones(4, 6),
                "down0": torch.ones(6, 4),
                "up1": torch.ones(4, 6),
                "down1": torch.ones(6, 4),
            }
            lowered = chained(megatron(device.get_group("tp").group_name)).lower(
                state, torch.ones(3, 4)
            )
            lowerings.append((str(lowered), lanes(lowered.graph), lowered.plan))
        finally:
            dist.destroy_process_group()
    assert all(lowering == lowerings[0] for lowering in lowerings)
    assert len(lowerings[0][1]) == 3 + ("host" in mesh)
