"""The largest model that a GPU can train, by how its updates read gradients and when they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from ztrans.ir.graph import Graph
from ztrans.planning.cost import memory
from ztrans.runtime.cuda.half_gradients import half_gradients

from ..peers.model import GPT
from .gpt_step import Config, Task

GIB = 2**30
CONFIG = Config(layers=8, width=2048, heads=16, vocab=8192, sequence=1024, batch=1)
CARDS = {"H100, 80 GB": 79.2, "H200, 141 GB": 139.8}  # GiB that torch sees
LAYERS = (3, 6)  # peaks grow linearly with the layers: two programs tell how
MEASURED = 12  # layers
STEPS = 4
READS = {"cast to fp32": False, "in bf16": True}  # the gradient
RUNS = {"at the end": "last", "during backward": "eager"}  # the updates


class Checkpointed(GPT):
    """The GPT, which keeps the inputs of its blocks, and computes everything else again in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def largest(
    device: torch.device,
    left: Callable[[], float] = lambda: 60.0,
    config: Config = CONFIG,
    layers: tuple[int, int] = LAYERS,
    measured: int = MEASURED,
) -> Iterator[list[dict]]:
    """The largest GPT of width 2048 that a card can train with AdamW, by arithmetic: its state and everything that is
    live at the peak, as `memory_analysis` counts it, fill the memory that torch sees. Activations are checkpointed, one
    sequence of 1024 tokens, autocast to bf16. `gradients` says how the update reads them, `updates` when they run.
    Then a smaller model on this card: what the analysis expects, and the state with the most that torch reports above
    it in a step.
    """
    lines: list[dict] = []
    base = _parameters(_sized(config, 0))
    size = _parameters(_sized(config, 1)) - base  # of a layer
    for runs, update in RUNS.items():
        few, many = (_program(_sized(config, n), device, update) for n in layers)
        for reads, is_half in READS.items():
            least = _bytes(few, is_half)
            of_layer = (_bytes(many, is_half) - least) / (layers[1] - layers[0])
            for card, gib in CARDS.items():
                count = (gib * GIB - least) / of_layer + layers[0]
                line = {"card": card, "updates": runs, "gradients": reads}
                line |= {"bytes per parameter": of_layer / size}
                lines.append(line | {"largest, G parameters": (base + count * size) / 1e9})
        yield lines
    if device.type == "cuda":
        for runs, update in RUNS.items():
            if left() > 15:
                lines.append(
                    {"updates": runs} | _measured(_sized(config, measured), device, update)
                )
                yield lines


def _sized(config: Config, layers: int) -> Config:
    return dataclasses.replace(config, layers=layers)


def _parameters(config: Config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def _program(config: Config, device: torch.device, update: str) -> Graph:
    """The step as a program of one rank."""
    return _lowered(Task(config, device), zt.AbstractMesh(dp=1), update)[0].graph


def _bytes(graph: Graph, is_half: bool) -> int:
    """The bytes at the peak of a program."""
    return memory(half_gradients(graph, set(graph.inputs)) if is_half else graph).peak


def _lowered(
    task: Task, mesh: object, update: str
) -> tuple[zt.stages.Lowered, dict, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    with task.device:
        model = Checkpointed(task.config)
    optimizer = task.optimizer(model)

    def loop_step(x: Tensor, y: Tensor) -> Tensor:
        loss = task.loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(update=update))(zt.Step.of(step))
    state = step.shard(state) if not isinstance(mesh, zt.AbstractMesh) else state
    batch = task.batch()
    return step.lower(state, *batch), state, batch


def _measured(config: Config, device: torch.device, update: str) -> dict:
    """The peak of some steps on this card, and what the analysis expects."""
    lowered, state, batch = _lowered(Task(config, device), zt.make_mesh("cuda", dp=1), update)
    compiled = lowered.compile()
    for _ in range(STEPS):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        state, loss = compiled(state, *batch)
        torch.cuda.synchronize(device)
        above = torch.cuda.max_memory_allocated(device) - before
    # The model and the optimizer of the untouched loop are still allocated, so only what a step adds is measured.
    peak = lowered.memory_analysis().state + above
    expected = _bytes(lowered.graph, is_half=True)
    torch.cuda.empty_cache()
    return {
        "card": torch.cuda.get_device_name(device),
        "gradients": "in bf16",
        "G parameters": _parameters(config) / 1e9,
        "expected, GiB": expected / GIB,
        "allocated, GiB": peak / GIB,
        "loss": round(loss.item(), 5),
    }
