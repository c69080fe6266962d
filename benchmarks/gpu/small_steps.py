"""Small steps on one GPU, which waits for the host: milliseconds a step, and the kernels that a step launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ztrans as zt

from ..host.models import MODELS, Model

STEPS, ROUNDS = (
    20,
    9,
)  # steps between two looks at the clock, and how often each subject has its turn
WARM_UP = 4  # the second call of a captured step captures it
Step = Callable[[], Tensor]
PEERS = {
    "ztrans": "PyTorch",
    "ztrans, inductor": "torch.compile",
    "ztrans, CUDA graph": "PyTorch",
    "ztrans, inductor, CUDA graph": "torch.compile, reduce-overhead",
}


def table(
    device: torch.device,
    left: Callable[[], float] = lambda: 240.0,
    models: Sequence[Model] = MODELS,
) -> Iterator[list[dict]]:
    """Small models, or a batch of one, so that the GPU waits for the host; GPT-2 under autocast to bf16. All loops use
    AdamW(fused=True), and no tf32 in convolutions: with its roundings, equal loops end with other losses. Subjects of
    a model are in one process and take turns of 20 steps; the host waits for the GPU before and after each turn.
    `kernels` is what torch's profiler counts in one step, without copies and memsets.
    """
    lines: list[dict] = []
    torch.backends.cudnn.allow_tf32 = False
    for model in models:
        ready: dict[str, Step] = {}
        for name in SUBJECTS:
            if left() < 40:
                lines.append(
                    {"model": model.name, "subject": name, "failed": "not run: the time was over"}
                )
                continue
            try:
                ready[name] = warm(SUBJECTS[name](model, device), device)
            except Exception as error:  # the other subjects still run
                first = next(iter(str(error).strip().splitlines()), "")
                lines.append(
                    {
                        "model": model.name,
                        "subject": name,
                        "failed": f"{type(error).__name__}: {first}",
                    }
                )
        lines += rows(model, ready, device)
        yield lines


def rows(model: Model, steps: dict[str, Step], device: torch.device) -> list[dict]:
    """A row for each subject, after all have had their turns."""
    kernels = {name: launched(step, device) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    last = {}
    for k in range(ROUNDS):
        names = [*steps][k % len(steps) :] + [*steps][: k % len(steps)]
        for name in names:
            milliseconds, last[name] = turn(steps[name], device)
            times[name].append(milliseconds)
    middle = {name: statistics.median(each) for name, each in times.items()}
    lines = []
    for name in steps:
        line = {
            "model": model.name,
            "subject": name,
            "ms, median": middle[name],
            "ms, least": min(times[name]),
        }
        peer = PEERS.get(name)
        line["of its peer"] = (
            f"{middle[name] / middle[peer]:.2f} of {peer}" if peer in middle else ""
        )
        lines.append(line | {"kernels": kernels[name], "loss": round(float(last[name]), 4)})
    return lines


def turn(step: Step, device: torch.device) -> tuple[float, Tensor]:
    """The milliseconds of a step, and the last loss."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start) / STEPS, loss.clone()


def launched(step: Step, device: torch.device) -> int:
    """The kernels that run on the GPU in one step."""
    on = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=on, acc_events=True) as recorded:
        step()
        _synchronize(device)
    ran = [
        event.name
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in ran)


def warm(step: Step, device: torch.device) -> Step:
    for _ in range(WARM_UP):
        step()
    _synchronize(device)
    return step


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _loop(
    model: Model, device: torch.device, mode: str | None
) -> tuple[Callable, tuple, nn.Module, torch.optim.AdamW]:
    """The body of an ordinary loop, its batch, model and optimizer. `mode` is that of torch.compile, None without."""
    torch.manual_seed(0)
    module, batch = model.build().to(device), tuple(x.to(device) for x in model.batch())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(module, mode=mode, dynamic=False) if mode else module
    bf16 = "GPT-2" in model.name

    def loop_step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return loop_step, batch, module, optimizer


def theirs(model: Model, device: torch.device, mode: str | None = None) -> Step:
    loop_step, batch, _, _ = _loop(model, device, mode)

    def run() -> Tensor:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return loop_step(*batch)

    return run


def ours(model: Model, device: torch.device, backend: str, cuda_graph: bool = False) -> Step:
    loop_step, batch, module, optimizer = _loop(model, device, None)
    lifted, state = zt.lift(loop_step, module, optimizer)
    step = zt.Step.of(lifted)
    held = [step.shard(state)]
    lowered = step.lower(held[0], *batch)
    call = (
        lowered.compile(backend=backend, cuda_graph=True)
        if cuda_graph
        else lowered.compile(backend=backend)
    )

    def run() -> Tensor:
        held[0], loss = call(held[0], *batch)
        return loss

    return run


SUBJECTS: dict[str, Callable[[Model, torch.device], Step]] = {
    "PyTorch": theirs,
    "ztrans": lambda model, device: ours(model, device, "eager"),
    "ztrans, CUDA graph": lambda model, device: ours(model, device, "eager", cuda_graph=True),
    "torch.compile": lambda model, device: theirs(model, device, "default"),
    "ztrans, inductor": lambda model, device: ours(model, device, "inductor"),
    "torch.compile, reduce-overhead": lambda model, device: theirs(
        model, device, "reduce-overhead"
    ),
    "ztrans, inductor, CUDA graph": lambda model, device: ours(
        model, device, "inductor", cuda_graph=True
    ),
}
