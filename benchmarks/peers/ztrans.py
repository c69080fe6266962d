"""ztrans, with the same module and training loop as the other subjects."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

import ztrans as zt

from .model import Task, adamw, loss_of

PROFILED = 5  # recorded steps from which the plan is made
RECORDED = 3  # recorded steps before and after the timed steps of a turn; several, as the first touches new memory


class Lifted:
    """A step of ztrans, planned for the calibrated cluster, and again from recorded steps. The faster plan stays."""

    def __init__(
        self, lowered: zt.stages.Lowered, shard: Callable[[], object], batch: tuple, backend: str
    ) -> None:
        self.batch = batch
        self.compiled, tuning = lowered.compile(backend=backend).tune(
            shard(), *batch, steps=PROFILED
        )
        self.first, self.state = tuning.before.profile.timeline.seconds, shard()
        self.foretold = self.compiled.lowered.timeline().seconds

    def __call__(self) -> Tensor:
        self.state, loss = self.compiled(self.state, *self.batch)
        return loss

    def predictions(self) -> dict:
        """The simulated seconds of this step and the lower bound, from the costs of steps that are recorded now."""
        lowered, copies = (
            self.compiled.lowered,
            pytree.tree_map(clone, self.state),
        )  # recorded steps train too
        profile = self.compiled.profile(copies, *self.batch, steps=RECORDED)
        timeline = lowered.timeline(profile.cluster(lowered.cluster))
        bound, binds = timeline.bound
        before = {
            "first": self.first,
            "foretold": self.foretold,
            "recorded": profile.timeline.seconds,
        }
        return before | {"simulated": timeline.seconds, "bound": bound, "binds": binds}


def clone(x: object) -> object:
    return x.clone() if isinstance(x, Tensor) else x


def lifted(
    task: Task,
    stage: int,
    backend: str = "eager",
    remat: bool = False,
    gathers: dict | None = None,
    grads: dict | None = None,
) -> Lifted:
    """A step of a stage. In bf16, stage 0 uses autocast, as DDP does; other stages cast parameters, as FSDP2 does.

    `gathers` and `grads` are the options of `quantize_gathers` and `quantize_grads`, if there are to be any.
    """
    model, batch = task.model(), task.batch()
    optimizer = adamw(model.parameters())

    def logits_of(x: Tensor) -> Tensor:
        if task.bf16 and stage:
            return functional_call(
                model, {name: p.bfloat16() for name, p in model.named_parameters()}, (x,)
            )
        with task.autocast():
            return model(x)

    def loop_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(logits_of(x), y)
        loss.backward()
        optimizer.step()
        return loss

    mesh = zt.make_mesh("cpu", dp=-1)
    dtype = torch.bfloat16 if task.bf16 else None
    # outputs="local", as the other subjects do not average their losses over the ranks either.
    shard = zt.shard_params(mesh, axis="dp", stage=stage, reduce_dtype=dtype, outputs="local")
    step, state = zt.lift(loop_step, model, optimizer)
    more: list[zt.Transform] = []
    if remat:
        more.append(zt.remat())
    if gathers is not None:
        more.append(zt.quantize_gathers(**gathers))
    if grads is not None:
        more.append(zt.quantize_grads(**grads))
    step = zt.chain(shard, zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather(), *more)(step)
    lowered = step.lower(step.shard(state), *batch, cluster=zt.calibrate(mesh))
    subject = Lifted(lowered, lambda: step.shard(state), batch, backend)
    for param in model.parameters():  # only the state is needed now
        param.data = param.data.new_empty(0)
    optimizer.state.clear()
    return subject
