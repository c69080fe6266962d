"""Barriers of streams by the driver: a stream writes a signal, and another one waits for it, without a kernel.

    stream_waits    what products lose beside a stream that waits
    memops          gathers by copies between such barriers, launched one by one and replayed from a graph

The functions that call the driver take it as an argument, so a double can stand in for it.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from . import contention

RANKS = 4
ROUNDS = 2000
REPLAYS = 1000
BARRIERS = 50  # in the graph that is timed
NUMEL = 1 << 16  # elements of a rank's part
MOST_CYCLES = 60_000  # of a pause: 30 us at 2 GHz
WAIT, WRITE = "cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ; a write has no flags
# Calls the driver: the name of the function, a stream, the address of a signal, and its value.
Call = Callable[[str, Any, int, int], None]


def checked(driver: Any, name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises: RuntimeError if it refuses.
    """
    code = getattr(driver, name)(*arguments)
    if code:
        raise RuntimeError(f"{name} returned {code}")


def on_stream(driver: Any, name: str, stream: Any, address: int, value: int) -> None:
    """Have a stream write a signal of 32 bits, or wait until it has a value."""
    flags = EQUAL if name == WAIT else 0
    handle = ctypes.c_void_p(stream.cuda_stream)
    signal = ctypes.c_uint64(address), ctypes.c_uint32(value)
    checked(driver, name, handle, *signal, ctypes.c_uint(flags))


# ---- the same as a node of a graph, if a stream that is being captured refuses it


class Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, a union of 48 bytes, of an operation on a value of 32 bits."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class Node(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("operations", ctypes.POINTER(Operation)),
        ("flags", ctypes.c_uint),
    )


OPERATIONS = {WAIT: 1, WRITE: 2}  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


def as_node(driver: Any, name: str, stream: Any, address: int, value: int) -> None:
    """Add what `on_stream` does to the graph that is being captured on a stream, after all that is in it so far."""
    handle = ctypes.c_void_p(stream.cuda_stream)
    state, capture, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    before, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
    found = [ctypes.byref(x) for x in (state, capture, graph, before, count)]
    checked(driver, "cuStreamGetCaptureInfo_v2", handle, *found)
    context = ctypes.c_void_p()
    checked(driver, "cuCtxGetCurrent", ctypes.byref(context))
    flags = EQUAL if name == WAIT else 0
    operation = Operation(OPERATIONS[name], address, value, flags)
    parameters = Node(context, 1, ctypes.pointer(operation), 0)
    node = ctypes.c_void_p()
    place = ctypes.byref(node), graph, before, count
    checked(driver, "cuGraphAddBatchMemOpNode", *place, ctypes.byref(parameters))
    after = ctypes.byref(node), ctypes.c_size_t(1), ctypes.c_uint(SET_DEPENDENCIES)
    checked(driver, "cuStreamUpdateCaptureDependencies", handle, *after)


def captures(driver: Any, stream: Any, address: int) -> bool:
    """Whether a stream that is being captured takes a write and a wait. Its graph is thrown away."""
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    checked(driver, "cuStreamBeginCapture_v2", handle, ctypes.c_uint(RELAXED))
    takes = True
    for name in (WRITE, WAIT):
        try:
            on_stream(driver, name, stream, address, 1)
        except RuntimeError:
            takes = False
    code = driver.cuStreamEndCapture(handle, ctypes.byref(graph))
    if graph.value:
        checked(driver, "cuGraphDestroy", graph)
    return takes and not code


# ---- what products lose


def stream_waits(device: torch.device) -> Iterator[list[dict]]:
    """A stream that waits for a value in memory, by the driver, takes nothing from the products beside it."""
    torch.cuda.set_device(device)
    products = contention.Products(device)
    waiting = StreamWait(device)
    alone = [products.seconds() for _ in range(contention.ROUNDS)]
    beside = [products.seconds(waiting) for _ in range(contention.ROUNDS)]
    yield [{"beside": "a stream that waits", "of alone": min(beside) / min(alone)}]


class StreamWait:
    """A stream that waits for a value until another one writes it."""

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        self.driver = driver or ctypes.CDLL("libcuda.so.1")
        self.flag = torch.zeros((), dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(device)
        self.setter = torch.cuda.Stream(device)

    def begin(self) -> None:
        self.flag.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())
        on_stream(self.driver, WAIT, self.stream, self.flag.data_ptr(), 1)

    def end_after(self, event: Any) -> None:
        self.setter.wait_event(event)
        on_stream(self.driver, WRITE, self.setter, self.flag.data_ptr(), 1)


# ---- gathers between barriers


