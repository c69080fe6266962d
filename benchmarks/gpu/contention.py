"""What matmuls lose while a message is under way beside them, emulated on one GPU.

Kernels that send and receive wait for other ranks, and a kernel that waits keeps its multiprocessors. Here blocks that
wait for a flag stand in for them. Copies by the copy engines stand in for messages that no kernel carries.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ztrans import ops
from ztrans.ops.kernel import kernel

from .kernels import MIB

if TYPE_CHECKING:
    import triton.language as tl

TOKENS, WIDTH = 8192, 2048
# Rows, inner and columns of the products of a layer: forward, and the gradient of its largest weight.
PRODUCTS = (
    (TOKENS, WIDTH, 3 * WIDTH),
    (TOKENS, WIDTH, WIDTH),
    (TOKENS, WIDTH, 4 * WIDTH),
    (TOKENS, 4 * WIDTH, WIDTH),
    (WIDTH, TOKENS, 4 * WIDTH),
)
LAYERS = 4  # that are timed together
ROUNDS = 7
AHEAD = 4_000_000  # cycles that compute sleeps, so that all is launched, and waits beside it, before it begins
SPINS = 1 << 20  # how often a block looks at the flag before it gives up: about a second
COPIED = 64 * MIB  # bytes of one copy
CARVE_OUTS = (0, 16, 24, 32)


@dataclass(frozen=True)
class Waiting:
    """Blocks of a kernel that waits. Each thread keeps about `registers` registers."""

    name: str
    blocks: int
    warps: int
    registers: int


# NCCL's ring takes 24 blocks of 512 threads or more, as traces of 8 GPUs show; our kernels take 32 of 256 threads.
RING = Waiting("24 blocks, as NCCL's ring", 24, 16, 64)
WAITING = (
    Waiting("2 blocks, as NCCL's symmetric kernels", 2, 16, 64),
    Waiting("8 blocks", 8, 16, 64),
    Waiting("16 blocks", 16, 16, 64),
    RING,
    Waiting("32 blocks, as symmetric memory", 32, 8, 96),
)


@kernel(unspecialized="spins")
def _hold(flag, values, spins, BLOCK: tl.constexpr):
    # The values stay in registers while the block waits.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + i)
    looks = 0
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while (seen == 0) & (looks < spins):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
        looks += 1
    tl.store(values + i, x + 1)


def contention(
    device: torch.device, left: Callable[[], float] = lambda: 60.0
) -> Iterator[list[dict]]:
    """The products of a layer of the step's model, in bf16, beside blocks of a kernel that waits, beside copies by copy
    engines, and beside packing. `carve-out` is the number of multiprocessors that cuBLAS is told to leave free. `of
    alone` is their time, relative to the products alone without it, timed just before. `lost` is the share of the GPU
    that they have lost.
    """
    torch.cuda.set_device(device)
    products = Products(device)
    waiting = Blocks(device)
    lines = []
    subjects: list[tuple[str, int, Callable]] = []
    for carve_out in CARVE_OUTS[1:]:
        subjects.append(("nothing", carve_out, contextlib.nullcontext))
    for each in WAITING:
        for carve_out in CARVE_OUTS:
            if carve_out in (0, each.blocks):
                subjects.append((each.name, carve_out, lambda each=each: waiting.beside(each)))
    for name, copy in copies(device).items():
        subjects.append((name, 0, lambda copy=copy: repeated(copy, device)))
    for name, carve_out, beside in subjects:
        if left() < 5:
            lines.append({"beside": name, "failed": "not run: the time was over"})
            yield lines
            return
        alone, together = [], []
        for _ in range(ROUNDS):
            alone.append(products.seconds())
            with carved_out(carve_out), beside() as side:
                together.append(products.seconds(side))
        ratio = statistics.median(together) / statistics.median(alone)
        line = {
            "beside": name,
            "carve-out": carve_out,
            "ms": 1e3 * statistics.median(together),
            "of alone": ratio,
            "lost": 1 - 1 / ratio,
        }
        if isinstance(side, Copies):
            line["GB/s"] = side.bytes_per_second() / 1e9
        lines.append(line)
        yield lines


class Products:
    """The products of some layers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arguments = []
        for m, k, n in PRODUCTS:
            a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
            self.arguments.append((a, b, torch.empty(m, n, device=device, dtype=torch.bfloat16)))
        self.run()
        torch.cuda.synchronize(device)

    def run(self) -> None:
        for _ in range(LAYERS):
            for a, b, out in self.arguments:
                torch.mm(a, b, out=out)

    def seconds(self, side: Blocks | Copies | None = None) -> float:
        """Time them, with something beside them that begins before and is told to end after them."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.run()  # with the kernels that cuBLAS chooses for this carve-out
        torch.cuda.synchronize(self.device)
        if side is not None:
            side.begin()
        torch.cuda._sleep(AHEAD)
        begin.record()
        self.run()
        end.record()
        if side is not None:
            side.end_after(end)
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3


class Blocks:
    """Blocks of a kernel that wait on a stream of their own, until a flag is set."""

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros((), dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.setter = torch.cuda.Stream(device, priority=-1)
        most = max(w.blocks * block_size(w) for w in WAITING)
        self.values = torch.zeros(most, device=device)
        self.kind = WAITING[0]
        self.flag.fill_(1)
        for kind in WAITING:  # compiles and loads each variant
            self.launch(kind)

    @contextlib.contextmanager
    def beside(self, kind: Waiting) -> Iterator[Blocks]:
        self.kind = kind
        yield self

    def launch(self, kind: Waiting) -> None:
        _hold[(kind.blocks,)](
            self.flag, self.values, SPINS, BLOCK=block_size(kind), num_warps=kind.warps, maxnreg=128
        )

    def begin(self) -> None:
        self.flag.zero_()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.launch(self.kind)

    def end_after(self, event: torch.cuda.Event) -> None:
        self.setter.wait_event(event)
        with torch.cuda.stream(self.setter):
            self.flag.fill_(1)


def block_size(kind: Waiting) -> int:
    """The elements that the threads of a block keep."""
    return 1 << (32 * kind.warps * kind.registers).bit_length() - 1


class Copies:
    """Copies one after the other on a stream of their own, for about as long as the products take."""

    def __init__(self, copy: Callable[[], int], device: torch.device, count: int = 200) -> None:
        self.copy = copy
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.count = count
        self.nbytes = 0

    def begin(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        self.nbytes = 0
        with torch.cuda.stream(self.stream):
            self.events[0].record()
            for _ in range(self.count):
                self.nbytes += self.copy()
            self.events[1].record()

    def end_after(self, event: torch.cuda.Event) -> None:
        """They end by themselves."""

    def bytes_per_second(self) -> float:
        return self.nbytes / (self.events[0].elapsed_time(self.events[1]) / 1e3)


@contextlib.contextmanager
def repeated(copy: Callable[[], int], device: torch.device) -> Iterator[Copies]:
    """Copies that take at least as long as the products, and the pause before these."""
    trial = Copies(copy, device, 20)
    trial.begin()
    torch.cuda.synchronize(device)
    each = trial.events[0].elapsed_time(trial.events[1]) / 20
    yield Copies(copy, device, max(20, int(LAYERS * 10 / each)))


def copies(device: torch.device) -> dict[str, Callable[[], int]]:
    """Copies by name. Each launches one, and returns the bytes that it brings."""
    source = torch.randint(255, (COPIED,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    floats = torch.randn(COPIED // 2, device=device)  # as many bytes in bf16
    packed = torch.empty(COPIED // 2, dtype=torch.bfloat16, device=device)
    sizes = [len(packed)]

    def within_the_card() -> int:
        target.copy_(source)
        return COPIED

    def from_the_host() -> int:
        target.copy_(host, non_blocking=True)
        return COPIED

    def packing() -> int:
        ops.cast_pack([floats], sizes, torch.bfloat16, out=packed)
        return COPIED

    for run in (within_the_card, from_the_host, packing):
        run()
    return {
        "copies within the card": within_the_card,
        "copies from the host, by a copy engine": from_the_host,
        "packing, by cast_pack": packing,
    }


@contextlib.contextmanager
def carved_out(processors: int) -> Iterator[None]:
    """A context in which cuBLAS leaves some multiprocessors free.

    It uses a private torch API, checked on torch 2.11.
    """
    if processors:
        torch._C._set_sm_carveout_experimental(processors)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


# ---- whether cuBLAS leaves processors free

APPLIED = 1.15  # of the time alone: with 32 processors fewer, products take at least so long
SUMS = "copies, and a sum about every 2 ms"


class Carving(NamedTuple):
    """A way to tell cuBLAS to leave processors free: a library of torch's, and what tells it."""

    name: str
    library: str
    leave: Callable[[int], AbstractContextManager]


