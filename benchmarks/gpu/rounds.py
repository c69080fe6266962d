"""Time subjects that take turns on one GPU, round after round. Each has a process of its own, for all tables."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from .gpt_step import BASE, CONFIG, POOLED, SUBJECTS, VARIANTS, Config, Task, flops, peak

GIB = 2**30
FIRST = 3  # steps before the first round
SETTLE = 2  # untimed steps at the beginning of each round
TIMED = 10  # timed steps of each round
ROUNDS = 5  # so that each subject has 50 timed steps
LIMIT = 100  # seconds in which all subjects of a table must be ready
LEFT_OVER = 2**29  # bytes that may be allocated in a process after its step is dropped
# The batches, in sequences of 1024 tokens, and whether gradients are clipped.
TABLES = (
    (8, False),
    (2, False),
    (2, True),
    (1, False),
    (4, False),
    (1, True),
    (8, True),
    (4, True),
)
_YES_OR_NO = {True: "yes", False: "no"}
APART = 1e-2  # the relative difference allowed between a loss and the first subject's, as the steps are in bf16


class Child:
    """A process that runs `target(pipe, *args)` and sends answers over its pipe. An error is sent as an answer, too."""

    def __init__(self, target: Callable, *args: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = spawn.Pipe()
        self.process = spawn.Process(target=_answering, args=(target, child_pipe, *args))
        self.process.start()
        child_pipe.close()

    def answer(self, seconds: float) -> Any:
        """The next answer of the process.

        Raises: RuntimeError if the process has failed, or if it sends nothing for `seconds`.
        """
        if not self.pipe.poll(max(seconds, 0)):
            raise RuntimeError(f"no answer in {seconds:.0f} s")
        try:
            reply = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with code {self.process.exitcode}") from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def tell(self, message: Any) -> None:
        """Send a message to the process. If it has ended, `answer` raises the reason."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(message)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _answering(target: Callable, pipe: Connection, *args: Any) -> None:
    try:
        target(pipe, *args)
    except EOFError:
        pass  # the parent has closed the pipe
    except Exception as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        pipe.send(RuntimeError(f"{type(error).__name__}: {first}"))


def apart(section: Callable[..., Iterator[list[dict]]]) -> Callable[..., Iterator[list[dict]]]:
    """The section, run in a process of its own."""

    @functools.wraps(section)
    def run(device: torch.device, left: Callable[[], float] = lambda: 60.0) -> Iterator[list[dict]]:
        child = Child(_lines, section, device, left() - 5)
        try:
            while lines := child.answer(left()):
                yield lines
        finally:
            child.end()

    return run


def _lines(pipe: Connection, section: Callable, device: torch.device, seconds: float) -> None:
    end = time.monotonic() + seconds
    for lines in section(device, lambda: end - time.monotonic()):
        pipe.send(lines)
    pipe.send(None)


def serve(pipe: Connection, name: str) -> None:
    """The process of a subject. It gets ready for each task that it is sent; at each other message it runs a round."""
    step: Callable[[], Tensor] | None = None
    while True:
        message = pipe.recv()
        if isinstance(message, Task):
            task = message
            start = time.perf_counter()
            step = None
            _drop(task.device)
            step = warm(name, task)
            pipe.send(time.perf_counter() - start)
        else:
            pipe.send(played(step, task.device))


def warm(name: str, task: Task) -> Callable[[], Tensor]:
    """The step of a subject, after its first steps."""
    step = (SUBJECTS | VARIANTS)[name](task)
    for _ in range(FIRST):
        loss = step()
    loss.item()
    return step


def _drop(device: torch.device) -> None:
    """Free what the step of the table before has compiled and allocated.

    Raises: RuntimeError if much of it stays. The next table then needs a new process.
    """
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()
        if torch.cuda.memory_allocated() > LEFT_OVER:
            gib = torch.cuda.memory_allocated() / GIB
            raise RuntimeError(f"{gib:.1f} GiB of the step before are still allocated")


def played(step: Callable[[], Tensor], device: torch.device) -> dict:
    """Run one round. Returns the milliseconds of each step, the last loss, and on a GPU the peak memory."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    for _ in range(SETTLE):
        step()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    times = [_now(cuda)]
    for _ in range(TIMED):
        loss = step()
        times.append(_now(cuda))
    figures = {"loss": loss.item()}  # waits for all steps
    if cuda:
        figures["ms"] = [a.elapsed_time(b) for a, b in itertools.pairwise(times)]
        figures["allocated"] = torch.cuda.max_memory_allocated(device)
        figures["reserved"] = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()  # leaves the memory to the other subjects
    else:
        figures["ms"] = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return figures


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Subject:
    """One subject: its process, and of the present table the results of its rounds, and its error if it failed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.child: Child | None = None
        self.is_new = True
        self.rounds: list[dict] = []
        self.ready: float | None = None
        self.wrong = ""

    def begin(self, task: Task) -> None:
        """Let the process build the step of a table. If it has ended, there is a new one."""
        self.rounds, self.ready, self.wrong = [], None, ""
        self.is_new = self.child is None
        self.child = self.child or Child(serve, self.name)
        self.child.tell(task)

    def await_start(self, task: Task, seconds: float) -> None:
        """Wait until the step can run. A process that served another table, and fails now, is replaced once."""
        end = time.monotonic() + seconds
        self.ready = self._answer(seconds)
        if self.ready is None and not self.is_new:
            self.begin(task)
            self.ready = self._answer(end - time.monotonic())

    def play(self, seconds: float) -> None:
        self.child.tell("play")
        if figures := self._answer(seconds):
            self.rounds.append(figures)

    def end(self) -> None:
        if self.child:
            self.child.end()
            self.child = None

    def _answer(self, seconds: float) -> Any:
        try:
            return self.child.answer(seconds)
        except RuntimeError as error:
            self.wrong = str(error)
            self.end()
            return None


