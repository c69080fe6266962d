"""A stage-3 step that sends all its messages through symmetric memory is compared with lockstep."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value

import ztrans as zt
from ztrans.calling.call import BoundCall
from ztrans.runtime.codegen import to_fx
from ztrans.runtime.cuda.streams import Streams
from ztrans.runtime.cuda.symmetric import SymmetricMemory, Times
from ztrans.runtime.cuda.symmetric_start import SymmetricStart
from ztrans.runtime.executable import bind
from ztrans.runtime.transports import StreamTransports, reserve

STEPS = 3


class Always(SymmetricMemory):
    """Symmetric memory whose kernels claim to be faster than NCCL, so that they carry every message they can."""

    def trial(self, buffer, kind, from_all) -> Times:
        return Times(1e-6 if kind.has_kernel else math.inf, 2e-6, kind.nbytes)


class AlwaysCopied(SymmetricMemory):
    """Symmetric memory from which copies claim to be fastest, so that they carry every message they can."""

    def trial(self, buffer, kind, from_all) -> Times:
        return Times(math.inf, 2e-6, kind.nbytes, copies=1e-6)


def loss_of(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for w in params.values():
        x = torch.tanh(F.linear(x.bfloat16(), w.bfloat16()))
    return F.mse_loss(x.float(), y)


def train_step(state: dict, x: torch.Tensor, y: torch.Tensor) -> tuple[dict, torch.Tensor]:
    grads, loss = grad_and_value(loss_of)(state, x, y)
    return {k: w - 0.1 * grads[k] for k, w in state.items()}, loss


def stepped(mesh: DeviceMesh, streams: Streams) -> int:
    """Run some steps, and return the number of messages of a step.

    Raises: AssertionError if a bit of the state differs from lockstep, which runs all ranks in one process.
    """
    device, ranks, rank = mesh.device_type, mesh.size(), mesh.get_local_rank()
    draw = torch.Generator().manual_seed(0)
    state = {f"w{k}": (torch.randn(65, 65, generator=draw) / 8).to(device) for k in range(4)}
    batches = [
        tuple(torch.randn(ranks, 64, 65, generator=draw).to(device) for _ in "xy")
        for _ in range(STEPS)
    ]
    sharded = zt.shard_params(mesh, reduce_dtype=torch.bfloat16, outputs="local")
    step = zt.chain(sharded, zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())(train_step)
    mine = step.shard({k: w.clone() for k, w in state.items()})
    lowered = step.lower(mine, *(part[rank] for part in batches[0]))
    transports = StreamTransports(streams)
    reserve(mesh, [lowered.graph], transports)
    run = bind(lowered.graph, to_fx(lowered.graph, mesh, True, transports=transports))
    for batch in batches:
        arguments = BoundCall(mine, tuple(part[rank] for part in batch))
        run(lowered.recording.local_inputs(arguments).tensors)
        state, _ = lowered.lockstep(state, list(zip(*batch)))
    if streams.symmetric.error():
        raise AssertionError(streams.symmetric.error())
    for (
        name,
        w,
    ) in mine.items():  # compares shards: a gloo group may not be able to gather tensors on a GPU
        if not torch.equal(w.to_local(), state[name].chunk(ranks, w.placements[0].dim)[rank]):
            raise AssertionError(f"{name} differs from its value in lockstep")
    starts = [m for m in run.program.modules() if isinstance(m, SymmetricStart)]
    return sum(len(start.members_by_message) for start in starts)
