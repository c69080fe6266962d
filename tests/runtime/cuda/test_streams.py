"""Streams for packing and communication: real programs on a simulated GPU, and a checker that must report races."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ztrans as zt
from tests.support.cover import parameters_of
from tests.support.fake_cuda import TimedEvent
from tests.support.processes import run_ranks
from tests.support.programs import CASES
from tests.support.races import Races
from tests.support.worlds import ALL, batches, lower_traced, slices, traced
from ztrans import ops
from ztrans.calling.call import BoundCall
from ztrans.ir import donation
from ztrans.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    all_gather,
    is_start,
    reduce,
    rules,
    wait,
)
from ztrans.ir.graph import Eqn, Graph, Partial, Provenance, Split, Var
from ztrans.ir.routes import Hosts, route_of
from ztrans.ir.wire_format import format_of
from ztrans.ops.symmetric import in_one_process
from ztrans.planning.cluster import Link
from ztrans.profiling.profile import Record, recorded
from ztrans.runtime.carried import CarryingExecutable
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda.nccl import StreamedStart
from ztrans.runtime.cuda.streams import Done, Streams, back_to_back_seconds
from ztrans.runtime.cuda.symmetric import Times
from ztrans.runtime.executable import bind
from ztrans.runtime.session import session_of
from ztrans.runtime.transports import StreamTransports, choose_transport

WORLD = 4
CHAINS = {
    "as_written": (),
    "overlap": (zt.overlap_grads(),),
    "one": (zt.overlap_grads(bucket=0, max_in_flight=0),),
    "all": ALL,
}


@pytest.fixture(scope="module")
def mesh():
    """A mesh of four ranks of which this process is the second. The others do not exist: nothing arrives."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=FakeStore())
    yield init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def lowered(mesh, name, stage, chain=ALL, **options):
    case = CASES[name]
    step = zt.chain(zt.shard_params(mesh, stage=stage, **options), *chain)(case.step)
    state, batch = step.shard(case.state()), slices(batches(case, 1)[0], WORLD)[1]
    low = lower_traced(traced(case, WORLD), step)
    local = low.recording.local_inputs(BoundCall(state, batch)).tensors
    return low, local


def play(low, local, mesh, steps=2):
    """Run some steps of a program under the race checker, and return the checker."""
    with Races() as cuda:
        program = bind(
            low.graph, to_fx(low.graph, mesh, True, transports=StreamTransports(Streams(cuda)))
        )
        for _ in range(steps):
            outputs = program(local)
            del outputs
    return cuda


