"""PyTorch's own: the plain loop, DDP and FSDP2, each with and without torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .model import Task, adamw, loss_of
from .wire import AllGather, ReduceScatter


def loop(
    task: Task, model: nn.Module, compile: bool = False, fused: bool = True
) -> Callable[[], Tensor]:
    """A step of the ordinary loop. Every step uses the same batch."""
    optimizer, (x, y) = adamw(model.parameters(), fused), task.batch()
    model = torch.compile(model) if compile else model

    def step() -> Tensor:
        with task.autocast():
            logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(task: Task, compile: bool = False, fused: bool = True) -> Callable[[], Tensor]:
    return loop(task, task.model(), compile, fused)


def ddp(
    task: Task, compile: bool = False, bucket: float = 25, rank: int = 0
) -> Callable[[], Tensor]:
    """DDP, whose gradients are sent in bf16 if the task is; or by PowerSGD, as matrices of a low `rank`."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        task.model(), gradient_as_bucket_view=True, bucket_cap_mb=bucket
    )
    if rank:
        # It begins after the second step, the earliest that the hook allows with error feedback.
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    elif task.bf16:
        # In a lambda, as DDP accepts the hook itself only with NCCL.
        model.register_comm_hook(None, lambda _, bucket: bf16_compress_hook(None, bucket))
    return loop(task, model, compile)


def fsdp(task: Task, compile: bool = False, tuned: bool = False) -> Callable[[], Tensor]:
    dist.init_process_group("gloo")
    # FSDP2's policy casts, so autocast is off.
    return loop(replace(task, bf16=False), sharded(task, tuned), compile)


def sharded(task: Task, tuned: bool) -> nn.Module:
    """The model of a task with FSDP2 around each block.

    With `tuned`, it is set up for gloo: gathers start ahead, and messages use both directions of a link.
    """
    model = task.model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy if task.bf16 else MixedPrecisionPolicy())
    if tuned:
        assert isinstance(model, FSDPModule)
        model._set_unshard_async_op(True)  # on a CPU, a gather is asynchronous only with this flag
        for module in (model, *model.blocks):
            module.set_custom_all_gather(AllGather())
            module.set_custom_reduce_scatter(ReduceScatter())
        for before, after in zip([model, *model.blocks], model.blocks):
            before.set_modules_to_forward_prefetch([after])
    return model