def carvings(device: torch.device) -> list[Carving]:
    """By torch, which passes the number to cublasLt alone in 2.11, and by cuBLAS itself."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    cublas = ctypes.CDLL(path_of("libcublas.so"))

    def by_target(free: int) -> AbstractContextManager:
        return sm_count_target(processors - free, cublas, torch.cuda.current_blas_handle())

    return [
        Carving("cublas, torch's carve-out", "cublas", carved_out),
        Carving("cublasLt, torch's carve-out", "cublaslt", carved_out),
        Carving("cublas, cublasSetSmCountTarget", "cublas", by_target),
    ]


@contextlib.contextmanager
def sm_count_target(processors: int, cublas: Any, handle: int) -> Iterator[None]:
    """A context in which the products of a handle are made for so many multiprocessors.

    Raises: RuntimeError if cuBLAS refuses.
    """

    def set_target(count: int) -> None:
        code = cublas.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(count))
        if code:
            raise RuntimeError(f"cublasSetSmCountTarget returned {code}")

    set_target(processors)
    try:
        yield
    finally:
        set_target(0)  # all of them


def path_of(library: str) -> str:
    """The file of a library that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(library):
            return path
    raise FileNotFoundError(f"this process has not loaded {library}")


def carve_outs(
    products: Products, blocks: Blocks, carvings: Sequence[Carving]
) -> Iterator[dict[str, Any]]:
    """Products with 32 processors left free, and, if that is applied, with 24 left free beside 24 blocks."""
    for carving in carvings:
        torch.backends.cuda.preferred_blas_library(carving.library)
        alone = least_seconds(products)
        with carving.leave(32):
            carved = least_seconds(products) / alone
        line: dict[str, Any] = {"products by": carving.name, "carve-out 32, of alone": carved}
        line["carve-out"] = "applied" if carved > APPLIED else "not applied"
        if carved > APPLIED:
            with carving.leave(24), blocks.beside(RING) as side:
                line["24 blocks beside carve-out 24, of alone"] = (
                    least_seconds(products, side) / alone
                )
        yield line


def least_seconds(products: Products, side: Blocks | Copies | None = None) -> float:
    return min(products.seconds(side) for _ in range(ROUNDS))


def copied_sums(device: torch.device) -> Callable[[], int]:
    """What a reduction by copies does: copies from elsewhere, here from the host, and one sum of the terms of 8 ranks.

    Two copies take about 2 ms over PCIe 5. A call launches them and the sum, and returns the bytes that it brings.
    """
    target = torch.empty(COPIED, dtype=torch.uint8, device=device)
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    terms = torch.randn(8, COPIED // 32, device=device).bfloat16()
    total = torch.empty(COPIED // 32, device=device)

    def run() -> int:
        for _ in range(2):
            target.copy_(host, non_blocking=True)
        ops.sum_terms(terms, [total], [len(total)], "mean", 8)
        return 2 * COPIED

    run()
    return run
