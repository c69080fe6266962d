"""A step on one screen: how long it takes and what binds it, how much of the device it uses, its memory, its messages.

The figures come from the timeline, from `cost` and from `memory`. With a profile, the measured time stands beside the
simulated one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ir.axes import members
from ..ir.collectives import is_start
from ..ir.graph import Graph
from ..ir.micro_batches import micro_batch_programs
from ..ir.printer import counted, format_bytes, format_seconds
from ..ir.wire_traffic import wire_traffic
from ..report.table import columns
from ..report.timeline import Timeline
from .cluster import Cluster
from .cost import Cost, Memory
from .durations import transfers
from .flops import flops
from .roofline import rate_name


@dataclass(frozen=True)
class Summary:
    """The figures of a step.

    Attributes:
        name: the name of the step.
        cluster: the speeds that the plan assumes.
        ranks: the number of ranks that share the batch.
        items: the tokens of a step on all ranks, or its rows if its batch has no tokens.
        items_are_tokens: whether `items` are tokens: the elements of the largest tensor of integers in the batch.
        written_seconds: the seconds of the FLOPs of one rank, as the step is written, at the peak rates of the device.
        run_seconds: the same with recomputation.
        timelines: the simulated step, and the measured one if there is a profile.
        link_seconds: ((axis, link), seconds that its messages take), such as inside hosts and between them.
        coded: ((axis, format), the number of values that are sent as its codes).
        memory: the bytes that are live on the device.
        cost: what one rank computes and receives.
        notes: what transforms did not do, and why.
    """

    name: str
    cluster: Cluster
    ranks: int
    items: int
    items_are_tokens: bool
    written_seconds: float
    run_seconds: float
    timelines: tuple[Timeline, ...]
    link_seconds: tuple[tuple[tuple[str, str], float], ...]
    memory: Memory
    cost: Cost
    coded: tuple[tuple[tuple[str, str], int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def mfu(self) -> float:
        """The share of the peak rate of the device that the step uses as it is written (PaLM, 2022)."""
        return self.written_seconds / self.timelines[-1].seconds

    @property
    def items_per_second(self) -> float:
        """Tokens or rows a second, on all ranks."""
        return self.items / self.timelines[-1].seconds

    def __str__(self) -> str:
        simulated = self.timelines[0]
        ranks = counted(self.ranks, "rank")
        title = f"{self.name} on {ranks}, {self.cluster.device.name}"
        rows = []
        if len(self.timelines) > 1:
            rows.append(["", "simulated", "measured", ""])

        def row(name: str, figures: Sequence[str], note: str = "") -> None:
            rows.append([name, *figures, *[""] * (len(self.timelines) - len(figures)), note])

        note = ""
        if simulated.bound is not None:
            least, cause = simulated.bound
            note = f"{simulated.seconds / least:.2f} of the bound, {format_seconds(least)}; {cause} binds"
        row("step", [format_seconds(each.seconds) for each in self.timelines], note)
        kind = "tokens" if self.items_are_tokens else "rows"
        speeds = [f"{_si(self.items / each.seconds)}/s" for each in self.timelines]
        row(kind, speeds, f"{self.items:,} a step")
        shares = [f"{self.written_seconds / each.seconds:.1%}" for each in self.timelines]
        with_recomputation = ""
        if self.run_seconds > self.written_seconds:
            with_recomputation = f"{self.run_seconds / simulated.seconds:.1%} with recomputation"
        row("MFU", shares, with_recomputation)
        row("exposed", [format_seconds(each.stalled) for each in self.timelines])
        for (axis, role), seconds in simulated.exposed.items():
            if seconds:
                row(f"  {axis} {role}", [format_seconds(seconds)])
        limit = ""
        if simulated.limit:
            limit = f"{self.memory.peak / simulated.limit:.1%} of {format_bytes(simulated.limit)}"
        row("peak memory", [format_bytes(self.memory.peak)], limit)
        row("  state", [format_bytes(self.memory.state)])
        for kind, peak in self.memory.other_peaks.items():
            row(f"  on the {kind}", [format_bytes(peak)])
        row("received", [format_bytes(self.cost.wire_bytes)])
        for axis in dict.fromkeys(axis for (axis, _), _ in self.cost.wire):
            row(f"  {axis}", [format_bytes(self.cost.over(axis))], self._messages_over(axis))
        return "\n".join([title, columns(rows), *(f"note: {note}" for note in self.notes)])

    def _messages_over(self, axis: str) -> str:
        """The links that the messages of an axis cross, with their seconds, and the values that are sent as codes."""
        texts = [f"{link} {format_seconds(s)}" for (on, link), s in self.link_seconds if on == axis]
        texts += (f"values as {wire}: {count}" for (on, wire), count in self.coded if on == axis)
        return ", ".join(texts)


def summarize(
    written: Graph,
    micro: int,
    graph: Graph,
    cluster: Cluster,
    axes: Sequence[str],
    timelines: tuple[Timeline, ...],
    memory: Memory,
    cost: Cost,
) -> Summary:
    """The summary of a step.

    Args:
        written: the program as it is written, for one micro-batch of one rank.
        micro: the number of micro-batches.
        graph: the program that runs.
        cluster: the speeds.
        axes: the axes of the mesh whose ranks share the batch.
        timelines: the simulated step, and the measured one if there is a profile.
        memory, cost: of `graph`.
    """
    sizes = {axis: graph.axes[axis] for name in axes for axis in members(name)}
    ranks = math.prod(sizes.values())
    items, are_tokens = _items(written)
    run_seconds = 0.0
    link_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    coded: Counter[tuple[str, str]] = Counter()
    for (axis, _), total in wire_traffic(graph).items():
        for wire, values in total.coded:
            coded[axis, wire] += values
    for part, times in micro_batch_programs(graph).runs:
        run_seconds += _peak_seconds(part, cluster) * times
        for e in filter(is_start, part.eqns):
            axis = e.kwargs["axis"]
            link = cluster.link(axis)
            # The ranks of one host only use the link inside it.
            inside = link.inside if graph.axes[axis] <= link.local else None
            for level in transfers(e, part, cluster):
                name = level.link if inside is None else inside.name
                link_seconds[axis, name] += level.seconds * times
    return Summary(
        name=graph.name,
        cluster=cluster,
        ranks=ranks,
        items=items * micro * ranks,
        items_are_tokens=are_tokens,
        written_seconds=_peak_seconds(written, cluster) * micro,
        run_seconds=run_seconds,
        timelines=timelines,
        link_seconds=tuple(link_seconds.items()),
        memory=memory,
        cost=cost,
        coded=tuple(coded.items()),
        notes=graph.hints.notes,
    )


def _items(written: Graph) -> tuple[int, bool]:
    """The tokens of the batch, or its rows; and whether they are tokens."""
    batch = [v for v in written.arguments if v.shape]
    tokens = [v for v in batch if v.dtype in (torch.int64, torch.int32) and len(v.shape) > 1]
    if tokens:
        return max(math.prod(v.shape) for v in tokens), True
    return max((v.shape[0] for v in batch), default=1), False


def _peak_seconds(graph: Graph, cluster: Cluster) -> float:
    """The seconds of the FLOPs of a program at the peak rates of the device."""
    return sum(flops(e, graph) / cluster.device.rate(rate_name(e)) for e in graph.eqns)


def _si(count: float) -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}".rstrip()
        count /= 1000
    return f"{count:.3g} T"
