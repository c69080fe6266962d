"""Instrument: add readings of the clock to the generated code of a program.

The clock is read after every equation, when a collective is started, when it is done, and when the first wait for it
returns. The lifetimes of values are the same as in the code without readings.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir.collectives import WAIT, is_start, lane
from ..runtime.collectives import Member, Work
from ..runtime.cuda.streams import Done


class Times(NamedTuple):
    """The readings of one run, in seconds from its first equation."""

    marks: tuple[float, ...]  # before the first equation, and after each equation
    started: tuple[float, ...]  # when each collective was started, in order of the starts
    done: tuple[float, ...]  # when each collective was done, in the same order
    arrived: tuple[
        float, ...
    ]  # when the first wait for each collective returned, in order of these waits
    end: float


class Record:
    """The readings of one run.

    On a CPU they are times. On a GPU they are events, which are compared after the run. They are on the current stream,
    except for the end of a collective, which is an event on the stream of its lane.
    """

    def __init__(self, device: str, watchers: Mapping[str, ThreadPoolExecutor]) -> None:
        self.device, self.watchers = device, watchers
        self.marks: list[Any] = []
        self.started: list[Any] = []
        self.done: dict[int, Any] = {}
        self.arrived: list[Any] = []

    def read(self, stream: Any = None) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record() if stream is None else event.record(stream)
        return event

    def times(self) -> Times:
        """The readings in seconds. Call it right after the run: it reads the clock for the end of the run."""
        end = self.read()
        while len(self.done) < len(
            self.started
        ):  # the watchers may not have noted the last collectives yet
            time.sleep(1e-5)
        if self.device != "cpu":
            torch.accelerator.synchronize()
        first, done = self.marks[0], [self.done[k] for k in range(len(self.started))]

        def since(reading: Any) -> float:
            return reading - first if self.device == "cpu" else first.elapsed_time(reading) * 1e-3

        readings = self.marks, self.started, done, self.arrived
        marks, started, ended, arrived = (tuple(map(since, each)) for each in readings)
        return Times(marks, started, ended, arrived, since(end))


@contextlib.contextmanager
def watching() -> Iterator[Mapping[str, ThreadPoolExecutor]]:
    """Keep a thread for each lane, which waits for the collectives of that lane one after the other."""
    with contextlib.ExitStack() as stack:
        yield defaultdict(lambda: stack.enter_context(ThreadPoolExecutor(1, "ztrans-watcher")))


def mark(record: Record, weights: tuple[int, ...] = (1,)) -> None:
    """Note that equations have ended, which ran as a single call and share its time by their weights."""
    now = record.read()
    before, total = record.marks[-1] if record.marks else now, sum(weights)
    for passed in itertools.accumulate(weights[:-1]):
        if record.device == "cpu":
            record.marks.append(before + (now - before) * passed / total)
        else:  # events cannot be interpolated
            record.marks.append(now if passed else before)
    record.marks.append(now)


def watch(record: Record, members: tuple[Member, ...], lane: str) -> None:
    """Note that a collective has been started, and arrange for its end to be noted."""
    future, k = members[0].future, len(record.started)
    record.started.append(record.read())
    if isinstance(future.work, Done):
        record.done[k] = record.read(future.work.lane)
    elif future.work is not None:
        # Work can be waited for only once: the watcher does, and the program waits for the watcher.
        future.work = SimpleNamespace(
            wait=record.watchers[lane].submit(_wait, record, future.work, k).result
        )


def _wait(record: Record, work: Work, k: int) -> None:
    """Wait for a collective, in the thread of its lane, because sends and receives have no callbacks."""
    work.wait()
    record.done[k] = record.read()


def block(record: Record, member: Member) -> None:
    """Wait until a collective is done, and note that, before the program turns the received bytes into values."""
    work = member.future.work
    if work is not None:  # it is None once another member of the bucket has been waited for
        work.wait()
        record.arrived.append(record.read())


def recorded(program: fx.GraphModule) -> fx.GraphModule:
    """The same program with readings of the clock, which go to its attribute `record`. Set that before each run."""
    out = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    record: fx.Node | None = None
    for node in program.graph.nodes:
        eqn = node.meta.get("eqn")
        if record is None and node.op != "placeholder":
            record = out.get_attr("record")
            out.call_function(mark, (record,))
        if eqn is not None and eqn.op is WAIT:
            out.call_function(block, (record, env[node.args[0]]))
        env[node] = out.node_copy(node, env.__getitem__)
        if eqn is not None and is_start(eqn) and node.op == "call_module":
            out.call_function(watch, (record, env[node], lane(eqn)))
        if eqn is not None and node.next.meta.get("eqn") is not eqn:
            out.call_function(mark, (record, node.meta["weights"]))
    attributes = {**dict(program.named_children()), **dict(program.named_buffers()), "record": None}
    return fx.GraphModule(attributes, out, "Recorded")
