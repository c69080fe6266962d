"""Whole steps with and without each choice that ztrans makes: what does a choice gain?

    OMP_NUM_THREADS=1 python -m benchmarks.plans.ablations

For each step and each choice, a version of the step is built without that choice, and one without any of them. All
versions of a step run in one process. Measured versions take turns. Simulated versions run once, because they have the
same seconds in every run. Writes benchmarks/results/ablations.md and .json; parts that are not run keep their figures.

A `Part` is one table of the report, and an entry of `PARTS`: its choices, its steps, and a function that builds a step
without some of the choices. A built step is a function that returns seconds, measured or simulated.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from tests.support.evaluate import evaluate
from ztrans.planning.levers import PARTS, WHOLE
from ztrans.planning.solver.changes import CHANGES, Change
from ztrans.planning.solver.problem import Problem
from ztrans.planning.solver.search import solve
from ztrans.planning.solver.sweep import VALUES, values_of

from .. import RESULTS, processor
from .planned import subjects

ALL, NONE = "all choices", "no choice"
WARM_UP = 3  # calls of each version before its steps are timed
LITTLE = 0.005  # the table of a simulated part lists the steps that change by this share

Step = Callable[[], float]  # runs a step, or simulates one, and returns its seconds
Build = Callable[[frozenset[str]], Step]  # builds a step without the named choices


@dataclass(frozen=True)
class Part:
    """One table: choices, and steps that can be built without some of them.

    The steps are built one after the other, because the programs of all would fill the memory.
    """

    title: str
    unit: str  # where the seconds come from
    choices: tuple[str, ...]
    steps: Iterable[tuple[str, Build]]
    simulated: bool = False


CHOICES: dict[str, Change | str] = {
    **{f"sweep: {scalar}": scalar for scalar in (WHOLE.name, PARTS.name, *VALUES)},
    **{f"climb: {change.__doc__}".rstrip("."): change for change, _ in CHANGES},
}


def planned_step(problem: Problem, without: frozenset[str]) -> Step:
    """A step that is planned without some of what the search tries."""
    left_out = [CHOICES[name] for name in without]
    changes = tuple(each for each in CHANGES if each[0] not in left_out)
    values = {k: values for k, values in values_of(problem).items() if k not in left_out}
    return lambda: evaluate(problem, solve(problem, changes=changes, values=values)).seconds


def search_part() -> Part:
    """What the planner's search tries: the scalars of its sweep, and the random changes of its climbs."""
    steps = ((name, functools.partial(planned_step, problem)) for name, problem in subjects())
    return Part(
        "What the planner's search tries",
        "simulated",
        tuple(CHOICES),
        steps,
        simulated=True,
    )


PARTS: dict[str, Callable[[], Part]] = {
    "search": search_part,
}


def measure(part: Part, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round, by step and by what was left out."""
    seconds = {}
    for name, build in part.steps:
        steps = versions(part.choices, build)
        seconds[name] = (
            {v: [step()] for v, step in steps.items()}
            if part.simulated
            else interleaved(steps, rounds)
        )
    return seconds


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
    lines = [
        "| step | without | median, s | least, s | of the step with all | gain |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for step, by_version in seconds.items():
        base = statistics.median(by_version[ALL])
        for version, each in by_version.items():
            middle = statistics.median(each)
            without = {ALL: "nothing", NONE: "any of them"}.get(version, version)
            gain = "" if version == ALL else f"{1 - base / middle:.1%}"
            lines.append(
                f"| {step} | {without} | {middle:.4f} | {min(each):.4f} | {middle / base:.3f} | {gain} |"
            )
    return lines


def by_choice(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """A row for each choice: how much longer steps are without it, on average and at most, and the steps it changes."""
    lines = ["| without | mean | most | steps: with, without, ms |", "|---|---:|---:|---|"]
    versions = [version for version in next(iter(seconds.values())) if version != ALL]
    for version in versions:
        pairs = {
            step: (by_version[ALL][0], by_version[version][0])
            for step, by_version in seconds.items()
        }
        more = sorted(((b / a - 1, step) for step, (a, b) in pairs.items()), reverse=True)
        listed = "; ".join(
            _pair(step, *pairs[step]) for share, step in more if abs(share) >= LITTLE
        )
        without = "any of them" if version == NONE else version
        lines.append(
            f"| {without} | {statistics.mean(m for m, _ in more):+.2%} | {more[0][0]:+.2%} | {listed} |"
        )
    return lines


def _pair(step: str, base: float, without: float) -> str:
    return f"{step}: {1e3 * base:.1f}, {1e3 * without:.1f} ({without / base - 1:+.1%})"


def report(results: Mapping[str, dict]) -> str:
    """The tables of all parts that have been measured."""
    lines = ["# Ablations: whole steps with and without each choice", ""]
    for each in results.values():
        rounds = len(next(iter(next(iter(each["seconds"].values())).values())))
        lines += [f"## {each['title']}", "", f"{each['where']}; {each['date']}."]
        if each.get("simulated"):
            count = len(each["seconds"])
            lines += [
                f"Simulated seconds of {count} steps. Steps that change by {LITTLE:.1%} or more are listed.",
                "",
            ]
            lines += [*by_choice(each["seconds"]), ""]
        else:
            lines += [
                f"Seconds a step, {each['unit']}: medians of {rounds}, all versions of a step in turns.",
                "",
            ]
            lines += [*table(each["seconds"]), ""]
    return "\n".join(lines)


def main(
    names: Sequence[str], rounds: int, out: Path, parts: Mapping[str, Callable[[], Part]] = PARTS
) -> str:
    """Measure some parts, and write the report of all. Returns its text."""
    file = out / "ablations.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    where = f"{processor()}, torch {torch.__version__}"
    for name in names:
        part = parts[name]()
        about = {"title": part.title, "unit": part.unit, "where": where, "date": str(date.today())}
        about |= {"simulated": True} if part.simulated else {}
        results[name] = about | {"seconds": measure(part, rounds)}
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    (out / "ablations.md").write_text(report(results))
    return report(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="a folder, for figures of another machine"
    )
    arguments = parser.parse_args()
    print(main(arguments.parts, arguments.rounds, arguments.out))
