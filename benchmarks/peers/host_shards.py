"""Parameters that the ranks of a host keep in parts, against stage 3 and HSDP, by ztrans and by FSDP2, on two hosts.

    NETLAB=hostlab benchmarks/netlab up 2 300mbit     # two hosts on this machine; needs root and iproute2
    NETLAB=hostlab PYTHONPATH=. benchmarks/netlab run python -m benchmarks.peers.host_shards
    NETLAB=hostlab benchmarks/netlab down

Each host has two processes on one core. The Llama, its loop and the counting of bytes are those of `between_hosts.py`.
All subjects train the same model on the same batches, in turns. "the plan" knows the links by `zt.calibrate`, and
nothing else is asked of it: without a limit it stays near the memory of stage 3. So it is also made within the memory
that HSDP takes. Writes benchmarks/results/host_shards.md, unless --quick.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ztrans as zt

from .. import RESULTS
from .between_hosts import (
    BATCH,
    SEQUENCE,
    MiB,
    TrainStep,
    Used,
    loop,
    start_ranks,
    trained_in_turns,
)
from .tensor_parallel import network, with_state
from .tensor_parallel_fsdp import CONFIG

LOCAL = 2  # ranks of a host
PLAN = "ztrans, the plan"
PLAN_IN_MEMORY_OF_HSDP = "ztrans, the plan within the memory of HSDP"
HSDP = "ztrans, HSDP"


class Subject(NamedTuple):
    """A way to train: a step that returns the loss of this rank, or of all, its peak, and what its plan decided."""

    step: TrainStep
    is_mean: bool
    plan: str = ""
    peak: int | None = None


def by_fsdp(mesh: DeviceMesh, **options: Any) -> Subject:
    return Subject(loop({"mesh": mesh, **options})[1], is_mean=False)


def by_ztrans(
    mesh: DeviceMesh,
    tokens: Tensor,
    cluster: zt.Cluster,
    memory: int | str = "auto",
    **options: Any,
) -> Subject:
    model, train_step, optimizer = loop(None)
    lifted, state = zt.lift(train_step, model, optimizer)
    transforms = (
        zt.shard_params(mesh, **options),
        zt.overlap_grads(),
        zt.prefetch(memory=memory),
        zt.fuse_cast_gather(),
    )
    step = zt.chain(*transforms)(zt.Step.of(lifted))
    state = step.shard(state)
    lowered = step.lower(state, tokens, cluster=cluster)
    again = [name for members, _ in lowered.plan.gathers for name in members if "@" in name]
    simulated = lowered.timeline().seconds
    plan = f"{len(again)} in parts, {len(lowered.plan.dropped)} kept whole; {simulated:.2f} s simulated"
    peak = lowered.memory_analysis().peak
    return Subject(with_state(lowered.compile(), state), True, plan, peak)


def subjects(tokens: Tensor) -> dict[str, Subject]:
    """All ways to train. Every rank makes them in this order."""
    flat = zt.make_mesh("cpu", dp=-1)
    hosts = zt.make_mesh("cpu", host=-1, dp=LOCAL)
    cluster = zt.calibrate(flat)
    of_hosts = zt.calibrate(hosts)
    if dist.get_rank() == 0:
        print(cluster)
    replicated = by_ztrans(hosts, tokens, of_hosts, replicate_axis="host")
    return {
        "FSDP2": by_fsdp(flat),
        f"FSDP2, reshard_after_forward={LOCAL}": by_fsdp(flat, reshard_after_forward=LOCAL),
        "FSDP2, HSDP": by_fsdp(hosts),
        'ztrans, reshard="always"': by_ztrans(flat, tokens, cluster, reshard="always"),
        HSDP: replicated,
        f"ztrans, reshard={LOCAL}": by_ztrans(flat, tokens, cluster, reshard=LOCAL),
        PLAN: by_ztrans(flat, tokens, cluster),
        PLAN_IN_MEMORY_OF_HSDP: by_ztrans(flat, tokens, cluster, memory=replicated.peak),
    }


def report(
    every: dict[str, Subject],
    used: dict[str, Used],
    losses: dict[str, float],
    nbytes: int,
    rounds: int,
) -> str:
    size = nbytes / MiB
    hosts = dist.get_world_size() // LOCAL
    rows = []
    for name, each in used.items():
        peak = every[name].peak
        cells = [name, f"{each.mebibytes:.0f}", f"{each.seconds:.2f}"]
        cells.append("" if peak is None else f"{peak / MiB:.0f} MiB")
        cells += [f"{losses[name]:.4f}", every[name].plan]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([
        f"# Parameters kept in parts by the ranks of a host: {network(hosts)}, {dist.get_world_size()} ranks",
        "",
        f"{date.today()}, torch {torch.__version__}, gloo, two processes and one core a host, fp32. A Llama of "
        f"{CONFIG.layers} layers of {CONFIG.width} ({size:.1f} MiB of parameters), {BATCH} x {SEQUENCE} tokens a rank, "
        f"AdamW. Bytes of the first host's interface in both directions, headers included; medians of {rounds} steps, "
        f"in turns. The last column says how the plan gathers the parameters that backward reads: the others are "
        f"gathered again over all ranks. It also has the seconds of the step as simulated with the measured cluster.",
        "",
        "| | MiB between the hosts | seconds a step | planned peak | mean loss of the last step | of the parameters |",
        "|---|---:|---:|---:|---:|---|",
        *rows,
        "",
        "By arithmetic, with P bytes of parameters: a hierarchical gather or reduce_scatter over all ranks sends P "
        f"({size:.0f} MiB), and HSDP's all_reduce of shards sends 2 P.",
        "",
    ])  # fmt: skip


def main(quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(CONFIG.vocab, (BATCH, SEQUENCE + 1), generator=generator)
    every = subjects(tokens)
    rounds = 2 if quick else 5
    runs = {name: partial(subject.step, tokens) for name, subject in every.items()}
    used, losses = trained_in_turns(runs, rounds)
    if dist.get_rank() == 0:
        nbytes = sum(p.nbytes for p in loop(None)[0].parameters())
        text = report(every, used, losses, nbytes, rounds)
        print(text)
        if not quick:
            (RESULTS / "host_shards.md").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two steps each, and no file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        main(options.quick)
    else:
        sys.exit(start_ranks("benchmarks.peers.host_shards", *sys.argv[1:]))
