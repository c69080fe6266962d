"""What is measured on the next card: its parts, with doubles of the driver, of cuBLAS and of products."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import RESULTS
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import contention, memops, next_gpu, starts
from tests.support.fabric import Fabric, Rank
from tests.support.fake_cuda import FakeCuda
from ztrans.ir.collectives import reduce
from ztrans.ir.graph import Split, Var
from ztrans.ir.routes import Hosts
from ztrans.runtime.collectives import wait
from ztrans.runtime.cuda.nccl import StreamedStart, Transport
from ztrans.runtime.cuda.streams import Streams

CPU = torch.device("cpu")


def test_what_is_measured_next_says_what_is_expected_beside_what_was_seen(monkeypatch):

    seen = {"numerics": [{"check": "sums", "result": "bit for bit"}], "gil": [{"failed": "so"}]}
    name_of = {part: name for name, part in next_gpu.PARTS.items()}
    run_part = lambda part, device, seconds: seen[name_of[part]]
    monkeypatch.setattr(next_gpu, "run_part", run_part)
    texts = []
    assert not next_gpu.run(CPU, 100.0, texts.append, ("numerics", "gil"))
    first, last = texts
    assert "## gil" not in first
    assert (
        "Expected: six times 'bit for bit'" in last and "- check sums, result bit for bit" in last
    )
    assert "- failed so" in last
    assert not next_gpu.run(CPU, 4.0, texts.append, ("numerics",))
    assert "not run: the time was over" in texts[-1]
    assert sum(part.seconds for part in next_gpu.PARTS.values()) <= gpu.NEXT_SECONDS
    assert set(next_gpu.SCENARIOS) <= set(next_gpu.two_ranks.SCENARIOS)


def test_a_thread_that_looks_shows_who_keeps_the_lock_of_python():
    """As the two ways to call a function of C do."""

    micros = 400_000
    assert next_gpu.looks_beside(lambda: ctypes.CDLL(None).usleep(micros)) > 5
    assert next_gpu.looks_beside(lambda: ctypes.PyDLL(None).usleep(micros)) <= 2


@pytest.mark.slow
def test_without_a_gpu_nothing_is_measured_next():
    command = [sys.executable, "-m", "benchmarks.gpu", "--next"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parents[1])
    assert run.returncode == 1 and "torch sees none here: nothing is measured" in run.stderr
    assert not (RESULTS / "gpu_next.md").exists()


@pytest.mark.parametrize("seed", range(20))
def test_barriers_by_the_driver_let_no_rank_read_too_early_or_too_late(seed):
    """On streams that go on in random order. Each rank writes its part, meets, reads all parts, meets."""

    chance, ranks, rounds = random.Random(seed), 3, 6
    pads, parts = defaultdict(int), [None] * ranks
    streams = []
    for rank in range(ranks):
        operations = []
        for k in range(rounds):
            operations.append(("fill", rank, k))
            operations += memops.barrier(rank, ranks, 0)
            operations.append(("read", rank, k))
            operations += memops.barrier(rank, ranks, 1)
            operations.append(("fill", rank, "NaN"))
        streams.append(operations)
    while any(streams):
        stream = chance.choice([stream for stream in streams if stream])
        what, *which = stream[0]
        if what == memops.WAIT and pads[tuple(which[:3])] != which[3]:
            assert any(
                s and (s[0][0] != memops.WAIT or pads[s[0][1:4]] == s[0][4]) for s in streams
            )
            continue
        stream.pop(0)
        if what == memops.WRITE:
            assert pads[tuple(which[:3])] != which[3], "a signal is set, or reset, twice"
            pads[tuple(which[:3])] = which[3]
        elif what == "fill":
            parts[which[0]] = which[1]
        elif what == "read":
            assert parts == [which[1]] * ranks


class Driver:
    """Stands in for CUDA's driver: its streams run at once, in the memory of this process."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[tuple] = []
        self.refuses = refuses
        self.is_capturing = False

    def cuStreamWaitValue32_v2(self, stream, address, value, flags):
        self.calls.append(("wait", stream.value, value.value, flags.value))
        if self.refuses == "capture" and self.is_capturing:
            return 900
        if not self.is_capturing:
            signal = ctypes.c_uint32.from_address(address.value)
            end = time.monotonic() + 20
            while signal.value != value.value:
                assert time.monotonic() < end, "a rank waits in vain"
                time.sleep(0)
        return 0

    def cuStreamWriteValue32_v2(self, stream, address, value, flags):
        self.calls.append(("write", stream.value, value.value, flags.value))
        if self.refuses == "write" or (self.refuses == "capture" and self.is_capturing):
            return 801
        if not self.is_capturing:
            ctypes.c_uint32.from_address(address.value).value = value.value
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert mode.value == 2
        self.is_capturing = True
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.is_capturing = False
        graph._obj.value = 0 if self.refuses == "capture" else 77
        return 901 if self.refuses == "capture" else 0

    def cuGraphDestroy(self, graph):
        self.calls.append(("destroy", graph.value))
        return 0


