"""Time each kernel, and compare it with a plain copy on the same GPU and with what peers use for the same work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ztrans import ops

MIB = 2**20
SIZES = (16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)  # bytes of the fp32 parameters
UPDATED = (
    440 * 10**6,
    1744 * 10**6,
)  # bytes of the fp32 parameters of a model that an optimizer updates
RANKS = 8
REPEATS = 20
AHEAD = 2_000_000  # cycles that the GPU sleeps, so that the timed work does not wait for its launch
Work = tuple[str, Callable[[], object]]


def table(
    device: torch.device,
    left: Callable[[], float] = lambda: 60.0,
    sizes=SIZES,
    updated=UPDATED,
) -> Iterator[list[dict]]:
    """Medians, with nothing in the cache.

    `moved` is the bytes that the work must read and write at least, also for contenders that move more. `of copy` is
    the speed at which these bytes moved, as a share of that of a plain copy of as many bytes, timed just before.
    """
    lines = []
    for make in (copying, packing, scattering, unpacking, summing, *OF_MODELS):
        for size in updated if make in OF_MODELS else sizes:
            if left() > 10:
                lines += compared(make, size, device)
            else:
                late = "not run: the time was over"
                lines.append({"kernel": make.__name__, "size, MiB": size // MIB, "failed": late})
            yield lines


def compared(make: Callable, size: int, device: torch.device) -> list[dict]:
    """A line for each contender, for fp32 parameters of `size` bytes."""
    numels = (parameters if make in OF_MODELS else shapes)(size // 4)
    moved, contenders = make(numels, device)
    copied, lines = copy_seconds(moved, device), []
    for name, work in contenders:
        took = seconds(work, device)
        lines.append(
            {
                "kernel": make.__name__,
                "size, MiB": size // MIB,
                "by": name,
                "moved, MiB": round(moved / MIB, 1),
                "us": took * 1e6,
                "GB/s": moved / took / 1e9,
                "of copy": copied / took,
            }
        )
    return lines


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median time of `work`, with nothing of it in the cache."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    flush = torch.empty(256 * MIB, dtype=torch.uint8, device=device)  # more than the L2 cache holds
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        torch.cuda._sleep(AHEAD)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in times) / 1e3


def copy_seconds(moved: int, device: torch.device) -> float:
    """The seconds of a copy that reads and writes `moved` bytes in all."""
    src, dst = (torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device) for _ in range(2))
    return seconds(lambda: dst.copy_(src), device)


def shapes(count: int) -> list[int]:
    """The elements of each parameter of a bucket: the matrices and vectors of a layer of a transformer."""
    width = max(16, int((count / 12.1) ** 0.5) // 16 * 16)
    layer = [3 * width * width, width * width, 4 * width * width, 4 * width * width]
    vectors = [3 * width, width, 4 * width, width, width, width, width]
    rest = count - sum(layer) - sum(vectors)
    return [*layer, *vectors, *([rest // 16 * 16] if rest >= 16 else [])]


def parameters(count: int) -> list[int]:
    """The elements of each parameter of a transformer with 100 parameters: nine layers, and the rest as one matrix."""
    layer = shapes(count // 9)[:11]
    return [*layer * 9, count - 9 * sum(layer)]


def copying(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """A plain copy, with which all other work is compared."""
    src, dst = (torch.empty(sum(numels), device=device) for _ in range(2))
    return 8 * sum(numels), [("torch copy_", lambda: dst.copy_(src))]


def packing(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """fp32 shards to one bf16 send buffer."""
    parts = [torch.randn(n, device=device) for n in numels]
    buffer, temporary = (
        torch.empty(sum(numels), dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    into, between = list(buffer.split(numels)), list(temporary.split(numels))

    def fsdp() -> None:
        torch._foreach_copy_(between, parts)
        torch._foreach_copy_(into, between)

    return 6 * sum(numels), [
        ("ztrans cast_pack", lambda: ops.cast_pack(parts, numels, torch.bfloat16, out=buffer)),
        ("torch._foreach_copy_", lambda: torch._foreach_copy_(into, parts)),
        ("FSDP2's two copies", fsdp),
        ("DeepSpeed's cat", lambda: torch.cat([p.to(torch.bfloat16) for p in parts], out=buffer)),
    ]


def scattering(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """Whole bf16 gradients to the rows of a reduce-scatter's send buffer."""
    parts = [
        torch.randn(n // 128 * 128, device=device).bfloat16().view(-1, 16)
        for n in numels
        if n >= 128
    ]
    sizes = [p.numel() // RANKS for p in parts]
    buffer = torch.empty(RANKS, sum(sizes), dtype=torch.bfloat16, device=device)
    return 4 * buffer.numel(), [
        (
            "ztrans cast_pack",
            lambda: ops.cast_pack(parts, sizes, torch.bfloat16, ranks=RANKS, out=buffer.view(-1)),
        ),
        ("FSDP2's chunk_cat", lambda: torch._chunk_cat(parts, dim=0, num_chunks=RANKS, out=buffer)),
    ]


def unpacking(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """A gathered bf16 buffer to whole parameters."""
    sizes = [n // RANKS for n in numels]
    wholes = [RANKS * size for size in sizes]
    buffer = torch.randn(RANKS * sum(sizes), device=device).bfloat16()
    outs = [torch.empty(n, dtype=torch.bfloat16, device=device) for n in wholes]
    rows = [out.view(RANKS, -1) for out in outs]

    def split() -> None:
        torch.split_with_sizes_copy(buffer.view(RANKS, -1), sizes, dim=1, out=rows)

    return 4 * buffer.numel(), [
        ("ztrans unpack", lambda: torch.ops.ztrans.unpack(buffer, sizes, RANKS, outs)),
        ("FSDP2's split_with_sizes_copy", split),
    ]


def summing(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """The bf16 terms of 8 ranks to this rank's parts of their mean in fp32."""
    sizes = [n // RANKS for n in numels]
    terms = torch.randn(RANKS, sum(sizes), device=device).bfloat16()
    outs = [torch.empty(n, device=device) for n in sizes]

    def one_by_one() -> None:
        total = ops.reduce(list(terms), "mean", torch.float32)
        torch.ops.ztrans.unpack(total, sizes, 1, outs)

    def by_torch() -> None:
        total = torch.mean(terms, 0, dtype=torch.float32)
        torch.split_with_sizes_copy(total, sizes, out=outs)

    return (2 * RANKS + 4) * sum(sizes), [
        ("ztrans sum_terms", lambda: ops.sum_terms(terms, outs, sizes, "mean", RANKS)),
        ("an addition for each rank", one_by_one),
        ("torch.mean, in an order of its own", by_torch),
    ]


def updating(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """AdamW on fp32 parameters, from bf16 gradients; PyTorch's optimizer needs them in fp32."""
    (_, grads), ours, theirs = adamw(numels, device)
    wide = [g.float() for g in grads]
    return 26 * sum(numels), [
        ("ztrans fused_adamw_", lambda: ours()),
        ("casts, torch._fused_adamw_", lambda: theirs([g.float() for g in grads])),
        ("torch._fused_adamw_, of fp32 gradients", lambda: theirs(wide)),
    ]


def clipping(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """The same after clipping by the norm of all gradients."""
    (_, grads), ours, theirs = adamw(numels, device)

    def factor(norms: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.linalg.vector_norm(torch.stack(list(norms)))
        return (1 / (total + 1e-6)).clamp(max=1.0)

    def by_scale() -> None:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        ours(scale=factor(norms))

    def by_products() -> None:
        wide = [g.float() for g in grads]
        torch._foreach_mul_(wide, factor(torch._foreach_norm(wide)))
        theirs(wide)

    return 28 * sum(numels), [
        ("norms, ztrans fused_adamw_ with a scale", by_scale),
        ("casts, norms, products, torch._fused_adamw_", by_products),
    ]


def casting(numels: list[int], device: torch.device) -> tuple[int, list[Work]]:
    """The update, and copies of the new parameters in bf16."""
    (params, _), ours, _ = adamw(numels, device)
    halves = [p.bfloat16() for p in params]

    def by_casts() -> None:
        ours()
        for half, p in zip(halves, params):
            half.copy_(p)

    return 28 * sum(numels), [
        ("ztrans fused_adamw_ with halves", lambda: ours(halves)),
        ("ztrans fused_adamw_, casts", by_casts),
    ]


OF_MODELS = (updating, clipping, casting)  # what is timed for all parameters of a model


def adamw(
    numels: list[int], device: torch.device
) -> tuple[tuple[list[torch.Tensor], ...], Callable[..., None], Callable[..., None]]:
    """Parameters and bf16 gradients, the update by ztrans, and that by PyTorch from gradients that it is given."""
    params, exp_avgs, exp_avg_sqs = (
        [torch.rand(n, device=device) for n in numels] for _ in range(3)
    )
    grads = [torch.randn(n, device=device).bfloat16() for n in numels]
    steps = [torch.ones((), device=device) for _ in numels]
    rate = torch.tensor(1e-4, device=device)
    options = {"lr": rate, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    others = {"amsgrad": False, "maximize": False}

    def ours(halves: list[torch.Tensor] | None = None, scale: torch.Tensor | None = None) -> None:
        lists = params, grads, exp_avgs, exp_avg_sqs, steps, halves
        torch.ops.ztrans.fused_adamw_(*lists, **options, scale=scale)

    def theirs(wide: list[torch.Tensor]) -> None:
        lists = params, wide, exp_avgs, exp_avg_sqs, [], steps
        torch._fused_adamw_(*lists, **options, **others)

    return (params, grads), ours, theirs
