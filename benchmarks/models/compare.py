"""Lift a build, and compare it with the untouched loop."""

from __future__ import annotations

import importlib
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ztrans as zt

from .build import Build

LIBRARIES = ("transformers", "timm", "diffusers", "peft")
WORLDS, STAGES, STEPS = (2, 3), (2, 3), 2
TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
}  # many models compute parts in fp32, whatever dtype they have


@dataclass(frozen=True)
class Outcome:
    """What became of a build: equal, refused, different or failed; its distance, or the first line of its error."""

    build: Build
    kind: str
    detail: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.kind in ("equal", "refused")


def all_builds() -> list[Build]:
    """The builds of every library that is installed."""
    builds: list[Build] = []
    for library in LIBRARIES:
        try:
            builds += importlib.import_module(f"benchmarks.models.{library}_builds").builds()
        except ImportError as error:
            print(f"without {library}: {error}", file=sys.stderr)
    return builds


def loop(
    build: Build, fused: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor]]:
    """The model of a build, its optimizer, and the body of an ordinary loop."""
    torch.manual_seed(0)
    model = build.make().to(build.dtype).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-5, fused=fused
    )

    def loop_step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = build.loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, loop_step


def batches(build: Build) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(1)
    batches = [build.batch(draw) for _ in range(STEPS)]
    return [
        tuple(x.to(build.dtype) if x.is_floating_point() else x for x in batch) for batch in batches
    ]


def untouched(
    build: Build, world: int, fused: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a loop without ztrans, and the values of its parameters and buffers after it."""
    model, optimizer, loop_step = loop(build, fused)
    losses = []
    for batch in batches(build):
        if not build.apart:
            losses.append(loop_step(*batch).item())
            continue
        before, parts, after = [b.clone() for b in model.buffers()], [], []
        optimizer.zero_grad()
        for rank in range(world):
            restore_buffers(model, before)
            part = build.loss(model, *(x.chunk(world)[rank] for x in batch)) / world
            part.backward()
            parts.append(part.item())
            after.append([b.clone() for b in model.buffers()])
        restore_buffers(
            model, [sum(b) / world if b[0].is_floating_point() else b[0] for b in zip(*after)]
        )
        optimizer.step()
        losses.append(sum(parts))
    return losses, {
        name: x.detach() for name, x in [*model.named_parameters(), *model.named_buffers()]
    }


def restore_buffers(model: nn.Module, values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values):
            buffer.copy_(value)


def distance(build: Build, world: int, stages: Sequence[int], fused: bool = False) -> float:
    """How far the sharded loop is off the untouched one, relative to what the loop has changed."""
    losses, truth = untouched(build, world, fused)
    model, optimizer, loop_step = loop(build, fused)
    step, first = zt.lift(loop_step, model, optimizer)
    rows = [
        [tuple(x.chunk(world)[rank] for x in batch) for rank in range(world)]
        for batch in batches(build)
    ]
    traced, worst = zt.Step.of(step).trace(first, *rows[0][0]), 0.0
    for stage in stages:
        mesh = zt.AbstractMesh(dp=world)
        transforms = (
            zt.shard_params(mesh, stage=stage),
            zt.overlap_grads(),
            zt.prefetch(),
            zt.fuse_cast_gather(),
        )
        lowered = zt.stages.Traced(traced.recording, zt.chain(*transforms)(step).transforms).lower()
        state = pytree.tree_map_only(Tensor, torch.clone, first)
        for row, loss in zip(rows, losses):
            state, outputs = lowered.lockstep(state, row)
            if not all(x.isfinite() for x in outputs):
                return math.inf
            worst = max(worst, abs(sum(x.item() for x in outputs) / world - loss) / abs(loss))
        worst = max(worst, *_apart({**state["params"], **state["buffers"]}, truth, first))
    return worst


def _apart(state: dict[str, Tensor], truth: dict[str, Tensor], first: dict) -> Iterator[float]:
    before = {**first["params"], **first["buffers"]}
    # A plain tensor in an attribute is in the state of a lifted loop, and nothing trains it.
    truth = {**first["buffers"], **truth}
    moved = {name: (truth[name].double() - x.double()).norm().item() for name, x in before.items()}
    for name, x in state.items():
        off = (x.double() - truth[name].double()).norm().item()
        if math.isnan(off):
            yield math.inf  # `max` would drop a NaN
        yield off / max(moved[name], 1e-2 * max(moved.values()))


def outcome(
    build: Build,
    worlds: Sequence[int] = WORLDS,
    stages: Sequence[int] = STAGES,
    fused: bool = False,
) -> Outcome:
    """Compare a build with the untouched loop."""
    start = time.perf_counter()
    try:
        worst = max(distance(build, world, stages, fused) for world in worlds)
        kind, detail = "equal" if worst <= TOLERANCE[build.dtype] else "different", f"{worst:.0e}"
    except Exception as error:
        text = str(error).splitlines() or [""]
        is_own = (
            isinstance(error, ValueError | TypeError | RuntimeError)
            and text[0].split(":")[0] in _TRANSFORMS
        )
        kind = "refused" if is_own else "failed"
        detail = text[0] if is_own else f"{type(error).__name__}: {text[0]}"
        if not is_own:
            traceback.print_exc()
    return Outcome(build, kind, detail, time.perf_counter() - start)


_TRANSFORMS = ("lift", "trace", "shard_params", "overlap_grads", "prefetch", "fuse_cast_gather")


def titled(title: str) -> tuple[str, str, float]:
    """The outcome of the build with this title. A build cannot be sent between processes, and its title can."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    build = next(build for build in all_builds() if build.title == title)
    result = outcome(build)
    return result.kind, result.detail, result.seconds