def test_a_stream_waits_for_a_value_and_another_one_writes_it(monkeypatch):

    streams, waited = [], []

    def stream(device):
        found = SimpleNamespace(
            cuda_stream=len(streams) + 1, wait_stream=waited.append, wait_event=waited.append
        )
        streams.append(found)
        return found

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "compute")
    driver = Driver()
    driver.is_capturing = True  # so that the wait returns
    waiting = memops.StreamWait(CPU, driver)
    waiting.begin()
    waiting.end_after("event")
    assert waited == ["compute", "event"]
    assert driver.calls == [("wait", 1, 1, 1), ("write", 2, 1, 0)]
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32_v2 returned 801"):
        memops.StreamWait(CPU, Driver("write")).end_after("event")


def gathered(rounds: int, waits: bool, driver: Driver) -> dict:
    """What a judge says of some gathers. Each stream is a thread; without waits one rank is ahead of the others."""

    gathers = memops.Gathers(CPU, ranks=3, waits=waits)
    call = functools.partial(memops.on_stream, driver)

    def send(rank: int) -> None:
        for _ in range(rounds):
            gathers.send(rank, SimpleNamespace(cuda_stream=rank + 1), call)

    if not waits:
        for rank in range(3):
            send(rank)
        return gathers.judged()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(send, range(3)))
    return gathers.judged()


def test_gathers_between_barriers_by_the_driver_are_right_and_the_control_is_noticed(monkeypatch):

    monkeypatch.setattr(memops, "NUMEL", 64)
    assert gathered(40, True, Driver()) == {"result": "0 wrong values"}
    assert gathered(1, False, Driver()) == {"result": f"{3 * 2 * 64} wrong values"}
    monkeypatch.setattr(memops.Gathers, "meet", lambda self, rank, row, stream, call: None)
    gathers = memops.Gathers(CPU, ranks=3)
    gathers.send(0, None, None)
    assert gathers.judged() == {"failed": "128 wrong values"}


@pytest.mark.parametrize("refuses", ["", "capture"])
def test_a_captured_stream_is_asked_whether_it_takes_writes_and_waits(refuses):

    driver = Driver(refuses)
    stream = SimpleNamespace(cuda_stream=5)
    assert memops.captures(driver, stream, 128) == (refuses == "")
    assert driver.calls[:2] == [("write", 5, 1, 0), ("wait", 5, 1, 1)]
    assert driver.calls[2:] == ([] if refuses else [("destroy", 77)])


class CapturingDriver:
    """Stands in for the driver of a stream that is being captured: its graph is a list of nodes."""

    def __init__(self) -> None:
        self.nodes: list[tuple] = []
        self.last = (ctypes.c_void_p * 1)(11)

    def cuStreamGetCaptureInfo_v2(self, stream, state, capture, graph, before, count):
        assert stream.value == 5
        state._obj.value, graph._obj.value, count._obj.value = 1, 70, 1
        nodes = ctypes.c_void_p(ctypes.addressof(self.last))
        ctypes.memmove(ctypes.addressof(before._obj), ctypes.addressof(nodes), 8)
        return 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = 90
        return 0

    def cuGraphAddBatchMemOpNode(self, node, graph, before, count, parameters):
        given = parameters._obj
        operation = given.operations[0]
        assert (graph.value, count.value, given.context, given.count) == (70, 1, 90, 1)
        fields = operation.operation, operation.address, operation.value, operation.flags
        self.nodes.append((before[0], *fields))
        node._obj.value = 100 + len(self.nodes)
        return 0

    def cuStreamUpdateCaptureDependencies(self, stream, node, count, flags):
        assert (count.value, flags.value) == (1, 1)
        self.last = (ctypes.c_void_p * 1)(node._obj.value)
        return 0


def test_nodes_by_hand_follow_one_another():
    """In the layout of cuda.h: 48 bytes for an operation, 32 for the parameters of a node."""

    assert (ctypes.sizeof(memops.Operation), ctypes.sizeof(memops.Node)) == (48, 32)
    assert [getattr(memops.Operation, x).offset for x in ("address", "value", "flags")] == [
        8, 16, 24
    ]  # fmt: skip
    driver, stream = CapturingDriver(), SimpleNamespace(cuda_stream=5)
    memops.as_node(driver, memops.WRITE, stream, 4096, 1)
    memops.as_node(driver, memops.WAIT, stream, 8192, 1)
    assert driver.nodes == [(11, 2, 4096, 1, 0), (101, 1, 8192, 1, 1)]


