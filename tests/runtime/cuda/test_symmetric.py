"""Symmetric memory: when it is used, on which GPUs, and what ranks do if one of them cannot use it."""

from __future__ import annotations

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_memory

import ztrans as zt
from tests.support.fabric import Fabric, Rank
from tests.support.fake_cuda import FakeCuda
from tests.support.gloo_threads import on_threads
from tests.support.mailbox import Group, Mailbox
from tests.support.processes import run_ranks
from tests.support.worlds import fake_mesh
from ztrans.ir.collectives import all_gather, buffer_bytes, is_start, reduce, wire_format
from ztrans.ir.graph import Eqn, Graph, Split, Var
from ztrans.ir.routes import Hosts
from ztrans.ops import symmetric as memories
from ztrans.ops.symmetric import allocate, has_native_atomics, in_one_process
from ztrans.runtime import transports
from ztrans.runtime.channels import Channel
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.collectives import channel as axis_channel
from ztrans.runtime.collectives import wait
from ztrans.runtime.cuda import symmetric
from ztrans.runtime.cuda.nccl import Transport
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric import (
    LARGEST_FOR_KERNEL,
    LARGEST_TIMED,
    MOST_SPINS,
    Buffer,
    CudaSource,
    MessageKind,
    Refused,
    SymmetricMemory,
    Times,
    message_kind,
    on_all_ranks,
    spins_of,
)
from ztrans.runtime.cuda.symmetric_start import SymmetricStart
from ztrans.runtime.transports import StreamTransports, Transports

KIND = MessageKind(sums=False, gathers=True, wire=torch.float32, nbytes=1024)


@pytest.fixture(scope="module")
def mesh():
    with fake_mesh() as mesh:
        yield mesh


def channel_of(group, hosts=None) -> Channel:
    return Channel("dp", "gathers", hosts=hosts or Hosts(4), _group=weakref.ref(group))


def gathered(dtype, rows):
    return all_gather([Var("w", dtype, (rows,), (Split("dp"),))], ["w.full"], "dp")


def test_a_message_has_a_kind_or_a_reason_why_symmetric_memory_cannot_carry_it():
    assert message_kind(gathered(torch.float32, 200), {"dp": 4}, 1) == KIND
    assert (
        message_kind(gathered(torch.complex128, 4), {"dp": 4}, 1) == "elements of more than 8 bytes"
    )
    larger = message_kind(gathered(torch.uint8, LARGEST_FOR_KERNEL + 1), {"dp": 4}, 1)
    assert larger.nbytes == 2 * LARGEST_FOR_KERNEL
    assert not larger.has_kernel


def summed(numel, to, count=1):
    terms = [Var(f"g{k}", torch.bfloat16, (numel,)) for k in range(count)]
    return reduce(terms, [f"f{k}" for k in range(count)], "dp", "sum", to)


