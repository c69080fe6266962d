"""What to measure on the next card, in order: each part with its time limit, and what is expected beside what was seen.

    python benchmarks/gpu.py --next           # on a GPU, at most 9 minutes; results/gpu_next.md

A part has a process of its own. If it needs longer than its limit it is ended, and that is its result.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_contention
import gpu_numerics
import gpu_two_ranks
import torch
from gpu_rounds import Child

Lines = Iterator[list[dict]]
HERE = Path(__file__).parent
LAUNCHES = 4000  # more than the queue of a stream holds
LOOK = 0.02  # seconds between two looks of the thread that counts
REPLAYS = 200
PART = 1 << 16  # bytes of a rank in a gather
CHANNELS = 16  # blocks of a gather: 4 ranks with 3 lanes have 192, and an H100 has room for 264
WAITS = 1 << 20  # looks of a kernel before it gives up: about a second
BUSY = 4.0  # seconds that the stream is blocked
SCENARIOS = (
    *("stages", "half precision", "CUDA graphs", "symmetric memory", "copies", "two hosts"),
    *("batches of other sizes", "an exception", "an exception beside Inductor", "a disagreement"),
    *("a refused replay", "a rank leaves", "a rank is killed between replays"),
)


class Part(NamedTuple):
    """A measurement: its time limit in seconds, what it is to show, and what runs it on a device."""

    seconds: float
    expected: str
    run: Callable[[torch.device], Lines]


# ---- the parts


def numerics(device: torch.device) -> Lines:
    """The kernels of today beside their references."""
    return gpu_numerics.checks(device)


def contention(device: torch.device) -> Lines:
    """One block of one warp that waits, as a barrier of copies; and whether cuBLAS takes the carve-out at all."""
    torch.cuda.set_device(device)
    lines = []
    one_warp = gpu_contention.Waiting("1 block of 1 warp, as a barrier of copies", 1, 1, 40)
    gpu_contention.WAITING = (one_warp,)
    products = gpu_contention.Products(device)
    blocks = gpu_contention.Blocks(device)
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        alone = min(products.seconds() for _ in range(gpu_contention.ROUNDS))
        with gpu_contention.carved_out(32):
            carved = min(products.seconds() for _ in range(gpu_contention.ROUNDS))
        with blocks.beside(one_warp) as side:
            beside = min(products.seconds(side) for _ in range(gpu_contention.ROUNDS))
        applied = "applied" if carved > 1.15 * alone else "not applied"
        lines.append(
            {
                "by": library,
                "carve-out 32, of alone": carved / alone,
                "carve-out": applied,
                "beside 1 warp, of alone": beside / alone,
            }
        )
        yield lines


def looks_beside(run: Callable[[], object]) -> int:
    """How often a thread of this process has looked while `run` ran: not at all if it keeps Python's lock."""
    looks = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(LOOK):
            looks.append(1)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        run()
    finally:
        stop.set()
        thread.join()
    return len(looks)


def gil(device: torch.device) -> Lines:
    """Whether a thread goes on while a launch waits for room in the queue of a blocked stream."""
    lines = []
    for name, launch in launchers(device).items():
        launch()  # compiles
        torch.cuda.synchronize(device)

        def fill(launch: Callable = launch) -> None:
            torch.cuda._sleep(int(BUSY * 1.5e9))
            for _ in range(LAUNCHES):
                launch()

        began = time.monotonic()
        looks = looks_beside(fill)
        seconds = time.monotonic() - began
        torch.cuda.synchronize(device)
        share = looks * LOOK / seconds
        lines.append({"launch": name, "s": seconds, "share of the looks": share})
        yield lines


def launchers(device: torch.device) -> dict[str, Callable[[], object]]:
    """Launches of one kernel each, by who launches it."""
    from torch._inductor import config

    x = torch.ones(1024, device=device)
    event, old_event = torch.Event("cuda"), torch.cuda.Event()
    compiled = {}
    for static in (True, False):
        with config.patch(use_static_cuda_launcher=static):
            compiled[static] = torch.compile(lambda x, static=static: x * (2 + static) + 1)
            compiled[static](x)
    return {
        "aten": lambda: x.add_(1),
        "Inductor's own launcher": lambda: compiled[True](x),
        "Inductor with Triton's launcher": lambda: compiled[False](x),
        "torch.Event.record": event.record,
        "torch.cuda.Event.record": old_event.record,
    }


def scenarios(device: torch.device) -> Lines:
    """Several ranks on one card, or on one card each, over NCCL."""
    end = time.monotonic() + PARTS["scenarios"].seconds - 5
    return gpu_two_ranks.two_ranks(device, lambda: end - time.monotonic(), SCENARIOS)


