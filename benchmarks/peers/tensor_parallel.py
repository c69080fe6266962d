"""Measure `delay_weight_grads`: tensor parallelism over two hosts, with and without it, and by PyTorch.

    benchmarks/netlab up 2 1gbit                    # two hosts on this machine; needs root and iproute2
    PYTHONPATH=. benchmarks/netlab run python -m benchmarks.peers.tensor_parallel
    benchmarks/netlab down

Every rank holds half of each matrix. The step sums activations over both ranks in forward, sums the gradients of
inputs in backward, and updates with SGD. Each rank has one process, in which all subjects take turns, step by step.
Writes benchmarks/results/tensor_parallel.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ztrans as zt

from .. import RESULTS

BLOCKS, WIDTH, INNER, ROWS, RATE = 6, 512, 2048, 1024, 0.01
BASE = "ztrans"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDTH, INNER, bias=False),
            nn.Linear(INNER, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def weights() -> dict[str, Tensor]:
    """The whole matrices, which are the same on every rank."""
    torch.manual_seed(0)
    return {
        k: v.detach()
        for k, v in nn.Sequential(*(Block() for _ in range(BLOCKS))).named_parameters()
    }


def part(name: str, w: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's half of a matrix: half of the rows of `up`, or half of the columns of `down`."""
    return w.chunk(mesh.size(1), 0 if "up" in name else 1)[mesh.get_local_rank("tp")].contiguous()


def make_step(mesh: DeviceMesh) -> Callable:
    """A step with tensor parallelism written by hand, as in Megatron-LM."""
    group = mesh.get_group("tp")

    class Enter(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, g: collectives.all_reduce(g.contiguous(), "sum", group))

    class Leave(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: collectives.all_reduce(x, "sum", group))
        backward = staticmethod(lambda ctx, g: g.clone())

    def step(state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        params = {k: p.detach().requires_grad_() for k, p in state.items()}
        for i in range(BLOCKS):
            inner = F.gelu(Enter.apply(x) @ params[f"{i}.up.weight"].t())
            x = x + Leave.apply(inner @ params[f"{i}.down.weight"].t())
        loss = x.square().mean()
        grads = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            return {
                k: p.detach() - RATE * g for (k, p), g in zip(params.items(), grads)
            }, loss.detach()

    return step


def by_dtensor(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """The same step by PyTorch's `parallelize_module`."""
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    model.load_state_dict(weights())
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def with_state(step: Callable, state: Any) -> Callable[[Tensor], Tensor]:
    """A step that keeps its state from call to call, and returns the loss."""

    def run(x: Tensor) -> Tensor:
        nonlocal state
        state, loss = step(state, x)
        return loss

    return run


def by_ztrans(mesh: DeviceMesh, x: Tensor, *transforms: zt.Transform) -> Callable[[Tensor], Tensor]:
    step = zt.chain(zt.shard_params(mesh, axis="dp"), *transforms)(make_step(mesh))
    state = step.shard({k: part(k, w, mesh) for k, w in weights().items()})
    return with_state(step.lower(state, x).compile(), state)


def plain(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    return with_state(make_step(mesh), {k: part(k, w, mesh) for k, w in weights().items()})


def network(hosts: int) -> str:
    """The hosts and the rate of their links, as `netlab` has set it."""
    shown = subprocess.run(
        "tc qdisc show dev eth0", shell=True, capture_output=True, text=True
    ).stdout
    rate = re.search(r"rate (\S+)", shown)
    return f"{hosts} hosts, {rate[1]}/s" if rate else f"{dist.get_world_size()} ranks of one host"


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    subjects = {
        "the plain step": plain(mesh),
        "parallelize_module": by_dtensor(mesh),
        BASE: by_ztrans(mesh, x),
        "ztrans, delay_weight_grads()": by_ztrans(mesh, x, zt.delay_weight_grads()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    last: dict[str, float] = {}
    for _ in range(3 + rounds):
        for name, run in subjects.items():
            dist.barrier()
            start = time.perf_counter()
            loss = run(x)
            seconds[name].append(time.perf_counter() - start)
            last[name] = loss.item()
    if dist.get_rank() == 0:
        median = {name: statistics.median(s[3:]) for name, s in seconds.items()}
        rows = [
            f"| {n} | {s:.3f} | {s / median[BASE]:.3f} | {last[n]:.7f} |" for n, s in median.items()
        ]
        text = "\n".join([
            f"# Tensor parallelism in the step: {network(dist.get_world_size())}", "",
            f"{date.today()}, torch {torch.__version__}, gloo, one core a rank. {BLOCKS} blocks of {WIDTH} x {INNER}, "
            f"{ROWS} rows; {rounds} steps each, in turns.", "",
            "| | seconds a step, median | of ztrans | last loss |", "|---|---:|---:|---:|", *rows, "",
        ])  # fmt: skip
        print(text)
        (RESULTS / "tensor_parallel.md").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    main(parser.parse_args().rounds)
