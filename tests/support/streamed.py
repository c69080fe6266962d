"""Programs on simulated streams compute what they compute without streams. Run by torchrun on two ranks.

torchrun --standalone --nproc-per-node 2 tests/support/streamed.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import ztrans as zt
from benchmarks.gpu_symmetric import Always, stepped
from tests.support.programs import CASES
from tests.support.races import Races
from tests.support.shared_files import over_files
from tests.support.worlds import ALL, batches, slices
from ztrans.calling.call import BoundCall
from ztrans.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from ztrans.ops.symmetric import Symmetric
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda import symmetric as transports
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.executable import bind

RANK = int(os.environ.get("RANK", 0))
HALF = {"reduce_dtype": torch.bfloat16}
NAMES, SINGLE, DOUBLE = (
    ("gpt_adam", "autocast", "accumulation", "uneven", "muon"),
    torch.float32,
    torch.float64,
)
RUNS = [(name, {}, (0, 1, 2, 3), False, SINGLE) for name in NAMES]
RUNS += [("uneven", HALF, (0, 1, 2, 3), False, SINGLE), ("uneven", HALF, (2, 3), True, SINGLE)]
RUNS += [("gpt_adam", HALF, (1, 3), True, SINGLE), ("uneven", HALF, (3,), True, DOUBLE)]


class Files:
    """Allocates symmetric memories over files, each in a folder of its own."""

    def __init__(self) -> None:
        folder = [tempfile.mkdtemp(dir="/dev/shm") if RANK == 0 else None]
        dist.broadcast_object_list(folder)
        self.folder, self.memories = Path(folder[0]), []

    def __call__(self, nbytes: int, group: dist.ProcessGroup) -> Symmetric:
        folder = self.folder / str(len(self.memories))
        folder.mkdir(exist_ok=True)
        self.memories.append(over_files(folder, group.rank(), group.size(), nbytes))
        return self.memories[-1]

    def end(self) -> None:
        dist.barrier()
        shutil.rmtree(self.folder, ignore_errors=True)


def trained(case, state, low, mesh, streams) -> tuple[list[torch.Tensor], str]:
    """The state on this rank after two steps, and the program that ran."""
    run = bind(low.graph, to_fx(low.graph, mesh, True, streams=streams))
    for batch in batches(case, 2):
        local = low.program.local_inputs(BoundCall(state, slices(batch, mesh.size())[RANK])).tensors
        run(local)
    return [x.to_local() if hasattr(x, "to_local") else x for x in pytree.tree_leaves(state)], str(
        run.program
    )


def report(**figures) -> None:
    if RANK == 0:
        print(json.dumps(figures), flush=True)


def contest(group: dist.ProcessGroup, files: Files) -> None:
    """The choice between symmetric memory and the group's collective.

    The clock differs between the ranks, but the choice must not. If symmetric memory gives other bits, it is not used.
    """
    transports._seconds = lambda run: (run(), 1.0 + RANK)[1]
    for kind, wire in ((ALL_GATHER, torch.float32), (REDUCE_SCATTER, torch.bfloat16)):
        report(
            contest=kind.name,
            times=transports.SymmetricMemory(files).times(group, kind, wire, 1000),
        )
    true, transports.gather = (
        transports.gather,
        lambda memory, sent, outs, sizes: outs[0].zero_(),
    )
    report(
        contest="zeros",
        times=transports.SymmetricMemory(files).times(group, ALL_GATHER, torch.float64, 1000),
    )
    transports.gather = true


def main() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    files = Files()
    contest(mesh.get_group(), files)
    report(benchmark="stepped", sent=stepped(mesh, Streams(Races(), Always(files))))
    for name, options, stages, symmetric, dtype in RUNS:
        torch.set_default_dtype(dtype)
        for stage in stages:
            case = CASES[name]
            step = zt.chain(zt.shard_params(mesh, stage=stage, **options), *ALL)(case.step)
            low = step.lower(step.shard(case.state()), *slices(batches(case, 1)[0], 2)[RANK])
            states = [step.shard(case.state()) for _ in range(2)]
            with Races() as cuda:
                by = Always(cuda.knows(files)) if symmetric else None
                streamed, text = trained(case, states[0], low, mesh, Streams(cuda, by))
            plain, _ = trained(case, states[1], low, mesh, None)
            same = all(
                torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, streamed)
            )
            ways = sorted(set(re.findall(r"by=(\w+ \w+)", text)))
            report(
                case=name,
                stage=stage,
                bitwise=same,
                races=cuda.races,
                symmetric=symmetric,
                ways=ways,
            )
    files.end()


if __name__ == "__main__":
    main()
