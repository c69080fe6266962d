"""The kernels of all_gather, reduce_scatter and barrier, between processes and with all ranks in one launch."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks.gpu import numerics
from tests.ops.interpreted.patterns import bits, same
from tests.ops.processes import run_ranks

all_gather = importlib.import_module("ztrans.ops.all_gather")
barrier = importlib.import_module("ztrans.ops.barrier")
reduce_scatter = importlib.import_module("ztrans.ops.reduce_scatter")
symmetric = importlib.import_module("ztrans.ops.symmetric")
reduce = importlib.import_module("ztrans.ops.reduce").reduce
unpack = importlib.import_module("ztrans.ops.unpack")

NUMELS = (9001, 3, 8192, 0, 130)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_kernels_work_between_processes_over_shared_memory(world):
    run_ranks(world, TRITON_INTERPRET="1")


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_all_ranks_gather_in_one_launch(ranks, dtype, skew):
    sizes = [-(-n // ranks) + 1 for n in NUMELS]
    memories = symmetric.in_one_process(ranks, sum(sizes) * dtype.itemsize)
    sent = [bits(sum(sizes), dtype, r) for r in range(ranks)]
    for memory, buffer in zip(memories, sent):
        memory.mine.copy_(buffer.view(torch.uint8))
    outs = [torch.zeros(n + skew, dtype=dtype)[skew:] for _ in range(ranks) for n in NUMELS]
    at = memories[0]
    all_gather.launch(
        at.buffers, at.pads, at.error, outs, sizes, 0, 2, 9, together=ranks, sync=False
    )
    true = [torch.zeros(n, dtype=dtype) for n in NUMELS]
    unpack.reference(torch.cat(sent), sizes, ranks, true)
    assert all(same(out, true[k % len(NUMELS)]) for k, out in enumerate(outs))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_all_ranks_scatter_in_one_launch(ranks, dtype, out, how):
    sizes = [-(-n // ranks) + 2 for n in NUMELS]
    total = sum(sizes)
    memories = symmetric.in_one_process(ranks, ranks * total * dtype.itemsize)
    terms = []
    for r, memory in enumerate(memories):
        terms.append(torch.randn(ranks, total).to(dtype))
        memory.mine.copy_(terms[r].view(-1).view(torch.uint8))
    outs = [
        torch.zeros(max(0, min(s, n - r * s)), dtype=out)
        for r in range(ranks)
        for n, s in zip(NUMELS, sizes)
    ]
    at = memories[0]
    reduce_scatter.launch(
        at.buffers, at.pads, at.error, outs, sizes, how, dtype, 0, 3, 9, together=ranks, sync=False
    )
    for r in range(ranks):
        mine, offset = outs[r * len(sizes) : (r + 1) * len(sizes)], 0
        for part, size in zip(mine, sizes):
            here = [t[r, offset : offset + part.numel()] for t in terms]
            assert same(part, reduce(here, how, out))
            offset += size


def test_a_rank_that_never_comes_is_an_error():
    late, _ = symmetric.in_one_process(2, 0)
    barrier.launch(late.pads, late.error, 0, 20)
    with pytest.raises(RuntimeError, match="rank 0 waited in vain for rank 1"):
        late.check()
    with pytest.raises(RuntimeError, match="in vain"):
        barrier.launch(late.pads, late.error, 0, 20)


def test_no_rank_uses_what_a_rank_that_never_came_has_sent():
    """Nor does the rank that came late, after the first has given up: it gets no signal any more."""
    ranks = 2
    first, second = symmetric.in_one_process(ranks, 64)
    for memory in (first, second):
        memory.mine.view(torch.float32).fill_(1.0)
    outs = [torch.zeros(16), torch.zeros(4, dtype=torch.int64)]
    all_gather.launch(first.buffers, first.pads, first.error, outs[:1], [8], 0, 2, 20)
    assert outs[0].isnan().all()
    with pytest.raises(RuntimeError, match="rank 0 waited in vain for rank 1"):
        first.check()
    first.error.zero_()
    all_gather.launch(first.buffers, first.pads, first.error, outs[1:], [2], 0, 2, 20)
    assert outs[1].eq(-1).all(), "the signals of a memory that has failed stay wrong"
    late = torch.zeros(8)
    reduce_scatter.launch(
        second.buffers, second.pads, second.error, [late], [8], "sum", torch.float32, 1, 2, 20
    )
    with pytest.raises(RuntimeError, match="rank 1 waited in vain for rank 0"):
        second.check()


def test_the_benchmark_checks_collectives(monkeypatch):

    monkeypatch.setattr(numerics, "NUMELS", (5003, 3, 0, 4096, 1, 537))
    assert numerics.collectives(torch.device("cpu")).startswith("bit for bit")
