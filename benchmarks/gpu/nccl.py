"""The collective path with a process group of one rank: stage 3 sends its messages over NCCL, and no bit changes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ztrans.ir.collectives import is_start

from .gpt_step import Config, Ours, Task
from .rounds import Child

CONFIG = Config(layers=4, width=512, heads=4, vocab=2048, sequence=256, batch=4)
STEPS = 6
LIMIT = 90


def collectives(
    device: torch.device, left: Callable[[], float] = lambda: 120.0, config: Config = CONFIG
) -> Iterator[list[dict]]:
    """Stage 3 with prefetch and overlap, planned for 8 ranks, sends its gathers and reductions over NCCL to a group of
    one rank. After 6 steps the whole state is compared with that of the plain step. At the end the process group is
    destroyed after the captured graph.
    """
    child, lines = Child(_compared, Task(config, device)), []
    try:
        while line := child.answer(min(LIMIT, left())):
            lines.append(line)
            yield lines
        child.process.join(20)
        if child.process.exitcode != 0:
            raise RuntimeError("the process did not end after its group")
        yield [*lines, {"what": "graph dropped, group ended, process ended", "result": "right"}]
    finally:
        child.end()


def _compared(pipe: Connection, task: Task) -> None:
    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Without this flag, the backward of flash attention adds in an order that varies between runs.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    for line in bits(task):
        pipe.send(line)
    gc.collect()  # a captured graph keeps its communicators alive
    dist.destroy_process_group()
    pipe.send(None)


def bits(task: Task, ways: Sequence[bool] = (False, True)) -> Iterator[dict]:
    """A result for each variant of the step: sharded, with collectives, and with a CUDA graph.

    Raises: AssertionError if a bit of the state differs from the plain step's.
    """
    _, plain = trained(task)
    _, repeated = trained(task)
    if differing(plain, repeated):
        raise AssertionError(
            "the plain step does not repeat itself, so there is nothing to compare with"
        )
    _, state = trained(task, sharded=True)
    if wrong := differing(plain, state):
        raise AssertionError(
            f"sharded: {wrong} of {len(plain)} leaves are not those of the plain step"
        )
    yield {
        "what": f"eager, state as DTensors on a mesh of one, {STEPS} steps",
        "result": "bits of the plain step",
    }
    for cuda_graph in ways:
        description = f"eager{', CUDA graph' if cuda_graph else ''}"
        sent, state = trained(task, cuda_graph=cuda_graph, collectives=True)
        if wrong := differing(plain, state):
            raise AssertionError(
                f"{description}: {wrong} of {len(plain)} leaves are not those of the plain step"
            )
        yield {
            "what": f"{description}: {sent} collectives a step, {STEPS} steps",
            "result": "bits of the plain step",
        }


def trained(task: Task, **options: bool) -> tuple[int, list[torch.Tensor]]:
    """The number of collectives that a step starts, and the state after `STEPS` steps."""
    step = Ours(task, "eager", **options)
    for _ in range(STEPS):
        step()
    leaves = [x for x in pytree.tree_leaves(step.state) if isinstance(x, torch.Tensor)]
    leaves = [x.full_tensor() if isinstance(x, DTensor) else x for x in leaves]
    return sum(map(is_start, step.lowered.graph.eqns)), [x.clone() for x in leaves]


def differing(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
