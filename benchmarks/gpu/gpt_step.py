"""A training step of a GPT, by ztrans and by torch.compile with torch.optim. All subjects do the same work.

Parameters, gradients and moments are fp32, and the model runs under autocast to bf16. Attention is the kernel that
torch chooses, cuDNN's included, and the optimizer is torch's fused AdamW. torch.compile is given the model and the loss
in one function, with which it is faster than with the model alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import ztrans as zt
from ztrans.ir.layout import mesh_axes

from ..peers.model import GPT, Config, loss_of

CONFIG = Config(
    layers=8, width=2048, heads=16, vocab=8192, sequence=1024, batch=8
)  # 436 M parameters
RATE, EPS = 1e-4, 1e-6
RANKS = 8  # the program that is sent over NCCL is planned for this number of ranks
# Dense bf16 FLOP/s from the data sheets. The first entry whose name is part of the card's name counts.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}


@dataclass(frozen=True)
class Task:
    """The model to train, and the device. With `clip`, gradients are clipped to a norm of 1."""

    config: Config
    device: torch.device
    clip: bool = False

    @property
    def tokens(self) -> int:
        return self.config.batch * self.config.sequence

    def model(self) -> GPT:
        torch.manual_seed(0)
        with self.device:
            return GPT(self.config)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The tokens, and for each the token that follows it."""
        shape = self.config.batch, self.config.sequence + 1
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.config.vocab, shape, generator=draw).to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: GPT, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = model(x)
        return loss_of(logits, y)

    def clip_gradients(self, model: GPT) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def optimizer(self, model: GPT, capturable: bool = False) -> torch.optim.AdamW:
        rate = torch.tensor(
            RATE, device=self.device
        )  # on the device, where a captured step can read it
        return torch.optim.AdamW(
            model.parameters(), lr=rate, eps=EPS, fused=True, capturable=capturable
        )


def flops(c: Config) -> float:
    """The FLOPs of a step: 6 for each weight and token, and those of causal attention.

    >>> flops(CONFIG) / 1e12
    21.44...
    """
    weights = (
        12 * c.layers * c.width**2 + c.vocab * c.width
    )  # with the head, but not the embedding: it is a lookup
    return c.batch * c.sequence * (6.0 * weights + 6 * c.layers * c.width * c.sequence)


def peak(card: str) -> float | None:
    """The dense bf16 FLOP/s of a known card, None for others. A MIG slice is not a whole card, so it has no entry.

    >>> peak("NVIDIA H100 80GB HBM3"), peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    (989000000000000.0, None)
    """
    return (
        None
        if "MIG" in card
        else next((rate for name, rate in PEAKS.items() if name in card), None)
    )


class Theirs:
    """The ordinary loop.

    With a `mode`, its loss is compiled by torch.compile in that mode. With `compiled_update`, clipping and the
    optimizer are compiled too. With `whole_graph`, everything from the loss to the update is captured by hand in one
    CUDA graph, and replayed. With `cudnn`, attention is cuDNN's.
    """

    def __init__(
        self,
        task: Task,
        mode: str | None = None,
        compiled_update: bool = False,
        whole_graph: bool = False,
        cudnn: bool = False,
    ) -> None:
        model = task.model()
        self.batch = task.batch()
        self.optimizer = task.optimizer(model, capturable=whole_graph)
        self.mode = mode
        self.cudnn = cudnn

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return task.loss(model, x, y)

        def update() -> None:
            task.clip_gradients(model)
            self.optimizer.step()

        self.loss = torch.compile(loss, mode=mode, fullgraph=True) if mode else loss
        self.update = torch.compile(update) if compiled_update else update
        self.graph = None
        if whole_graph:
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a capture needs kernels and optimizer state that exist
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.captured_loss = self._step()
        self.graph = graph

    def _step(self) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.cudnn else nullcontext():
            loss = self.loss(*self.batch)
        loss.backward()
        self.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def __call__(self) -> Tensor:
        if self.graph is not None:
            self.graph.replay()
            return self.captured_loss
        if self.mode:
            torch.compiler.cudagraph_mark_step_begin()
        return self._step()


