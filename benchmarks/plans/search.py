"""How long `zt.search` takes, how well its small programs predict a step, and how near its winner is to the best.

    OMP_NUM_THREADS=1 python -m benchmarks.plans.search                 # from the project's root; 15 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.plans.search search          # one part: search, predictions or exhaustive

search       Llama-3-8B with 4 x 8,192 tokens a rank on 64 H100s, 8 on a host: all knobs, within 50 seconds.
predictions  six settings of the same step: the row of a search beside the plan of all 32 layers.
exhaustive   a GPT of 4 layers on 16 cards with little memory: the winner beside the plans of all settings.

Everything is simulated, on one core. Each part writes its section of benchmarks/results/search.md. Fails if the search
takes more than 60 s of processor time, if a prediction is off by more than 2%, or if the winner takes more than 1.03 of
the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch

import ztrans as zt
from ztrans.planning.devices import H100
from ztrans.search.knobs import Setting, Start, described, settings, with_schedules

from .. import RESULTS
from .frontier_models import gpt, llama

PAGE = RESULTS / "search.md"
MOST_SECONDS, MOST_OFF, MOST_ABOVE = 60.0, 0.02, 1.03
LINKS = zt.by_host(8, "nvlink4", "infiniband")
# The settings of `predictions`: with much recomputation and with little, and each knob once.
PREDICTED: tuple[dict[str, Any], ...] = (
    {"micro_batches": 1, "stage": 3},
    {"micro_batches": 2, "stage": 3},
    {"micro_batches": 4, "stage": 1},
    {"micro_batches": 4, "stage": 2, "replicas": True},
    {"micro_batches": 4, "stage": 3, "on_host": "moments"},
    {"micro_batches": 4, "stage": 3, "order": "layers", "tile": 4096},
)
DEFAULTS = {"order": "batches", "replicas": False, "tile": 0, "on_host": "nothing"}


def llama_on_64() -> tuple[Callable, Any, tuple, zt.Cluster]:
    step, state, batch = llama(batch=4)
    return zt.shard_params(zt.AbstractMesh(dp=64))(step), state, batch, zt.cluster("h100", dp=LINKS)


def search() -> tuple[str, bool]:
    """The search over all knobs."""
    step, state, batch, machines = llama_on_64()
    begin = time.process_time()
    found = zt.search(step, state, *batch, cluster=machines, seconds=50)
    seconds = time.process_time() - begin
    text = f"{seconds:.1f} s of processor time.\n\n```text\n{found}\n\n{found.code()}\n```\n"
    return text, seconds <= MOST_SECONDS


def predictions() -> tuple[str, bool]:
    """Rows of a search beside plans of the whole step."""
    step, state, batch, machines = llama_on_64()
    lines = [
        "| setting | predicted ms | planned ms | | predicted GiB | planned GiB | small s | whole s |"
    ]
    lines.append(f"|{'---|' * 8}")
    all_near = True
    for values in PREDICTED:
        begin = time.process_time()
        knobs = {name: (value,) for name, value in {**DEFAULTS, **values}.items()}
        (row,) = zt.search(step, state, *batch, cluster=machines, knobs=knobs, seconds=1e6)
        between = time.process_time()
        lowered = row.lower()
        end = time.process_time()
        seconds = lowered.timeline().seconds
        off = row.seconds / seconds - 1
        all_near &= abs(off) <= MOST_OFF
        peaks = [x / 2**30 for x in (row.peak, lowered.memory_analysis().peak)]
        lines.append(
            f"| {row.setting} | {row.seconds * 1e3:,.1f} | {seconds * 1e3:,.1f} | {off:+.2%} | {peaks[0]:.2f} "
            f"| {peaks[1]:.2f} | {between - begin:.0f} | {end - between:.0f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join([*lines, ""]), all_near


def exhaustive() -> tuple[str, bool]:
    """The winner of a search beside the best of all settings, each of which is planned whole."""
    step, state, batch = gpt(layers=4, batch=4)
    sharded = zt.shard_params(zt.AbstractMesh(dp=16))(step)
    small_card = dataclasses.replace(H100, name="H100 with 1 GiB", memory=1 << 30, reserve=0.0)
    machines = zt.cluster(small_card, dp=LINKS)
    knobs = {"micro_batches": (1, 2), "on_host": ("nothing", "moments"), "tile": (0,)}
    knobs["order"] = ("batches",)
    begin = time.process_time()
    found = zt.search(sharded, state, *batch, cluster=machines, knobs=knobs, seconds=1e6)
    searched = time.process_time() - begin

    traced = sharded.trace(state, *batch)
    transforms = with_schedules(sharded.transforms)
    start = Start(traced.graph, Setting((), transforms, machines), rows=4)
    planned: list[tuple[float, str]] = []
    begin = time.process_time()
    tried = 0
    for setting in settings(start, knobs):
        tried += 1
        try:
            lowered = traced.with_transforms(setting.transforms).planned(setting.cluster)
        except ValueError:  # it does not fit
            continue
        planned.append((lowered.timeline().seconds, described(setting.values)))
    best, name = min(planned)
    winner = found[0].lower().timeline().seconds
    text = (
        f"{tried} settings, {len(planned)} of which fit, planned in {time.process_time() - begin:.0f} s: the best is "
        f"{name}, {best * 1e3:.2f} ms. The search took {searched:.0f} s: {found[0].setting}, {winner * 1e3:.2f} ms, "
        f"{winner / best:.3f} of the best.\n"
    )
    return text, winner <= MOST_ABOVE * best


PARTS = {"search": search, "predictions": predictions, "exhaustive": exhaustive}


def write_section(name: str, text: str) -> None:
    """Write one section of the page of results, and keep the others."""
    page = PAGE.read_text() if PAGE.exists() else "# zt.search, simulated\n"
    title, *old = page.split("\n## ")
    sections = {section.partition("\n")[0]: section for section in old}
    sections[name] = f"{name}\n\n{text}"
    in_order = [sections[part].rstrip() for part in PARTS if part in sections]
    PAGE.write_text("\n\n## ".join([title.rstrip(), *in_order]) + "\n")


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    wrong: list[str] = []
    where = f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    for name in names:
        text, is_right = PARTS[name]()
        print(f"## {name}\n\n{text}", flush=True)
        write_section(name, f"{where}.\n\n{text}")
        if not is_right:
            wrong.append(name)
    if wrong:
        sys.exit(f"more than it may be: {', '.join(wrong)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *PARTS], help="the parts, by default all")
    main(parser.parse_args().names or list(PARTS))