def expandable(device: torch.device) -> Lines:
    """CUDA graphs of 2 ranks with expandable segments, with and without buffers that NCCL registers."""
    lines: list[dict] = []
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    shares_card = torch.cuda.device_count() < 2
    for register in ("0", "1"):
        os.environ["NCCL_GRAPH_REGISTER"] = register
        found = gpu_two_ranks.outcome("CUDA graphs", 2, device.type, 25.0, shares_card)
        lines += [{"NCCL_GRAPH_REGISTER": register, **line} for line in found]
        yield lines


def memory(device: torch.device) -> Lines:
    """The memory that each communicator takes when it is opened, and by the first steps after that."""
    shares_card = torch.cuda.device_count() < 2
    lines = gpu_two_ranks.outcome("memory of NCCL", 2, device.type, 35.0, shares_card)
    yield lines


def starts(device: torch.device) -> Lines:
    """Steps of stage 3 of one rank, eager, by the number of connections of the card."""
    lines = []
    for connections in ("1", "8", "32"):
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
        command = [sys.executable, str(HERE / "gpu_next.py"), "seconds of a step"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=40)
        last = (run.stdout.splitlines() or [""])[-1]
        is_right = run.returncode == 0
        result = {"ms": 1e3 * float(last)} if is_right else {"failed": run.stderr[-200:]}
        lines.append({"connections": connections, **result})
        yield lines


def print_seconds_of_a_step() -> None:
    """The seconds of an eager step of stage 3 on one rank."""
    world = gpu_two_ranks.World("cuda", dp=1)
    step, state = world.step(stage=3)
    local = step.shard(state)
    batch = world.batches(0)[0]
    compiled = step.lower(local, *batch).compile()
    for k in range(25):
        if k == 5:
            torch.cuda.synchronize()
            began = time.monotonic()
        local, _ = compiled(local, *batch)
    torch.cuda.synchronize()
    print((time.monotonic() - began) / 20)


def memcheck(device: torch.device) -> Lines:
    """The kernels that wait for other ranks, under compute-sanitizer."""
    lines = []
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, sys.executable, str(HERE / "gpu_next.py")]
        try:
            run = subprocess.run(
                [*command, "one gather"], capture_output=True, text=True, timeout=60
            )
            summary = [
                x for x in run.stdout.splitlines() if "ERROR SUMMARY" in x or "RACECHECK" in x
            ]
            result = {"result" if not run.returncode else "failed": "; ".join(summary)[:200]}
        except FileNotFoundError:
            result = {"result": "not run: compute-sanitizer is missing"}
        lines.append({"tool": tool, **result})
        yield lines


def gather_once() -> None:
    """A gather through symmetric memory between 2 ranks of this process, on a stream each."""
    from ztrans import ops
    from ztrans.ops.symmetric import in_one_process

    memories = in_one_process(2, 1 << 20, "cuda")
    outs = [torch.empty(2 << 20, dtype=torch.uint8, device="cuda") for _ in memories]
    streams = [torch.cuda.Stream() for _ in memories]
    for memory_of_rank, out, stream in zip(memories, outs, streams):
        with torch.cuda.stream(stream):
            ops.all_gather(memory_of_rank, [out], [1 << 20], spins=1 << 24)
    torch.cuda.synchronize()


def stream_waits(device: torch.device) -> Lines:
    """A stream that waits for a value in memory, by the driver, takes nothing from the products beside it."""
    torch.cuda.set_device(device)
    products = gpu_contention.Products(device)
    waiting = StreamWait(device)
    alone = [products.seconds() for _ in range(gpu_contention.ROUNDS)]
    beside = [products.seconds(waiting) for _ in range(gpu_contention.ROUNDS)]
    yield [{"beside": "a stream that waits", "of alone": min(beside) / min(alone)}]


class StreamWait:
    """A stream that waits in `cuStreamWaitValue32` until another one writes the value. `driver` may be a double."""

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        self.driver = driver or ctypes.CDLL("libcuda.so.1")
        self.flag = torch.zeros((), dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(device)
        self.setter = torch.cuda.Stream(device)

    def begin(self) -> None:
        self.flag.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())
        call_driver(self.driver, "wait", self.stream, self.flag.data_ptr(), 1)

    def end_after(self, event: Any) -> None:
        self.setter.wait_event(event)
        call_driver(self.driver, "write", self.setter, self.flag.data_ptr(), 1)


def barrier(rank: int, ranks: int, row: int) -> list[tuple[str, int, int, int, int]]:
    """What a stream does to meet those of the other ranks: what, whose pad, its row, whose signal in it, the value.

    A rank waits on its own pad alone, and resets it. A signal is not set again before it is reset: between two barriers
    of one row lies one of the other row, which a peer passes only after this rank has come to it.
    """
    peers = [peer for peer in range(ranks) if peer != rank]
    set_theirs = [("write", peer, row, rank, 1) for peer in peers]
    see_ours = [("wait", rank, row, peer, 1) for peer in peers]
    reset_ours = [("write", rank, row, peer, 0) for peer in peers]
    return [*set_theirs, *see_ours, *reset_ours]