def barrier(rank: int, ranks: int, row: int) -> list[tuple[str, int, int, int, int]]:
    """What a stream does to meet those of the other ranks: what, whose pad, its row, whose signal in it, the value.

    A rank waits on its own pad alone, and resets it. A signal is not set again before it is reset: between two barriers
    of one row lies one of the other row, which a peer passes only after this rank has come to it.
    """
    peers = [peer for peer in range(ranks) if peer != rank]
    set_theirs = [(WRITE, peer, row, rank, 1) for peer in peers]
    see_ours = [(WAIT, rank, row, peer, 1) for peer in peers]
    reset_ours = [(WRITE, rank, row, peer, 0) for peer in peers]
    return [*set_theirs, *see_ours, *reset_ours]


class Gathers:
    """Gathers by copies among ranks of one process, each on a stream of its own, between barriers by the driver.

    Each gather has another value, and a rank writes NaN over its part when the gather has ended, so one that reads too
    early or too late has a wrong value. Without `waits` nobody waits, as a control.
    """

    def __init__(self, device: torch.device, ranks: int = RANKS, waits: bool = True) -> None:
        self.ranks = ranks
        self.waits = waits
        self.pads = torch.zeros(ranks, 2, ranks, dtype=torch.int32, device=device)
        self.parts = torch.full((ranks, NUMEL), float("nan"), device=device)
        self.outs = torch.empty(ranks, ranks, NUMEL, device=device)
        self.counts = torch.zeros(ranks, device=device)
        self.wrong = torch.zeros(ranks, dtype=torch.int64, device=device)

    def meet(self, rank: int, row: int, stream: Any, call: Call) -> None:
        if not self.waits:
            return
        for name, owner, row_of_pad, sender, value in barrier(rank, self.ranks, row):
            call(name, stream, self.pads[owner, row_of_pad, sender].data_ptr(), value)

    def send(self, rank: int, stream: Any, call: Call) -> None:
        """One gather of a rank, on the current stream, which is `stream`."""
        count, part, out = self.counts[rank], self.parts[rank], self.outs[rank]
        count.add_(1)
        part.copy_(count.expand(NUMEL))
        self.meet(rank, 0, stream, call)
        out.copy_(self.parts)
        self.meet(rank, 1, stream, call)
        part.fill_(float("nan"))
        self.wrong[rank].add_((out != count).sum())

    def judged(self) -> dict[str, str]:
        """How many values have been wrong since this was last asked, and whether that is right."""
        count = int(self.wrong.sum())
        self.wrong.zero_()
        is_right = (count == 0) == self.waits
        return {"result" if is_right else "failed": f"{count} wrong values"}


def memops(device: torch.device) -> Iterator[list[dict]]:
    """Gathers of 4 ranks on streams of one process with random pauses, launched one by one, then replayed."""
    # Streams beyond the number of connections share one, in which a stream could wait behind one that waits for it.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    torch.cuda.set_device(device)
    driver = ctypes.CDLL("libcuda.so.1")
    streams = [torch.cuda.Stream(device) for _ in range(RANKS)]
    chance = random.Random(0)

    def played(run: Callable[[int], object], rounds: int, pauses: bool = True) -> float:
        """Have all ranks run something some times. Returns the microseconds of a round."""
        torch.cuda.synchronize(device)
        began = time.monotonic()
        for _ in range(rounds):
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    if pauses:
                        torch.cuda._sleep(chance.randrange(MOST_CYCLES))
                    run(rank)
        torch.cuda.synchronize(device)
        return 1e6 * (time.monotonic() - began) / rounds

    launched = partial(on_stream, driver)
    gathers = Gathers(device)
    us = played(lambda rank: gathers.send(rank, streams[rank], launched), ROUNDS)
    lines = [{"barriers": "by the driver", "rounds": ROUNDS, "us": us} | gathers.judged()]
    yield lines
    control = Gathers(device, waits=False)
    us = played(lambda rank: control.send(rank, streams[rank], launched), ROUNDS)
    lines.append({"barriers": "none, as a control", "rounds": ROUNDS, "us": us} | control.judged())
    yield lines

    takes = captures(driver, streams[0], gathers.pads.data_ptr())
    call = launched if takes else partial(as_node, driver)
    by = "captured from a stream" if takes else "nodes by hand: a captured stream refuses them"

    def graph_of(rank: int, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            run()
        return graph

    def meet_often(rank: int) -> None:
        for _ in range(BARRIERS // 2):
            for row in range(2):
                gathers.meet(rank, row, streams[rank], call)

    graphs = [
        graph_of(rank, partial(gathers.send, rank, streams[rank], call)) for rank in range(RANKS)
    ]
    us = played(lambda rank: graphs[rank].replay(), REPLAYS)
    lines.append({"barriers": by, "replays": REPLAYS, "us": us} | gathers.judged())
    yield lines
    timed = [graph_of(rank, partial(meet_often, rank)) for rank in range(RANKS)]
    played(lambda rank: timed[rank].replay(), 1, pauses=False)
    us = played(lambda rank: timed[rank].replay(), 20, pauses=False)
    lines.append({"barriers": by, "us of a barrier": us / BARRIERS})
    yield lines
