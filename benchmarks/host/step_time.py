"""What the host costs: small steps of a plain loop, torch.compile, FSDP2 and ztrans, on one rank and on two.

    OMP_NUM_THREADS=1 python -m benchmarks.host.step_time          # from the project's root

The models are small, or have a batch of one, so most of a step is the host's work. All subjects of a model are in one
process, or in the same two processes, and take turns. Their loops use AdamW(fused=True). The optimizers of torch.optim,
in each of their forms, have rows of a small model on one rank, whose loop clips gradients and has a scheduler. Prints
and writes benchmarks/results/host_time.md and .json; `--models`, `--optimizers` and `--ranks` run a part, and the rest
keeps its figures and their dates. The figures of another processor or another torch are not kept.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ztrans as zt
from ztrans.ir.op_facts import op_facts

from .. import RESULTS, processor
from .models import GPT, MODELS, RECURRENT, Model, ids

Step = Callable[[], Tensor]
PLAIN, COMPILED, FSDP, FSDP_COMPILED = "PyTorch", "torch.compile", "FSDP2", "FSDP2, torch.compile"
EAGER, INDUCTOR = "ztrans", 'ztrans, backend="inductor"'
AGAINST = {
    1: {EAGER: PLAIN, INDUCTOR: COMPILED},
    2: {EAGER: FSDP, INDUCTOR: FSDP_COMPILED},
}  # who replaces whom
DEPTHS = (1, 5, 9, 18)  # layers of the GPTs whose empty calls are timed
# The optimizers of torch.optim that can be lifted, with the settings that give them their usual state.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "ASGD": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "Muon": {},
}
WARM_UP = 5  # calls of each subject before its steps are timed


def loop(
    model: nn.Module, bf16: bool = False
) -> tuple[Callable[[Tensor, Tensor], Tensor], torch.optim.Optimizer]:
    """An ordinary train step, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loop_step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return loop_step, optimizer


def built(model: Model) -> nn.Module:
    torch.manual_seed(0)
    return model.build()


def plain(model: Model, batch: tuple, compiled: bool = False, bf16: bool = False) -> Step:
    module = built(model)
    step, _ = loop(torch.compile(module, dynamic=False) if compiled else module, bf16)
    return lambda: step(*batch)


def sharded(model: Model, batch: tuple, compiled: bool = False) -> Step:
    module = built(model)
    for part in module.modules():
        if isinstance(part, model.layers):
            fully_shard(part)
    fully_shard(module)
    step, _ = loop(torch.compile(module, dynamic=False) if compiled else module)
    return lambda: step(*batch)


def ours(model: Model, batch: tuple, backend: str, ranks: int, bf16: bool = False) -> Step:
    module = built(model)
    step, state = zt.lift(*_lifted(module, bf16))
    transforms: tuple[zt.Transform, ...] = ()
    if ranks > 1:
        mesh = zt.make_mesh("cpu", dp=ranks)
        transforms = zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch(), zt.fuse_cast_gather()
    step = zt.chain(*transforms)(zt.Step.of(step))
    held = [step.shard(state)]
    call = step if backend == "eager" else step.lower(held[0], *batch).compile(backend=backend)

    def run() -> Tensor:
        held[0], loss = call(held[0], *batch)
        return loss

    return run


def _lifted(module: nn.Module, bf16: bool) -> tuple[Callable, nn.Module, torch.optim.Optimizer]:
    step, optimizer = loop(module, bf16)
    return step, module, optimizer


