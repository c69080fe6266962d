"""Micro-batches one after the other, and layer by layer, on two hosts: bytes between them, and seconds of a step.

    NETLAB=hostlab benchmarks/netlab up 2 200mbit     # two hosts on this machine; needs root and iproute2
    NETLAB=hostlab PYTHONPATH=. benchmarks/netlab run python -m benchmarks.peers.layer_order
    NETLAB=hostlab benchmarks/netlab down

Each host has one process on one core. The Llama, its loop and the counting of bytes are those of `between_hosts.py`; a
step has 4 micro-batches. All subjects train the same model on the same batches, in turns. With reshard="always" every
parameter is gathered for forward and again for backward. Writes benchmarks/results/layer_order_hosts.md, unless
--quick. Fails if the order of layers sends more than 0.27 of what `accumulate(4)` sends, or, at 200 Mbit/s, takes more
than 0.4 of its time.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ztrans as zt

from .. import RESULTS
from .between_hosts import BATCH, SEQUENCE, MiB, Used, loop, trained_in_turns
from .host_shards import Subject
from .tensor_parallel import network, with_state
from .tensor_parallel_fsdp import CONFIG

PAGE = RESULTS / "layer_order_hosts.md"
MICRO = 4
BATCHES, LAYERS = f"accumulate({MICRO})", f'accumulate({MICRO}, order="layers")'
MOST_BYTES, MOST_SECONDS = 0.27, 0.4  # of `accumulate(4)`


def by_ztrans(mesh: DeviceMesh, tokens: Tensor, micro: zt.Transform, stage: int = 3) -> Subject:
    model, train_step, optimizer = loop(None)
    lifted, state = zt.lift(train_step, model, optimizer)
    shard = zt.shard_params(mesh, stage=stage, reshard="always")
    schedules = (zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather())
    step = zt.chain(micro, shard, *schedules)(zt.Step.of(lifted))
    state = step.shard(state)
    lowered = step.lower(state, tokens)
    peak = lowered.memory_analysis().peak
    return Subject(with_state(lowered.compile(), state), True, "", peak)


def subjects(tokens: Tensor) -> dict[str, Subject]:
    """All ways to train. Every rank makes them in this order."""
    mesh = zt.make_mesh("cpu", dp=-1)
    whole = zt.accumulate(MICRO, keep="whole")
    return {
        BATCHES: by_ztrans(mesh, tokens, zt.accumulate(MICRO)),
        f'accumulate({MICRO}, keep="whole")': by_ztrans(mesh, tokens, whole),
        f"accumulate({MICRO}), stage 1": by_ztrans(mesh, tokens, zt.accumulate(MICRO), 1),
        LAYERS: by_ztrans(mesh, tokens, zt.accumulate(MICRO, order="layers")),
    }


def report(
    every: dict[str, Subject], used: dict[str, Used], losses: dict[str, float], rounds: int
) -> str:
    ours, other = used[LAYERS], used[BATCHES]
    rows = []
    for name, each in used.items():
        peak = (every[name].peak or 0) / MiB
        cells = [name, f"{each.mebibytes:.0f}", f"{each.mebibytes / other.mebibytes:.3f}"]
        cells += [f"{each.seconds:.2f}", f"{each.seconds / other.seconds:.3f}"]
        cells += [f"{peak:.0f} MiB", f"{losses[name]:.4f}"]
        rows.append(f"| {' | '.join(cells)} |")
    size = sum(p.nbytes for p in loop(None)[0].parameters()) / MiB
    return "\n".join([
        f"# Micro-batches layer by layer: {network(dist.get_world_size())}",
        "",
        f"{date.today()}, torch {torch.__version__}, gloo, one process and one core a host, fp32, stage 3 unless a row "
        f"names another. A Llama of {CONFIG.layers} layers of {CONFIG.width} ({size:.1f} MiB of parameters), {MICRO} "
        f"micro-batches of {BATCH} x {SEQUENCE} tokens a rank, AdamW. Bytes of the first host's interface in both "
        f"directions, headers included; medians of {rounds} steps, in turns.",
        "",
        f"| | MiB between the hosts | of {BATCHES} | seconds a step | of {BATCHES} | planned peak | mean loss of the "
        f"last step |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"Bytes: {ours.mebibytes / other.mebibytes:.3f}, at most {MOST_BYTES}. Seconds: "
        f"{ours.seconds / other.seconds:.3f}, at most {MOST_SECONDS} at 200 Mbit/s.",
        "",
    ])  # fmt: skip


def main(quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(CONFIG.vocab, (MICRO * BATCH, SEQUENCE + 1), generator=generator)
    every = subjects(tokens)
    rounds = 1 if quick else 5
    runs = {name: partial(subject.step, tokens) for name, subject in every.items()}
    used, losses = trained_in_turns(runs, rounds)
    is_wrong = False
    if dist.get_rank() == 0:
        text = report(every, used, losses, rounds)
        print(text)
        if not quick:
            PAGE.write_text(text)
        ours, other = used[LAYERS], used[BATCHES]
        is_wrong = ours.mebibytes > MOST_BYTES * other.mebibytes
        if "200Mbit" in network(dist.get_world_size()):
            is_wrong |= ours.seconds > MOST_SECONDS * other.seconds
    dist.destroy_process_group()
    if is_wrong:
        sys.exit(f"{LAYERS} sends or takes too much")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one step each, and no file")
    main(parser.parse_args().quick)
