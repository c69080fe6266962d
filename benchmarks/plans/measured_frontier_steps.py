"""The steps that `measured_frontier.py` compares: a GPT planned by ztrans in many ways, and PyTorch's loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.planning.cost import memory
from ztrans.planning.limit import DoesNotFit
from ztrans.planning.make_plan import SLACK
from ztrans.stages import Lowered, Traced

from ..peers.model import GPT, Config, Task, adamw, loss_of
from ..peers.native import loop, sharded
from .frontier import OURS
from .frontier_models import Around, Wrapped, per_block, plain, selective

WARM_UP = 2  # steps of each program before its times count
PROFILED = 5  # recorded steps from which the plans are made


@dataclass(frozen=True)
class WrappedTask(Task):
    """A task whose model has something around each block."""

    around: Around = plain

    def model(self) -> GPT:
        model = super().model()
        model.blocks = nn.ModuleList(Wrapped(block, self.around) for block in model.blocks)
        return model


class Subject(NamedTuple):
    """A step that takes turns with others. Those with `remat(memory=...)` have a share of the activations."""

    method: str
    backend: str
    step: Callable[[], Tensor]
    share: float | None = None
    planned: int | None = None


class Loop:
    """The training loop of a task as a program, which is planned in many ways."""

    def __init__(self, task: Task, mesh: DeviceMesh) -> None:
        model = task.model()
        optimizer = adamw(model.parameters())

        def loop_step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        self.batch = task.batch()
        self.shard = zt.shard_params(mesh, outputs="local")
        step, self.whole_state = zt.lift(loop_step, model, optimizer)
        self.step = zt.Step.of(step)
        self.traced = self.step.trace(self.whole_state, *self.batch)

    def limited(self, limit: int | str, *more: zt.Transform) -> Traced:
        """The loop with all transforms, within a limit."""
        schedules = zt.overlap_grads(), zt.prefetch(memory=limit)
        return dataclasses.replace(self.traced, transforms=(self.shard, *schedules, *more))

    def state(self) -> Any:
        """A state of its own for each program, which writes over it."""
        copies = pytree.tree_map(_clone, self.whole_state)
        return self.shard(self.step).shard(copies)

    def subject(
        self, method: str, backend: str, lowered: Lowered, share: float | None = None
    ) -> Subject:
        """A step that trains on, from the state of the start."""
        compiled = lowered.compile(backend=backend)
        state = self.state()

        def step() -> Tensor:
            nonlocal state
            state, loss = compiled(state, *self.batch)
            return loss

        return Subject(method, backend, step, share, lowered.memory_analysis().peak)

    def measured_cluster(self, lowered: Lowered, backend: str) -> zt.Cluster:
        """The cluster with the durations of the operations of a program, as they were recorded."""
        compiled = lowered.compile(backend=backend)
        state = self.state()
        for _ in range(WARM_UP):
            state, _ = compiled(state, *self.batch)
        return compiled.profile(state, *self.batch, steps=PROFILED).cluster(lowered.cluster)


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class Limits(NamedTuple):
    """The state of a step, and all that is live at its peak if everything is kept, on one rank."""

    state: int
    peak: int

    def limit(self, share: float) -> int:
        return int(self.state + share * (self.peak - self.state))


def limits_of(kept: Loop, cluster: zt.Cluster) -> Limits:
    """The limits of a loop, as `frontier.py` has them."""
    unordered = kept.limited("auto").without_order(cluster).unordered
    least = int(memory(unordered).peak * (1 + SLACK))
    analysis = kept.limited(least).planned(cluster).memory_analysis()
    return Limits(analysis.state, analysis.peak)


class Part:
    """The subjects on one number of ranks."""

    def __init__(self, config: Config, ranks: int, backends: Sequence[str]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.task = WrappedTask(config, ranks, rank)
        self.mesh = zt.make_mesh("cpu", dp=-1)
        self.kept = Loop(self.task, self.mesh)
        base = zt.calibrate(self.mesh)
        self.clusters: dict[str, zt.Cluster] = {}
        for backend in backends:
            lowered = self.kept.limited("auto").planned(base)
            self.clusters[backend] = self.kept.measured_cluster(lowered, backend)
        self.limits = limits_of(self.kept, self.clusters[backends[0]])

    def subjects(self, shares: Sequence[float], budgets: Sequence[float]) -> Iterator[Subject]:
        """All steps that take turns."""
        block_task = dataclasses.replace(self.task, around=per_block)
        selective_task = dataclasses.replace(self.task, around=selective)
        others: dict[str, tuple[Loop, tuple[zt.Transform, ...]]] = {
            "block": (Loop(block_task, self.mesh), ()),
            "selective": (Loop(selective_task, self.mesh), ()),
            "remat()": (self.kept, (zt.remat(),)),
        }
        for backend, cluster in self.clusters.items():
            for share in shares:
                limit = self.limits.limit(share)
                lowered = self.kept.limited(limit, zt.remat(memory=limit)).planned(cluster)
                yield self.kept.subject(OURS, backend, lowered, share)
            for method, (program, more) in others.items():
                lowered = self._in_least_memory(program, more, shares, cluster)
                yield program.subject(method, backend, lowered)
        if "eager" in self.clusters:
            yield Subject("PyTorch, block", "eager", loop(block_task, model_of(block_task)))
        if "inductor" in self.clusters:
            for budget in budgets:
                step = loop(self.task, compiled_within(budget, model_of(self.task)))
                yield Subject(f"torch.compile, {budget}", "inductor", step)

    def _in_least_memory(
        self,
        program: Loop,
        more: Sequence[zt.Transform],
        shares: Sequence[float],
        cluster: zt.Cluster,
    ) -> Lowered:
        """A step within the smallest of the limits that it fits, or within none."""
        for share in sorted(shares):
            try:
                return program.limited(self.limits.limit(share), *more).planned(cluster)
            except DoesNotFit:
                continue
        return program.limited("auto", *more).planned(cluster)


def model_of(task: Task) -> nn.Module:
    """The model of a loop of PyTorch."""
    return sharded(task, tuned=True) if task.ranks > 1 else task.model()


def compiled_within(budget: float, model: nn.Module) -> nn.Module:
    """A model that torch.compile partitions within a share of its activations."""
    import torch._functorch.config as partitioner
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        with partitioner.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    # The models have the same code. Each must run what was compiled with its own budget.
    return torch.compile(model, backend=backend, dynamic=False, isolate_recompiles=True)