def steps(
    device: torch.device,
    left: Callable[[], float] = lambda: 450.0,
    config: Config = CONFIG,
    tables: Sequence[tuple[int, bool]] = TABLES,
    names: Sequence[str] = tuple(SUBJECTS),
    rounds: int = ROUNDS,
    earlier: Sequence[dict] = (),
) -> Iterator[list[dict]]:
    """A step of a GPT of 436 M parameters (8 layers of width 2048), sequences of 1024 tokens, one rank. All subjects do
    the same work: parameters, gradients and moments in fp32, the model under autocast to bf16, torch's choice of an
    attention kernel, fused AdamW, and in some tables gradients that are clipped by their norm. torch.compile is given
    the model and the loss. Each subject has a process of its own. They take turns: 5 rounds of 10 steps, timed by CUDA
    events. MFU is relative to the card's dense bf16 rate. Memory is the peak that torch reports; a CUDA graph's memory
    is only in `reserved`. Losses are those after the first round. `ready` is the time until the first step can run,
    while all subjects of the table get ready beside each other; a process serves all tables, so it is longest in the
    first.
    """
    tasks = [Task(dataclasses.replace(config, batch=b), device, clip) for b, clip in tables]
    measured_again = [_described(task) for task in tasks]
    lines = [line for line in earlier if _table_of(line) not in measured_again]
    subjects = [Subject(name) for name in names]
    try:
        for task in tasks:
            if left() < 60:
                lines.append(_described(task) | {"failed": "not run: the time was over"})
            else:
                _play(subjects, task, left, rounds)
                lines += table(subjects, task)
            yield lines
    finally:
        for subject in subjects:
            subject.end()


def variants(
    device: torch.device, left: Callable[[], float] = lambda: 450.0
) -> Iterator[list[dict]]:
    """The same step of 8192 tokens with cuDNN's attention, with recomputation, and sharded over a group of one rank."""
    yield from steps(device, left, tables=TABLES[:1], names=[BASE, *VARIANTS], rounds=3)


def _play(subjects: Sequence[Subject], task: Task, left: Callable[[], float], rounds: int) -> None:
    """Start all subjects, and let them take turns."""
    for subject in subjects:
        subject.begin(task)
    end = time.monotonic() + min(LIMIT, left() - 30)
    for subject in subjects:
        subject.await_start(task, end - time.monotonic())
    for _ in range(rounds):
        for subject in subjects:
            if subject.child and left() > 10:
                subject.play(min(60, left()))


def tables_of(tokens: Sequence[int] | None = None, clipped: str = "both") -> list[tuple[int, bool]]:
    """The tables of these numbers of tokens, None for all. `clipped` is "yes", "no" or "both".

    >>> tables_of([1024, 2048], "no")
    [(2, False), (1, False)]
    """
    chosen = []
    for batch, clip in TABLES:
        is_size = tokens is None or batch * CONFIG.sequence in tokens
        if is_size and clipped in ("both", _YES_OR_NO[clip]):
            chosen.append((batch, clip))
    return chosen


def _described(task: Task) -> dict:
    return {"tokens": task.tokens, "clipped": _YES_OR_NO[task.clip]}


def _table_of(line: dict) -> dict:
    return {key: line.get(key) for key in ("tokens", "clipped")}


def table(subjects: Sequence[Subject], task: Task) -> list[dict]:
    """A row of results for each subject."""
    medians = {s.name: statistics.median(_times(s)) for s in subjects if s.rounds}
    first = next(
        (s for s in subjects if s.rounds), None
    )  # the losses of the others are compared with its loss
    rate = peak(torch.cuda.get_device_name(task.device)) if task.device.type == "cuda" else None
    lines = []
    for s in subjects:
        line = _described(task) | {"subject": s.name}
        if s.rounds:
            middle, last, loss = medians[s.name], s.rounds[-1], s.rounds[0]["loss"]
            line |= {"ms, median": middle, "ms, least": min(_times(s)), "steps": len(_times(s))}
            line |= {f"of {BASE}": middle / medians[BASE]} if BASE in medians else {}
            line |= {"MFU": flops(task.config) / (middle / 1e3) / rate} if rate else {}
            counted = ("reserved",) if s.name in POOLED else ("allocated", "reserved")
            line |= {f"{k}, GiB": last[k] / GIB for k in counted if k in last}
            line |= {"loss": round(loss, 5), "ready, s": round(s.ready, 1)}
            if not math.isclose(loss, first.rounds[0]["loss"], rel_tol=APART):
                line["failed"] = f"its loss is not that of {first.name}"
        if s.wrong:
            line["failed"] = s.wrong
        lines.append(line)
    return lines


def _times(subject: Subject) -> list[float]:
    return [ms for each in subject.rounds for ms in each["ms"]]
