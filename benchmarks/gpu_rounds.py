"""Subjects in processes of their own, which take turns on the one GPU, round after round."""

from __future__ import annotations

import contextlib
import functools
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
from gpu_step import BASE, CONFIG, POOLED, SUBJECTS, Config, Task, flops, peak
from torch import Tensor

GIB = 2**30
FIRST, SETTLE, TIMED = 3, 2, 10  # steps: before the first round; of a round, untimed and timed
LIMIT = 100  # seconds in which a subject is ready, or is given up
LIMITS = {"torch.compile, max-autotune-no-cudagraphs": 180}
ROOM = 30 * GIB  # free on the card before a subject starts; the oldest go until there is as much
APART = 1e-2  # how far a loss may be from the first one's, in half precision


class Child:
    """A process that runs `target(pipe, *args)` and answers over its pipe; an error is an answer too."""

    def __init__(self, target: Callable, *args: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=_answering, args=(target, other, *args))
        self.process.start()
        other.close()

    def answer(self, seconds: float) -> Any:
        """What it says next.

        Raises: RuntimeError with what went wrong there, or when it says nothing for so long.
        """
        if not self.pipe.poll(max(seconds, 0)):
            raise RuntimeError(f"no answer in {seconds:.0f} s")
        try:
            said = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with code {self.process.exitcode}") from None
        if isinstance(said, Exception):
            raise said
        return said

    def ask(self, seconds: float) -> Any:
        """What it says when it is told to go on."""
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self.pipe.send(True)
        return self.answer(seconds)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _answering(target: Callable, pipe: Connection, *args: Any) -> None:
    try:
        target(pipe, *args)
    except EOFError:
        pass  # nobody asks any more
    except Exception as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        pipe.send(RuntimeError(f"{type(error).__name__}: {first}"))


def apart(section: Callable[..., Iterator[list[dict]]]) -> Callable[..., Iterator[list[dict]]]:
    """A section in a process of its own."""

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


def serve(pipe: Connection, name: str, task: Task) -> None:
    """A subject in its process: made and warmed up when it is first asked, and then played for a round each time."""
    pipe.recv()
    start = time.perf_counter()
    if task.device.type == "cuda":
        torch.cuda.set_device(task.device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # flash for all
    step = SUBJECTS[name](task)
    for _ in range(FIRST):
        loss = step()
    loss.item()
    pipe.send(time.perf_counter() - start)
    while pipe.recv():
        pipe.send(played(step, task.device))


def played(step: Callable[[], Tensor], device: torch.device) -> dict:
    """One round: milliseconds of each step, the last loss, and on a GPU the most memory."""
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
    found = {"loss": loss.item()}  # waits for all of them
    if cuda:
        found["ms"] = [a.elapsed_time(b) for a, b in itertools.pairwise(times)]
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()  # room for the others
    else:
        found["ms"] = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return found


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Subject:
    """One subject: its process while it has one, the rounds that it played, and what went wrong."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.rounds, self.ready, self.wrong = name, [], None, ""
        self.child = Child(serve, name, task)  # which imports what it needs, and waits

    def start(self, seconds: float) -> None:
        self.ready = self._or_wrong(self.child.ask, seconds)

    def play(self, seconds: float) -> None:
        if found := self._or_wrong(self.child.ask, seconds):
            self.rounds.append(found)

    def end(self) -> None:
        if self.child:
            self.child.end()
            self.child = None

    def _or_wrong(self, question: Callable[[float], Any], seconds: float) -> Any:
        try:
            return question(seconds)
        except RuntimeError as error:
            self.wrong = str(error)
            self.end()
            return None


def steps(
    device: torch.device,
    left: Callable[[], float] = lambda: 450.0,
    config: Config = CONFIG,
    names: Sequence[str] = tuple(SUBJECTS),
    rounds: int = 3,
) -> Iterator[list[dict]]:
    """A step of a GPT of 436 M parameters (8 layers of width 2048), 8 sequences of 1024 tokens, one rank. All do the
    same work: parameters, gradients and moments in fp32, the model under autocast to bf16, torch's flash attention,
    fused AdamW; torch.compile is given model and loss. Times are of CUDA events, in rounds of 10 steps, each subject
    in a process of its own; MFU is of the card's dense bf16 rate; memory is torch's count of the most, where a CUDA
    graph's is in `reserved` alone; losses are those after the same 15 steps; `ready` is what it took to start.
    """
    task = Task(config, device)
    subjects = [Subject(name, task) for name in names]
    try:
        for k, subject in enumerate(subjects, 1):
            if left() > 40:
                _make_room(subjects[: k - 1], device)
                subject.start(min(LIMITS.get(subject.name, LIMIT), left() - 30))
            else:
                subject.wrong = "not run: the time was over"
                subject.end()
            if subject.child:
                subject.play(min(60, left()))
            yield table(subjects[:k], task)
        for _ in range(rounds - 1):
            for subject in subjects:
                if subject.child and left() > 10:
                    subject.play(min(60, left()))
        yield table(subjects, task)
    finally:
        for subject in subjects:
            subject.end()


def _make_room(subjects: Sequence[Subject], device: torch.device) -> None:
    if device.type != "cuda":
        return
    for subject in subjects:
        if torch.cuda.mem_get_info(device)[0] < ROOM:
            subject.end()


def table(subjects: Sequence[Subject], task: Task) -> list[dict]:
    """A line for each subject."""
    medians = {s.name: statistics.median(_times(s)) for s in subjects if s.rounds}
    first = next((s for s in subjects if s.rounds), None)  # whose loss is everybody's
    rate = peak(torch.cuda.get_device_name(task.device)) if task.device.type == "cuda" else None
    lines = []
    for s in subjects:
        line = {"subject": s.name}
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