def memops(device: torch.device) -> Lines:
    """Gathers by copies of 4 ranks on streams of one process, between barriers by the driver, with random pauses."""
    torch.cuda.set_device(device)
    lines = []
    for waits in (True, False):
        lines.append(
            {"barriers": "by the driver" if waits else "none, as a control"}
            | gathers(device, waits)
        )
        yield lines


def gathers(device: torch.device, waits: bool, ranks: int = 4, rounds: int = 2000) -> dict:
    """How many values arrive wrong in some rounds, and the microseconds of a round."""
    driver = ctypes.CDLL("libcuda.so.1")
    chance = random.Random(0)
    pads = torch.zeros(ranks, 2, ranks, dtype=torch.int32, device=device)
    parts = torch.empty(ranks, 1 << 16, device=device)
    outs = torch.empty(ranks, ranks, 1 << 16, device=device)
    wrong = torch.zeros(ranks, dtype=torch.int64, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(ranks)]
    torch.cuda.synchronize(device)

    def meet(rank: int, row: int) -> None:
        for what, owner, row_of_pad, sender, value in barrier(rank, ranks, row) if waits else ():
            address = pads[owner, row_of_pad, sender].data_ptr()
            call_driver(driver, what, streams[rank], address, value)

    began = time.monotonic()
    for k in range(rounds):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(chance.randrange(60_000))
                parts[rank].fill_(k)
                meet(rank, 0)
                outs[rank].copy_(parts)
                meet(rank, 1)
                parts[rank].fill_(float("nan"))  # whoever reads later notices
                wrong[rank] += (outs[rank] != k).sum()
    torch.cuda.synchronize(device)
    us = 1e6 * (time.monotonic() - began) / rounds
    count = int(wrong.sum())
    is_right = (count == 0) == waits
    return {"result" if is_right else "failed": f"{count} wrong values", "us": us}


def call_driver(driver: Any, what: str, stream: Any, address: int, value: int) -> None:
    """Have a stream write a value of 32 bits, or wait until it is there.

    Raises: RuntimeError if the driver refuses.
    """
    name = {"wait": "cuStreamWaitValue32_v2", "write": "cuStreamWriteValue32_v2"}[what]
    flags = 1 if what == "wait" else 0  # CU_STREAM_WAIT_VALUE_EQ; a write has none
    code = getattr(driver, name)(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        ctypes.c_uint(flags),
    )
    if code:
        raise RuntimeError(f"{name} returned {code}")


def graphs(device: torch.device) -> Lines:
    """4 ranks in one process, with a graph each: three lanes of kernels that wait for the other ranks, and products.

    CUDA maps the branches of a graph to queues by its topology. If two ranks have more branches, as with a batch of
    another size, kernels of two lanes might wait for each other in a circle.
    """
    torch.cuda.set_device(device)
    lines = []
    for extra in (0, 10):
        ranks = GraphsOfRanks(device, extra)
        began = time.monotonic()
        for _ in range(REPLAYS):
            ranks.replay()
        torch.cuda.synchronize(device)
        waited = ranks.errors()
        figures = {
            "more branches on ranks 0 and 1": extra,
            "ms": 1e3 * (time.monotonic() - began) / REPLAYS,
        }
        lines.append(figures | {"failed" if waited else "result": waited or "right"})
        yield lines


