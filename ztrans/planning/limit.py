"""The bytes that a step may have live on a rank, and the error of a step that needs more.

A transform may name the limit. Otherwise it is the memory of the device, less a reserve, where that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..ir.graph import Graph, Hints, MemoryKind
from ..ir.printer import format_bytes, format_seconds
from .buffers import local_bytes
from .cluster import Device
from .cost import Memory, memory


class Way(NamedTuple):
    """A way in which a step fits its limit: the line to write, and the step that it makes, as it was simulated."""

    line: str
    seconds: float
    peak: int

    def __str__(self) -> str:
        return f"{self.line}: {format_seconds(self.seconds)} a step, peak {format_bytes(self.peak)}"


class DoesNotFit(ValueError):
    """A step needs more memory than its limit, in every order that was tried.

    Attributes:
        problem: what the limit is, what the step needs, and where.
        advice: what helps besides the ways.
        limit: the bytes that may be live.
        least: the memory of the order that needs least, of those that were tried.
        ways: how the step fits, the fastest first.
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
        """This error with the ways in which the step fits."""
        return DoesNotFit(self.problem, self.advice, self.limit, self.least, ways)

    @property
    def room(self) -> int:
        """The bytes that the limit leaves besides the state of the step."""
        return self.limit - self.least.state


def with_device_limit(graph: Graph, device: Device) -> Graph:
    """The program with the limit of a device, unless a transform names one."""
    return graph if graph.hints.limit_option else graph.with_hints(memory_limit=device.limit)


def does_not_fit(graph: Graph, device: Device, least: Memory) -> DoesNotFit:
    """The error of a program that needs more than its limit in every order that was tried, at least `least`."""
    # The limit, what is needed, and the largest values at the peak.
    needs = f"{least.peak} bytes ({format_bytes(least.peak)})"
    if least.peak_eqn is not None and least.peak_eqn.source:
        needs += f" at {least.peak_eqn.source.where}"
    limit = limit_text(graph.hints, device)
    lines = [f"{limit} is less than the step needs in any order tried: {needs}."]
    for v, size, line in least.holders[:5]:
        comment = f"  # {line}" if line else ""
        lines.append(f"  {format_bytes(size):>10}  {v!r}{comment}")

    help_of_ranks = ranks_may_help(graph, "device", least.peak, graph.hints.memory_limit or 0)
    if graph.hints.limit_option:
        others = "a smaller batch, or more ranks" if help_of_ranks else "or a smaller batch"
        advice = f"Give it that much, {others}."
    else:
        others = "a smaller batch, more ranks," if help_of_ranks else "a smaller batch"
        advice = (
            f"Take {others} or another device: lower(cluster=zt.cluster(...)). If you know that more may be live, name "
            f"the limit: zt.prefetch(memory=...)."
        )
    return DoesNotFit("\n".join(lines), advice, graph.hints.memory_limit or 0, least)


def ranks_may_help(graph: Graph, kind: MemoryKind, peak: int, limit: float) -> bool:
    """Whether a step with this peak in a memory could fit on more ranks, each with a smaller part of the state.

    The batch of each rank stays as large as it is.
    """
    size = local_bytes(graph)
    cut = 0
    for leaf in graph.inputs[: graph.num_state]:
        if leaf.split is not None and leaf.memory == kind:
            cut += size(leaf)
    return cut > 0 and peak - cut <= limit


def check_peak(graph: Graph, device: Device) -> None:
    """Check that a program is within its limit with what is placed after its plan: copies, and gathers that it carries.

    Raises: DoesNotFit if it is not.
    """
    limit = graph.hints.memory_limit
    needed = memory(graph)
    if limit is None or needed.peak <= limit:
        return
    if graph.carried:
        cause = "the gathers that it starts for the next one"
        advice = "Leave out across_steps, or give the step that much."
    else:
        cause = "its copies between device and host"
        advice = "Give it that much, or move less to the host."
    problem = (
        f"{limit_text(graph.hints, device)} is less than the step needs with {cause}: "
        f"{needed.peak} bytes ({format_bytes(needed.peak)})."
    )
    raise DoesNotFit(problem, advice, limit, needed)


def limit_text(hints: Hints, device: Device) -> str:
    """What the limit of a program is, for errors: who names it, and how many bytes it has."""
    limit = format_bytes(hints.memory_limit or 0)
    if hints.limit_option:
        return f"{hints.limit_option}: {limit}"
    reserve = format_bytes(int(device.memory) - (device.limit or 0))
    return f"{device.name}: {limit}, its memory without the reserve of {reserve},"
