"""The results of all subjects, as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
from datetime import date

import torch
from matplotlib.figure import Figure

from .model import Config
from .subjects import SUBJECTS

MIB = 2**20
# The relative difference that is allowed between a loss and that of plain fp32 training on the whole batch.
TOLERANCE = {"fp32": 2e-3, "bf16": 5e-2}
MIDDLE = (
    "first",
    "foretold",
    "recorded",
    "simulated",
    "bound",
)  # keys of predictions, of which the median is shown
REDUCED = {
    "fp32": "fp32 throughout",
    "bf16": "bf16 in matmuls, gathers and reductions; state in fp32",
}
HEAD = (
    "| | seconds a step, median | least | of compute | predicted | recorded | simulated | bound | sent, MiB "
    "| malloc, MiB | resident, MiB | loss | |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
)
LEGEND = """\
- All subjects stay in memory and take turns of a few steps, while the others are stopped.
- *of compute*: the median divided by that of the plain loop in eager mode without communication, on all hosts at once.
- *predicted*: simulated seconds of the plan, from what is known before the first turn: a calibration, and five recorded
  steps of an earlier plan. The ratio in brackets is the median divided by them. *recorded*: measured seconds of steps
  with recording, three before the timed steps of each turn and three after them; they show how noisy the machine was.
  *simulated*: simulated seconds from the costs of these recorded steps; they show how good the simulator is. *bound*:
  the lower bound, which no order of the same messages can beat with these costs. *first plan*: seconds of the five
  recorded steps. Of their plan and the plan that is made from them, the one that was faster is timed.
- *sent*: bytes that one host sends in a step, headers included.
- *malloc*: peak of the bytes that malloc has handed out, in the untimed step of each turn, minus those before the model
  was built. *resident*: the same for memory that the operating system has given, in all steps of the turns. It includes
  the modules of a compiler.
- *remat*: backward computes cheap activations again.
- *bf16*: FSDP2, DeepSpeed, the schedule by hand and ztrans from stage 1 on cast parameters; DDP, compute alone,
  SimpleFSDP and ztrans stage 0 use autocast.
