"""Llama-3-8B with parameters and moments in the memory of the host, on one H100 and on 8.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.parameters_on_host             # from the project's root; some minutes
    OMP_NUM_THREADS=1 python -m benchmarks.plans.parameters_on_host --layers 4  # a look

Parameters, gradients and moments are fp32; matrices are bf16 in forward and backward. A checkpoint around each block
keeps its input alone, and the loss is computed in parts of 4,096 tokens, each in a checkpoint. Values have shapes only,
and times are simulated. `times compute` is the step over the time that its operations take by themselves, and `times
device` the step over that with everything on the device. Fails if a row of 32 layers is slower, or larger, than it may.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ztrans as zt
from ztrans.planning.cluster import DEVICES
from ztrans.stages import Lowered

from .. import RESULTS
from .llama_model import Config, adamw, attention, init, norm, rotate

PAGE = RESULTS / "parameters_on_host.md"
SEQUENCE = 8192
PART = 4096  # tokens of a part of the loss


class Case(NamedTuple):
    """A row: a number of ranks, sequences for each in all micro-batches, the limit in GiB, and what it may take."""

    ranks: int
    sequences: int
    limit: float
    clips: bool = False
    link: str = "pcie5"
    gradients: bool = False
    across_steps: bool = False
    micro: int = 1
    times_compute: float = math.inf
    times_device: float = math.inf


CASES = (
    Case(1, 4, 18, times_compute=1.05),
    Case(1, 4, 70, clips=True, across_steps=True, times_compute=1.08),
    Case(1, 4, 18, clips=True, gradients=True, across_steps=True, times_compute=1.08),
    Case(1, 8, 36),
    Case(1, 4, 48, micro=4),
    Case(8, 1, 10, across_steps=True, times_device=1.03),
)


def make_step(config: Config, clips: bool) -> Callable:
    """The step `(state, tokens) -> (state, loss)`."""

    def block(x: Tensor, cos: Tensor, sin: Tensor, w: dict) -> Tensor:
        heads = lambda t: t.unflatten(-1, (-1, config.head)).transpose(1, 2)
        y = norm(x, w["norm1"])
        q, k, v = (heads(F.linear(y, w[m])) for m in ("wq", "wk", "wv"))
        y = attention(rotate(q, cos, sin), rotate(k, cos, sin), v).transpose(1, 2).flatten(2)
        x = x + F.linear(y, w["wo"])
        y = norm(x, w["norm2"])
        return x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])

    def loss_of(x: Tensor, targets: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, head).float(), targets, reduction="sum")

    def loss_fn(params: dict, tokens: Tensor) -> Tensor:
        w = {k: p.bfloat16() if p.ndim > 1 else p for k, p in params.items()}
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        rates = config.theta ** (
            -torch.arange(0, config.head, 2, device=tokens.device) / config.head
        )
        positions = torch.arange(inputs.shape[1], device=tokens.device)
        angles = torch.outer(positions, rates).repeat(1, 2)
        x = F.embedding(inputs, w["embed"])
        for i in range(config.layers):
            of_layer = {k.partition(".")[2]: v for k, v in w.items() if k.startswith(f"layer{i}.")}
            x = checkpoint(block, x, angles.cos(), angles.sin(), of_layer, use_reentrant=False)
        x = norm(x, w["norm"]).flatten(0, 1)
        loss = torch.zeros((), device=x.device)
        for part, labels in zip(x.split(PART), targets.split(PART)):
            loss = loss + checkpoint(loss_of, part, labels, w["head"], use_reentrant=False)
        return loss / len(x)

    def train_step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        params = {k: p.detach().requires_grad_() for k, p in state["params"].items()}
        loss = loss_fn(params, tokens)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        if clips:
            squares = [g.square().sum() for g in grads.values()]
            scale = (1 / torch.stack(squares).sum().sqrt()).clamp(max=1.0)
            grads = {k: g * scale for k, g in grads.items()}
        return adamw(state, grads), loss.detach()

    return train_step


def lowered(case: Case, config: Config, *transforms: zt.Transform) -> Lowered:
    """The program of a case, within its limit if something is on the host."""
    limit = int(case.limit * 2**30) if transforms else "auto"
    device = dataclasses.replace(DEVICES["h100"], memory=float("inf"))
    links = {"dp": "nvlink4"} if case.ranks > 1 else {}
    machines = zt.cluster(device, host_link=case.link, **links)
    shard = zt.shard_params(zt.AbstractMesh(dp=case.ranks))
    schedules = (zt.fuse_cast_gather(), zt.overlap_grads(), zt.prefetch(memory=limit))
    micro = (zt.accumulate(case.micro),) if case.micro > 1 else ()
    step = zt.chain(*micro, shard, *transforms, *schedules)(make_step(config, case.clips))
    tokens = torch.empty(case.sequences, SEQUENCE + 1, dtype=torch.int64, device="meta")
    return step.trace(init(config, 1), tokens).lower(cluster=machines)


class Row(NamedTuple):
    """What a program takes: milliseconds, those that compute waits for copies, GiB, and two ratios."""

    case: Case
    where: str
    step: float
    exposed: float
    device: float
    host: float
    times_compute: float
    times_device: float | None

    @property
    def cells(self) -> list[str]:
        case = self.case
        updates = "clipped" if case.clips else "early"
        options = [updates, *(o for o in ("gradients", "across_steps") if getattr(case, o))]
        options += [f"{case.micro} micro-batches"] if case.micro > 1 else []
        updates = ", ".join(options if self.where != "device" else [updates])
        ratio = f"{self.times_device:.3f}" if self.times_device else ""
        figures = [
            f"{self.step:,.0f}",
            f"{self.exposed:,.0f}",
            f"{self.device:.1f}",
            f"{self.host:.1f}",
        ]
        return [str(case.ranks), str(case.sequences), updates, self.where, *figures,
                f"{self.times_compute:.3f}", ratio]  # fmt: skip

    @property
    def problem(self) -> str:
        """What is above the limits of the case, or nothing."""
        case = self.case
        limits = [
            ("times compute", self.times_compute, case.times_compute),
            ("times device", self.times_device or 0.0, case.times_device),
        ]
        above = [f"{name} {x:.3f} > {most}" for name, x, most in limits if x > most]
        return f"{case}: {', '.join(above)}" if above else ""


def row(case: Case, where: str, low: Lowered, on_device: float | None) -> Row:
    timeline = low.timeline()
    memory = low.memory_analysis()
    compute = timeline.busy("compute")
    return Row(
        case,
        where,
        1e3 * timeline.seconds,
        1e3 * (timeline.seconds - compute),
        memory.peak / 2**30,
        memory.host_peak / 2**30,
        timeline.seconds / compute,
        timeline.seconds / on_device if on_device else None,
    )


def rows(case: Case, config: Config) -> Iterator[Row]:
    on_device = None
    if case.ranks > 1:
        plain = lowered(case, config)
        on_device = plain.timeline().seconds
        yield row(case, "device", plain, None)
    everything = zt.offload(where="*", gradients=case.gradients, across_steps=case.across_steps)
    yield row(case, f"host, {case.link}", lowered(case, config, everything), on_device)


def main(layers: int, chosen: list[int]) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    columns = ["GPUs", "sequences", "updates", "state", "step ms", "not compute ms", "GPU GiB"]
    columns += ["host GiB", "times compute", "times device"]
    lines = [columns, ["---"] * len(columns)]
    begin = time.perf_counter()
    wrong = []
    for k in chosen or range(len(CASES)):
        for found in rows(CASES[k], Config(layers=layers)):
            print(f"{time.perf_counter() - begin:.0f} s", *found.cells, flush=True)
            lines.append(found.cells)
            if found.where != "device" and found.problem:
                wrong.append(found.problem)
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    seconds = time.perf_counter() - begin
    text = "\n".join(
        [
            f"# Llama-3-8B with its state on the host, {layers} layers, {SEQUENCE:,} tokens a sequence\n",
            f"{where}. Simulated; all programs were made in {seconds:.0f} s.\n",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )
    print(text)
    if layers == Config.layers and not chosen:
        PAGE.write_text(text + "\n")
        if wrong:
            sys.exit("\n".join(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", type=int, help="numbers of cases, by default all")
    parser.add_argument("--layers", type=int, default=Config.layers)
    arguments = parser.parse_args()
    main(arguments.layers, arguments.cases)
