"""The loss of the demo's GPT with coded messages, and with its state in bf16, beside fp32.

    python -m benchmarks.bytes.loss                     # some minutes on one core
    python -m benchmarks.bytes.loss --steps 40          # a look; writes nothing

Two ranks run in lock-step in one process. Each way to train is run with three seeds, which draw the first parameters
and the batches, and is compared with fp32 of the same seed, because seeds differ by more than codes do. Rounding to
nearest loses most where a step changes a parameter by less than half of its last bit, so state in bf16 is also trained
at a tenth of the rate. Writes fewer_bytes_loss.json, .md and .png in benchmarks/results. Fails if a way loses more than
`MOST`, or if rounding to nearest at the low rate loses less than `LEAST_OF_NEAREST`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import functional_call, grad_and_value

import ztrans as zt

from .. import RESULTS

sys.path.insert(0, str(RESULTS.parents[1] / "examples"))
from gpt import adamw, init
from model import GPT, Config
from text import draw, stdlib_bytes

MESH = zt.AbstractMesh(dp=2)
CONFIG = Config(layers=2, width=96, heads=4, sequence=64)
BATCH, STEPS, EVERY, SEEDS = 16, 600, 20, (0, 1, 2)
HIGH, LOW = 1e-3, 1e-4
HELD_OUT = 1 << 16  # bytes of the text
LEAST_OF_NEAREST = 0.10


@dataclass(frozen=True)
class Way:
    """A way to train: its transforms, its rate, and the most that it may lose beside fp32, as a share."""

    name: str
    transforms: tuple[zt.Transform, ...] = ()
    rate: float = HIGH
    stage: int = 3
    most: float | None = None


IN_8_BITS = zt.store(torch.bfloat16, first_moments="m.*", second_moments="v.*")

WAYS = (
    Way("fp32"),
    Way("gathers and gradients in 8 bits", (zt.quantize_gathers(), zt.quantize_grads()), most=2e-3),
    Way(
        "4-bit differences of parameters, 4-bit gradients",
        (zt.quantize_gathers(bits=4, of="differences"), zt.quantize_grads(bits=4)),
        stage=2,
        most=3e-3,
    ),
    Way("state in bf16, stochastic", (zt.store(torch.bfloat16),), most=2e-3),
    Way("state in bf16, moments in 8 bits", (IN_8_BITS,), most=2e-3),
    Way("fp32, low rate", rate=LOW),
    Way("state in bf16, stochastic, low rate", (zt.store(torch.bfloat16),), LOW, most=2e-3),
    Way("state in bf16, moments in 8 bits, low rate", (IN_8_BITS,), LOW, most=2e-3),
    Way("state in bf16, nearest, low rate", (zt.store(torch.bfloat16, rounding="nearest"),), LOW),
)
NEAREST = WAYS[-1]


def base_of(way: Way) -> Way:
    """The way in fp32 with the same rate."""
    return next(w for w in WAYS if not w.transforms and w.rate == way.rate)


@dataclass
class Losses:
    """The losses of a run: every training loss, and the validation loss after every few steps."""

    train: list[float]
    held_out: list[float]

    @property
    def last(self) -> float:
        """The mean of the last 50 training losses."""
        return statistics.mean(self.train[-50:])


def train_step_of(model: GPT) -> Callable:
    def loss_fn(params: dict, tokens: Tensor) -> Tensor:
        logits = functional_call(model, params, tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(state: dict, tokens: Tensor) -> tuple[dict, Tensor]:
        grads, loss = grad_and_value(loss_fn)(state["params"], tokens)
        return adamw(state, grads, decay=0), loss

    return train_step


def run(way: Way, seed: int, steps: int, text: Tensor) -> Losses:
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    step = zt.chain(zt.shard_params(MESH, stage=way.stage), *way.transforms)(train_step_of(model))
    state = step.init(init(model, way.rate))
    held_out = [draw(text[-HELD_OUT:], i, BATCH, CONFIG.sequence) for i in range(16)]

    @torch.no_grad()
    def loss_of(params: dict) -> float:
        losses = []
        for tokens in held_out:
            logits = functional_call(model, params, tokens[:, :-1])
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())
        return statistics.mean(losses)

    losses = Losses([], [])
    lowered = None
    for i in range(steps):
        tokens = draw(text[:-HELD_OUT], seed * steps + i, BATCH, CONFIG.sequence)
        parts = tokens.chunk(2)
        lowered = lowered or step.lower(state, parts[0])
        state, outputs = lowered.lockstep(state, [(x,) for x in parts])
        losses.train.append(outputs[0].item())  # the mean of all ranks
        if i % EVERY == EVERY - 1:
            inner = state[0] if isinstance(state, tuple) else state
            losses.held_out.append(loss_of({k: p.float() for k, p in inner["params"].items()}))
    return losses


def measured(steps: int) -> dict[str, list[Losses]]:
    torch.set_num_threads(1)
    text = stdlib_bytes()
    losses: dict[str, list[Losses]] = {way.name: [] for way in WAYS}
    for seed in SEEDS:
        for way in WAYS:
            losses[way.name].append(run(way, seed, steps, text))
            end = losses[way.name][-1]
            print(f"seed {seed}, {way.name}: {end.last:.4f} {end.held_out[-1]:.4f}", flush=True)
    return losses


def loss_beside_fp32(way: Way, losses: dict[str, list[Losses]], held_out: bool) -> float:
    """What a way loses beside fp32 of the same seed, as a share: the mean over the seeds."""
    shares = []
    for mine, base in zip(losses[way.name], losses[base_of(way).name]):
        pair = (mine.held_out[-1], base.held_out[-1]) if held_out else (mine.last, base.last)
        shares.append(pair[0] / pair[1] - 1)
    return statistics.mean(shares)


def holds(losses: dict[str, list[Losses]]) -> bool:
    for way in WAYS:
        if way.most is None:
            continue
        if any(loss_beside_fp32(way, losses, which) > way.most for which in (False, True)):
            return False
    return loss_beside_fp32(NEAREST, losses, True) >= LEAST_OF_NEAREST


def picture(losses: dict[str, list[Losses]]) -> Figure:
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, height_ratios=(2, 1))
    names = list(dict.fromkeys(way.name.removesuffix(", low rate") for way in WAYS))
    for (top, bottom), rate in zip(axes.T, (HIGH, LOW)):
        for way in (w for w in WAYS if w.rate == rate):
            mean = _mean_curve(losses[way.name])
            base = _mean_curve(losses[base_of(way).name])
            steps = [EVERY * (k + 1) for k in range(len(mean))]
            name = way.name.removesuffix(", low rate")
            color = f"C{names.index(name)}"  # the same on both sides
            width = 1.2 if way.transforms else 2.5
            top.plot(steps, mean, label=name, linewidth=width, color=color)
            if way.transforms:
                more = [100 * (x / y - 1) for x, y in zip(mean, base)]
                bottom.plot(steps, more, color=color)
        top.set(ylabel="validation loss (nats per byte)", title=f"rate {rate:g}")
        bottom.set(ylabel="beside fp32, %", xlabel="step")
        bottom.axhline(0, color="black", linewidth=0.5)
        top.legend(frameon=False)
        for each in (top, bottom):
            each.grid(alpha=0.25)
            each.spines[["top", "right"]].set_visible(False)
    return figure


def _mean_curve(runs: list[Losses]) -> list[float]:
    return [statistics.mean(values) for values in zip(*(each.held_out for each in runs))]


def report(losses: dict[str, list[Losses]], steps: int) -> str:
    rows = []
    for way in WAYS:
        trained = statistics.mean(each.last for each in losses[way.name])
        held_out = statistics.mean(each.held_out[-1] for each in losses[way.name])
        cells = [way.name, f"{way.rate:g}", f"{trained:.4f}", f"{held_out:.4f}", "", "", ""]
        if way.transforms:
            cells[4] = f"{loss_beside_fp32(way, losses, False):+.2%}"
            cells[5] = f"{loss_beside_fp32(way, losses, True):+.2%}"
        if way.most is not None:
            cells[6] = f"{way.most:.1%}"
        rows.append(f"| {' | '.join(cells)} |")
    count = sum(p.numel() for p in GPT(CONFIG).parameters())
    return "\n".join([
        "# The loss with fewer bytes",
        "",
        f"{date.today()}, torch {torch.__version__}, two ranks in lock-step. The GPT of the demo ({CONFIG.layers} "
        f"layers of {CONFIG.width}, {count:,} parameters) on bytes of the standard library's source, {steps} steps of "
        f"{BATCH} x {CONFIG.sequence} tokens, AdamW without decay, {len(SEEDS)} seeds. The training loss is the mean "
        f"of the last 50 steps. A way is compared with fp32 of the same seed, and the table has the means.",
        "",
        "| | rate | training loss | validation loss | training, beside fp32 | validation, beside fp32 | at most |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        "![validation loss by step](fewer_bytes_loss.png)",
        "",
    ])  # fmt: skip


def main(steps: int) -> None:
    losses = measured(steps)
    text = report(losses, steps)
    print(text)
    if steps == STEPS:
        numbers = {name: [vars(each) for each in runs] for name, runs in losses.items()}
        (RESULTS / "fewer_bytes_loss.json").write_text(json.dumps(numbers) + "\n")
        (RESULTS / "fewer_bytes_loss.md").write_text(text)
        picture(losses).savefig(RESULTS / "fewer_bytes_loss.png", dpi=110)
        sys.exit(not holds(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    main(parser.parse_args().steps)
