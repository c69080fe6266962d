"""What the host spends on the starts of collectives: a step of stage 3 that sends its messages to a group of one rank.

    python -m benchmarks.gpu.starts eager     # a step, and its starts by function, from torch.profiler
    python -m benchmarks.gpu.starts graph     # the same step from a CUDA graph, and the step without collectives

It prints one line of JSON. `next_gpu.py` runs it with other numbers of connections of the card.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ztrans.runtime.cuda.nccl import PackedMessage, StreamedStart

from . import gpt_step

CONFIG = dataclasses.replace(gpt_step.CONFIG, layers=4)
WARM = 5  # steps before those that are timed
TIMED = 20
PROFILED = 5
START = "start"
# The functions of a start, of which none calls another one.
PARTS = ("message", "pack", "receive_buffer", "call", "finish")


def label(start: StreamedStart) -> None:
    """Have a profiler see a start and its functions, by these names."""

    def named(name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            with record_function(name):
                return function(*args)

        return run

    make_message = start.message

    def message(ks: list[int], members: list[torch.Tensor]) -> PackedMessage:
        with record_function("message"):
            made = make_message(ks, members)
        functions = ("pack", "receive_buffer", "finish")
        return dataclasses.replace(made, **{x: named(x, getattr(made, x)) for x in functions})

    labelled: Any = start  # its methods are replaced in this one object
    labelled.message = message
    labelled._call = named("call", start._call)
    labelled.forward = named(START, start.forward)


def split(events: Iterable[Any]) -> dict[str, float]:
    """The microseconds of the host for a start, by function, from the events of a profiler by name."""
    by_name = {event.key: event for event in events}
    starts = by_name[START].count
    us = {x: by_name[x].cpu_time_total / starts for x in PARTS if x in by_name}
    whole = by_name[START].cpu_time_total / starts
    return {"us a start": whole} | us | {"streams, events and the rest": whole - sum(us.values())}


def profiled(run: Callable[[], object], starts: Iterable[StreamedStart]) -> dict[str, float]:
    """The microseconds of a start, by function, while `run` runs."""
    for start in starts:
        label(start)
    # There is one cycle; without `acc_events`, torch 2.11 warns that the next cycle would clear its events.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        run()
    return split(found.key_averages())


def step_ms(step: Callable[[], object]) -> float:
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(TIMED):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.monotonic() - began) / TIMED


def eager(task: gpt_step.Task) -> dict[str, float]:
    step = gpt_step.Ours(task, "eager", collectives=True)
    figures: dict[str, float] = {"ms": step_ms(step)}
    program = step.compiled.binding.local_program.runner.executable.program
    starts = [module for module in program.modules() if isinstance(module, StreamedStart)]

    def steps() -> None:
        for _ in range(PROFILED):
            step()

    figures["starts"] = len(starts)
    figures |= profiled(steps, starts)
    figures["ms of starts"] = len(starts) * figures["us a start"] / 1e3
    return figures


def graph(task: gpt_step.Task) -> dict[str, float]:
    captured = gpt_step.Ours(task, "eager", collectives=True, cuda_graph=True)
    figures = {"ms": step_ms(captured)}
    captured.compiled.close()
    del captured
    figures["ms without collectives"] = step_ms(gpt_step.Ours(task, "eager"))
    return figures


def main() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    run = {"eager": eager, "graph": graph}[sys.argv[1]]
    print(json.dumps(run(gpt_step.Task(CONFIG, device))))


if __name__ == "__main__":
    main()