CHAINED = [("gpt_adam", "as_written"), ("gpt_adam", "overlap"), ("mlp_momentum", "one")] + [
    (name, "all") for name in ("gpt_adam", "autocast", "accumulation", "clipped", "muon", "uneven")
]
# Each chain and each program at a stage with reductions of whole values, or with shards, and at stage 3.
PLAYED = [
    ("gpt_adam", "as_written", 3),
    ("gpt_adam", "overlap", 1),
    *(("mlp_momentum", "one", stage) for stage in (0, 3)),
    ("gpt_adam", "all", 3),
    *(("autocast", "all", stage) for stage in (2, 3)),
    *(("accumulation", "all", stage) for stage in (0, 3)),
    *(("clipped", "all", stage) for stage in (1, 3)),
    *(("muon", "all", stage) for stage in (2, 3)),
    *(("uneven", "all", stage) for stage in (0, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chain", "stage"),
    parameters_of([(*each, stage) for each in CHAINED for stage in (0, 1, 2, 3)], PLAYED),
)
def test_programs_have_no_race_and_the_host_never_waits(mesh, name, stage, chain):
    low, local = lowered(mesh, name, stage, CHAINS[chain])
    cuda = play(low, local, mesh)
    assert cuda.races == []
    assert len({stream for _, stream in cuda.launches}) >= 3, (
        "compute, packing and at least one lane"
    )
    assert sum(block.owners for block in cuda.blocks) > len(cuda.blocks), (
        "memory must be reused, else races on it cannot be seen"
    )
    # The peak over all pools is that of the cost model plus the gradients that are being packed, up to alignment.
    inputs = sum(x.nbytes for x in local)
    assert cuda.peak <= 1.02 * (with_packing(low) - inputs) + 512


@pytest.mark.parametrize("stage", [1, 3])
def test_codes_have_no_race_and_the_host_never_waits(mesh, stage):
    """Members, codes and values are read on the streams that own them, for gathers and for reductions."""
    codes = (zt.quantize_gathers(block=16), zt.quantize_grads(bits=4, block=16))
    low, local = lowered(mesh, "mlp_momentum", stage, (*codes, *ALL))
    sent = {str(e.kwargs.get("dtype")) for e in low.graph.eqns if is_start(e)}
    assert {"i8/16", "i4/16"} <= sent
    cuda = play(low, local, mesh)
    assert cuda.races == []


@pytest.mark.parametrize("waits", [True, False])
def test_the_state_may_be_written_when_a_step_returns(mesh, monkeypatch, waits):
    """The gathers for the next step are under way then, but their members are packed. Without the wait it is a race."""
    if not waits:
        monkeypatch.setattr(StreamedStart, "release_members", lambda self: None)
    across = (zt.overlap_grads(), zt.prefetch(across_steps=True))
    low, local = lowered(mesh, "mlp_momentum", 3, across, outputs="local")
    assert low.graph.carried
    with Races() as cuda:
        program = bind(
            low.graph, to_fx(low.graph, mesh, True, transports=StreamTransports(Streams(cuda)))
        )
        run = CarryingExecutable(program, low.graph, mesh)
        for _ in range(3):
            run(local)
            for x in local[: low.graph.num_state]:
                x.mul_(1)
    session_of(mesh).carried = None
    assert (cuda.races == []) == waits


def test_a_failure_between_two_steps_frees_no_gather_that_is_under_way(mesh):
    """Compute writes over the memory that a carried gather fills as soon as it is free."""
    across = (zt.overlap_grads(), zt.prefetch(across_steps=True))
    low, local = lowered(mesh, "mlp_momentum", 3, across, outputs="local")
    with Races() as cuda:
        program = bind(
            low.graph, to_fx(low.graph, mesh, True, transports=StreamTransports(Streams(cuda)))
        )
        CarryingExecutable(program, low.graph, mesh)(local)
        session_of(mesh).close()  # as when another rank is lost
        loaded = [torch.zeros(x.numel()) for x in local[: low.graph.num_state]]
    session_of(mesh).open()
    assert loaded and cuda.races == []


def with_packing(low):
    """The peak of the memory analysis, if packed gradients stay live until the next collective, as on a GPU."""
    axes, packed, peak = low.graph.axes, 0, 0
    for e, live in zip(low.graph.eqns, low.memory_analysis().live):
        packed = 0 if is_start(e) or e.op is WAIT else packed
        peak = max(peak, live + packed)
        if is_start(e):
            copied = (
                v
                for k, v in enumerate(e.ins)
                if not rules(e).sends_without_copy(e, k, axes) and v not in low.graph.inputs
            )
            packed = sum(v.numel * v.dtype.itemsize for v in copied)
    return peak


def test_the_buffer_that_a_gather_unpacks_is_counted(mesh):
    """Small members share a message. While it is unpacked, they are live twice: in the buffer, and as values."""

    def step(state, x):
        for w in state.values():
            x = x @ w
        return state, x

    state, x = {f"w{k}": torch.ones(64, 64) for k in range(12)}, torch.ones(1, 64)
    step = zt.chain(zt.shard_params(mesh, outputs="local"), zt.prefetch(memory=1 << 30))(step)
    low = step.lower(step.shard(state), x, cluster=zt.cluster("h100", dp=Link("wire", 1.0, 1e15)))
    (gather,) = [e for e in low.graph.eqns if is_start(e)]
    assert len(gather.outs) == 12
    local = low.recording.local_inputs(BoundCall(step.shard(state), (x,))).tensors
    inputs, whole = sum(v.nbytes for v in local), 12 * 64 * 64 * 4
    predicted = low.memory_analysis().peak - inputs
    assert 2 * whole < play(low, local, mesh).peak <= 1.02 * predicted + 512
    assert predicted < 2.3 * whole


def test_half_precision_is_exchanged_and_summed_on_the_receiving_rank(mesh):
    """With bf16 on the wire, casts on both sides, and shards of different sizes."""
    low, local = lowered(mesh, "uneven", 3, reduce_dtype=torch.bfloat16)
    cuda = play(low, local, mesh)
    assert cuda.races == []
    assert {"alltoall_base_", "allgather_into_tensor_coalesced_", "cast_pack"} <= {
        name for name, _ in cuda.launches
    }
    packed = {stream for name, stream in cuda.launches if name == "cast_pack"}
    assert len(packed) == 1 and "compute" not in packed
    on_compute = {name for name, stream in cuda.launches if stream == "compute"}
    assert not on_compute & {"cast_pack", "unpack", "alltoall_base_"}, (
        "they run on streams of their own"
    )


@pytest.mark.parametrize(
    ("kind", "op", "wire", "text"),
    [
        (
            ALL_GATHER,
            None,
            torch.float32,
            "symmetric all_gather (moves bytes; 12.00 us for 64.00 KiB, NCCL 20.00 us)",
        ),
        (
            ALL_GATHER,
            None,
            torch.bool,
            "nccl all_gather (moves bytes; 20.00 us for 64.00 KiB, symmetric memory 30.00 us)",
        ),
        (
            ALL_GATHER,
            None,
            torch.int8,
            "nccl all_gather (moves bytes; no symmetric memory: above 32.00 MiB)",
        ),
        (
            ALL_GATHER,
            None,
            torch.int16,
            "copied all_gather (moves bytes; 13.00 us for 64.00 KiB, symmetric memory 12.00 us, NCCL 20.00 us)",
        ),
        (
            ALL_GATHER,
            None,
            torch.int64,
            "nccl all_gather (moves bytes; 20.00 us for 64.00 KiB, copies 30.00 us)",
        ),
        (REDUCE_SCATTER, "mean", torch.float32, "nccl reduce_scatter (reduces float32 on the way)"),
        (
            REDUCE_SCATTER,
            "mean",
            torch.bfloat16,
            "symmetric reduce_scatter (sums half precision in fp32 and in rank order; 12.00 us for 64.00 KiB, NCCL 20.00 us)",
        ),
        (
            REDUCE_SCATTER,
            "max",
            torch.bfloat16,
            "nccl all_to_all (NCCL's max loses NaN)",
        ),
        (ALL_REDUCE, "sum", torch.float64, "nccl all_reduce (reduces float64 on the way)"),
        (ALL_REDUCE, "min", torch.bool, "nccl all_reduce (reduces bool on the way)"),
        (
            ALL_REDUCE,
            "sum",
            torch.float16,
            "copied all_reduce (sums half precision in fp32 and in rank order; 21.00 us for 256.00 MiB, NCCL 20.00 us)",
        ),
        (
            ALL_REDUCE,
            "max",
            torch.float32,
            "nccl all_to_all (NCCL's max loses NaN)",
        ),
        (REDUCE_SCATTER, "max", torch.float32, "nccl all_to_all (NCCL's max loses NaN)"),
    ],
)
def test_the_choice_of_a_transport_prints_its_reason(kind, op, wire, text):
    times = {
        torch.bool: Times(30e-6, 20e-6, 2**16),
        torch.int8: "above 32.00 MiB",
        torch.int16: Times(12e-6, 20e-6, 2**16, copies=13e-6),
        torch.int64: Times(float("inf"), 20e-6, 2**16, copies=30e-6),
        torch.float16: Times(float("inf"), 20e-6, 2**28, copies=21e-6),
    }
    assert (
        str(
            choose_transport(
                kind, op, format_of(wire), lambda: times.get(wire, Times(12e-6, 20e-6, 2**16))
            )
        )
        == text
    )


@pytest.mark.parametrize(("wire", "hosts", "text"), [
    (torch.bfloat16, Hosts(64, 8),
     "nccl hierarchical all_to_all (sums half precision in fp32 and in the order of hosts; "
     "sums inside each of 8 hosts first, sent in f32: 22% of the bytes come from other hosts, not 88%)"),
    (torch.bfloat16, Hosts(4, 2),
     "nccl all_to_all (sums half precision in fp32 and in rank order; no symmetric memory: ranks on 2 hosts)"),
    (torch.float32, Hosts(64, 8), "nccl reduce_scatter (reduces float32 on the way)"),
])  # fmt: skip
def test_between_hosts_half_precision_is_summed_inside_each_host_first(wire, hosts, text):
    term = Var("g", wire, (64,), (Partial("dp", "sum"),))
    by = route_of(
        reduce([term], ["f"], "dp", "mean", Split("dp")), {"dp": hosts.ranks}, hosts, gloo=False
    )
    sent = format_of(wire)
    assert (
        str(choose_transport(REDUCE_SCATTER, "mean", sent, lambda: "ranks on 2 hosts", by)) == text
    )


def test_the_checker_reports_a_race_on_memory_read_through_addresses():
    with Races() as cuda:
        memory = cuda.knows(in_one_process(1, 8)[0])
        with cuda.stream(cuda.Stream()):
            memory.mine.fill_(1)
        ops.all_gather(memory, [torch.empty(8, dtype=torch.uint8)], [8])
    assert cuda.races


@pytest.mark.slow
def test_the_printed_program_names_the_transport_of_each_collective(mesh):
    low, _ = lowered(mesh, "gpt_adam", 3)
    text = str(to_fx(low.graph, mesh, True, transports=StreamTransports(Streams(Races()))))
    assert (
        "by=nccl all_gather (moves bytes" in text
        and "by=nccl reduce_scatter (reduces float32" in text
    )


@pytest.mark.slow
def test_a_profile_reads_events_on_compute_and_on_lanes(mesh, monkeypatch):
    monkeypatch.setattr("torch.Event", TimedEvent)
    monkeypatch.setattr(TimedEvent, "readings", [])
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)
    low, local = lowered(mesh, "gpt_adam", 3)
    with Races() as cuda:
        module = recorded(to_fx(low.graph, mesh, True, transports=StreamTransports(Streams(cuda))))
        module.record = Record("cuda", {})
        bind(low.graph, module)(local)
    times = module.record.times()
    starts = [e for e in low.graph.eqns if is_start(e)]
    assert len(times.marks) == len(low.graph.eqns) + 1 and list(times.marks) == sorted(times.marks)
    assert len(times.started) == len(times.done) == len(times.arrived) == len(starts)
    assert all(a < b for a, b in zip(times.started, times.done))
    lanes = [r.stream for r in TimedEvent.readings if r.stream is not None]
    assert len(lanes) == len(starts) and len(set(lanes)) == 2, (
        "one lane of gathers and one of reductions"
    )
    assert cuda.races == []


def test_back_to_back_timing_launches_while_the_gpu_has_other_work(monkeypatch):
    monkeypatch.setattr("torch.Event", TimedEvent)
    monkeypatch.setattr(TimedEvent, "readings", [])
    monkeypatch.setattr(
        "ztrans.runtime.cuda.streams.torch.ones", lambda *size, device: torch.empty(1, 1)
    )
    monkeypatch.setattr("torch.mm", lambda a, b: ran.append("busy"))
    ran = []
    assert (
        back_to_back_seconds(
            lambda: ran.append("run") or TimedEvent("cuda", True).record(), torch.device("cuda"), 4
        )
        == 5 / 4
    )
    assert ran == ["busy"] * 8 + ["run"] * 4


class FreesEarly(Streams):
    """Wrong: frees the packed gradients before the packing has ended."""

    def release(self):
        self.packed = None


class PacksEarly(Streams):
    """Wrong: packs without waiting for the operations that compute the members."""

    @contextlib.contextmanager
    def pack(self, members):
        with self.cuda.stream(self.packing):
            yield
        self.packed = self.packing.record_event(), members


class SendsEarly(Streams):
    """Wrong: sends the buffer before the packing has ended."""

    @contextlib.contextmanager
    def communicate(self, lane):
        with self.cuda.stream(lane):
            yield


def wait_without_event(done, *_):
    """Wrong: a wait that does not wait for the event of its message."""
    done.streams.release()


@pytest.mark.slow
@pytest.mark.parametrize("streams", [FreesEarly, PacksEarly, SendsEarly])
def test_the_checker_reports_a_missing_wait(mesh, streams, monkeypatch):
    monkeypatch.setattr("test_streams.Streams", streams)
    assert play(*lowered(mesh, "cast_inside", 3), mesh).races


@pytest.mark.slow
def test_the_checker_reports_a_wait_without_an_event(mesh, monkeypatch):
    monkeypatch.setattr(Done, "wait", wait_without_event)
    assert play(*lowered(mesh, "gpt_adam", 3), mesh).races


@pytest.mark.slow
def test_the_checker_reports_a_buffer_that_is_freed_too_early(mesh, monkeypatch):
    init = Done.__init__

    def without_buffers(self, streams, lane, event, buffers):
        init(self, streams, lane, event, ())

    monkeypatch.setattr(Done, "__init__", without_buffers)
    assert play(*lowered(mesh, "autocast", 3), mesh).races


class OutOfMemory(Exception):
    """The error of a step."""


def raise_at(call, function):
    """A function that calls `function`, and raises after one of its calls."""
    count = 0

    def raising(*args, **kwargs):
        nonlocal count
        count += 1
        result = function(*args, **kwargs)
        if count == call:
            raise OutOfMemory
        return result

    return raising


def races_after_a_failure(low, local, mesh) -> list[str]:
    """Run a step that fails, then allocate and write tensors, as a caller who goes on with a smaller batch."""
    with Races() as cuda:
        run = bind(
            low.graph, to_fx(low.graph, mesh, True, transports=StreamTransports(Streams(cuda)))
        )
        with pytest.raises(OutOfMemory):
            run(local)
        assert cuda.races == [], "the step itself has no race"
        gc.collect()
        kept = []
        for size in (64, 256, 1024, 4096, 8192, 16384):
            for _ in range(6):
                kept.append(torch.empty(size).fill_(1.0))
    return cuda.races


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_that_fails_frees_no_memory_of_messages_in_flight(mesh, monkeypatch, call):
    monkeypatch.setattr(StreamedStart, "forward", raise_at(call, StreamedStart.forward))
    assert races_after_a_failure(*lowered(mesh, "mlp_momentum", 3), mesh) == []


def test_a_step_that_fails_leaves_no_packing_behind(mesh, monkeypatch):
    """A step that is captured next may not wait for work outside of its capture."""
    monkeypatch.setattr(StreamedStart, "forward", raise_at(2, StreamedStart.forward))
    low, local = lowered(mesh, "mlp_momentum", 3)
    with Races() as cuda:
        streams = Streams(cuda)
        run = bind(low.graph, to_fx(low.graph, mesh, True, transports=StreamTransports(streams)))
        with pytest.raises(OutOfMemory):
            run(local)
    assert streams.packed is None


@pytest.mark.slow
@pytest.mark.parametrize("call", [2, 3])
def test_a_step_that_fails_while_it_packs_frees_no_memory_in_use(mesh, monkeypatch, call):
    monkeypatch.setattr(ops, "cast_pack", raise_at(call, ops.cast_pack))
    assert races_after_a_failure(*lowered(mesh, "mlp_momentum", 3), mesh) == []


def test_the_checker_raises_if_the_host_waits():
    with Races(), pytest.raises(AssertionError, match="the host waits for a value"):
        torch.ones(1).item()


def overwriting():
    """A program in which w is gathered while its new value is computed."""
    w, b = Var("w", torch.float32, (8,), (Split("dp"),)), Var("b", torch.float32, (8,))
    start = all_gather([w], ["w.full"], "dp", provenance=Provenance("param", ("w",), "dp"))
    new = Eqn(torch.ops.aten.mul.Tensor, (w, 0.5), (Var("w.new", w.dtype, w.shape, w.layout),))
    end = wait(start.outs[0])
    y = Var("y", torch.float32, (8,))
    eqns = (start, new, end, Eqn(torch.ops.aten.add.Tensor, (end.outs[0], b), (y,)))
    return Graph("f", (w, b), eqns, (new.outs[0], y), 1, mesh=(("dp", WORLD),))


def test_a_value_is_not_overwritten_while_a_collective_sends_it(mesh, monkeypatch):
    program = SimpleNamespace(graph=overwriting())
    new = program.graph.eqns[1]
    assert new not in donation.donation(program.graph).in_place_ops
    assert play(program, [torch.ones(2), torch.ones(8)], mesh).races == []
    monkeypatch.setattr(donation, "_released", lambda graph: {})
    program.graph = program.graph.replace()  # a program keeps its analyses
    assert new in donation.donation(program.graph).in_place_ops
    assert play(program, [torch.ones(2), torch.ones(8)], mesh).races


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_two_ranks_compute_the_same_bits_on_streams():
    """Over gloo, whose collectives have the same names and results as NCCL's."""
    figures = run_ranks(2, "streamed.py")
    contests, stepped, figures = figures[:5], figures[5], figures[6:]
    assert stepped["sent"] >= 3
    assert [f["times"] for f in contests] == [
        [2.0, 2.0, 1024, 2.0],
        [2.0, 2.0, 1024, 2.0],
        [float("inf"), 2.0, 1024, 2.0],
        *["tried here, it gave other bits"] * 2,
    ]
    assert len(figures) == 4 * 6 + 5 + 4
    assert all(f["bitwise"] and f["races"] == [] for f in figures), figures
    expected = {
        "": set(),
        "kernels": {"symmetric all_gather", "symmetric reduce_scatter"},
        "copies": {"copied all_gather", "copied reduce_scatter"},
    }
    for f in figures:
        assert {way for way in f["ways"] if "nccl" not in way} == expected[f["through"]], f
