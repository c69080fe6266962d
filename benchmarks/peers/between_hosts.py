"""Count the bytes between two hosts of two ranks: of one reduce_scatter, and of a training step by FSDP2 and ztrans.

    NETLAB=hostlab benchmarks/netlab up 2 1gbit     # two hosts on this machine; needs root and iproute2
    NETLAB=hostlab PYTHONPATH=. benchmarks/netlab run python -m benchmarks.peers.between_hosts
    NETLAB=hostlab benchmarks/netlab down

Each host has two processes on one core. The kernel counts the bytes of the first host's network interface, in both
directions and with all headers. The Llama of `llama_dtensor.py` is sharded over all four ranks, so a step gathers the
parameters for forward and for backward, and reduces the gradients. Writes benchmarks/results/between_hosts.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ztrans as zt
from ztrans.ir.collectives import reduce
from ztrans.ir.graph import Partial, Split, Var
from ztrans.runtime.collectives import Start, channel, wait

from .. import RESULTS
from ..plans.llama_dtensor import Llama
from .tensor_parallel import network, with_state
from .tensor_parallel_fsdp import ATTENTION, CONFIG

BATCH, SEQUENCE, WARM_UP, ROUNDS = 4, 128, 2, 8
ELEMENTS = 4 << 20  # of the reduce_scatter, in fp32
MiB = 1 << 20
OURS, PEER = "ztrans", "FSDP2"

Step = Callable[[], object]
TrainStep = Callable[[Tensor], Tensor]


class Used(NamedTuple):
    """The MiB between the hosts in one call, and its seconds: medians."""

    mebibytes: float
    seconds: float


def counted() -> int:
    """The bytes that this host has sent and received over its network interface."""
    folder = Path("/sys/class/net/eth0/statistics")
    return sum(int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


def measured(subjects: dict[str, Step]) -> dict[str, Used]:
    """Call the subjects in turns."""
    used: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for turn in range(WARM_UP + ROUNDS):
        for name, run in subjects.items():
            dist.barrier()
            before, start = counted(), time.perf_counter()
            run()
            took = time.perf_counter() - start
            dist.barrier()
            if turn >= WARM_UP:
                used[name].append(((counted() - before) / MiB, took))
    return {name: Used(*map(statistics.median, zip(*each))) for name, each in used.items()}


def trained_in_turns(
    runs: Mapping[str, Callable[[], Tensor]], rounds: int, steps: int = 1
) -> tuple[dict[str, Used], dict[str, float]]:
    """Train in turns, after one round that does not count: what a step takes, and the mean loss of the last one.

    Each call of a run trains for `steps` steps, and returns the last loss of this rank.
    """
    used: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    losses: dict[str, float] = {}
    for turn in range(1 + rounds):
        for name, run in runs.items():
            dist.barrier()
            before, start = counted(), time.perf_counter()
            loss = run().clone()
            dist.barrier()
            took = time.perf_counter() - start
            if turn:
                used[name].append(((counted() - before) / MiB / steps, took / steps))
            dist.all_reduce(loss)
            losses[name] = loss.item() / dist.get_world_size()
    return {name: Used(*map(statistics.median, zip(*each))) for name, each in used.items()}, losses


def scatters(mesh: DeviceMesh) -> dict[str, Step]:
    """One reduce_scatter, by gloo's own and by ztrans."""
    n, rank = mesh.size(), mesh.get_rank()
    term, mine = torch.ones(ELEMENTS), torch.empty(ELEMENTS // n)
    g = Var("g", torch.float32, (ELEMENTS,), (Partial("dp", "sum"),))
    start = Start(
        reduce([g], ["f"], "dp", "sum", Split("dp")),
        {"dp": n},
        {"dp": rank},
        channel(mesh, "dp", "reduce"),
    )

    def ours() -> None:
        (member,) = start(term)
        assert wait(member)[0] == n

    def peer() -> None:
        dist.reduce_scatter_tensor(mine, term)
        assert mine[0] == n

    if rank == 0:
        print(start.extra_repr())
    return {"gloo": peer, OURS: ours}


def loop(fsdp: dict[str, Any] | None) -> tuple[Llama, TrainStep, torch.optim.Optimizer]:
    """A model, an ordinary step and its optimizer; `fsdp` are options of `fully_shard`."""
    torch.manual_seed(0)
    model = Llama(CONFIG, ATTENTION)
    if fsdp is not None:
        for layer in model.layers:
            fully_shard(layer, **fsdp)
        fully_shard(model, **fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def train_step(tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, train_step, optimizer


def steps(
    mesh: DeviceMesh, tokens: Tensor, losses: dict[str, float]
) -> tuple[dict[str, Step], int]:
    """A training step by FSDP2 and by ztrans, and the bytes of the parameters."""

    _, by_fsdp, _ = loop({"mesh": mesh})
    model, train_step, optimizer = loop(None)
    lifted, state = zt.lift(train_step, model, optimizer)
    transforms = (
        zt.shard_params(mesh, reshard="always"),
        zt.overlap_grads(),
        zt.prefetch(),
        zt.fuse_cast_gather(),
    )
    step = zt.chain(*transforms)(zt.Step.of(lifted))
    state = step.shard(state)
    ours = with_state(step.lower(state, tokens).compile(), state)

    def noted(name: str, run: Callable[[Tensor], Tensor]) -> Step:
        return lambda: losses.update({name: run(tokens).item()})

    nbytes = sum(p.nbytes for p in model.parameters())
    return {PEER: noted(PEER, by_fsdp), OURS: noted(OURS, ours)}, nbytes


def start_ranks(module: str, *options: str) -> int:
    """Run a benchmark on two ranks of this host, one of those on which netlab has started a process."""
    nodes = ["--nnodes", os.environ["WORLD_SIZE"], "--node-rank", os.environ["RANK"]]
    nodes += ["--nproc-per-node", "2"]
    address = ["--master-addr", os.environ["MASTER_ADDR"]]
    address += ["--master-port", os.environ["MASTER_PORT"]]
    run = ["-m", module, "--rank", *options]
    return subprocess.call([sys.executable, "-m", "torch.distributed.run", *nodes, *address, *run])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = zt.make_mesh("cpu", dp=-1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(CONFIG.vocab, (BATCH, SEQUENCE + 1), generator=generator)
    losses: dict[str, float] = {}
    one = measured(scatters(mesh))
    subjects, nbytes = steps(mesh, tokens, losses)
    whole = measured(subjects)
    means = {name: torch.tensor(loss) for name, loss in losses.items()}
    dist.all_reduce(means[PEER])
    if dist.get_rank() == 0:
        report(one, whole, nbytes, means[PEER].item() / dist.get_world_size(), means[OURS].item())
    dist.destroy_process_group()


def arithmetic(whole: float, ranks: int, hosts: int) -> dict[str, float]:
    """The bytes between two hosts, in both directions, of a reduce_scatter or an all_gather of `whole` bytes."""
    local = ranks // hosts
    return {
        "ring": hosts * whole * (ranks - 1) / ranks,
        "exchange": ranks * whole * (ranks - local) / ranks,
        "hierarchical exchange": ranks * whole * (hosts - 1) / ranks,
    }


def report(
    one: dict[str, Used], whole: dict[str, Used], nbytes: int, peer_loss: float, our_loss: float
) -> None:
    ranks, hosts, size = dist.get_world_size(), dist.get_world_size() // 2, nbytes / MiB
    by = arithmetic(1.0, ranks, hosts)
    message = ELEMENTS * 4 / MiB
    step = {way: 3 * share for way, share in by.items()}
    text = "\n".join([
        f"# Bytes between hosts: {network(hosts)}, {ranks} ranks", "",
        f"{date.today()}, torch {torch.__version__}, gloo, two processes and one core a host, fp32. Bytes of the first "
        f"host's interface in both directions, headers included; medians of {ROUNDS} calls, in turns.", "",
        f"One reduce_scatter of {message:.0f} MiB:", "",
        "| | MiB between the hosts | seconds |", "|---|---:|---:|",
        *(f"| {name} | {used.mebibytes:.1f} | {used.seconds:.3f} |" for name, used in one.items()),
        *(f"| {way}, by arithmetic | {share * message:.1f} | |" for way, share in by.items()), "",
        f"A training step of a Llama of {CONFIG.layers} layers of {CONFIG.width} ({size:.1f} MiB of parameters), "
        f"{BATCH} x {SEQUENCE} tokens a rank. Parameters are gathered for forward and for backward. The mean loss of "
        f"the last step is {peer_loss:.4f} by FSDP2 and {our_loss:.4f} by ztrans.", "",
        "| | MiB between the hosts | seconds |", "|---|---:|---:|",
        *(f"| {name} | {used.mebibytes:.0f} | {used.seconds:.3f} |" for name, used in whole.items()),
        *(f"| gathers and reductions by {way}, by arithmetic | {share * size:.0f} | |" for way, share in step.items()),
        "",
    ])  # fmt: skip
    print(text)
    (RESULTS / "between_hosts.md").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().rank:
        main()
    else:
        sys.exit(start_ranks("benchmarks.peers.between_hosts"))
