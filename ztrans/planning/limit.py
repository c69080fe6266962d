"""The bytes that a step may have live on a rank, and the error of a step that needs more.

A transform may name the limit. Otherwise it is the memory of the device, less a reserve, where that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..ir.graph import Graph, Hints, MemoryKind
from ..ir.printer import format_bytes, format_seconds
from .buffers import local_bytes
from .cluster import Device
from .cost import Memory, memory


class Way(NamedTuple):
    """A way to fit the limit: the line to write, and the simulated seconds and peak of the step with it."""

    line: str
    seconds: float
    peak: int

    def __str__(self) -> str:
        return f"{self.line}: {format_seconds(self.seconds)} a step, peak {format_bytes(self.peak)}"


class DoesNotFit(ValueError):
    """A step needs more memory than its limit, in every order that was tried.

    Attributes:
        problem: what the limit is, what the step needs, and where.
        advice: what else helps.
        limit: the bytes that may be live.
        least: the memory of the order that needs the least, among the orders that were tried.
        ways: the ways to fit, the fastest first.
    """

    def __init__(
        self, problem: str, advice: str, limit: int, least: Memory, ways: Sequence[Way] = ()
    ) -> None:
        self.problem = problem
        self.advice = advice
        self.limit = limit
        self.least = least
        self.ways = tuple(sorted(ways, key=lambda way: (way.seconds, way.peak)))

        lines = [problem]
        if self.ways:
            lines.append("It fits in one of these ways, as they were simulated:")
            lines += [f"  {way}" for way in self.ways]
            advice = f"Or {advice[0].lower()}{advice[1:]}"
        super().__init__("\n".join([*lines, advice]))

    def with_ways(self, ways: Sequence[Way]) -> DoesNotFit:
        """This error with the ways to fit."""
        return DoesNotFit(self.problem, self.advice, self.limit, self.least, ways)

    @property
    def room(self) -> int:
        """The bytes that the state of the step leaves within the limit."""
        return self.limit - self.least.state


def with_device_limit(graph: Graph, device: Device) -> Graph:
    """The program with the limit of a device, unless a transform names one."""
    return graph if graph.hints.limit_option else graph.with_hints(memory_limit=device.limit)


def does_not_fit(graph: Graph, device: Device, least: Memory) -> DoesNotFit:
    """The error of a program that exceeds its limit in every order that was tried; `least` is the lowest memory."""
    peak_text = f"{least.peak} bytes ({format_bytes(least.peak)})"
    if least.peak_eqn is not None and least.peak_eqn.source:
        peak_text += f" at {least.peak_eqn.source.where}"
    limit = limit_text(graph.hints, device)
    lines = [f"{limit} is less than the step needs in any order tried: {peak_text}."]
    for v, size, line in least.holders[:5]:
        comment = f"  # {line}" if line else ""
        lines.append(f"  {format_bytes(size):>10}  {v!r}{comment}")

    ranks = more_ranks(graph, "device", least.peak, graph.hints.memory_limit or 0)
    if graph.hints.limit_option:
        remedies = f"a smaller batch, or {ranks}" if ranks else "or a smaller batch"
        advice = f"Give it that much, {remedies}."
    else:
        remedies = f"a smaller batch, {ranks}," if ranks else "a smaller batch"
        advice = (
            f"Take {remedies} or another device: lower(cluster=zt.cluster(...)). If you know that more may be live, "
            f"name the limit: zt.prefetch(memory=...)."
        )
    return DoesNotFit("\n".join(lines), advice, graph.hints.memory_limit or 0, least)


def more_ranks(graph: Graph, kind: MemoryKind, peak: int, limit: float) -> str:
    """The advice to take more ranks, each with smaller shards of the state, and how many may be enough.

    It is empty if a step with this peak in a memory fits on no number of ranks. The batch of each rank keeps its size.
    """
    size = local_bytes(graph)
    # On one rank nothing is split yet.
    is_alone = bool(graph.zero_stage) and math.prod(graph.axes.values()) == 1
    shard_bytes = 0
    for leaf in graph.state:
        if leaf.memory == kind and (is_alone or leaf.split is not None):
            shard_bytes += size(leaf)
    room = limit - (peak - shard_bytes)
    if room <= 0 or not shard_bytes:
        return ""
    times = math.ceil(10 * shard_bytes / room) / 10
    return f"more ranks ({times:g} times as many may be enough)"


def check_peak(graph: Graph, device: Device) -> None:
    """Check the limit again once copies and carried gathers are placed, which a plan does not count.

    Raises: DoesNotFit if it is not.
    """
    limit = graph.hints.memory_limit
    placed_memory = memory(graph)
    if limit is None or placed_memory.peak <= limit:
        return
    if graph.carried:
        cause = "the gathers that it starts for the next one"
        advice = "Leave out across_steps, or give the step that much."
    else:
        cause = "its copies between device and host"
        advice = "Give it that much, or move less to the host."
    problem = (
        f"{limit_text(graph.hints, device)} is less than the step needs with {cause}: "
        f"{placed_memory.peak} bytes ({format_bytes(placed_memory.peak)})."
    )
    raise DoesNotFit(problem, advice, limit, placed_memory)


def limit_text(hints: Hints, device: Device) -> str:
    """The limit of a program for errors: who sets it, and its bytes."""
    limit = format_bytes(hints.memory_limit or 0)
    if hints.limit_option:
        return f"{hints.limit_option}: {limit}"
    reserve = format_bytes(int(device.memory) - (device.limit or 0))
    return f"{device.name}: {limit}, its memory without the reserve of {reserve},"
