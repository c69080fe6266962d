"""Steps whose loss and MLPs run in tiles: time and memory, simulated, and on a CPU malloc's peak and the time.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.tiles             # simulated, some two minutes
    OMP_NUM_THREADS=1 python -m benchmarks.plans.tiles measured    # on this CPU, with nothing beside it

The simulated steps are a GPT-2 on one H100, Llamas in the shapes of Llama-3-8B on 8 H100s at stage 3, and the same
within limits of memory. A limit is the state and a share of what the step that keeps everything has live besides. The
measured step is a GPT with a vocabulary of 32,768, beside the same loop with its loss chunked by hand; they run in
turns. Writes benchmarks/results/tiles.md; each part replaces its own rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial

import torch
import torch.nn.functional as F

import ztrans as zt
from examples.model import GPT, Config
from ztrans.planning.limit import DoesNotFit
from ztrans.stages import Lowered, Traced

from .. import RESULTS
from ..peers.memory import Peak, lent
from .frontier_models import Made, gpt, llama, per_block, plain

H100 = zt.cluster("h100")
EIGHT = zt.cluster("h100", dp="nvlink4")
SHARD = zt.shard_params(zt.AbstractMesh(dp=8))
SHARES = (0.8, 0.65, 0.5, 0.35, 0.25)
CHUNKS = 8
Row = tuple[str, ...]


def traced(made: Made) -> Traced:
    step, state, batch = made
    return zt.Step.of(step).trace(state, *batch)


def through(step: Traced, *transforms: zt.Transform, cluster: zt.Cluster) -> Lowered:
    return dataclasses.replace(step, transforms=transforms).planned(cluster)


def schedules(limit: int | str = "auto") -> tuple[zt.Transform, ...]:
    return SHARD, zt.overlap_grads(), zt.prefetch(memory=limit), zt.fuse_cast_gather()


def row(what: str, tiles: str, lowered: Lowered) -> Row:
    peak = lowered.memory_analysis().peak
    seconds = lowered.timeline().seconds
    return (
        what,
        tiles,
        f"{1e3 * seconds:.1f}",
        f"{peak / 2**30:.2f}",
        f"{len(lowered.graph.eqns):,}",
    )


# ---- simulated


def simulated() -> Iterator[Row]:
    gpt2 = traced(gpt(layers=12, width=768, heads=12, vocab=50304, sequence=1024, batch=16))
    for parts in (1, 4, 8):
        lowered = through(gpt2, zt.tile(parts=parts), cluster=H100)
        yield row("GPT-2, 16 x 1,024, one H100", f"parts={parts}", lowered)

    four = traced(llama(layers=4))
    for parts in (1, 4, 8, 32):
        lowered = through(four, *schedules(), zt.tile(parts=parts), cluster=EIGHT)
        yield row("Llama, 4 layers, 2 x 8,192", f"parts={parts}", lowered)

    long = traced(llama(per_block, layers=4, batch=1, sequence=65536))
    for tile in (zt.tile(parts=1), zt.tile(tokens=4096), zt.tile(tokens=2048)):
        lowered = through(long, *schedules(), tile, cluster=EIGHT)
        options = repr(tile).removeprefix("tile(").removesuffix(")")
        yield row("Llama, 4 layers, checkpoints, 1 x 65,536", options, lowered)


def within_limits() -> Iterator[Row]:
    step = traced(llama(plain, layers=8))
    everything = through(step, *schedules(), cluster=zt.cluster("h100", dp="nvlink4"))
    memory = everything.memory_analysis()
    yield row("Llama, 8 layers, 2 x 8,192, all kept", "", everything)
    for share in SHARES:
        limit = int(memory.state + share * (memory.peak - memory.state))
        for parts in (1, 4, 8):
            what = f"the same, {share} of the activations, {limit / 2**30:.2f} GiB"
            transforms = (*schedules(limit), zt.remat(memory=limit), zt.tile(parts=parts))
            try:
                yield row(what, f"parts={parts}", through(step, *transforms, cluster=EIGHT))
            except DoesNotFit as error:
                needs = f"needs {error.least.peak / 2**30:.2f}"
                yield what, f"parts={parts}", "does not fit", needs, ""


# ---- measured


def loop(model: GPT, loss_fn: Callable) -> Callable:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.optimizer = optimizer
    return step


def features(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    x = model.token(tokens) + model.position.weight[: tokens.shape[1]]
    for block in model.blocks:
        x = block(x)
    return model.norm(x).flatten(0, 1)


def whole_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    logits = F.linear(features(model, tokens[:, :-1]), model.token.weight)
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


class ChunkedLoss(torch.autograd.Function):
    """The loss chunked by hand, as Liger does it: forward computes the gradients too."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        dx, dw, total = [], None, torch.zeros(())
        for rows, targets in zip(x.chunk(CHUNKS), labels.chunk(CHUNKS)):
            logits = rows @ w.t()
            probabilities = torch.log_softmax(logits, 1)
            total += F.nll_loss(probabilities, targets, reduction="sum")
            probabilities.exp_()
            probabilities[torch.arange(len(targets)), targets] -= 1
            probabilities /= len(labels)
            dx.append(probabilities @ w)
            if dw is None:
                dw = probabilities.t() @ rows
            else:
                dw.addmm_(probabilities.t(), rows)
            del logits, probabilities
        ctx.save_for_backward(torch.cat(dx), dw)
        return total / len(labels)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        dx, dw = ctx.saved_tensors
        return dx * gradient, dw * gradient, None