class Card:
    """Products and blocks on a card of 132 processors. What a block keeps, a product has less."""

    def __init__(self, obeys: tuple[str, ...]) -> None:
        self.obeys = obeys
        self.free = 0
        self.blocks = 0

    def seconds(self, side=None) -> float:
        # Blocks beside a product cost most where it was made for their processors.
        taken = 1.41 if self.blocks > self.free else 1.0
        return taken * 132 / (132 - self.free)

    @contextlib.contextmanager
    def beside(self, kind):
        self.blocks = kind.blocks
        yield
        self.blocks = 0

    @contextlib.contextmanager
    def leave(self, by, free):
        self.free = free if by in self.obeys else 0
        yield
        self.free = 0


def test_blocks_run_beside_a_carve_out_where_it_is_applied(monkeypatch):

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name: None)
    card = Card(obeys=("target",))
    ways = []
    for name in ("torch", "target"):
        ways.append(contention.Carving(name, "cublas", functools.partial(card.leave, name)))
    first, second = contention.carve_outs(card, card, ways)
    assert first == {
        "products by": "torch", "carve-out 32, of alone": 1.0, "carve-out": "not applied"
    }  # fmt: skip
    assert second["carve-out"] == "applied"
    assert second["24 blocks beside carve-out 24, of alone"] == pytest.approx(132 / 108)


def test_cublas_is_told_its_number_of_processors_and_then_all_of_them():

    told = []

    class Cublas:
        def cublasSetSmCountTarget(self, handle, count):
            told.append((handle.value, count.value))
            return 0 if count.value < 200 else 7

    with contention.sm_count_target(100, Cublas(), 33):
        assert told == [(33, 100)]
    assert told == [(33, 100), (33, 0)]
    refused = pytest.raises(RuntimeError, match="cublasSetSmCountTarget returned 7")
    with refused, contention.sm_count_target(200, Cublas(), 33):
        pass
    assert Path(contention.path_of("libtorch_cpu.so")).exists()
    with pytest.raises(FileNotFoundError, match=r"this process has not loaded libnothing\.so"):
        contention.path_of("libnothing.so")


def test_copies_and_sums_bring_what_they_say(monkeypatch):

    monkeypatch.setattr(contention, "COPIED", 1 << 10)
    assert contention.copied_sums(CPU)() == 2 << 10


def test_the_host_time_of_a_start_is_split_by_function():

    eqn = reduce([Var("g", torch.bfloat16, (64,))], ["f"], "dp", "sum", Split("dp"))
    channel = Rank(Fabric(1), 0, Hosts(1))
    transport = Transport("nccl", "reduce_scatter", "a double")
    start = StreamedStart(eqn, {"dp": 1}, {"dp": 0}, channel, Streams(FakeCuda()), transport)
    term = torch.ones(64, dtype=torch.bfloat16)

    def steps() -> None:
        for _ in range(3):
            (member,) = start(term)
            assert torch.equal(wait(member), term)

    figures = starts.profiled(steps, [start])
    assert list(figures) == [
        "us a start", *starts.PARTS, "streams, events and the rest"
    ]  # fmt: skip
    whole, *parts = figures.values()
    assert all(us > 0 for us in parts)
    assert sum(parts) == pytest.approx(whole)


class Waiting:
    """Graphs of ranks of which one waits in vain in the third replay."""

    extra = 10

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def synchronize(self) -> None:
        pass

    def errors(self) -> str:
        return "rank 1 waited in vain for rank 0" if self.replays >= self.patience else ""


def test_graphs_are_replayed_until_a_rank_waits_in_vain():

    failed = next_gpu.replayed(Waiting(3))
    assert failed["replays"] == 3 and failed["failed"] == "rank 1 waited in vain for rank 0"
    well = next_gpu.replayed(Waiting(1000))
    assert well["replays"] == 500 and well["result"] == "right"


def starts_another(path: Path, device: torch.device):
    """A part that starts a process, and fails."""
    other = subprocess.Popen(["sleep", "600"])
    path.write_text(str(other.pid))
    yield [{"what": "started"}]
    raise ValueError("planted")


@pytest.mark.slow
def test_a_part_that_fails_or_is_ended_leaves_no_process(tmp_path):

    path = tmp_path / "pid"
    part = next_gpu.Part(60, "nothing", functools.partial(starts_another, path))
    lines = next_gpu.run_part(part, CPU, 100)
    assert lines == [{"what": "started"}, {"failed": "RuntimeError: ValueError: planted"}]
    state = Path(f"/proc/{path.read_text()}/stat")
    end = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "the process that it has started goes on"
        time.sleep(0.05)
