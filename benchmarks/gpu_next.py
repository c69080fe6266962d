"""What to measure on the next card, in order: each part with its time limit, and what is expected beside what was seen.

    python benchmarks/gpu.py --next           # on a GPU, at most 9 minutes; results/gpu_next.md

A part has a process of its own. If it needs longer than its limit it is ended, and that is its result.
"""

from __future__ import annotations

import ctypes
import os
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
        self._call("cuStreamWaitValue32_v2", self.stream)

    def end_after(self, event: Any) -> None:
        self.setter.wait_event(event)
        self._call("cuStreamWriteValue32_v2", self.setter)

    def _call(self, name: str, stream: Any) -> None:
        # The value is 1; as a flag of a wait, 1 is CU_STREAM_WAIT_VALUE_EQ, and a write has none.
        flags = 1 if "Wait" in name else 0
        address = ctypes.c_uint64(self.flag.data_ptr())
        handle = ctypes.c_void_p(stream.cuda_stream)
        code = getattr(self.driver, name)(handle, address, ctypes.c_uint32(1), ctypes.c_uint(flags))
        if code:
            raise RuntimeError(f"{name} returned {code}")


PARTS = {
    "numerics": Part(25, "six times 'bit for bit' or 'ends and raises'; else stop: the kernels are wrong", numerics),
    "contention": Part(
        40,
        "cublas: carve-out not applied. cublaslt: 1.2 to 1.35 of alone. Beside one warp 1.05 to 1.18: the barriers of "
        "copies cost that much",
        contention,
    ),
    "stream waits": Part(20, "1.00 of alone: barriers by the driver take nothing from products", stream_waits),
    "gil": Part(
        60,
        "near 1 for aten, Triton's launcher and torch.cuda.Event; near 0 for Inductor's own launcher and torch.Event",
        gil,
    ),
    "scenarios": Part(
        200,
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
