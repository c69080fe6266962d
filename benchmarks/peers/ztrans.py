"""ztrans, on the same module and loop as the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import ztrans as zt

from .model import Task, adamw, loss_of
from .subjects import Skip


def lifted(task: Task, stage: int, backend: str = "eager") -> Callable[[], Tensor]:
    model, batch = task.model(), task.batch()
    optimizer = adamw(model.parameters())

    def loop_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with task.autocast():
            logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        optimizer.step()
        return loss

    mesh = zt.make_mesh("cpu", dp=-1)
    dtype = torch.bfloat16 if task.bf16 else None
    # The others do not average their losses over the ranks either.
    shard = zt.shard_params(mesh, axis="dp", stage=stage, reduce_dtype=dtype, outputs="local")
    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.chain(shard, zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())(step)
    state = step.shard(state)
    try:
        compiled = step.lower(state, *batch).compile(backend=backend)
    except ValueError as error:
        if "unknown backend" in str(error):
            raise Skip(str(error)) from None
        raise
    model.to("meta")  # traced; the state is all that is needed now
    optimizer.state.clear()

    def run() -> Tensor:
        nonlocal state
        state, loss = compiled(state, *batch)
        return loss

    return run