- *loss*: mean over ranks after the last step. An exclamation mark: it differs from plain training on the whole batch.
- All but JAX use AdamW(fused=True). Every step uses the same batch. Its seconds are those of its slowest host.
"""


def line(run: dict) -> str:
    """The result of a turn in a few words, for the terminal."""
    if "seconds" not in run:
        return " ".join(f"{key}: {str(value).splitlines()[0]}" for key, value in run.items())
    return f"{statistics.median(run['seconds']):.3f} s   loss {run['losses'][0]:.4f} -> {run['losses'][1]:.4f}"


def pooled(runs: list[dict]) -> dict:
    """The turns of one subject merged into one: all steps, the median of the predictions, the largest memory."""
    good = [run for run in runs if "seconds" in run]
    if len(good) < len(runs) or not runs:
        return next((run for run in runs if "seconds" not in run), {"skipped": "not run"})
    pool, predictions = dict(good[-1]), [prediction for run in good for prediction in run["said"]]
    pool |= pool.pop("said")[-1]
    pool |= {
        k: statistics.median(prediction[k] for prediction in predictions)
        for k in MIDDLE
        if k in predictions[-1]
    }
    pool |= {k: max(run[k] for run in good) for k in ("lent", "resident")}
    pool["sent"] = statistics.median(run["sent"] for run in good)
    return pool | {"seconds": [s for run in good for s in run["seconds"]]}


def agrees(losses: list[float], truth: list[float], precision: str) -> bool:
    return all(abs(a - b) <= TOLERANCE[precision] * b for a, b in zip(losses, truth))


def table(runs: dict[str, dict], precision: str, truth: list[float]) -> list[str]:
    subjects = {s.name: s for s in SUBJECTS}
    base = runs.get("compute alone", {}).get("seconds")
    rows = list(HEAD)
    for name, run in runs.items():
        if "seconds" not in run:
            rows.append(f"| {name} | | | | | | | | | | | | {line(run)} |")
            continue
        median, least = statistics.median(run["seconds"]), min(run["seconds"])
        memory = f"{run['lent'] / MIB:.0f} | {run['resident'] / MIB:.0f}"
        loss = f"{run['losses'][1]:.4f}"
        subject = subjects[name.split(" [")[0]]
        if subject.alone:
            loss = ""
        elif not agrees(run["losses"], truth, precision):
            loss += " !"
        compared = [
            f"{run[k]:.3f} ({median / run[k]:.2f}x)" if k in run else "" for k in MIDDLE[1:]
        ]
        share = f"{median / statistics.median(base):.2f}" if base else ""
        times = f"{median:.3f} | {least:.3f} | {share} | {' | '.join(compared)}"
        figures = f"{times} | {run['sent'] / MIB:.1f} | {memory} | {loss}"
        remark = f"{run['first']:.3f} s with the first plan" if "first" in run else subject.remark
        rows.append(f"| {name} | {figures} | {remark} |")
    return rows


def ratios(runs: dict[str, dict]) -> list[str]:
    """The seconds of each ztrans row divided by those of each peer, whose faster row counts (eager or compiled)."""
    medians = {
        name: statistics.median(run["seconds"]) for name, run in runs.items() if "seconds" in run
    }
    peers: dict[str, float] = {}
    for name, seconds in medians.items():
        peer = name.removesuffix(", torch.compile")
        if "ztrans" not in name and "alone" not in name:
            peers[peer] = min(seconds, peers.get(peer, seconds))
    if not peers:
        return []
    rows = [f"| | {' | '.join(peers)} |", f"|---|{'---:|' * len(peers)}"]
    for name, seconds in medians.items():
        if "ztrans" in name:
            shares = " | ".join(f"{seconds / peer_seconds:.3f}" for peer_seconds in peers.values())
            rows.append(f"| {name} | {shares} |")
    return [
        "Seconds divided by those of each peer, whose faster row counts (eager or compiled):",
        "",
        *rows,
        "",
    ]


def changes(runs: dict[str, dict]) -> list[str]:
    """The seconds of ztrans divided by those of the same subject with the ztrans of another checkout."""
    medians = {
        name: statistics.median(run["seconds"]) for name, run in runs.items() if "seconds" in run
    }
    rows = [
        f"| {listed} | {seconds:.3f} | {medians[listed]:.3f} | {medians[listed] / seconds:.3f} |"
        for name, seconds in medians.items()
        if (listed := name.split(" [")[0]) != name and listed in medians
    ]
    head = ["Seconds with the other checkout, with this one, and their ratio:", ""]
    return (
        [*head, "| | other | this | this / other |", "|---|---:|---:|---:|", *rows, ""]
        if rows
        else []
    )


def write(args: argparse.Namespace, config: Config, truth: list[float], runs: dict) -> str:
    """Write the report, the JSON and the picture. Returns the text of the report."""
    by_precision = {p: {n: pooled(turns) for n, turns in each.items()} for p, each in runs.items()}
    names = ("torch", "deepspeed", "jax")
    versions = {n: importlib.metadata.version(n) for n in names if importlib.util.find_spec(n)}
    processor = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    where = f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, "
    where += ", ".join(f"{n} {v}" for n, v in versions.items())
    network = f"{args.hosts} hosts, {args.rate} links"
    steps = f"{args.steps * args.rounds} steps timed, in {args.rounds} turns"
    text = [f"# Training steps: {network}", "", f"{date.today()}; {where}. {steps}.", ""]
    text += [
        f"GPT: {', '.join(f'{k} {v}' for k, v in dataclasses.asdict(config).items())} a rank.",
        "",
    ]
    text += [
        f"Plain training on the whole batch: loss {truth[0]:.4f}, and after the last step {truth[1]:.4f}.",
        "",
    ]
    for precision, results in by_precision.items():
        text += [f"## {precision}: {REDUCED[precision]}", "", *table(results, precision, truth), ""]
        text += [*ratios(results), *changes(results)]
    text += [LEGEND]
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"peers_{args.hosts}hosts_{args.rate}"
    stem.with_suffix(".md").write_text("\n".join(text))
    about = {
        "date": str(date.today()),
        "where": where,
        "hosts": args.hosts,
        "rate": args.rate,
        "truth": truth,
    }
    data = about | {"config": dataclasses.asdict(config), "results": by_precision}
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1))
    picture(by_precision, network).savefig(stem.with_suffix(".png"), dpi=130)
    return "\n".join(text)


def picture(by_precision: dict[str, dict], network: str) -> Figure:
    """A bar chart of the medians, with a tick at the fastest step, and a line at compute alone."""
    timed = {
        p: {n: r["seconds"] for n, r in results.items() if "seconds" in r}
        for p, results in by_precision.items()
    }
    timed = {p: seconds for p, seconds in timed.items() if seconds}
    rows = max(map(len, timed.values()), default=1)
    figure = Figure(figsize=(7 * len(timed) or 7, 1.4 + 0.3 * rows), layout="constrained")
    figure.suptitle(f"Seconds a training step: {network}")
    for axes, (precision, seconds) in zip(
        figure.subplots(1, len(timed) or 1, squeeze=False)[0], timed.items()
    ):
        medians = {name: statistics.median(s) for name, s in seconds.items()}
        colours = [
            "tab:blue" if "ztrans" in n else "0.35" if "alone" in n else "0.7" for n in medians
        ]
        bars = axes.barh(list(medians), list(medians.values()), color=colours, height=0.7)
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8)
        for i, s in enumerate(seconds.values()):
            axes.plot([min(s)] * 2, [i - 0.35, i + 0.35], color="black", linewidth=1)
        if "compute alone" in medians:
            axes.axvline(medians["compute alone"], color="black", linewidth=0.8, linestyle=":")
        axes.set(
            title=precision,
            xlabel="median; black tick: the fastest step",
            xlim=(0, 1.12 * max(medians.values())),
        )
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
