"""Several ranks on one GPU: barriers and collectives in one cooperative launch, and between processes.

One card shows whether the signals are right, and how many bytes its memory moves. It does not show the speed of a
link between cards. Ranks in one launch run at the same time, so a barrier that lets a rank through early is noticed.
Processes on one card take turns. They show that the rendezvous and the library's calls work, but their times mean
nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import ztrans as zt
from ztrans import ops
from ztrans.ops import symmetric
from ztrans.ops.all_gather import launch as gather
from ztrans.ops.barrier import meet
from ztrans.ops.kernel import kernel
from ztrans.ops.reduce_scatter import launch as scatter
from ztrans.runtime.cuda.streams import Streams

from .kernels import MIB, copy_seconds, seconds
from .symmetric import Always, stepped

if TYPE_CHECKING:
    import triton.language as tl

ROUNDS = 5000
SPINS = 1 << 20  # how often a rank looks for a signal before it gives up: about a second


@kernel(unspecialized="rounds spins")
def _rounds(buffers, pads, error, wrong, rounds, spins, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    # Every rank writes, then a barrier, then every rank reads the values of all ranks, then a barrier, then every rank
    # overwrites its own values.
    block, rank = tl.program_id(0), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(buffers + rank).to(tl.pointer_type(tl.int32)) + i
    bad = tl.full((BLOCK,), 0, tl.int32)
    r = 0
    while r < rounds:
        tl.store(mine, (r * 31 + rank) * 7919 + i)
        meet(pads, error, rank, block, spins, WORLD)
        p = 0
        while p < WORLD:
            theirs = tl.load(buffers + p).to(tl.pointer_type(tl.int32)) + i
            bad += (tl.load(theirs) != (r * 31 + p) * 7919 + i).to(tl.int32)
            p += 1
        meet(pads, error, rank, block, spins, WORLD)
        tl.store(mine, tl.full((BLOCK,), -1, tl.int32))
        r += 1
    tl.atomic_add(wrong, tl.sum(bad, 0))


def one_launch(
    device: torch.device, left: Callable[[], float] = lambda: 60.0
) -> Iterator[list[dict]]:
    """2, 4 and 8 ranks in one cooperative launch: barriers, then the collectives, then both from a CUDA graph. `us` is
    the time of one barrier or collective. `memory GB/s` counts the bytes that all ranks read and write in the card's
    memory.
    """
    lines = []
    for ranks in (2, 4, 8):
        if left() < 15:
            lines.append({"ranks": ranks, "failed": "not run: the time was over"})
            yield lines
            continue
        lines.append(barriers(ranks, device))
        yield lines
        for size in (1 * MIB, 64 * MIB, 512 * MIB):
            lines += collectives(ranks, size, device)
            yield lines
        lines.append(replayed(ranks, device))
        yield lines


def barriers(ranks: int, device: torch.device) -> dict:
    """Thousands of rounds in one launch. Every value that a rank reads from a peer is checked."""
    blocks, block = 16, 256
    memories = symmetric.in_one_process(ranks, 4 * blocks * block, device)
    at, wrong = memories[0], torch.zeros((), dtype=torch.int32, device=device)

    def play(rounds: int) -> None:
        _rounds[(blocks, ranks)](
            at.buffers, at.pads, at.error, wrong, rounds, SPINS, WORLD=ranks, BLOCK=block,
            num_warps=4, launch_cooperative_grid=True,
        )  # fmt: skip

    play(0)  # compiles and loads the kernel
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    play(ROUNDS)
    end.record()
    torch.cuda.synchronize(device)
    at.check()
    if int(wrong):
        raise AssertionError(
            f"{int(wrong)} reads of {ranks} ranks returned another value than was written"
        )
    clean(memories)
    each = begin.elapsed_time(end) * 1e3 / (2 * ROUNDS)
    description = f"{2 * ROUNDS} barriers of {blocks} blocks, poisoned"
    return {"ranks": ranks, "what": description, "us": each, "result": "right"}


def clean(memories: list[symmetric.Symmetric]) -> None:
    """Raise an error unless all signals are zero again."""
    for memory in memories:
        whole = memory.mapping[memory.rank]
        if whole[memory.mine.numel() :].any():
            raise AssertionError(f"signals of rank {memory.rank} are left set")


def setting(ranks: int, size: int, device: torch.device):
    """Symmetric memories with random bf16 values: a parameter of `size` bytes in total, and a small one."""
    sizes = [size // 2 // ranks // 64 * 64, 72]  # rows of whole 16 bytes
    memories = symmetric.in_one_process(ranks, 2 * ranks * sum(sizes), device)
    for memory in memories:
        memory.mine.view(torch.bfloat16).copy_(torch.randn(ranks * sum(sizes), device=device))
    return sizes, memories


def collectives(ranks: int, size: int, device: torch.device) -> list[dict]:
    """all_gather and reduce_scatter with their barriers: checked, and timed beside a copy of as many bytes."""
    sizes, memories = setting(ranks, size, device)
    at, total = memories[0], sum(sizes)
    tables = (at.buffers, at.pads, at.error)
    channels = min(128 // ranks, 32)
    wholes = [
        torch.empty(ranks * s, dtype=torch.bfloat16, device=device)
        for _ in range(ranks)
        for s in sizes
    ]
    parts = [torch.empty(s, device=device) for _ in range(ranks) for s in sizes]
    options = {"together": ranks}
    ways = {
        "all_gather": (
            lambda: gather(*tables, wholes, sizes, 0, channels, SPINS, **options),
            2 * ranks * 2 * ranks * total,
        ),
        "reduce_scatter": (
            lambda: scatter(
                *tables, parts, sizes, "sum", torch.bfloat16, 0, channels, SPINS, **options
            ),
            ranks * (2 * ranks + 4) * total,
        ),
    }
    lines = []
    for name, (work, moved) in ways.items():
        taken = seconds(work, device)
        at.check()
        lines.append(
            {
                "ranks": ranks,
                "what": f"{name} of {size // MIB} MiB, all ranks in one launch",
                "us": taken * 1e6,
                "memory GB/s": moved / taken / 1e9,
                "of copy": copy_seconds(moved, device) / taken,
            }
        )
    sent = [m.mine.view(torch.bfloat16)[:total] for m in memories]
    truth = ops.unpack(torch.cat(sent), sizes, [(ranks * s,) for s in sizes], ranks)
    rows = [m.mine.view(torch.bfloat16).view(ranks, total) for m in memories]
    for rank in range(ranks):
        mine = wholes[rank * len(sizes) : (rank + 1) * len(sizes)]
        summed = ops.reduce([row[rank] for row in rows], "sum", torch.float32)
        if not all(torch.equal(a, b) for a, b in zip(mine, truth)):
            raise AssertionError(f"all_gather of {ranks} ranks: the result of rank {rank} is wrong")
        if not torch.equal(torch.cat(parts[rank * len(sizes) : (rank + 1) * len(sizes)]), summed):
            raise AssertionError(
                f"reduce_scatter of {ranks} ranks: the result of rank {rank} is wrong"
            )
    clean(memories)
    return [line | {"result": "right"} for line in lines]


def replayed(ranks: int, device: torch.device, times: int = 1000) -> dict:
    """A captured gather is replayed with new values each time. Signals that count calls would fail in a replay."""
    sizes, memories = setting(ranks, MIB, device)
    at, total = memories[0], sum(sizes)
    wholes = [
        torch.empty(ranks * s, dtype=torch.bfloat16, device=device)
        for _ in range(ranks)
        for s in sizes
    ]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    count = torch.zeros((), device=device)
    sent = [m.mine.view(torch.bfloat16)[:total] for m in memories]

    def step() -> None:
        count.add_(1).remainder_(251)  # exact in bf16
        for rank, buffer in enumerate(sent):
            buffer.copy_((count + rank).expand(total))
        for whole in wholes:
            whole.fill_(-1)
        gather(at.buffers, at.pads, at.error, wholes, sizes, 0, 128 // ranks, SPINS, together=ranks)
        for whole in wholes:
            expected = (count + torch.arange(ranks, device=device)).bfloat16()[:, None]
            wrong.add_((whole.view(ranks, -1) != expected).sum())

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with ops.filled_after_capture(device), torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize(device)
    at.check()
    if int(wrong):
        raise AssertionError(f"{int(wrong)} elements of replayed gathers are wrong")
    clean(memories)
    return {
        "ranks": ranks,
        "what": f"all_gather captured and replayed {times} times",
        "result": "right",
    }


def processes(
    device: torch.device, left: Callable[[], float] = lambda: 100.0
) -> Iterator[list[dict]]:
    """Ranks in processes of their own on one card, with torch's symmetric memory and a gloo group."""
    lines = []
    for ranks in (2, 4):
        if left() > 30:
            meeting(ranks, min(60, left()))
            description = (
                "rendezvous, barrier, all_gather, reduce_scatter, steps of stage 3 in processes"
            )
            lines.append({"ranks": ranks, "what": description, "result": "right"})
        else:
            lines.append({"ranks": ranks, "failed": "not run: the time was over"})
        yield lines