def chunked_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    x = features(model, tokens[:, :-1])
    return ChunkedLoss.apply(x, model.token.weight, tokens[:, 1:].flatten())


def measured(vocab: int, batch: int, rounds: int) -> Iterator[Row]:
    """The step by ztrans, with the loss whole and in tiles, and the loop with the loss chunked by hand, in turns."""
    config = Config(layers=2, width=256, heads=4, vocab=vocab, sequence=256)
    tokens = torch.randint(vocab, (batch, config.sequence + 1))
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    state_bytes = 0  # all of them have the same state
    planned: dict[str, int] = {}
    for name, loss_fn, transforms in (
        ("loop, loss whole", whole_loss, None),
        ("loop, loss chunked by hand", chunked_loss, None),
        ("ztrans", whole_loss, ()),
        (f"ztrans, tile(parts={CHUNKS})", whole_loss, (zt.tile(parts=CHUNKS),)),
    ):
        torch.manual_seed(0)
        model = GPT(config)
        step = loop(model, loss_fn)
        if transforms is None:
            calls[name] = partial(step, tokens)
            continue
        lifted, state = zt.lift(step, model, step.optimizer)
        transformed = zt.chain(*transforms)(lifted)
        compiled = transformed.lower(state, tokens).compile()
        memory = compiled.lowered.memory_analysis()
        planned[name], state_bytes = memory.peak, memory.state
        calls[name] = _stateful(compiled, [state], tokens)

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks: dict[str, int] = {}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    for name, call in calls.items():
        gc.collect()
        before = lent()
        with Peak() as peak:
            call()
        peaks[name] = peak.bytes - before + state_bytes
    for name in calls:
        plan = f"{planned[name] / 2**20:.0f}" if name in planned else ""
        yield (
            name, f"{1e3 * statistics.median(seconds[name]):.1f}", f"{1e3 * min(seconds[name]):.1f}",
            f"{peaks[name] / 2**20:.0f}", plan,
        )  # fmt: skip


def _stateful(compiled: Callable, state: list, tokens: torch.Tensor) -> Callable:
    def call() -> torch.Tensor:
        state[0], loss = compiled(state[0], tokens)
        return loss

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["simulated", "measured"], default="simulated")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    path = RESULTS / "tiles.json"
    parts = json.loads(path.read_text()) if path.exists() else {}
    rows: list[Row] = []
    if options.part == "simulated":
        source = (*simulated(), *within_limits())
    else:
        source = measured(options.vocab, options.batch, options.rounds)
    for each in source:
        print(*each, sep=" | ", flush=True)
        rows.append(each)
    parts[options.part] = {"date": str(date.today()), "rows": rows}
    path.write_text(json.dumps(parts, indent=1) + "\n")
    write(parts)


def write(parts: dict) -> None:
    text = ["# Tiles of the tokens"]
    heads = {
        "simulated": "| step | tiles | ms | peak, GiB | equations |\n|---|---|---|---|---|",
        "measured": "| step | median ms | least ms | malloc's peak, MiB | the plan's |\n|---|---|---|---|---|",
    }
    for part, head in heads.items():
        if part in parts:
            lines = [head, *(f"| {' | '.join(each)} |" for each in parts[part]["rows"])]
            command = "`python -m benchmarks.plans.tiles" + (
                " measured`" if part == "measured" else "`"
            )
            text.append(
                f"## {part.capitalize()}\n\n{command}, {parts[part]['date']}.\n\n"
                + "\n".join(lines)
            )
    (RESULTS / "tiles.md").write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
