"""A step of stage 3 whose messages all go through symmetric memory, beside what the program means."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value

import ztrans as zt
from ztrans.runtime.codegen import bind, to_fx
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric_memory import SymmetricMemory
from ztrans.runtime.cuda.symmetric_start import SymmetricStart
from ztrans.runtime.cuda.transport import Times
from ztrans.tracing.arguments import Arguments, flat

STEPS = 3


class Always(SymmetricMemory):
    """Symmetric memory, faster whatever the message."""

    def times(self, group, kind, wire, nbytes) -> Times:
        return Times(1e-6, 2e-6, nbytes)


def loss_of(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for w in params.values():
        x = torch.tanh(F.linear(x.bfloat16(), w.bfloat16()))
    return F.mse_loss(x.float(), y)


def train_step(state: dict, x: torch.Tensor, y: torch.Tensor) -> tuple[dict, torch.Tensor]:
    grads, loss = grad_and_value(loss_of)(state, x, y)
    return {k: w - 0.1 * grads[k] for k, w in state.items()}, loss


def stepped(mesh: DeviceMesh, streams: Streams) -> int:
    """How many messages a step sends; raises unless some steps compute what all ranks in lock-step do, to the bit."""
    device, ranks, rank = mesh.device_type, mesh.size(), mesh.get_local_rank()
    draw = torch.Generator().manual_seed(0)
    state = {f"w{k}": (torch.randn(65, 65, generator=draw) / 8).to(device) for k in range(4)}
    batches = [tuple(torch.randn(ranks, 64, 65, generator=draw).to(device) for _ in "xy") for _ in range(STEPS)]
    sharded = zt.shard_params(mesh, reduce_dtype=torch.bfloat16, outputs="local")
    step = zt.chain(sharded, zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())(train_step)
    mine = step.shard({k: w.clone() for k, w in state.items()})
    lowered = step.lower(mine, *(part[rank] for part in batches[0]))
    run = bind(lowered.graph, to_fx(lowered.graph, mesh, True, streams=streams))
    for batch in batches:
        arguments = Arguments(mine, tuple(part[rank] for part in batch))
        run(flat(lowered.program, lowered.graph, mesh, arguments)[1])
        state, _ = lowered.lockstep(state, list(zip(*batch)))
    streams.symmetric.check()
    for name, w in mine.items():  # not gathered: a group of gloo's may not gather what is on a GPU
        if not torch.equal(w.to_local(), state[name].chunk(ranks, w.placements[0].dim)[rank]):
            raise AssertionError(f"{name} is not what the program means")
    starts = [m for m in run.program.modules() if isinstance(m, SymmetricStart)]
    return sum(len(start.groups) for start in starts)
