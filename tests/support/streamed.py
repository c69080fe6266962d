"""Programs on simulated streams compute what they compute without streams. Run by torchrun on two ranks.

torchrun --standalone --nproc-per-node 2 tests/support/streamed.py
"""

from __future__ import annotations

import functools
import json
import os
import re

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import ztrans as zt
from benchmarks.gpu.symmetric import Always, AlwaysCopied, stepped
from tests.support.programs import CASES
from tests.support.races import Races
from tests.support.shared_files import FileSource
from tests.support.worlds import ALL, batches, on_ranks, slices
from ztrans.calling.call import BoundCall
from ztrans.runtime.agreement import everywhere
from ztrans.runtime.channels import Channel
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.collectives import channel
from ztrans.runtime.cuda import symmetric
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric import Times
from ztrans.runtime.executable import bind
from ztrans.runtime.transports import StreamTransports, reserve

RANK = int(os.environ.get("RANK", 0))
HALF = {"reduce_dtype": torch.bfloat16}
NAMES, SINGLE, DOUBLE = (
    ("gpt_adam", "autocast", "accumulation", "uneven", "muon"),
    torch.float32,
    torch.float64,
)
THROUGH = {"": lambda files: None, "kernels": Always, "copies": AlwaysCopied}
RUNS = [(name, {}, (0, 1, 2, 3), "", SINGLE) for name in NAMES]
RUNS += [("uneven", HALF, (0, 1, 2, 3), "", SINGLE), ("uneven", HALF, (2, 3), "kernels", SINGLE)]
RUNS += [("gpt_adam", HALF, (1, 3), "kernels", SINGLE), ("uneven", HALF, (3,), "kernels", DOUBLE)]
RUNS += [("gpt_adam", HALF, (1, 3), "copies", SINGLE), ("uneven", HALF, (2, 3), "copies", SINGLE)]


def trained(case, state, low, mesh, transports) -> tuple[list[torch.Tensor], str]:
    """The state on this rank after two steps, and the program that ran."""
    run = bind(low.graph, to_fx(low.graph, mesh, True, transports=transports))
    for batch in batches(case, 2):
        local = low.recording.local_inputs(
            BoundCall(state, slices(batch, mesh.size())[RANK])
        ).tensors
        run(local)
    return [x.to_local() if hasattr(x, "to_local") else x for x in pytree.tree_leaves(state)], str(
        run.program
    )


def report(**figures) -> None:
    if RANK == 0:
        print(json.dumps(figures), flush=True)


def contest(mesh: DeviceMesh, files: FileSource) -> None:
    """The choice between symmetric memory and the group's collective.

    The clock differs between the ranks, but the choice must not. If symmetric memory gives other bits, it is not used.
    """
    exchange = functools.partial(everywhere, mesh=mesh)
    queue = channel(mesh, "dp", "gather")

    def times(sums: bool, gathers: bool, wire: torch.dtype) -> Times | str:
        messages = symmetric.MessageKind(sums, gathers, wire, 1024)
        memory = symmetric.SymmetricMemory(files)
        memory.reserve([(queue, messages)], exchange)
        return memory.answer(queue, messages)

    symmetric._seconds = lambda run: (run(), 1.0 + RANK)[1]
    report(contest="all_gather", times=times(False, True, torch.float32))
    report(contest="reduce_scatter", times=times(True, False, torch.bfloat16))
    report(contest="all_reduce", times=times(True, True, torch.bfloat16))
    right_gather = symmetric.gather
    symmetric.gather = lambda memory, sent, outs, sizes, spins: outs[0].zero_()
    report(contest="zeros", times=times(False, True, torch.float64))
    symmetric.gather = right_gather
    right_copies = symmetric.gather_by_copies
    symmetric.gather_by_copies = lambda memory, received, sent, spins: received[0].zero_()
    report(contest="zeros by copies", times=times(False, True, torch.float64))
    symmetric.gather_by_copies = right_copies


def main() -> None:
    # Without streams too, half precision is added as over NCCL, by its all_reduces and by an exchange.
    Channel.is_gloo = False
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    files = FileSource()
    contest(mesh, files)
    report(benchmark="stepped", sent=stepped(mesh, Streams(Races(), Always(files))))
    for name, options, stages, through, dtype in RUNS:
        torch.set_default_dtype(dtype)
        for stage in stages:
            case = CASES[name]
            transforms = zt.shard_params(mesh, stage=stage, **options), *ALL
            step, low = zt.chain(*transforms)(case.step), on_ranks(case, 2, *transforms)
            states = [step.shard(case.state()) for _ in range(2)]
            cuda = Races()
            files.note = cuda.knows
            transports = StreamTransports(Streams(cuda, THROUGH[through](files)))
            reserve(mesh, [low.graph], transports)
            with cuda:
                streamed, text = trained(case, states[0], low, mesh, transports)
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
                through=through,
                ways=ways,
            )
    files.end()


if __name__ == "__main__":
    main()
