"""Seconds that a CPU needs to encode, decode and sum codes of 8 and 4 bits, beside a cast of as many elements to bf16.

    OMP_NUM_THREADS=1 python -m benchmarks.host.codec

Operations of PyTorch are what `backend="eager"` runs, compiled ones are those of `backend="inductor"`. Each turn runs
the cast and all others once, on one thread. Writes benchmarks/results/codec.md with medians. It takes a minute; run it
on a quiet machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from itertools import starmap
from typing import NamedTuple

import torch

from ztrans.ir.wire_format import Coded, Shaped
from ztrans.runtime.inductor.codec import CompiledCoded, decoder, encoder

from .. import RESULTS, processor

ELEMENTS = 1 << 22
TERMS = 4
TURNS = 15
FORMATS = (8, 256), (4, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Case(NamedTuple):
    """A format and the dtype of what it encodes, with functions to time."""

    name: str
    runs: dict[str, Callable[[], object]]


def case(form: Coded, name: str, dtype: torch.dtype) -> Case:
    x = torch.randn(1, ELEMENTS, dtype=dtype)
    codes = torch.empty(1, form.nbytes(ELEMENTS), dtype=torch.uint8)
    terms = [form.pack([x], [ELEMENTS], 1, codes)[0].clone() for _ in range(TERMS)]
    value = [Shaped(x.shape, dtype)]
    total = [Shaped((ELEMENTS,), torch.float32)]
    runs: dict[str, Callable[[], object]] = {
        "encode": lambda: form.pack([x], [ELEMENTS], 1, codes),
        "decode": lambda: form.unpack(codes, [ELEMENTS], value),
        "sum": lambda: form.totals(terms, [ELEMENTS], total, "mean", TERMS),
    }
    return Case(f"{form}, {name}", runs)


def cases_of(kind: type[Coded]) -> list[Case]:
    forms = list(starmap(kind, FORMATS))
    return [case(form, name, dtype) for form in forms for name, dtype in DTYPES.items()]


def medians(cases: list[Case]) -> tuple[float, dict[str, dict[str, float]]]:
    """The median seconds of the cast, and of each function by case."""
    wide = torch.randn(ELEMENTS)
    narrow = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    casts: list[float] = []
    times: dict[str, dict[str, list[float]]] = {
        c.name: {name: [] for name in c.runs} for c in cases
    }
    for _ in range(TURNS):
        for c in cases:
            casts.append(seconds(lambda: narrow.copy_(wide)))
            for name, run in c.runs.items():
                times[c.name][name].append(seconds(run))
    found = {}
    for name, by_run in times.items():
        found[name] = {run: statistics.median(values) for run, values in by_run.items()}
    return statistics.median(casts), found


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows = rows_of("PyTorch", *medians(cases_of(Coded)))
    began = time.perf_counter()
    for form in starmap(CompiledCoded, FORMATS):
        for dtype in DTYPES.values():
            encoder(form, dtype)
            decoder(form, dtype, False)
        decoder(form, torch.float32, True)
    compiling = time.perf_counter() - began
    rows += rows_of("compiled", *medians(cases_of(CompiledCoded)))
    head = [
        "# The codec on a CPU",
        "",
        f"{date.today()}, {processor()}, torch {torch.__version__}, one thread, load average {load:.1f}. Median",
        f"milliseconds of {TURNS} turns for {ELEMENTS:,} elements, and how many casts from fp32 to bf16 take as long.",
        f"`sum` decodes and adds {TERMS} terms. Compiling all of it took {compiling:.0f} s. Written by",
        "`benchmarks/host/codec.py`.",
        "",
        "| | | cast | encode | decode | sum |",
        "|---|---|--:|--:|--:|--:|",
    ]
    text = "\n".join([*head, *rows, ""])
    (RESULTS / "codec.md").write_text(text)
    print(text)


def rows_of(by: str, cast: float, found: dict[str, dict[str, float]]) -> list[str]:
    rows = []
    for name, times in found.items():
        cells = [f"{1e3 * t:.2f} ({t / cast:.1f})" for t in times.values()]
        rows.append(f"| {name} | {by} | {1e3 * cast:.2f} | {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    main()
