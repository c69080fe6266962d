"""Train a tensor-parallel Llama sharded over two hosts, by FSDP2 and by ztrans.

    benchmarks/netlab up 2 1gbit                    # two hosts on this machine; needs root and iproute2
    PYTHONPATH=. benchmarks/netlab run python -m benchmarks.peers.tensor_parallel_fsdp
    benchmarks/netlab down

Each host has two processes on one core. The model of `llama_dtensor.py` is tensor parallel in a host, by
`parallelize_module`, and its parameters are sharded over the hosts: by `fully_shard`, layer by layer, or by `lift` and
four transforms. Both train the same loop in the same processes, and take turns, step by step. Writes
benchmarks/results/tensor_parallel_fsdp.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

import ztrans as zt

from .. import RESULTS
from ..plans.llama_dtensor import Llama, parallel
from ..plans.llama_model import Config
from .tensor_parallel import network, with_state

CONFIG = Config(layers=6, width=512, hidden=1408, heads=8, kv_heads=4, vocab=2048)
BATCH, SEQUENCE, WARM_UP = 4, 128, 3
TUNED = 6  # steps that ztrans takes while it is tuned, and FSDP2 before the first turn
OURS, PEER = "ztrans", "FSDP2"

ATTENTION = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
Step = Callable[[Tensor], Tensor]


def built(mesh: DeviceMesh) -> Llama:
    torch.manual_seed(0)
    return parallel(Llama(CONFIG, ATTENTION), mesh["tp"])


def loop(model: Llama) -> tuple[Step, torch.optim.Optimizer]:
    """One step of training, and its optimizer. A fused update has parameters of one mesh, so norms have their own."""
    params = dict(model.named_parameters())
    groups = [
        [p for name, p in params.items() if ("norm" in name) == is_norm]
        for is_norm in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3, fused=True)

    def train_step(tokens: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step, optimizer


def by_fsdp(mesh: DeviceMesh) -> Step:
    model = built(mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    step, _ = loop(model)
    return step


def by_ztrans(mesh: DeviceMesh, tokens: Tensor) -> Step:
    model = built(mesh)
    step, optimizer = loop(model)
    lifted, state = zt.lift(step, model, optimizer)
    transforms = (
        zt.shard_params(mesh, axis="dp"),
        zt.overlap_grads(),
        zt.prefetch(),
        zt.fuse_cast_gather(),
    )
    sharded = zt.chain(*transforms)(zt.Step.of(lifted))
    state = sharded.shard(state)
    compiled, _ = sharded.lower(state, tokens).compile().tune(state, tokens, steps=TUNED // 2)
    return with_state(compiled, state)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    tokens = torch.randint(CONFIG.vocab, (BATCH, SEQUENCE + 1), generator=generator)
    subjects = {PEER: by_fsdp(mesh), OURS: by_ztrans(mesh, tokens)}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    losses: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(TUNED):
        subjects[PEER](tokens)
    for _ in range(WARM_UP + rounds):
        for name, run in subjects.items():
            dist.barrier()
            start = time.perf_counter()
            loss = run(tokens)
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(mean(loss))
    if dist.get_rank() == 0:
        report(seconds, losses, rounds)
    dist.destroy_process_group()


def mean(loss: Tensor) -> float:
    """The mean over the hosts, of what the loop returns on each, or of what ztrans has averaged already."""
    total = torch.tensor(loss.item())
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def report(seconds: dict[str, list[float]], losses: dict[str, list[float]], rounds: int) -> None:
    median = {name: statistics.median(each[WARM_UP:]) for name, each in seconds.items()}
    rows = [
        f"| {name} | {middle:.3f} | {middle / median[PEER]:.3f} | {losses[name][0]:.6f} | {losses[name][-1]:.6f} |"
        for name, middle in median.items()
    ]
    text = "\n".join([
        f"# Tensor parallelism in a host, sharding over hosts: {network(dist.get_world_size() // 2)}", "",
        f"{date.today()}, torch {torch.__version__}, gloo, two processes and one core a host, fp32. Llama of "
        f"{CONFIG.layers} layers of {CONFIG.width}, {BATCH} x {SEQUENCE} tokens a host; {rounds} steps each, in turns. "
        f"The losses are means over the hosts, in the first turn and in the last one.", "",
        "| | seconds a step, median | of FSDP2 | first loss | last loss |", "|---|---:|---:|---:|---:|", *rows, "",
    ])  # fmt: skip
    print(text)
    (RESULTS / "tensor_parallel_fsdp.md").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        main(arguments.rounds)
    else:  # the process that netlab has started on a host starts two
        nodes = [
            "--nnodes",
            os.environ["WORLD_SIZE"],
            "--node-rank",
            os.environ["RANK"],
            "--nproc-per-node",
            "2",
        ]
        address = [
            "--master-addr",
            os.environ["MASTER_ADDR"],
            "--master-port",
            os.environ["MASTER_PORT"],
        ]
        run = [
            "-m",
            "benchmarks.peers.tensor_parallel_fsdp",
            "--rank",
            "--rounds",
            str(arguments.rounds),
        ]
        sys.exit(
            subprocess.call([sys.executable, "-m", "torch.distributed.run", *nodes, *address, *run])
        )