class GraphsOfRanks:
    """A captured graph for each of 4 ranks: 20 rounds of a gather on each of three lanes, with products beside them."""

    def __init__(self, device: torch.device, extra: int, ranks: int = 4, lanes: int = 3) -> None:
        from ztrans.ops.symmetric import in_one_process

        self.device = device
        self.memories = [in_one_process(ranks, PART, device) for _ in range(lanes)]
        self.graphs = []
        self.streams = [torch.cuda.Stream(device) for _ in range(ranks)]
        self.x = torch.randn(256, 256, device=device)
        self.outs = torch.empty(ranks, lanes, ranks * PART, dtype=torch.uint8, device=device)
        alone = in_one_process(ranks, PART, device)
        self.gather(alone[0], self.outs[0, 0], spins=0)  # compiles; nobody sees these signals
        torch.cuda.synchronize(device)
        for rank in range(ranks):
            self.graphs.append(self.captured(rank, extra if rank < 2 else 0))

    def gather(self, memory_of_rank: Any, out: torch.Tensor, spins: int) -> None:
        from ztrans import ops

        ops.all_gather(memory_of_rank, [out], [PART], channels=CHANNELS, spins=spins)

    def captured(self, rank: int, extra: int) -> torch.cuda.CUDAGraph:
        from ztrans import ops

        graph = torch.cuda.CUDAGraph()
        side = [torch.cuda.Stream(self.device) for _ in range(extra)]
        lanes = [torch.cuda.Stream(self.device, priority=-1) for _ in self.memories]
        with ops.filled_after_capture("cuda"), torch.cuda.graph(graph):
            compute = torch.cuda.current_stream()
            for _ in range(20):
                for lane, memory_of_lane, out in zip(lanes, self.memories, self.outs[rank]):
                    lane.wait_stream(compute)
                    with torch.cuda.stream(lane):
                        self.gather(memory_of_lane[rank], out, spins=WAITS)
                for stream in side:
                    stream.wait_stream(compute)
                    with torch.cuda.stream(stream):
                        torch.mm(self.x, self.x)
                for _ in range(3):
                    torch.mm(self.x, self.x)
                for lane in (*lanes, *side):
                    compute.wait_stream(lane)
        return graph

    def replay(self) -> None:
        for graph, stream in zip(self.graphs, self.streams):
            with torch.cuda.stream(stream):
                graph.replay()

    def errors(self) -> str:
        for of_lane in self.memories:
            for memory_of_rank in of_lane:
                try:
                    memory_of_rank.check()
                except RuntimeError as error:
                    return str(error).partition(":")[0]
        return ""


PARTS = {
    "numerics": Part(25, "six times 'bit for bit' or 'ends and raises'; else stop: the kernels are wrong", numerics),
    "contention": Part(
        40,
        "cublas: carve-out not applied. cublaslt: 1.2 to 1.35 of alone. Beside one warp 1.05 to 1.18: the barriers of "
        "copies cost that much",
        contention,
    ),
    "stream waits": Part(20, "1.00 of alone: barriers by the driver take nothing from products", stream_waits),
    "memops": Part(25, "0 wrong values; the control has some; 3 to 6 us a barrier", memops),
    "graphs": Part(
        30,
        "right. If ranks waited in vain with more branches alone, all messages of a graph need one lane",
        graphs,
    ),
    "gil": Part(
        60,
        "near 1 for aten, Triton's launcher and torch.cuda.Event; near 0 for Inductor's own launcher and torch.Event",
        gil,
    ),
    "scenarios": Part(
        145,
        "bits of lockstep; 1e-5 for other sizes; 5e-2 on two hosts; failures end all ranks, with the first text",
        scenarios,
    ),
    "expandable": Part(55, "the bits both times; on several cards with NCCL_GRAPH_REGISTER=1 a hang", expandable),
    "memory": Part(40, "some ten MB for each communicator over sockets; nothing after they are open", memory),
    "starts": Part(60, "8 and 32 alike; if 1 is slower by 5%, make_mesh should warn", starts),
    "memcheck": Part(40, "0 errors", memcheck),
}  # fmt: skip


# ---- running them


def run_part(name: str, part: Part, device: torch.device, seconds: float) -> list[dict]:
    """The lines of a part, which has a process of its own and is ended after these seconds."""
    end = time.monotonic() + seconds
    lines: list[dict] = []
    child = Child(_send_lines, name, device)
    try:
        while more := child.answer(end - time.monotonic()):
            lines = more
    except Exception as error:
        lines = [*lines, {"failed": f"{type(error).__name__}: {error}"}]
    finally:
        child.end()
    return lines


def _send_lines(pipe: Any, name: str, device: torch.device) -> None:
    for lines in PARTS[name].run(device):
        pipe.send(list(lines))
    pipe.send(None)


def run(
    device: torch.device,
    seconds: float,
    write: Callable[[str], object],
    parts: Sequence[str] = tuple(PARTS),
) -> bool:
    """Run the parts one after the other, and write the report after each. Returns whether nothing failed."""
    end = time.monotonic() + seconds
    found: dict[str, list[dict]] = {}
    for name in parts:
        limit = min(PARTS[name].seconds, end - time.monotonic())
        if limit < 5:
            found[name] = [{"failed": "not run: the time was over"}]
        else:
            found[name] = run_part(name, PARTS[name], device, limit)
        write(markdown(found))
    return not any("failed" in line for lines in found.values() for line in lines)


def markdown(found: dict[str, list[dict]]) -> str:
    """What was expected of each part, and what was seen."""
    texts = ["# The next card"]
    for name, lines in found.items():
        texts.append(f"## {name}\n\nExpected: {PARTS[name].expected}.\n\nSeen:")
        seen = [", ".join(f"{k} {_cell(v)}" for k, v in line.items()) for line in lines]
        texts.append("\n".join(f"- {line}" for line in seen) or "- nothing")
    return "\n\n".join(texts) + "\n"


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    {"seconds of a step": print_seconds_of_a_step, "one gather": gather_once}[sys.argv[1]]()
