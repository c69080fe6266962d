"""One rank of several processes over shared memory: `python tests/ops/rank.py FOLDER RANK WORLD...`.

Runs the kernels if TRITON_INTERPRET=1, else the CPU references. Each rank can draw the inputs of all ranks, so it
computes every result by itself too, and exits with an error if a bit differs.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch

from tests.support.shared_files import over_files

torch.set_num_threads(1)
op = {
    name: importlib.import_module(f"ztrans.ops.{name}")
    for name in ("barrier", "all_gather", "reduce_scatter")
}
packing = importlib.import_module("ztrans.ops.cast_pack")
symmetric = importlib.import_module("ztrans.ops.symmetric")
reduce = importlib.import_module("ztrans.ops.reduce").reduce

NUMELS = (4100, 3, 8192, 0, 2049)
SPINS = 1 << 22
CHANNELS = 3


def run(name: str, kernels: bool):
    return op[name].launch if kernels else op[name].reference


def parts(rank: int, round_: int, size: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * round_ + rank)
    return [torch.randn(n if size == 0 else size * n, generator=draw) for n in NUMELS]


def gathers(memory: symmetric.Symmetric, kernels: bool, rounds: int = 3) -> None:
    ranks, sizes = memory.ranks, [-(-n // memory.ranks) for n in NUMELS]
    for round_ in range(rounds):
        dtype = (torch.bfloat16, torch.float32)[round_ % 2]
        cut = [
            [p[r * size : (r + 1) * size] for p, size in zip(parts(0, round_, 0), sizes)]
            for r in range(ranks)
        ]  # the shards of rank r
        send = memory.mine[: sum(sizes) * dtype.itemsize].view(dtype)
        packing.reference(cut[memory.rank], sizes, 1, send)
        outs = [torch.full((n,), 7.0, dtype=dtype) for n in NUMELS]
        run("all_gather", kernels)(
            memory.buffers, memory.pads, memory.error, outs, sizes, memory.rank, CHANNELS, SPINS
        )
        memory.check()
        for out, whole in zip(outs, parts(0, round_, 0)):
            assert torch.equal(out, whole.to(dtype)), (
                f"gather of rank {memory.rank}, round {round_}"
            )
        memory.mine.fill_(0xA5)  # a peer that still reads this memory gets wrong values, and fails


def scatters(memory: symmetric.Symmetric, kernels: bool, rounds: int = 3) -> None:
    ranks, rank, sizes = memory.ranks, memory.rank, [-(-n // memory.ranks) + 5 for n in NUMELS]
    numels = [max(0, min(size, n - rank * size)) for n, size in zip(NUMELS, sizes)]
    for round_ in range(rounds):
        dtype, out_dtype, how = (
            (torch.bfloat16, torch.float32, "mean"),
            (torch.float32, torch.float32, "sum"),
            (torch.float16, torch.bfloat16, "sum"),
        )[round_ % 3]
        send = memory.mine[: ranks * sum(sizes) * dtype.itemsize].view(dtype)
        packing.reference(parts(rank, round_, 0), sizes, ranks, send)
        outs = [torch.full((n,), 7.0, dtype=out_dtype) for n in numels]
        run("reduce_scatter", kernels)(
            memory.buffers,
            memory.pads,
            memory.error,
            outs,
            sizes,
            how,
            dtype,
            rank,
            CHANNELS,
            SPINS,
        )
        memory.check()
        by_rank = [[p.to(dtype) for p in parts(r, round_, 0)] for r in range(ranks)]
        for k, (out, size) in enumerate(zip(outs, sizes)):
            terms = [sent[k][rank * size : (rank + 1) * size] for sent in by_rank]
            true = reduce(terms, how, out_dtype)
            assert torch.equal(out, true), f"scatter of rank {rank}, round {round_}, part {k}"
        memory.mine.fill_(0xA5)


def barriers(memory: symmetric.Symmetric, kernels: bool, rounds: int = 50) -> None:
    """No rank is ever more than one barrier ahead of another."""
    counts = [
        memory_.view(torch.int32)[:1] for memory_ in symmetric.at_addresses(memory.buffers, 4)
    ]
    counts[memory.rank].zero_()
    run("barrier", kernels)(memory.pads, memory.error, memory.rank, SPINS)
    for round_ in range(rounds):
        counts[memory.rank].fill_(round_)
        run("barrier", kernels)(memory.pads, memory.error, memory.rank, SPINS)
        assert all(int(c) == round_ for c in counts), f"barrier {round_} let a rank through early"
        run("barrier", kernels)(memory.pads, memory.error, memory.rank, SPINS)


if __name__ == "__main__":
    folder, rank, *worlds = Path(sys.argv[1]), *map(int, sys.argv[2:])
    kernels = os.environ.get("TRITON_INTERPRET") == "1"
    if kernels:
        from tests.ops.interpreted.casts import exact_casts

        exact_casts()
    for ranks in (n for n in worlds if rank < n):
        (folder / str(ranks)).mkdir(exist_ok=True)
        memory = over_files(
            folder / str(ranks), rank, ranks, 4 * (sum(NUMELS) + 8 * 5 * len(NUMELS)) + 64
        )
        for check in (barriers, gathers, scatters):
            check(memory, kernels)
        mine = symmetric.at_addresses(memory.pads[rank : rank + 1], 4 * ranks * symmetric.CHANNELS)
        assert not mine[0].any(), "not all signals were taken"
