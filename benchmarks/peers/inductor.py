"""backend="inductor" beside torch.compile: the time of a step on one core, and of compiling.

    OMP_NUM_THREADS=1 python -m benchmarks.peers.inductor

The steps of all subjects are interleaved in one process. Compile times are measured in new processes with empty
caches, as the first call minus a later call. Writes benchmarks/results/inductor.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date

import torch
import torch.distributed as dist
from torch import Tensor

import ztrans as zt
from ztrans.ir.op_facts import is_matmul
from ztrans.runtime.inductor.backend import KernelCall

from .. import RESULTS, processor
from .model import Config, Task, adamw, loss_of
from .native import plain

BASE = "torch.compile(model), torch.optim.AdamW"
FUSED = "torch.compile(model), torch.optim.AdamW(fused=True)"


def lifted(
    config: Config, ranks: int = 1, bf16: bool = False, fused: bool = True
) -> tuple[zt.stages.Lowered, object, tuple]:
    """The plain loop, lifted and lowered. With several ranks it is stage 3 on a fake process group: nothing is sent.

    Returns the lowered step, its state, and its batch.
    """
    task = Task(config, ranks, 0, bf16)
    model, batch = task.model(), task.batch()
    optimizer = adamw(model.parameters(), fused)

    def loop_step(x: Tensor, y: Tensor) -> Tensor:
        with task.autocast():
            logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer.zero_grad()
    step, state = zt.lift(loop_step, model, optimizer)
    shards = ()
    if ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        mesh = zt.make_mesh("cpu", dp=-1)
        shards = (
            zt.shard_params(mesh, outputs="local"),
            zt.overlap_grads(),
            zt.prefetch(),
            zt.fuse_cast_gather(),
        )
    step = zt.chain(*shards)(zt.Step.of(step))
    state = step.shard(state)
    return step.lower(state, *batch), state, batch


class Ours:
    """The lifted loop, compiled by ztrans."""

    def __init__(
        self, backend: str, bf16: bool, fused: bool = True, cast_ahead: bool = False
    ) -> None:
        lowered, self.state, self.batch = lifted(Config(), bf16=bf16, fused=fused)
        self.compiled = lowered.compile(backend=backend, cast_ahead=cast_ahead)

    def __call__(self) -> Tensor:
        return self.compiled(self.state, *self.batch)[1]  # the state is updated in place

    def products(self) -> float:
        """The seconds that a step spends in matrix products, without attention. Fusion cannot make them shorter."""
        timeline = self.compiled.profile(self.state, *self.batch, steps=5).timeline
        multiplies = (bar for bar in timeline.events if is_matmul(bar.eqn))
        return sum(bar.seconds for bar in multiplies)


def steps(rounds: int, bf16: bool) -> dict:
    """The seconds of each timed step and the last loss, by subject."""
    inductor = Ours("inductor", bf16)
    subjects: dict[str, Callable[[], Tensor]] = {
        BASE: plain(Task(Config(), 1, 0, bf16), compile=True, fused=False),
        FUSED: plain(Task(Config(), 1, 0, bf16), compile=True),
        "ztrans, inductor, AdamW": Ours("inductor", bf16, fused=False),
        "ztrans, inductor, AdamW(fused=True)": inductor,
        "ztrans, eager, AdamW(fused=True)": Ours("eager", bf16),
    }
    if bf16:
        ahead = Ours("inductor", bf16, fused=False, cast_ahead=True)
        subjects["ztrans, inductor, AdamW, cast_ahead"] = ahead
    for step in subjects.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    losses = {}
    for _ in range(rounds):
        for name, step in subjects.items():
            start = time.perf_counter()
            losses[name] = float(step())
            seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "losses": losses, "products": inductor.products()}


def compile_seconds(layers: int, ranks: int) -> dict:
    """The seconds to compile one program, and its numbers of groups and kernels."""
    lowered, state, batch = lifted(Config(layers=layers), ranks)
    calls = []
    compiled = lowered.compile(backend="inductor")
    for _ in range(3):
        start = time.perf_counter()
        compiled(state, *batch)
        calls.append(time.perf_counter() - start)
    run = compiled.binding.local_program.runner.executable.last
    groups = sum(isinstance(node.target, KernelCall) for node in run.program.graph.nodes)
    return {"seconds": calls[0] - min(calls[1:]), "groups": groups, "kernels": len(run.kernels)}


def fresh(layers: int, ranks: int) -> dict:
    """`compile_seconds` in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [
            sys.executable,
            "-m",
            "benchmarks.peers.inductor",
            "--one",
            str(layers),
            str(ranks),
        ]
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {"layers": layers, "ranks": ranks} | json.loads(done.stdout.splitlines()[-1])


def table(precision: str, when: str, seconds: dict, losses: dict, products: float) -> list[str]:
    base, fused = (statistics.median(seconds[name]) for name in (BASE, FUSED))
    lines = [f"A step in {precision}, medians of {len(seconds[BASE])}, interleaved; {when}.\n"]
    lines += ["| step | s | of AdamW | of AdamW(fused=True) | last loss |", "|---|---|---|---|---|"]
    for name, each in seconds.items():
        middle = statistics.median(each)
        lines.append(
            f"| {name} | {middle:.3f} | {middle / base:.3f} | {middle / fused:.3f} | {losses[name]:.5f} |"
        )
    shares = f"{products:.3f} | {products / base:.3f} | {products / fused:.3f}"
    return [*lines, f"| matrix products alone, in ztrans, inductor | {shares} | |", ""]


def report(results: dict) -> str:
    lines = [
        '# compile(backend="inductor")\n',
        f"{results['where']}; the GPT of `benchmarks/peers/model.py`.\n",
    ]
    for precision in ("fp32", "bf16"):
        if precision in results:
            lines += table(precision, results["dates"][precision], **results[precision])
    if "compile" in results:
        lines += [f"Compiling, caches empty; {results['dates']['compile']}.\n"]
        lines += [
            "| layers | program | groups | kernels | s | of 6 layers |",
            "|---|---|---|---|---|---|",
        ]
        six = {r["ranks"]: r["seconds"] for r in results["compile"] if r["layers"] == 6}
        for r in results["compile"]:
            name = "plain" if r["ranks"] == 1 else f"stage 3, {r['ranks']} ranks"
            share = r["seconds"] / six[r["ranks"]]
            figures = f"{r['groups']} | {r['kernels']} | {r['seconds']:.1f} | {share:.2f}"
            lines.append(f"| {r['layers']} | {name} | {figures} |")
    return "\n".join([*lines, ""])


def main(args: argparse.Namespace) -> None:
    file = RESULTS / "inductor.json"
    where = f"{processor()}, one core, torch {torch.__version__}"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    # A table compares its rows, so figures of another processor or another torch are not kept.
    results = earlier if earlier.get("where") == where else {"where": where, "dates": {}}
    parts = ("fp32", "bf16", "compile") if args.part == "all" else (args.part,)
    results["dates"] |= dict.fromkeys(parts, str(date.today()))
    for precision in ("fp32", "bf16"):
        if precision in parts:
            results[precision] = steps(args.rounds, precision == "bf16")
    if "compile" in parts:
        results["compile"] = [fresh(layers, ranks) for ranks in (1, 2) for layers in (6, 24)]
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "inductor.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--part", choices=("fp32", "bf16", "compile", "all"), default="all")
    parser.add_argument(
        "--one", type=int, nargs=2, metavar=("LAYERS", "RANKS"), help=argparse.SUPPRESS
    )
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compile_seconds(*arguments.one)))
    else:
        main(arguments)
