"""Moments in the memory of the host, on one GPU: the same bits, the memory that it saves, and what it costs.

    python -m benchmarks.gpu.offload          # under 40 s; prints a table, and writes results/gpu_offload.md

A model of 24 blocks (403 M parameters in fp32) is trained under autocast to bf16, with gradients clipped to a norm of
1 and torch's fused AdamW. Its moments are 3.2 GB. `gpu.py` runs the same as its section "offload".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

import ztrans as zt

from .. import RESULTS

STEPS = 20
WARM = 4  # steps before those that are timed
MOMENTS = "[mv].*"
COPIED = 1 << 28  # bytes of the copies that measure the link
SIZES = (24, 4096, 49152)  # blocks, width, rows of the batch


def initial(blocks: int, width: int, device: torch.device) -> dict:
    """Parameters, moments, and counters of steps."""
    params = {f"w{k:02}": drawn(k, width, width, device) / width**0.5 for k in range(blocks)}
    moments = [{k: torch.zeros_like(p) for k, p in params.items()} for _ in "mv"]
    steps = {k: torch.zeros((), device=device) for k in params}
    return {"params": params, "m": moments[0], "v": moments[1], "steps": steps}


def drawn(seed: int, rows: int, width: int, device: torch.device) -> Tensor:
    """Normal numbers, the same for every subject."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device=device)


def train_step(state: dict, x: Tensor) -> tuple[dict, Tensor]:
    params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
    with torch.autocast(x.device.type, torch.bfloat16):
        y = x
        for w in params.values():
            y = y + F.gelu(F.linear(y, w))
        loss = (y - x).float().square().mean()
    grads = torch.autograd.grad(loss, list(params.values()))
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        columns = [list(params.values()), [g * scale for g in grads]]
        columns += [list(state[key].values()) for key in ("m", "v")]
        adamw(
            *columns, [], list(state["steps"].values()), fused=True, amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-4,
            weight_decay=0.1, eps=1e-6, maximize=False, capturable=False, differentiable=False,
        )  # fmt: skip
    return {**state, "params": {k: p.detach() for k, p in params.items()}}, loss.detach()


def table(
    device: torch.device,
    left: Callable[[], float] = lambda: 60.0,
    sizes: tuple[int, int, int] = SIZES,
) -> Iterator[list[dict]]:
    """Twenty steps with the moments on the GPU and in the memory of its host. `peak` is max_memory_allocated in a step
    after the first ones; it also has the other one of two batches, and cuBLAS's workspace. `expected` is the peak of
    memory_analysis. `bits` compares all parameters and moments.
    """
    lines: list[dict] = [{"subject": name, **rates} for name, rates in link(device)]
    yield lines
    digests: dict[str, list[Tensor]] = {}
    subjects = (
        ("on the GPU", ()),
        ("on the host", (zt.offload(where=MOMENTS, at_least=0),)),
        ("on the host, across steps", (zt.offload(where=MOMENTS, at_least=0, across_steps=True),)),
    )
    for name, transforms in subjects:
        if left() < 10:
            lines.append({"subject": name, "failed": "not run: the time was over"})
            continue
        line, digests[name] = trained(zt.chain(*transforms)(train_step), device, sizes)
        if len(digests) > 1:
            first = next(iter(digests.values()))
            is_equal = all(map(torch.equal, first, digests[name]))
            line |= {"bits": "equal"} if is_equal else {"failed": "other bits than on the GPU"}
        lines.append({"subject": f"moments {name}", **line})
        yield lines


def trained(
    step: zt.Step, device: torch.device, sizes: tuple[int, int, int]
) -> tuple[dict, list[Tensor]]:
    """The figures of twenty steps, and the state after them on the CPU."""
    blocks, width, rows = sizes
    state = step.shard(initial(blocks, width, device))
    batches = [drawn(1000 + k, rows, width, device) for k in range(2)]
    lowered = step.lower(state, batches[0])
    memory = lowered.memory_analysis()
    start = 0.0
    for k in range(STEPS):
        if k == WARM:
            begin_peak(device)
            wait(device)
            start = time.perf_counter()
        state, loss = step(
            state, batches[k % 2]
        )  # nothing waits, so copies may go on in the next step
    wait(device)
    seconds = time.perf_counter() - start
    line = {
        "ms": round(1e3 * seconds / (STEPS - WARM), 2),
        "peak, MiB": round(peak(device) / 2**20),
        "expected, MiB": round(memory.peak / 2**20),
        "on the host, MiB": round(memory.host_peak / 2**20),
        "loss": loss.item(),
    }
    result = [x.to("cpu", copy=True) for key in ("params", "m", "v") for x in state[key].values()]
    del state, batches
    free(device)
    return line, result


def link(device: torch.device) -> Iterator[tuple[str, dict]]:
    """The GB/s of copies from pinned memory and to it, alone and both at once."""
    if device.type != "cuda":
        return
    host = [torch.empty(COPIED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_device = [torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(directions: Sequence[str]) -> float:
        times = []
        for _ in range(5):
            wait(device)
            start = time.perf_counter()
            for k, direction in enumerate(directions):
                with torch.cuda.stream(streams[k]):
                    to, source = (host, on_device) if direction == "out" else (on_device, host)
                    to[k].copy_(source[k], non_blocking=True)
            wait(device)
            times.append(time.perf_counter() - start)
        return round(COPIED / min(times) / 1e9, 1)

    yield "copies", {
        "in, GB/s": rate(["in"]), "out, GB/s": rate(["out"]), "each of both, GB/s": rate(["in", "out"]),
    }  # fmt: skip


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def markdown(lines: Sequence[dict], device: torch.device) -> str:
    """The results as tables, one for each set of columns."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    text = ["# Moments in the memory of the host", "", f"{name}, torch {torch.__version__}."]
    columns: list[str] = []
    for line in lines:
        if [*line] != columns:
            columns = [*line]
            text += ["", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        text.append(f"| {' | '.join(map(str, line.values()))} |")
    return "\n".join(text) + "\n"


def main() -> None:
    if not torch.cuda.is_available():
        print("There is no GPU here, so there is nothing to measure.")
        return
    device = torch.device("cuda", 0)
    end = time.monotonic() + 40
    for lines in table(device, lambda: end - time.monotonic()):
        print(lines[-1:], flush=True)
    text = markdown(lines, device)
    print(text)
    (RESULTS / "gpu_offload.md").write_text(text)


if __name__ == "__main__":
    main()