@pytest.mark.parametrize("to", [None, Split("dp")], ids=["all_reduce", "reduce_scatter"])
def test_a_reduction_of_any_size_has_a_kind_and_room_for_what_is_copied_at_once(to):
    """A kernel carries a reduce_scatter of up to 32 MiB; copies of larger messages go through the buffer in rounds."""
    for nbytes in (1 << 20, 32 << 20, 96 << 20, 864 << 20):
        eqn = summed(nbytes // 2, to)
        kind = message_kind(eqn, {"dp": 8}, 1)
        assert kind.sums and kind.gathers == (to is None)
        assert kind.nbytes >= min(nbytes, LARGEST_TIMED)
        assert kind.room(8) == min(kind.nbytes, LARGEST_FOR_KERNEL)
        assert kind.has_kernel == (nbytes <= LARGEST_FOR_KERNEL and to is not None)


def test_the_limits_are_those_of_a_message_and_not_of_a_bucket():
    """Each message of a reduction has a kernel alone, and gathers of 256 MiB are copied together."""
    nine = summed(LARGEST_FOR_KERNEL // 2, Split("dp"), count=9)
    assert message_kind(nine, {"dp": 4}, 1).nbytes == LARGEST_FOR_KERNEL
    for count, nbytes in ((2, 64 << 20), (3, 128 << 20), (9, LARGEST_TIMED)):
        shards = [Var(f"w{k}", torch.uint8, (32 << 20,), (Split("dp"),)) for k in range(count)]
        eqn = all_gather(shards, [f"f{k}" for k in range(count)], "dp")
        assert message_kind(eqn, {"dp": 4}, 1).nbytes == nbytes


def test_a_larger_message_than_is_timed_is_of_the_largest_kind_that_is():
    for rows in (LARGEST_TIMED, LARGEST_TIMED + 1, 7 * LARGEST_TIMED):
        kind = message_kind(gathered(torch.uint8, rows), {"dp": 4}, 1)
        assert kind.nbytes == LARGEST_TIMED and kind.room(4) == LARGEST_TIMED // 4


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_message_of_a_kind_has_room_in_its_buffer(ranks):
    for rows in (1, 5, 100, 255, 256, 257):
        eqn = gathered(torch.bfloat16, rows)
        sent = 2 * -(-rows // ranks)  # this rank's padded part
        gather = message_kind(eqn, {"dp": ranks}, 1)
        assert sent <= gather.room(ranks)
        assert ranks * sent <= gather._replace(sums=True).room(ranks)


def test_what_carries_a_message_is_looked_up_and_never_decided_by_one_rank(mesh):
    memory = SymmetricMemory()
    alone = dist.new_group([1])
    assert memory.answer(channel_of(alone), KIND) == "one rank"
    answer = memory.answer(channel_of(mesh.get_group()), KIND)
    assert answer == "not tried, because this rank alone has made the program"


class Local(CudaSource):
    """A source for one of two ranks, whose memories are all in this process."""

    def __init__(self, refuse=""):
        self.refuse = refuse
        self.sizes = []

    def device(self):
        return "cpu"

    def check_room(self, lanes):
        if lanes > 4:
            raise RuntimeError("no room for so many lanes")

    def check_links(self, devices):
        if self.refuse:
            raise RuntimeError(self.refuse)

    def allocate(self, nbytes, ranks):
        self.sizes.append(nbytes)
        return nbytes

    def connect(self, part, nbytes, group):
        return in_one_process(2, nbytes)[0]


class Fast(SymmetricMemory):
    """Every message is faster through this memory, except for those of 16 bytes."""

    def trial(self, buffer, kind, from_all):
        return Times(3e-6 if kind.nbytes == 16 else 1e-6, 2e-6, kind.nbytes)


class Small(Local):
    """A source that notes the sizes of its memories, and makes small ones."""

    def connect(self, part, nbytes, group):
        return in_one_process(2, 64)[0]


class FastCopies(SymmetricMemory):
    """Every message is fastest by copies."""

    def trial(self, buffer, kind, from_all):
        return Times(2e-6 if kind.has_kernel else float("inf"), 3e-6, kind.nbytes, copies=1e-6)


def alike(value):
    """The values of this rank and of three others, which do what it does."""
    return [value] * 4 if not isinstance(value, tuple) else [(rank, value[1]) for rank in range(4)]


def test_programs_share_the_buffer_of_a_channel(mesh):
    source = Local()
    memory = Fast(source)
    channel = channel_of(mesh.get_group())
    small, large = (KIND._replace(nbytes=n) for n in (1 << 10, 1 << 20))
    memory.reserve([(channel, small), (channel, large), (channel, KIND._replace(nbytes=16))], alike)
    (buffer,) = memory.buffers
    assert buffer.nbytes == large.room(4)
    memory.reserve([(channel, small), (channel, large)], alike)
    assert len(source.sizes) == 1, "what has been decided is not tried again"
    other = KIND._replace(nbytes=1 << 12)
    memory.reserve([(channel, other)], alike)
    carried = {kind: found for (_, kind), found in memory.buffer_of.items()}
    assert carried == {small: buffer, large: buffer, other: buffer}
    # A larger message gets a larger buffer. A captured graph still has the addresses of the first one.
    larger = KIND._replace(nbytes=1 << 22)
    memory.reserve([(channel, larger)], alike)
    assert memory.buffer_of[channel, small] is buffer
    assert memory.buffer_of[channel, larger] is not buffer


@pytest.mark.parametrize(
    ("times", "way"),
    [
        (Times(10e-6, 20e-6, 64), "kernel"),
        (Times(10e-6, 20e-6, 64, copies=11e-6), "copies"),
        (Times(10e-6, 20e-6, 64, copies=12e-6), "kernel"),
        (Times(float("inf"), 20e-6, 64, copies=21e-6), "copies"),
        (Times(float("inf"), 20e-6, 64, copies=23e-6), "NCCL"),
    ],
)
def test_copies_carry_a_gather_if_they_are_nearly_as_fast_as_the_fastest(times, way):
    """They take no multiprocessors."""
    assert times.is_copied == (way == "copies")
    assert times.uses_symmetric_memory == (way != "NCCL")


def test_a_large_gather_is_tried_by_copies_and_not_by_a_kernel(mesh, monkeypatch):
    tried = []
    monkeypatch.setattr(symmetric, "_seconds", lambda run: run() or 1.0)
    monkeypatch.setattr(symmetric, "all_gather", lambda *_, **__: None)
    monkeypatch.setattr(symmetric, "gather_by_copies", lambda *_: tried.append("copies"))
    monkeypatch.setattr(symmetric, "gather", lambda *_: tried.append("a kernel"))
    monkeypatch.setattr(symmetric._Trial, "gave_equal_bits", lambda self: True)
    memory = SymmetricMemory(Local())
    channel = channel_of(mesh.get_group())
    large = KIND._replace(nbytes=LARGEST_FOR_KERNEL * 2)
    memory.reserve([(channel, KIND)], alike)
    assert tried == ["a kernel", "copies"]
    memory.reserve([(channel, large)], alike)
    assert tried == ["a kernel", "copies", "copies"]
    assert memory.answer(channel, KIND) == Times(1.0, 1.0, KIND.nbytes, 1.0)
    assert memory.answer(channel, large) == Times(float("inf"), 1.0, large.nbytes, 1.0)
    assert memory.buffer_of[channel, large].nbytes == large.room(4)


def test_the_kernel_gathers_a_message_of_one_member_and_one_of_two():
    ranks = 3
    shards = [[torch.full((k + 2,), 10.0 * rank + k) for k in range(3)] for rank in range(ranks)]
    memories = in_one_process(ranks, 48)
    fabric = Fabric(ranks)
    gathered_vars = [
        Var(f"w{k}", torch.float32, (ranks * len(x),), (Split("dp"),))
        for k, x in enumerate(shards[0])
    ]
    eqn = all_gather(gathered_vars, [f"f{k}" for k in range(3)], "dp")

    def run(rank):
        channel = Rank(fabric, rank, Hosts(ranks))
        buffer = Buffer(channel, 48, memories[rank], MOST_SPINS)
        transport = Transport("symmetric", "all_gather", "a double")
        common = eqn, {"dp": ranks}, {"dp": rank}, channel, Streams(FakeCuda()), transport
        start = SymmetricStart(buffer, *common)
        start.members_by_message = [[0], [1, 2]]
        return [wait(member) for member in start(*shards[rank])]

    for values in on_threads(ranks, run):
        for k, value in enumerate(values):
            assert torch.equal(value, torch.cat([of_rank[k] for of_rank in shards]))


class Block(torch.nn.Module):
    """A layer of width 4096, with products of 32 and 96 MiB in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4096)
        self.q, self.o = (torch.nn.Linear(4096, 4096, bias=False) for _ in range(2))
        self.up = torch.nn.Linear(4096, 3 * 4096, bias=False)
        self.down = torch.nn.Linear(3 * 4096, 4096, bias=False)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.o(self.q(y).relu())
        return x + self.down(self.up(y).relu())


class OfNccl(Channel):
    """A channel whose group is a double."""

    is_gloo = False


def eight_ranks() -> tuple[Channel, list[Group]]:
    """A channel of eight ranks on one host, and the group that it refers to."""
    groups = [Group(Mailbox(), 0, 8)]
    channel = OfNccl("dp", "gathers", hosts=Hosts(8))
    channel.open(groups[0])
    return channel, groups


def test_the_messages_of_a_plan_for_eight_gpus_go_by_copies(mesh, monkeypatch):
    """Its buckets are up to several hundred MiB. One weight is on all ranks, so its gradient is an all_reduce."""
    with torch.device("meta"):
        model = torch.nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def loop(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step, state = zt.lift(loop, model, optimizer)
    abstract_mesh = zt.AbstractMesh(dp=8)
    is_cut = lambda path, leaf: "1.down" not in path
    shard = zt.shard_params(abstract_mesh, stage=3, reduce_dtype=torch.bfloat16, where=is_cut)
    schedule = zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
    x = torch.empty(8 * 4096, 4096, device="meta")
    cluster = zt.cluster("h100", dp="nvlink4")
    graph = zt.chain(shard, *schedule)(step).lower(state, x, cluster=cluster).graph
    channel, groups = eight_ranks()
    memory = FastCopies(Small())
    by_streams = StreamTransports(Streams(FakeCuda(), memory))
    monkeypatch.setattr(transports, "everywhere", lambda value, mesh: [value] * 8)
    monkeypatch.setattr(memory, "_check_links", lambda channel, from_all: None)
    starts = [eqn for eqn in graph.eqns if is_start(eqn)]
    messages = [(channel, eqn, graph.axes, 2) for eqn in starts]
    by_streams.reserve(mesh, messages)
    ways, largest = {}, Counter()
    for eqn in starts:
        start = by_streams.start_module(eqn, graph.axes, {"dp": 0}, channel, lanes=2)
        wire = wire_format(eqn, eqn.ins[0]).carrier
        ways.setdefault((eqn.op.name, wire), set()).add(start.transport.way)
        nbytes = sum(buffer_bytes(eqn, k, graph.axes) for k in range(len(eqn.outs)))
        largest[eqn.op.name] = max(largest[eqn.op.name], nbytes)
    del groups
    assert largest["all_gather"] > 128 << 20
    assert largest["reduce_scatter"] > 128 << 20
    assert largest["all_reduce"] == 96 << 20
    bf16 = torch.bfloat16
    assert ways["all_gather", bf16] == {"copied"}
    assert ways["reduce_scatter", bf16] == {"copied"}
    assert ways["all_reduce", bf16] == {"copied"}
    assert ways["all_reduce", torch.float32] == {"nccl"}, "the loss: NCCL has other bits"
    assert max(buffer.nbytes for buffer in memory.buffers) == LARGEST_FOR_KERNEL


def test_ranks_on_several_hosts_do_not_try(mesh):
    source = Local()
    memory = Fast(source)
    channel = channel_of(mesh.get_group(), Hosts(4, 2))
    memory.reserve([(channel, KIND)], alike)
    assert (memory.answer(channel, KIND), source.sizes) == ("ranks on 2 hosts", [])


def test_more_lanes_than_a_device_has_room_for_are_refused(mesh):
    """Even if the same message has been sent in a program with fewer lanes, which still sends it as before."""
    memory = Fast(Local())
    channel = channel_of(mesh.get_group())
    crowded = KIND._replace(lanes=5)
    memory.reserve([(channel, KIND)], alike)
    memory.reserve([(channel, crowded)], alike)
    assert memory.answer(channel, crowded) == "rank 1: no room for so many lanes"
    assert memory.answer(channel, KIND).uses_symmetric_memory
    assert list(memory.buffer_of) == [(channel, KIND)]


@pytest.mark.parametrize(
    "processors, most", [(132, 4), (108, 3), (58, 2), (16, 1)], ids=["h100", "a100", "l4", "1/8"]
)
def test_waiting_kernels_of_all_lanes_fit_on_a_device(monkeypatch, processors, most):
    """One lane of symmetric memory, of 32 blocks in pairs, and 32 blocks of NCCL for each other lane."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(multi_processor_count=processors),
    )
    CudaSource().check_room(most)
    with pytest.raises(RuntimeError, match=rf"^{most + 1} lanes .* the GPU has {processors}$"):
        CudaSource().check_room(most + 1)


def test_the_lanes_of_a_program_are_counted():
    """Those of gathers and of reductions, and the one of collectives that the step itself calls."""
    w = Var("w", torch.float32, (8,), (Split("dp"),))
    own = Eqn(torch.ops._c10d_functional.all_reduce.default, (w, "sum", "dp"), (w,))
    term = Var("g", torch.float32, (8,))
    scatter = reduce([term], ["g"], "dp", "sum", Split("dp"))
    eqns = (gathered(torch.float32, 8), gathered(torch.bfloat16, 8), scatter, own)
    graph = Graph("f", (w, term), eqns, (), 0, mesh=(("dp", 4),))
    assert transports.lane_count(graph, None, Transports()) == 3


def without_room():
    raise RuntimeError("no room\nat all")


def test_a_failure_on_another_rank_refuses_on_this_one(mesh):
    def reason_there(value):
        return [value] * 3 + ["rank 3: CUDA driver error: out of memory"]

    with pytest.raises(Refused, match="rank 3: CUDA driver error: out of memory"):
        on_all_ranks(lambda: 1, reason_there)
    with pytest.raises(Refused, match="rank 1: no room"):
        on_all_ranks(without_room, alike)
    assert on_all_ranks(lambda: 1, alike) == 1


def test_a_trial_without_room_for_its_message_is_refused_on_all_ranks(mesh, monkeypatch):
    def no_room(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")

    memory = SymmetricMemory(Local())
    channel = channel_of(mesh.get_group())
    monkeypatch.setattr(torch, "randn", no_room)
    memory.reserve([(channel, KIND)], alike)
    reason = "rank 1: CUDA out of memory. Tried to allocate 32.00 MiB"
    assert (memory.answer(channel, KIND), memory.buffers) == (reason, [])


@pytest.mark.parametrize("part", ["all_to_all", "torch.equal"])
def test_a_trial_that_fails_by_nccl_is_refused_on_all_ranks(mesh, monkeypatch, part):
    def without_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def seconds(run):
        run()
        return 1.0

    memory = SymmetricMemory(Local())
    channel = channel_of(mesh.get_group())
    kind = KIND._replace(sums=True, gathers=False)
    monkeypatch.setattr(symmetric, "_seconds", seconds)
    for name in ("scatter", "exchange_by_copies", "all_to_all"):
        monkeypatch.setattr(symmetric, name, lambda *_: None)
    monkeypatch.setattr(symmetric.ops, "sum_terms", lambda *_: None)
    monkeypatch.setattr(f"ztrans.runtime.cuda.symmetric.{part}", without_memory)
    memory.reserve([(channel, kind)], alike)
    assert memory.answer(channel, kind) == "rank 1: CUDA out of memory"


def test_a_kernel_that_has_waited_in_vain_is_an_error_of_the_mesh(mesh):
    memory = Fast(Local())
    channel = channel_of(mesh.get_group())
    memory.reserve([(channel, KIND)], alike)
    assert memory.error() == ""
    memory.buffer_of[channel, KIND].memory.error.fill_(2)
    assert memory.error().startswith("rank 0 waited in vain for rank 1: it has died, is far behind")


@pytest.mark.parametrize(("timeout", "spins"), [(600.0, 747_110_400), (3600.0, MOST_SPINS)])
def test_kernels_wait_for_nearly_the_time_out(timeout, spins):
    """The 2**16 looks that were timed have taken 50 ms; an int32 holds the number of looks."""
    assert spins_of(0.95 * timeout, 0.05) == spins


class Driver:
    """Stands in for CUDA's driver. Devices 0 and 1 are joined by NVLink, and 2 by PCIe."""

    def cuDeviceGetP2PAttribute(self, value, attribute, device, peer):
        assert attribute == 3
        value._obj.value = {device, peer} == {0, 1}
        return 0 if peer < 3 else 101


def test_atomic_operations_need_nvlink():
    links = {(0, 1): True, (1, 0): True, (0, 2): False, (2, 2): True, (0, 3): False}
    for (device, peer), expected in links.items():
        assert has_native_atomics(device, peer, Driver()) == expected


def test_gpus_without_nvlink_or_hidden_ones_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}")
    )
    monkeypatch.setattr(
        symmetric, "has_native_atomics", lambda *pair: has_native_atomics(*pair, Driver())
    )
    source = CudaSource()
    assert source.device() == "GPU-0"
    source.check_links({0: "GPU-0", 1: "GPU-1"})
    with pytest.raises(RuntimeError, match="no NVLink to the GPU of rank 5, and PCIe carries no"):
        source.check_links({4: "GPU-0", 5: "GPU-2"})
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES hides the GPU of rank 1"):
        source.check_links({0: "GPU-0", 1: "GPU-7"})


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_memory_that_torch_has_cached_makes_room_once(monkeypatch, failures):
    calls = []

    def empty(size, dtype, device):
        calls.append("allocate")
        if calls.count("allocate") <= failures:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.ones(size, dtype=dtype)

    monkeypatch.setattr(torch_memory, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty the cache"))
    if failures == 2:
        with pytest.raises(RuntimeError, match="out of memory"):
            allocate(100, 2)
    else:
        part = allocate(100, 2)
        assert len(part) == memories.room(100, 2) and not part.any()
    assert calls == ["allocate", "empty the cache", "allocate"][: 1 if failures == 0 else 3]


def test_a_program_is_printed_without_a_message_to_any_rank(mesh, monkeypatch):
    """Nor is one timed when a rank makes a program alone."""

    def sent(*args, **kwargs):
        raise AssertionError("a collective")

    step = zt.chain(zt.shard_params(mesh), zt.prefetch())(lambda w, x: (w, (w * x).sum()))
    lowered = step.lower(step.shard(torch.ones(8)), torch.ones(8))
    axis_channel(mesh, "dp", "gather")
    axis_channel(mesh, "dp", "reduce")
    for name in ("all_gather_object", "new_group", "barrier", "all_gather_single"):
        monkeypatch.setattr(dist, name, sent, raising=False)
    assert "all_gather" in str(lowered.to_fx())
    source = Local()
    streams = Streams(FakeCuda(), SymmetricMemory(source))
    text = str(to_fx(lowered.graph, mesh, transports=StreamTransports(streams)))
    assert "no symmetric memory: not tried, because this rank alone has made the program" in text
    assert source.sizes == []


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_two_ranks_decide_together_and_go_on_with_batches_of_other_sizes():
    """The smaller batch of one rank has a program that this rank has bound alone."""
    figures = run_ranks(2, "symmetric_ranks.py")
    assert all(f["bitwise"] for f in figures), figures
    by_case = {f["case"]: f for f in figures}
    assert by_case["ragged"]["buffers"] == by_case["micro-batches"]["buffers"] == 2
    assert by_case["ragged"]["refusals"] == by_case["micro-batches"]["refusals"] == []
    reasons = {
        "MissingOnRank1": "rank 1: CUDA out of memory",
        "UnlinkedOnRank1": "rank 1: no NVLink to the GPU of rank 0",
        "LostOnRank1": "rank 1: CUDA driver error: invalid handle",
        "trial": "rank 0: rank 0 waited in vain for rank 1",
    }
    for case, reason in reasons.items():
        assert by_case[case]["buffers"] == 0
        assert [text.startswith(reason) for text in by_case[case]["refusals"]] == [True]


def test_a_message_that_symmetric_memory_cannot_carry_leaves_it_to_others():
    """Complex numbers of 16 bytes have no kernel."""
    messages = []
    for name, dtype in (("z", torch.complex128), ("w", torch.float32)):
        shard = Var(name, dtype, (8,), (Split("dp"),))
        gather = all_gather([shard], [f"{name}.full"], "dp")
        messages.append((SimpleNamespace(hosts=Hosts(2)), gather, {"dp": 2}, 1))
    reserved = []
    memory = SimpleNamespace(reserve=lambda kinds, everywhere: reserved.extend(kinds))
    StreamTransports(SimpleNamespace(symmetric=memory)).reserve(None, messages)
    assert [kind.wire for _, kind in reserved] == [torch.float32]
