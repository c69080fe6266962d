"""The loss of the demo's GPT on two hosts: averaged in every step, and by local steps.

    python -m benchmarks.local.loss                     # some minutes on one core
    python -m benchmarks.local.loss --steps 40          # a look; writes nothing

Two hosts of one rank run in lock-step in one process, on the same batches of the standard library's source, with the
AdamW of the demo and a cosine of its rate. All begin with the same steps that average gradients. The validation loss is
that of the parameters that all hosts share, on text that no batch is drawn from. Writes local_steps.json,
local_steps.md and local_steps.png in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from datetime import date

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

import ztrans as zt
from ztrans.local_steps import LocalSteps

from .. import RESULTS

sys.path.insert(0, str(RESULTS.parents[1] / "examples"))
from gpt import init, make_step
from model import GPT, Config
from text import draw, stdlib_bytes

MESH = zt.AbstractMesh(host=2, dp=1)
CONFIG = Config(layers=4, width=128, heads=4, sequence=128)
BATCH, LR, STEPS, WARM, H, EVERY = 8, 1e-3, 240, 60, 10, 20
BASE = "averaged in every step"
HELD_OUT = 1 << 16  # bytes of the text


def subjects(step: Callable) -> dict[str, LocalSteps | zt.Step]:
    local = zt.shard_params(MESH, independent_axis="host")(step)
    outer = zt.nesterov(lr=0.8, momentum=0.5)
    return {
        BASE: zt.shard_params(MESH, axis=("host", "dp"), stage=0)(step),
        "LocalSGD": zt.local_steps(local, H),
        "DiLoCo, outer momentum 0.5": zt.local_steps(local, H, outer),
        "the same in 5 parts": zt.local_steps(local, H, outer, parts=5),
        "DiLoCo, outer momentum 0.9": zt.local_steps(local, H, zt.nesterov(0.7, 0.9)),
    }


def rate(step: int, steps: int) -> float:
    return LR * (1 + math.cos(math.pi * step / steps)) / 2


def shared(state: dict) -> dict[str, Tensor]:
    """The parameters that all hosts share; without an outer optimizer, their mean."""
    if "params" in state:
        return state["params"]
    of_hosts = state.get("outer") or state["state"]["params"]
    return {name: p.mean(0) for name, p in of_hosts.items()}


def train(
    subject: LocalSteps | zt.Step,
    state: dict,
    batches: list[Tensor],
    start: int,
    end: int,
    loss_of: Callable[[dict], float],
) -> tuple[dict, list[float]]:
    """The state after some steps of a subject, and the validation loss after every few of them."""
    if isinstance(subject, LocalSteps):
        state = subject.init(state)
    first = state
    programs: dict[zt.Step, zt.stages.Lowered] = {}
    losses = []
    for i, tokens in enumerate(batches[start:end], start):
        state.get("state", state)["lr"].fill_(rate(i, len(batches)))
        step = subject.at(i) if isinstance(subject, LocalSteps) else subject
        slices = tokens.chunk(2)
        if step not in programs:
            programs[step] = step.lower(first, slices[0])
        state, _ = programs[step].lockstep(state, [(x,) for x in slices])
        if i % EVERY == EVERY - 1:
            losses.append(loss_of(shared(state)))
    return state, losses


def measured(steps: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm_steps = min(WARM, steps // 2)
    model = GPT(CONFIG)
    text = stdlib_bytes()
    train_step = make_step(model)
    batches = [draw(text[:-HELD_OUT], i, 2 * BATCH, CONFIG.sequence) for i in range(steps)]
    held_out = draw(text[-HELD_OUT:], 0, 64, CONFIG.sequence)

    @torch.no_grad()
    def loss_of(params: dict) -> float:
        logits = functional_call(model, params, held_out[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()).item()

    every = subjects(train_step)
    warm, before = train(every[BASE], init(model, LR), batches, 0, warm_steps, loss_of)
    losses = {}
    for name, subject in every.items():
        state = pytree.tree_map(torch.clone, warm)
        _, after = train(subject, state, batches, warm_steps, steps, loss_of)
        losses[name] = before + after
        print(f"{name}: {losses[name][-1]:.4f}", flush=True)
    return losses


def picture(losses: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    steps = [EVERY * (k + 1) for k in range(len(losses[BASE]))]
    for name, values in losses.items():
        top.plot(steps, values, label=name, linewidth=2.5 if name == BASE else 1.2)
        if name != BASE:
            more = [100 * (x / y - 1) for x, y in zip(values, losses[BASE])]
            bottom.plot(steps, more, label=name, color=top.lines[-1].get_color())
    top.axvline(WARM, color="gray", linestyle=":", linewidth=1)
    top.set(ylabel="validation loss (nats per byte)", title="A byte-level GPT on two hosts")
    top.legend(frameon=False)
    bottom.set(ylabel="difference, %", xlabel="step")
    bottom.axhline(0, color="black", linewidth=0.5)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def report(losses: dict[str, list[float]], steps: int) -> str:
    rows = []
    for name, values in losses.items():
        rows.append(
            f"| {name} | {values[-1]:.4f} | {100 * (values[-1] / losses[BASE][-1] - 1):+.2f}% |"
        )
    count = sum(p.numel() for p in GPT(CONFIG).parameters())
    return "\n".join([
        "# The loss of local steps",
        "",
        f"{date.today()}, torch {torch.__version__}, fp32, lock-step. The GPT of the demo ({CONFIG.layers} layers of "
        f"{CONFIG.width}, {count:,} parameters) on bytes of the standard library's source, {steps} steps of {BATCH} x "
        f"{CONFIG.sequence} tokens on each of two hosts, AdamW with a rate that falls from {LR} to 0. All begin with "
        f"the same {WARM} steps of data parallelism, as DiLoCo begins from a model that is trained already; then local "
        f"steps average in every {H}th step. The loss is that of the shared parameters on text that no batch is drawn "
        f"from. Local steps depend on this protocol: in a run of 2026-11-30 with a constant rate from the first step, "
        f"LocalSGD ended 1.95% above data parallelism, and DiLoCo with an outer momentum of 0.9 4.31%.",
        "",
        "| parameters are | validation loss | beside data parallelism |",
        "|---|---:|---:|",
        *rows,
        "",
        "![validation loss by step](local_steps.png)",
        "",
    ])  # fmt: skip


def main(steps: int) -> None:
    losses = measured(steps)
    text = report(losses, steps)
    print(text)
    if steps == STEPS:
        (RESULTS / "local_steps.json").write_text(json.dumps(losses, indent=1) + "\n")
        (RESULTS / "local_steps.md").write_text(text)
        picture(losses).savefig(RESULTS / "local_steps.png", dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    main(parser.parse_args().steps)