def meeting(ranks: int, limit: float) -> None:
    """Run all processes, and raise an error if one of them fails or takes longer than `limit` seconds."""
    env = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMMMEM": "CUDA"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.ranks", folder]
        started = [
            subprocess.Popen(
                [*command, str(r), str(ranks)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for r in range(ranks)
        ]
        end = time.monotonic() + limit
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            if any(process.returncode for process in started):
                break  # the other processes would wait for the one that failed
            time.sleep(0.1)
        for process in started:
            process.kill()
        outputs = [process.communicate()[0].decode() for process in started]
    if any(process.returncode for process in started):
        ends = (f"code {process.returncode}" for process in started)
        raise RuntimeError(
            " | ".join((text.strip().splitlines() or [end])[-1] for text, end in zip(outputs, ends))
        )


def one_process(folder: str, rank: int, ranks: int) -> None:
    """The program of one rank of `meeting`."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    sizes = [4096, 67]
    nbytes = 4 * ranks * sum(sizes)
    memory = symmetric.connect(symmetric.allocate(nbytes, ranks), nbytes, dist.group.WORLD)
    dist.barrier()  # the signals of all ranks must be zero before any rank sets one
    draws = [torch.Generator().manual_seed(r) for r in range(ranks)]
    by_rank = [torch.randn(ranks, sum(sizes), generator=draw).bfloat16() for draw in draws]
    memory.mine.view(torch.bfloat16)[: ranks * sum(sizes)].copy_(by_rank[rank].view(-1))
    wholes = [torch.empty(ranks * s, dtype=torch.bfloat16, device="cuda") for s in sizes]
    parts = [torch.empty(s, device="cuda") for s in sizes]
    ops.barrier(memory)
    for _ in range(3):  # few, as on one card a wait lasts until the other process gets its turn
        ops.all_gather(memory, wholes, sizes, channels=2)
        ops.reduce_scatter(memory, parts, sizes, "sum", torch.bfloat16, channels=2)
    torch.cuda.synchronize()
    memory.check()
    truth = ops.unpack(
        torch.cat([e[0] for e in by_rank]), sizes, [(ranks * s,) for s in sizes], ranks
    )
    assert all(torch.equal(a.cpu(), b) for a, b in zip(wholes, truth)), "all_gather"
    summed = ops.reduce([e[rank] for e in by_rank], "sum", torch.float32)
    assert torch.equal(torch.cat(parts).cpu(), summed), "reduce_scatter"
    streams = Streams(symmetric=Always())
    assert stepped(zt.make_mesh("cuda", dp=-1), streams), "the step sends nothing"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    one_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
