"""DeepSpeed's ZeRO, stages 1 to 3, on CPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from torch import Tensor

from .model import Task, adamw, loss_of


def deepspeed(task: Task, stage: int, bucket: int = 4_000_000) -> Callable[[], Tensor]:
    """Buckets have `bucket` elements. With the default of 500 million, one would hold the whole model: no overlap."""
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", LOCAL_SIZE="1")
    import deepspeed  # reads these variables

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    buckets = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), bucket)
    config = {
        "train_micro_batch_size_per_gpu": task.config.batch,
        "zero_optimization": {"stage": stage, "overlap_comm": True, **buckets},
        "bf16": {"enabled": task.bf16},
    }
    model = task.model()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config
    )
    x, y = task.batch()

    def step() -> Tensor:
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