class Ours:
    """The same loop by ztrans.

    With `sharded`, the state is sharded over a mesh of one rank. With `collectives`, the step is stage 3 and sends its
    collectives to a group of one rank. With `remat`, backward computes cheap activations again, as it does in
    torch.compile.
    """

    def __init__(
        self,
        task: Task,
        backend: str,
        cuda_graph: bool = False,
        collectives: bool = False,
        remat: bool = False,
        sharded: bool = False,
        reduce_dtype: torch.dtype | None = None,
        cast_ahead: bool = False,
    ) -> None:
        model = task.model()
        self.batch, optimizer = task.batch(), task.optimizer(model)

        def loop_step(x: Tensor, y: Tensor) -> Tensor:
            loss = task.loss(model, x, y)
            loss.backward()
            task.clip_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step, self.state = zt.lift(loop_step, model, optimizer)
        step = zt.remat()(step) if remat else step
        if sharded:
            step = _stage3(zt.make_mesh(task.device.type, dp=1))(step)
            self.state = step.shard(self.state)
        if collectives:
            self.lowered = _sent(step, task, self.state, self.batch, reduce_dtype)
        else:
            self.lowered = _plain(step, self.state, self.batch)
        self.compiled = self.lowered.compile(
            backend=backend, cuda_graph=cuda_graph, cast_ahead=cast_ahead
        )

    def __call__(self) -> Tensor:
        self.state, loss = self.compiled(self.state, *self.batch)
        return loss


def _plain(step: Callable, state: dict, batch: tuple) -> zt.stages.Lowered:
    return zt.Step.of(step).lower(state, *batch)


def _stage3(
    mesh: DeviceMesh | zt.AbstractMesh, reduce_dtype: torch.dtype | None = None
) -> zt.Transform:
    """Many messages: backward gathers parameters again, and buckets are small."""
    shard = zt.shard_params(mesh, axis="dp", reshard="always", reduce_dtype=reduce_dtype)
    overlap = zt.overlap_grads(bucket=BUCKET)
    return zt.chain(shard, overlap, zt.prefetch(), zt.fuse_cast_gather())


def _sent(
    step: Callable, task: Task, state: dict, batch: tuple, reduce_dtype: torch.dtype | None
) -> zt.stages.Lowered:
    # A program that is lowered for one rank has no collectives. Shapes in a program are global, so a program that is
    # planned for several ranks can run on a mesh of one rank, and keeps its collectives.
    several = _stage3(zt.AbstractMesh(dp=RANKS), reduce_dtype)(step).lower(state, *batch)
    mesh = zt.make_mesh(task.device.type, dp=1)
    return dataclasses.replace(
        several, graph=several.graph.replace(mesh=mesh_axes(mesh)), mesh=mesh
    )


# The subjects of every table.
SUBJECTS: dict[str, Callable[[Task], Callable[[], Tensor]]] = {
    "torch, eager": Theirs,
    "torch.compile": partial(Theirs, mode="default"),
    "torch.compile, update too": partial(Theirs, mode="default", compiled_update=True),
    "torch.compile, reduce-overhead": partial(Theirs, mode="reduce-overhead"),
    "torch.compile, one CUDA graph by hand": partial(Theirs, mode="default", whole_graph=True),
    "ztrans, eager": partial(Ours, backend="eager"),
    "ztrans, inductor": partial(Ours, backend="inductor"),
    "ztrans, inductor, CUDA graph": partial(Ours, backend="inductor", cuda_graph=True),
    "ztrans, inductor, CUDA graph, cast_ahead": partial(
        Ours, backend="inductor", cuda_graph=True, cast_ahead=True
    ),
}
# Variants, which run in the table of the largest batch.
VARIANTS: dict[str, Callable[[Task], Callable[[], Tensor]]] = {
    "torch.compile, cuDNN attention": partial(Theirs, mode="default", cudnn=True),
    "ztrans, remat, inductor": partial(Ours, backend="inductor", remat=True),
    "ztrans, stage 3 over NCCL": partial(Ours, backend="eager", collectives=True),
    "ztrans, stage 3 over NCCL, CUDA graph": partial(
        Ours, backend="eager", cuda_graph=True, collectives=True
    ),
}
BUCKET = 1 << 12  # bytes, fewer than any large gradient has: each has a message of its own
BASE = "torch.compile"
# A CUDA graph has a memory pool of its own. torch counts the pool as reserved, but not as allocated.
POOLED = {
    name for name in (*SUBJECTS, *VARIANTS) if "CUDA graph" in name or "reduce-overhead" in name
}
