"""Whole steps with and without each choice that ztrans makes: what does a choice gain?

    OMP_NUM_THREADS=1 python -m benchmarks.ablations

For each step and each choice a version of the step is built without that choice, and one without any of them. All
versions of a step are in one process and take turns. Writes benchmarks/results/ablations.md and .json; parts that are
not run keep their figures.

A `Part` is one table of the report. Another subject, such as the search moves of the planner, is another entry of
`PARTS`: its choices, its steps, and how to build a step without some of the choices. What is built is a function that
returns seconds, measured or simulated.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from ztrans.runtime.inductor import backend
from ztrans.tracing.arguments import Arguments, local_inputs

from .inductor import RESULTS, lifted, processor
from .peers.model import Config

ALL, NONE = "all choices", "no choice"
WARM_UP = 3  # calls of each version before its steps are timed

Step = Callable[[], float]  # runs a step, or simulates one, and returns its seconds
Build = Callable[[frozenset[str]], Step]  # builds a step without the named choices


@dataclass(frozen=True)
class Part:
    """One table: choices, and steps that can be built without some of them. `unit` says what the seconds are."""

    title: str
    unit: str
    choices: tuple[str, ...]
    steps: Mapping[str, Build]


ONEDNN = "matrix products by oneDNN"


def compiled_step(config: Config, bf16: bool, without: frozenset[str]) -> Step:
    """A step of the benchmark's GPT, compiled by Inductor, with or without oneDNN for matrix products."""
    lowered, state, batch = lifted(config, bf16=bf16)
    arguments = Arguments.of(lowered.program.captured.fn, (state, *batch), {})
    _, local = local_inputs(lowered.program, lowered.graph, arguments)
    _, run = backend.executable(lowered.graph, None, local, onednn=ONEDNN not in without)

    def step() -> float:
        start = time.perf_counter()
        run(local)  # the state among these is donated: updated in place
        return time.perf_counter() - start

    return step


def cpu_part(config: Config, long: Config) -> Part:
    """The choices of the CPU's compiled backend, in fp32, in bf16, and with a longer sequence."""
    steps = {
        f"GPT, sequence {config.sequence}, fp32": functools.partial(compiled_step, config, False),
        f"GPT, sequence {config.sequence}, bf16": functools.partial(compiled_step, config, True),
        f"GPT, sequence {long.sequence}, fp32": functools.partial(compiled_step, long, False),
        f"GPT, sequence {long.sequence}, bf16": functools.partial(compiled_step, long, True),
    }
    return Part("The CPU's kernels", "measured, one core", (ONEDNN,), steps)


LONG = Config(sequence=1024, batch=1)  # as many tokens as in the benchmark's own step
PARTS: dict[str, Callable[[], Part]] = {"cpu": functools.partial(cpu_part, Config(), LONG)}


def measure(part: Part, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round, by step and by what was left out."""
    return {name: interleaved(versions(part.choices, build), rounds) for name, build in part.steps.items()}


def versions(choices: Sequence[str], build: Build) -> dict[str, Step]:
    """A step with all choices, without each of them, and, where there are several, without any."""
    left_out = {ALL: frozenset[str](), **{choice: frozenset([choice]) for choice in choices}}
    if len(choices) > 1:
        left_out[NONE] = frozenset(choices)
    return {name: build(without) for name, without in left_out.items()}


def interleaved(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each version, which take turns. Every round begins with another one, so noise affects all alike."""
    names, seconds = list(steps), {name: [] for name in steps}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    for k in range(rounds):
        first = k % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(steps[name]())
    return seconds


def table(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """A row for each version of each step. `gain`: by how much the choice shortens the step."""
    lines = ["| step | without | median, s | least, s | of the step with all | gain |", "|---|---|---:|---:|---:|---:|"]
    for step, by_version in seconds.items():
        base = statistics.median(by_version[ALL])
        for version, each in by_version.items():
            middle = statistics.median(each)
            without = {ALL: "nothing", NONE: "any of them"}.get(version, version)
            gain = "" if version == ALL else f"{1 - base / middle:.1%}"
            lines.append(f"| {step} | {without} | {middle:.4f} | {min(each):.4f} | {middle / base:.3f} | {gain} |")
    return lines


def report(results: Mapping[str, dict]) -> str:
    """The tables of all parts that have been measured."""
    lines = ["# Ablations: whole steps with and without each choice", ""]
    for each in results.values():
        rounds = len(next(iter(next(iter(each["seconds"].values())).values())))
        lines += [f"## {each['title']}", "", f"{each['where']}; {each['date']}."]
        lines += [f"Seconds a step, {each['unit']}: medians of {rounds}, all versions of a step in turns.", ""]
        lines += [*table(each["seconds"]), ""]
    return "\n".join(lines)


def main(names: Sequence[str], rounds: int, out: Path, parts: Mapping[str, Callable[[], Part]] = PARTS) -> str:
    """Measure some parts, and write the report of all. Returns its text."""
    file = out / "ablations.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    where = f"{processor()}, torch {torch.__version__}"
    for name in names:
        part = parts[name]()
        about = {"title": part.title, "unit": part.unit, "where": where, "date": str(date.today())}
        results[name] = about | {"seconds": measure(part, rounds)}
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    (out / "ablations.md").write_text(report(results))
    return report(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder, for figures of another machine")
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    print(main(arguments.parts, arguments.rounds, arguments.out))