def subjects(model: Model, ranks: int) -> dict[str, Step]:
    """The subjects of a model, ready to run."""
    batch = model.batch()
    if ranks == 1:
        peers = {PLAIN: plain(model, batch), COMPILED: plain(model, batch, compiled=True)}
    else:
        peers = {FSDP: sharded(model, batch), FSDP_COMPILED: sharded(model, batch, compiled=True)}
    return peers | {
        EAGER: ours(model, batch, "eager", ranks),
        INDUCTOR: ours(model, batch, "inductor", ranks),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Seconds of every step by subject, which take turns, and the last losses, as means over the ranks."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    last: dict[str, Tensor] = {}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    for k in range(rounds):
        names = [*steps][k % len(steps) :] + [*steps][: k % len(steps)]
        for name in names:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            loss = steps[name]()
            seconds[name].append(time.perf_counter() - start)
            last[name] = loss.clone()
    # FSDP2 returns the loss of its rank, ztrans the mean.
    for loss in last.values() if dist.is_initialized() else ():
        dist.all_reduce(loss.div_(dist.get_world_size()))
    return {"seconds": seconds, "losses": {name: float(loss) for name, loss in last.items()}}


def forms(name: str) -> list[str]:
    """The forms that an optimizer has: the one that PyTorch chooses, and `foreach` and `fused` where they exist."""
    parameters = inspect.signature(getattr(torch.optim, name)).parameters
    return ["default", *(form for form in ("foreach", "fused") if form in parameters)]


def with_optimizer(name: str, form: str, subject: str) -> Step:
    """The step of a small model with an optimizer, clipping by the norm of all gradients, and a scheduler."""
    torch.manual_seed(0)
    model, batch = GPT(2, 48, 4, 64, 16), ids(64, 16)()
    if name == "Muon":  # it takes matrices alone
        layers = (m for _ in range(8) for m in (nn.Linear(64, 64, bias=False), nn.ReLU()))
        model, batch = nn.Sequential(*layers), (torch.randn(16, 64), torch.randint(64, (16,)))
    chosen = {} if form == "default" else {form: True}
    make = getattr(torch.optim, name)
    optimizer = make(model.parameters(), lr=1e-4, **OPTIMIZERS[name], **chosen)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.999)
    run_model = torch.compile(model, dynamic=False) if subject == COMPILED else model

    def loop_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(run_model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if subject in (PLAIN, COMPILED):

        def run() -> Tensor:
            loss = loop_step(*batch)
            scheduler.step()
            return loss

        return run

    step, state = zt.lift(loop_step, model, optimizer)
    step = zt.Step.of(step)
    held = [step.shard(state)]
    call = step
    if subject == INDUCTOR:
        call = step.lower(held[0], *batch).compile(backend="inductor")

    def run_lifted() -> Tensor:
        held[0], loss = call(held[0], *batch)
        scheduler.step()
        return loss

    return run_lifted


def optimizer_rows(names: list[str], rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The measured steps of each optimizer and form."""
    for name in names:
        for form in forms(name):
            subjects = (PLAIN, COMPILED, EAGER, INDUCTOR)
            steps = {subject: with_optimizer(name, form, subject) for subject in subjects}
            yield f"{name}, {form}", measure(steps, rounds)


class Counted(TorchDispatchMode):
    """Count the operations that are called, and those that launch a kernel on a GPU: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        self.launches += not op_facts(func).view
        return func(*args, **(kwargs or {}))


def counts(model: Model, bf16: bool) -> dict[str, list[int]]:
    """The operations and launches of one step, eager, by subject."""
    by_subject, batch = {}, model.batch()
    for name, step in {
        PLAIN: plain(model, batch, bf16=bf16),
        EAGER: ours(model, batch, "eager", 1, bf16),
    }.items():
        step(), step()
        with Counted() as counted:
            step()
        by_subject[name] = [counted.calls, counted.launches]
    return by_subject


def shares(model: Model) -> dict[str, float]:
    """Where the milliseconds of an eager step go: in each region of the program, and outside of it."""
    batch, module = model.batch(), built(model)
    lifted, state = zt.lift(*_lifted(module, False))
    step = zt.Step.of(lifted)
    state, _ = step(step.shard(state), *batch)
    compiled = step.compiled(state, *batch)
    program = compiled.binding.local_program.runner.executable.program
    seconds: dict[str, list[float]] = {"in all": [], "outside of the program": []}
    forward = program.forward

    def timed(*inputs: Tensor) -> list:
        start = time.perf_counter()
        outputs = forward(*inputs)
        seconds["outside of the program"].append(start - time.perf_counter())
        return outputs

    program.forward = timed
    for _ in range(50):
        start = time.perf_counter()
        state, _ = step(state, *batch)
        seconds["in all"].append(time.perf_counter() - start)
        seconds["outside of the program"][-1] += seconds["in all"][-1]
    profile = compiled.profile(state, *batch, steps=10)
    parts = {name: statistics.median(each) for name, each in seconds.items()}
    inside, total = parts["in all"] - parts["outside of the program"], profile.timeline.compute
    for region in ("forward", "backward", "update"):
        busy = sum(event.seconds for event in profile.timeline.events if event.eqn.region == region)
        parts[region] = busy / total * inside  # reading clocks makes each part longer
    return {name: 1e3 * value for name, value in parts.items()}


def empty_call(layers: int) -> tuple[int, float]:
    """The leaves of a GPT's state, and the milliseconds of a call of its step whose program does nothing."""
    model = Model("", lambda: GPT(layers, 48, 4, 64, 16), ids(64, 16), ())
    batch, (lifted, state) = model.batch(), zt.lift(*_lifted(built(model), False))
    step = zt.Step.of(lifted)
    state, _ = step(step.shard(state), *batch)
    program = step.compiled(state, *batch).binding.local_program.runner.executable.program
    outputs, forward = list[Any](), program.forward
    program.forward = lambda *inputs: (
        [*outputs] if outputs else outputs.extend(forward(*inputs)) or [*outputs]
    )
    seconds = []
    for _ in range(1000):
        start = time.perf_counter()
        state, _ = step(state, *batch)
        seconds.append(time.perf_counter() - start)
    return len(pytree.tree_leaves(state)), 1e3 * statistics.median(seconds)


def rank(name: str, rounds: int) -> None:
    """What each of two processes does: the steps of one model, whose figures rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # each rank has its own batch
    (model,) = (model for model in MODELS if model.name == name)
    measured = measure(subjects(model, dist.get_world_size()), rounds)
    if dist.get_rank() == 0:
        print(json.dumps(measured), flush=True)
    dist.destroy_process_group()


def of_two_ranks(name: str, rounds: int) -> dict[str, Any]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "-m", "benchmarks.host.step_time", "--rank", name, "--rounds", str(rounds)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def table(by_model: dict[str, dict[str, Any]], ranks: int) -> Iterator[str]:
    """A row for each model and subject: milliseconds, the share of what it replaces, and the day of the run."""
    yield "| model | subject | ms a step, median | least | of its peer | last loss | date |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for name, measured in by_model.items():
        middle = {subject: statistics.median(each) for subject, each in measured["seconds"].items()}
        for subject, each in measured["seconds"].items():
            peer = AGAINST[ranks].get(subject)
            share = f"{middle[subject] / middle[peer]:.2f} of {peer}" if peer else ""
            loss = measured["losses"][subject]
            milliseconds = f"{1e3 * middle[subject]:.3f} | {1e3 * min(each):.3f}"
            yield f"| {name} | {subject} | {milliseconds} | {share} | {loss:.4f} | {measured['date']} |"


def report(results: dict[str, Any]) -> str:
    lines = [
        "# Host time",
        "",
        f"{results['where']}. AdamW(fused=True), where no optimizer is named.",
        "",
    ]
    for ranks, title in ((1, "One rank"), (2, "Two ranks on one machine, gloo; ztrans at stage 3")):
        if str(ranks) in results:
            lines += [f"## {title}", "", *table(results[str(ranks)], ranks), ""]
    if "optimizers" in results:
        lines += ["## Optimizers, with clipping and a scheduler, on one rank", ""]
        lines += [*table(results["optimizers"], 1), ""]
    if "counts" in results:
        lines += [
            "## Operations called, and kernel launches (all but views), of an eager step on one rank",
            "",
        ]
        lines += ["| model | subject | calls | launches |", "|---|---|---:|---:|"]
        for name, by_subject in results["counts"].items():
            lines += [
                f"| {name} | {subject} | {calls:,} | {n:,} |"
                for subject, (calls, n) in by_subject.items()
            ]
        lines += ["", "## Where the milliseconds of an eager step of ztrans go, on one rank", ""]
        lines += ["Measured on the days of the first table.", ""]
        parts = [*next(iter(results["shares"].values()))]
        lines += [f"| model | {' | '.join(parts)} |", f"|---|{'---:|' * len(parts)}"]
        lines += [
            f"| {name} | {' | '.join(f'{by_part[part]:.3f}' for part in parts)} |"
            for name, by_part in results["shares"].items()
        ]
    if "empty calls" in results:
        lines += ["", "## A call of a GPT's step whose program does nothing, on one rank", ""]
        lines += [f"{results['empty calls']['date']}.", ""]
        lines += ["| leaves of the state | ms |", "|---:|---:|"]
        lines += [
            f"| {leaves} | {milliseconds:.3f} |"
            for leaves, milliseconds in results["empty calls"]["by leaves"]
        ]
    return "\n".join([*lines, ""])


def main(names: list[str], optimizers: list[str], ranks: list[int], rounds: int) -> None:
    file = RESULTS / "host_time.json"
    where, today = f"{processor()}, torch {torch.__version__}", {"date": str(date.today())}
    earlier = json.loads(file.read_text()) if file.exists() else {}
    results = earlier if earlier.get("where") == where else {"where": where}
    if 1 in ranks and names:
        results["empty calls"] = {"by leaves": [empty_call(layers) for layers in DEPTHS]} | today
    for model in (model for model in (*MODELS, *RECURRENT) if model.name in names):
        few = rounds // 5 if "GPT-2" in model.name else rounds
        if 1 in ranks:
            results.setdefault("1", {})[model.name] = measure(subjects(model, 1), few) | today
            results.setdefault("shares", {})[model.name] = shares(model)
            bf16 = "GPT-2" in model.name
            results.setdefault("counts", {})[f"{model.name}{', bf16' if bf16 else ''}"] = counts(
                model, bf16
            )
        if 2 in ranks and model in MODELS:
            results.setdefault("2", {})[model.name] = of_two_ranks(model.name, few) | today
        write(results)
    if 1 in ranks:
        for row, measured in optimizer_rows(optimizers, rounds):
            results.setdefault("optimizers", {})[row] = measured | today
            write(results)
    print(report(results))


def write(results: dict[str, Any]) -> None:
    (RESULTS / "host_time.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "host_time.md").write_text(report(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="*", default=[model.name for model in (*MODELS, *RECURRENT)]
    )
    parser.add_argument("--optimizers", nargs="*", default=[*OPTIMIZERS], choices=[*OPTIMIZERS])
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank:
        rank(arguments.rank, arguments.rounds)
    else:
        main(arguments.models, arguments.optimizers, arguments.ranks, arguments.rounds)
