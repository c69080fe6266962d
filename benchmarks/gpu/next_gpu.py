"""Measurements for the next GPU, in order. Each part has a time limit, and an expected result beside what was seen.

    python -m benchmarks.gpu --next           # on a GPU, at most 9 minutes; results/gpu_next.md

Each part has a process of its own. If it needs longer than its limit it is ended, and the report says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import contention, memops, numerics, ranks, two_ranks
from .rounds import Child

Lines = Iterator[list[dict]]
LAUNCHES = 4000  # more than the queue of a stream holds
LOOK = 0.02  # seconds between two looks of the thread that counts
REPLAYS = 500
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
    """A measurement: its time limit in seconds, the expected result, and the function that runs it on a device."""

    seconds: float
    expected: str
    run: Callable[[torch.device], Lines]


# ---- the parts


def kernels(device: torch.device) -> Lines:
    """The kernels compared with their references."""
    return numerics.checks(device)


def beside_products(device: torch.device) -> Lines:
    """Whether cuBLAS leaves processors free if it is told to; and what products lose to reductions by copies."""
    torch.cuda.set_device(device)
    one_warp = contention.Waiting("1 block of 1 warp, as a barrier of copies", 1, 1, 40)
    contention.WAITING = (one_warp, contention.RING)
    products = contention.Products(device)
    blocks = contention.Blocks(device)
    lines: list[dict] = []
    for found in contention.carve_outs(products, blocks, contention.carvings(device)):
        lines.append(found)
        yield lines
    torch.backends.cuda.preferred_blas_library("cublas")
    reductions = contention.repeated(contention.copied_sums(device), device)
    for name, beside in (
        (one_warp.name, blocks.beside(one_warp)),
        (contention.SUMS, reductions),
    ):
        alone = contention.least_seconds(products)
        with beside as side:
            together = contention.least_seconds(products, side)
        lines.append({"beside": name, "of alone": together / alone})
        yield lines


def looks_beside(run: Callable[[], object]) -> int:
    """How often another thread has looked while `run` ran: not at all if `run` holds the GIL."""
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
    """Whether other threads run while a launch waits for room in the queue of a blocked stream."""
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
    return two_ranks.two_ranks(device, lambda: end - time.monotonic(), SCENARIOS)


def expandable(device: torch.device) -> Lines:
    """CUDA graphs of 2 ranks with expandable segments, with and without buffers that NCCL registers."""
    lines: list[dict] = []
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    shares_card = torch.cuda.device_count() < 2
    for register in ("0", "1"):
        os.environ["NCCL_GRAPH_REGISTER"] = register
        found = two_ranks.outcome("CUDA graphs", 2, device.type, 22.0, shares_card)
        lines += [{"NCCL_GRAPH_REGISTER": register, **line} for line in found]
        yield lines


def memory(device: torch.device) -> Lines:
    """The memory that each communicator takes when it is opened, and by the first steps after that."""
    shares_card = torch.cuda.device_count() < 2
    lines = two_ranks.outcome("memory of NCCL", 2, device.type, 22.0, shares_card)
    yield lines


def starts(device: torch.device) -> Lines:
    """A step of stage 3 on one rank: its starts by function and number of connections, and the step from a graph."""
    lines = []
    runs = [("eager", "1"), ("eager", "8"), ("eager", "32"), ("graph", "8")]
    for how, connections in runs:
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
        command = [sys.executable, "-m", "benchmarks.gpu.starts", how]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        result = {"failed": run.stderr[-200:]}
        if run.returncode == 0:
            result = json.loads(run.stdout.splitlines()[-1])
        lines.append({"step": how, "connections": connections} | result)
        yield lines


def memcheck(device: torch.device) -> Lines:
    """The kernels that wait for other ranks, under compute-sanitizer."""
    lines = []
    for tool in ("memcheck", "racecheck"):
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            sys.executable,
            "-m",
            "benchmarks.gpu.next_gpu",
        ]
        try:
            run = subprocess.run([*command, "a few rounds"], capture_output=True, text=True)
            summary = [
                x for x in run.stdout.splitlines() if "ERROR SUMMARY" in x or "RACECHECK" in x
            ]
            result = {"result" if not run.returncode else "failed": "; ".join(summary)[:200]}
        except FileNotFoundError:
            result = {"result": "not run: compute-sanitizer is missing"}
        lines.append({"tool": tool, **result})
        yield lines


def few_rounds() -> None:
    """Barriers and messages of 1 MiB among 2 ranks, three times, in launches that run both ranks.

    A tool that runs one launch after the other would let a rank with a launch of its own wait in vain.
    """
    device = torch.device("cuda", 0)
    ranks.ROUNDS = 3
    ranks.barriers(2, device)
    sizes, memories = ranks.setting(2, ranks.MIB, device)
    at = memories[0]
    tables = at.buffers, at.pads, at.error
    wholes = [torch.empty(2 * size, dtype=torch.bfloat16, device=device) for size in sizes * 2]
    parts = [torch.empty(size, device=device) for size in sizes * 2]
    last = 0, CHANNELS, WAITS
    for _ in range(3):
        ranks.gather(*tables, wholes, sizes, *last, together=2)
        ranks.scatter(*tables, parts, sizes, "sum", torch.bfloat16, *last, together=2)
    torch.cuda.synchronize()
    at.check()
    ranks.clean(memories)


def graphs(device: torch.device) -> Lines:
    """4 ranks in one process, with a graph each: three lanes of kernels that wait for the other ranks, and products.

    CUDA maps the branches of a graph to queues by its topology. If two ranks have more branches, as with a batch of
    another size, kernels of two lanes might wait for each other in a circle. A process reads the number of connections
    once, so each number has a process.
    """
    lines: list[dict] = []
    for connections in ("8", "32"):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
        child = Child(_send_graphs, device)
        try:
            while line := child.answer(PARTS["graphs"].seconds):
                lines.append({"connections": connections} | line)
                yield lines
        finally:
            child.end()


def _send_graphs(pipe: Any, device: torch.device) -> None:
    torch.cuda.set_device(device)
    for extra in (0, 10):
        pipe.send(replayed(GraphsOfRanks(device, extra)))
    pipe.send(None)


def replayed(ranks: GraphsOfRanks) -> dict:
    """Replay the graphs of all ranks, with random pauses, until one has waited in vain."""
    began = time.monotonic()
    count = 0
    while count < REPLAYS and not ranks.errors():
        ranks.replay()
        count += 1
    ranks.synchronize()
    waited = ranks.errors()
    figures = {
        "more branches on ranks 0 and 1": ranks.extra,
        "replays": count,
        "ms": 1e3 * (time.monotonic() - began) / count,
    }
    return figures | {"failed" if waited else "result": waited or "right"}


class GraphsOfRanks:
    """A captured graph for each of 4 ranks: 20 rounds of a gather on each of three lanes, with products beside them."""

    def __init__(self, device: torch.device, extra: int, ranks: int = 4, lanes: int = 3) -> None:
        from ztrans.ops.symmetric import in_one_process

        self.device = device
        self.extra = extra
        self.pauses = random.Random(0)
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
                torch.cuda._sleep(self.pauses.randrange(memops.MOST_CYCLES))
                graph.replay()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def errors(self) -> str:
        for of_lane in self.memories:
            for memory_of_rank in of_lane:
                try:
                    memory_of_rank.check()
                except RuntimeError as error:
                    return str(error).partition(":")[0]
        return ""


PARTS = {
    "numerics": Part(25, "six times 'bit for bit' or 'ends and raises'; else stop: the kernels are wrong", kernels),
    "contention": Part(
        60,
        "cublas with torch's carve-out: not applied. By cublasLt, and with an SM count target: 1.2 to 1.35 of alone, "
        "and then 24 blocks beside carve-out 24 at most 1.25, where it was 1.41. Beside one warp 1.05 to 1.18: the "
        "barriers of copies cost that much. Beside copies and sums at most 1.12",
        beside_products,
    ),
    "stream waits": Part(
        15, "1.00 of alone: barriers by the driver take nothing from products", memops.stream_waits
    ),
    "memops": Part(
        30,
        "0 wrong values, launched and replayed; the control has some; 3 to 6 us a barrier",
        memops.memops,
    ),
    "graphs": Part(
        40,
        "right. If ranks waited in vain with more branches alone, all messages of a graph need one lane",
        graphs,
    ),
    "gil": Part(
        50,
        "near 1 for aten, Triton's launcher and torch.cuda.Event; near 0 for Inductor's own launcher and torch.Event",
        gil,
    ),
    "scenarios": Part(
        145,
        "bits of lockstep; 1e-5 for other sizes; 5e-2 on two hosts; failures end all ranks, with the first text",
        scenarios,
    ),
    "expandable": Part(50, "the bits both times; on several cards with NCCL_GRAPH_REGISTER=1 a hang", expandable),
    "memory": Part(25, "some ten MB for each communicator over sockets; nothing after they are open", memory),
    "starts": Part(
        60,
        "the ms of starts explain what the eager step takes beyond that of the graph; 8 and 32 alike; if 1 is slower "
        "by 5%, make_mesh should warn",
        starts,
    ),
    "memcheck": Part(40, "0 errors", memcheck),
}  # fmt: skip


# ---- running them


def run_part(part: Part, device: torch.device, seconds: float) -> list[dict]:
    """The lines of a part, which has a process of its own and is ended after these seconds, with all it has started."""
    end = time.monotonic() + seconds
    lines: list[dict] = []
    child = Child(_send_lines, part.run, device)
    try:
        while more := child.answer(end - time.monotonic()):
            lines = more
    except Exception as error:
        lines = [*lines, {"failed": f"{type(error).__name__}: {error}"}]
    finally:
        # What it has started would go on beside the next part. It leads a group of processes, once it runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.end()
    return lines


def _send_lines(pipe: Any, run: Callable[[torch.device], Lines], device: torch.device) -> None:
    os.setpgid(0, 0)
    for lines in run(device):
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
            found[name] = run_part(PARTS[name], device, limit)
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
    {"a few rounds": few_rounds}[sys.argv[1]]()
