"""A GPT on two hosts of one rank, averaged in every step and by local steps: seconds, and bytes between the hosts.

    benchmarks/netlab up 2 50mbit                    # two hosts on this machine; needs root and iproute2
    PYTHONPATH=. benchmarks/netlab run python -m benchmarks.local.between_hosts
    benchmarks/netlab down

Each subject trains for some rounds of H steps, in turns. A round ends when both hosts have ended it. "compute alone"
sends nothing. Plans know the link by `zt.calibrate`. Writes benchmarks/results/local_steps_50mbit.md, unless --quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ztrans as zt

from .. import RESULTS
from ..peers.between_hosts import MiB, Used, trained_in_turns
from ..peers.model import Config, Task, adamw, loss_of
from ..peers.tensor_parallel import network

# A step of the first takes as long as its share of the messages, and one of the second three times as long.
CONFIGS = tuple(
    Config(layers=2, width=256, vocab=512, sequence=256, batch=batch) for batch in (4, 12)
)
H = 10
ALONE = "compute alone"


class Subject(NamedTuple):
    """A way to train for H steps, which returns the last loss, and the bytes of its messages by arithmetic."""

    train: Callable[[], Tensor]
    nbytes: int


def lifted(config: Config, mesh: DeviceMesh) -> tuple[Callable, dict, tuple[Tensor, Tensor]]:
    task = Task(config, mesh.size(), mesh.get_rank())
    model = task.model()
    optimizer = adamw(model.parameters())

    def loop_step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, state = zt.lift(loop_step, model, optimizer)
    return step, state, task.batch()


def in_rounds(
    step_at: Callable[[int], zt.Step], state: Any, batch: tuple, cluster: zt.Cluster
) -> Subject:
    """H steps, each by the program of the step that is due."""
    programs: dict[zt.Step, zt.stages.Compiled] = {}
    sent = 0
    for i in range(H):
        step = step_at(i)
        if step not in programs:
            programs[step] = step.lower(state, *batch, cluster=cluster).compile()
        sent += programs[step].lowered.cost_analysis().over("host")

    def train() -> Tensor:
        nonlocal state
        for i in range(H):
            state, loss = programs[step_at(i)](state, *batch)
        return loss

    return Subject(train, sent)


def subjects(config: Config) -> dict[str, Subject]:
    mesh = zt.make_mesh("cpu", host=-1, dp=1)
    cluster = zt.calibrate(mesh)
    if mesh.get_rank() == 0:
        print(cluster)

    def every_step() -> Subject:
        step, state, batch = lifted(config, mesh)
        shard = zt.shard_params(mesh, axis=("host", "dp"), stage=0)
        step = zt.chain(shard, zt.overlap_grads())(step)
        subject = in_rounds(lambda _: step, step.shard(state), batch, cluster)
        return subject._replace(nbytes=H * _gradient_bytes(step, state, batch))

    def local(parts: int = 1, averages: bool = True) -> Subject:
        step, state, batch = lifted(config, mesh)
        shard = zt.shard_params(mesh, independent_axis="host")
        step = zt.chain(shard, zt.overlap_grads())(step)
        steps = zt.local_steps(step, H, zt.nesterov(lr=0.7, momentum=0.9), parts)
        state = steps.inner.shard(steps.init(state))
        return in_rounds(steps.at if averages else lambda _: steps.inner, state, batch, cluster)

    return {
        ALONE: local(averages=False),
        "averaged in every step": every_step(),
        f"in every {H}th step": local(),
        f"in 5 parts, one in every {H // 5}nd step": local(5),
        "in 10 parts, one in every step": local(10),
    }


def _gradient_bytes(step: zt.Step, state: Any, batch: tuple) -> int:
    """The bytes that a rank receives for the gradients of a step."""
    return step.lower(state, *batch).cost_analysis().over(role="grad")


def table(every: dict[str, Subject], used: dict[str, Used], losses: dict[str, float]) -> list[str]:
    alone = used[ALONE].seconds
    rows = [
        "| parameters are averaged | ms a step | of compute alone | MiB a step | MiB received, by arithmetic | loss |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, each in used.items():
        cells = (
            name,
            f"{1000 * each.seconds:.0f}",
            f"{each.seconds / alone:.2f}",
            f"{each.mebibytes:.2f}",
            f"{every[name].nbytes / MiB / H:.2f}",
            f"{losses[name]:.3f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def heading(rounds: int) -> list[str]:
    count = sum(p.numel() for p in Task(CONFIGS[0], 1).model().parameters())
    return [
        f"# Local steps: {network(dist.get_world_size())}",
        "",
        f"{date.today()}, torch {torch.__version__}, gloo, one process and one core a host, fp32. A GPT of "
        f"{count:,} parameters, AdamW; local steps with the outer optimizer of DiLoCo. Medians of {rounds} rounds of "
        f"{H} steps, in turns. MiB are those of the first host's interface in both directions, headers included; "
        f"beside them what a rank receives by arithmetic. All train on the same few tokens again and again, so the "
        f"losses say only that they train.",
    ]


def main(quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds = 1 if quick else 5
    lines = heading(rounds)
    for config in (Config(2, 32, 2, 64, 16, 2),) if quick else CONFIGS:
        every = subjects(config)
        runs = {name: subject.train for name, subject in every.items()}
        used, losses = trained_in_turns(runs, rounds, H)
        title = f"{config.batch} x {config.sequence} tokens a rank:"
        lines += ["", title, "", *table(every, used, losses)]
    if dist.get_rank() == 0:
        text = "\n".join([*lines, ""])
        print(text)
        if not quick:
            (RESULTS / "local_steps_50mbit.md").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round, no file")
    main(parser.parse_args().quick)
