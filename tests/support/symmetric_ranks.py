"""Compiled steps through symmetric memory on two ranks, whose devices are simulated. Run by torchrun.

torchrun --standalone --nproc-per-node 2 tests/support/symmetric_ranks.py
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ztrans as zt
from benchmarks.gpu.symmetric import Always, train_step
from tests.support.fake_cuda import FakeCuda
from tests.support.shared_files import FileSource
from ztrans.runtime import codegen, transports
from ztrans.runtime.cuda import symmetric
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric import SymmetricMemory
from ztrans.runtime.session import session_of
from ztrans.runtime.transports import StreamTransports, transports_of

RANK = int(os.environ.get("RANK", 0))
CUDA = FakeCuda()
EVEN = ((6, 6), (6, 6), (6, 6))
# Rank 0 has a smaller batch in the third step, and rank 1 in the fourth.
RAGGED = ((6, 6), (6, 6), (3, 6), (6, 3), (6, 6))


class MissingOnRank1(FileSource):
    """Cannot allocate on rank 1."""

    def allocate(self, nbytes, ranks):
        if RANK == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().allocate(nbytes, ranks)


class UnlinkedOnRank1(FileSource):
    """Has no NVLink on rank 1."""

    def check_links(self, devices):
        if RANK == 1:
            raise RuntimeError("no NVLink to the GPU of rank 0")


class LostOnRank1(FileSource):
    """Cannot map the memory of the other rank on rank 1."""

    def connect(self, part, nbytes, group):
        memory = super().connect(part, nbytes, group)
        if RANK == 1:
            raise RuntimeError("CUDA driver error: invalid handle")
        return memory


def use(memory: SymmetricMemory | None) -> None:
    """Simulate devices with this symmetric memory; None is for CPUs."""

    def simulated(mesh: DeviceMesh, device: torch.device | None = None) -> StreamTransports:
        groups = session_of(mesh)
        groups.symmetric = memory
        return StreamTransports(Streams(CUDA, memory))

    for module in (transports, codegen):  # both look it up
        module.transports_of = transports_of if memory is None else simulated


def sharded(*transforms):
    shard = zt.shard_params(MESH, reduce_dtype=torch.bfloat16, outputs="local")
    schedule = zt.overlap_grads(update="last"), zt.prefetch(), zt.fuse_cast_gather()
    return zt.chain(shard, *transforms, *schedule)(train_step)


def trained(step, rows) -> list[torch.Tensor]:
    """The shards of the state, and the losses, after a step for each of these numbers of rows by rank."""
    draw = torch.Generator().manual_seed(0)
    state = step.shard({f"w{k}": torch.randn(65, 65, generator=draw) / 8 for k in range(4)})
    losses = []
    for by_rank in rows:
        x, y = torch.randn(2, 2, 6, 65, generator=draw)
        state, loss = step(state, x[RANK, : by_rank[RANK]], y[RANK, : by_rank[RANK]])
        losses.append(loss)
    return [w.to_local() for w in state.values()] + losses


def report(**figures) -> None:
    print(json.dumps(figures), flush=True)


def compared(
    case: str, memory: SymmetricMemory, rows=EVEN, transforms=(), wrap=lambda step: step
) -> None:
    """Run steps through this memory and without it, and print whether the bits are equal."""
    use(memory)
    through = trained(wrap(sharded(*transforms)), rows)
    use(None)
    plain = trained(sharded(*transforms), rows)
    refusals = sorted({answer for answer in memory.answers.values() if isinstance(answer, str)})
    report(
        case=case,
        bitwise=all(map(torch.equal, through, plain)),
        buffers=len(memory.buffers),
        refusals=refusals,
    )


def spent_in_vain(run) -> float:
    """Run a message as a trial does; rank 1 fails."""
    if RANK == 1:
        raise RuntimeError("the kernel does not compile")
    run()
    return 1.0


def main() -> None:
    files = FileSource()
    compared("ragged", Always(files), RAGGED)
    compared("micro-batches", Always(files), transforms=(zt.accumulate(3),))
    for source in (MissingOnRank1(), UnlinkedOnRank1(), LostOnRank1()):
        compared(type(source).__name__, Always(source))
        source.end()
    symmetric._TRIAL_SPINS = 300
    symmetric._seconds = spent_in_vain
    compared("trial", SymmetricMemory(files))
    files.end()


if __name__ == "__main__":
    symmetric.MOST_SPINS = 30_000
    torch.set_num_threads(1)
    MESH = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    main()
    dist.destroy_process_group()
