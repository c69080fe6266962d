"""instrument: the generated code of a program, with the clock read after every equation.

It is read too when a collective is started, when its bytes have come, and when the first wait for it
no longer blocks. Values live and die as in the code that nobody watches.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir.collectives import WAIT, is_start
from ..planning.simulate import lane
from ..runtime.collectives import Member


class Times(NamedTuple):
    """One run, in seconds from its first equation."""

    marks: tuple[float, ...]  # before the first equation and after each
    started: tuple[float, ...]  # by collective, in order of their start
    done: tuple[float, ...]
    came: tuple[float, ...]  # by collective, in order of their first wait: when that no longer blocked
    end: float


class Record:
    """The readings of one run: of the processor's clock on CPU; elsewhere of events, on the current stream but for
    the end of a collective, which is on its lane. They are compared when the run is over."""

    def __init__(self, device: str, watchers: Mapping[str, ThreadPoolExecutor]) -> None:
        self.device, self.watchers = device, watchers
        self.marks: list[Any] = []
        self.started: list[Any] = []
        self.done: dict[int, Any] = {}
        self.came: list[Any] = []

    def read(self, stream: Any = None) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record() if stream is None else event.record(stream)
        return event

    def times(self) -> Times:
        """What was read, in seconds; called at the end of the run, which is now."""
        end = self.read()
        while len(self.done) < len(self.started):  # the last callbacks may still be on their way
            time.sleep(1e-5)
        if self.device != "cpu":
            torch.accelerator.synchronize()
        first = self.marks[0] if self.marks else end

        def since(readings: list) -> tuple[float, ...]:
            return tuple(r - first if self.device == "cpu" else first.elapsed_time(r) * 1e-3 for r in readings)

        done = [self.done[k] for k in range(len(self.started))]
        return Times(since(self.marks), since(self.started), since(done), since(self.came), *since([end]))


@contextlib.contextmanager
def watching() -> Iterator[Mapping[str, ThreadPoolExecutor]]:
    """A thread for each lane, which waits for its collectives one after the other."""
    watchers: defaultdict[str, ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1, "ztrans-watcher"))
    try:
        yield watchers
    finally:
        for watcher in watchers.values():
            watcher.shutdown()


def mark(record: Record, equations: int = 1) -> None:
    """An equation ends here; or several that ran as one, which share the time alike."""
    now = record.read()
    before = record.marks[-1] if record.marks else now
    shares = range(1, equations) if record.device == "cpu" else ()
    record.marks += [before + (now - before) * k / equations for k in shares] or [now] * (equations - 1)
    record.marks.append(now)


def watch(record: Record, members: tuple[Member, ...], lane: str) -> None:
    """A collective has been started: note when, and when it will be done."""
    future, k = members[0][0], len(record.started)
    record.started.append(record.read())
    if record.device == "cpu":
        future.work = _Watched(record.watchers[lane].submit(_wait, record, future.work, k))
    else:
        record.done[k] = record.read(future.work.lane)


def _wait(record: Record, work: Any, k: int) -> None:
    """Wait beside the program, since sends and receives call nobody back."""
    work.wait()
    record.done[k] = record.read()


class _Watched:
    """Work for which a watcher waits: it must not be waited for twice."""

    def __init__(self, watching: concurrent.futures.Future) -> None:
        self.watching = watching

    def wait(self) -> None:
        self.watching.result()


def block(record: Record, member: Member) -> None:
    """Wait until a collective is done, before anything is made of what came."""
    work = member[0].work
    if work is not None:  # else another member of its bucket has been waited for
        work.wait()
        record.came.append(record.read())


def recorded(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, writing what it reads into its attribute `record`, which is to be set before each run."""
    out, env, record = fx.Graph(), {}, None
    nodes = list(program.graph.nodes)
    for node, after in zip(nodes, [*nodes[1:], None]):
        eqn = node.meta.get("eqn")
        if record is None and node.op != "placeholder":
            record = out.get_attr("record")
            out.call_function(mark, (record,))
        if eqn is not None and eqn.op is WAIT:
            out.call_function(block, (record, env[node.args[0]]))
        env[node] = out.node_copy(node, env.__getitem__)
        if eqn is not None and is_start(eqn) and node.op == "call_module":
            out.call_function(watch, (record, env[node], lane(eqn)))
        if eqn is not None and after.meta.get("eqn") is not eqn:
            out.call_function(mark, (record, len(node.meta["eqns"])))
    held = {**dict(program.named_children()), **dict(program.named_buffers()), "record": None}
    return fx.GraphModule(held, out, "Recorded")
