"""Count a program's operations, memory traffic, bytes on the wire and live bytes.

The figures are for rank 0, whose shards are the largest. They follow from the program; nothing runs. `durations` turns
them into seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import rules
from ..ir.copies import is_copy
from ..ir.donation import donation, is_constant
from ..ir.graph import Eqn, Graph, MemoryKind, Primitive, Var
from ..ir.higher_order import inner_work
from ..ir.micro_batches import MicroBatchPrograms, is_cut, micro_batch_programs
from ..ir.op_facts import is_view, op_facts
from ..ir.pairing import pair
from ..ir.printer import counted, format_bytes
from ..ir.wire_format import ARRIVED, Coded
from ..ir.wire_traffic import wire_traffic
from ..rewrites.number_operands import Number, settings, with_number_operands
from ..rewrites.update_groups import group_updates
from .buffers import by_memory, device_bytes, live_bytes, local_bytes, storages
from .flops import flops

_MOST_HOLDERS = 12  # the values at the peak that a `Memory` prints


@dataclass(frozen=True, repr=False)
class Cost:
    """What one rank computes, reads, writes and receives in one step.

    Attributes:
        flops: the floating-point operations of the kernels (see `flops`), with recomputation, and with half of the
            scores of causal attention.
        bytes: read and written in memory.
        wire: bytes received, by mesh axis and role.
        calls: the calls of the host.
        launches: the kernels that these calls launch (see `Launches`).
    """

    flops: int
    bytes: int
    wire: tuple[tuple[tuple[str, str], int], ...]  # ((axis, role), bytes)
    calls: int = 0
    launches: int = 0

    @property
    def wire_bytes(self) -> int:
        return sum(n for _, n in self.wire)

    def over(self, axis: str | None = None, role: str | None = None) -> int:
        """The wire bytes over one axis, with one role, or both."""
        total = 0
        for (each_axis, each_role), received in self.wire:
            if axis in (None, each_axis) and role in (None, each_role):
                total += received
        return total

    def __str__(self) -> str:
        launches = counted(self.launches, "kernel launch", "kernel launches")
        rows = [
            ("compute", _si(self.flops, "FLOP")),
            ("memory traffic", format_bytes(self.bytes)),
            ("host", f"{counted(self.calls, 'call')}, {launches}"),
        ]
        for (axis, role), received in self.wire:
            rows.append((f"wire {axis} {role}", format_bytes(received)))
        return "\n".join(f"{name:<24}{figure}" for name, figure in rows)

    def __repr__(self) -> str:
        bytes_text = f"{format_bytes(self.bytes)} of memory traffic, {format_bytes(self.wire_bytes)} received"
        launches = counted(self.launches, "launch", "launches")
        return f"Cost({_si(self.flops, 'FLOP')}, {bytes_text}, {launches})"


@dataclass(frozen=True, repr=False)
class Memory:
    """The bytes that are live on the device while each equation runs, and the values that are live at the peak.

    Attributes:
        live: bytes that are live on the device, by equation.
        peak: the maximum of `live`.
        peak_eqn: the equation at the peak.
        holders: (value, bytes, user's line) at the peak, the largest first.
        state: the bytes of the state on the device.
        other_memories: for each other memory that has any, the bytes that are live there, by equation.
    """

    live: tuple[int, ...]
    peak: int
    peak_eqn: Eqn | None
    holders: tuple[tuple[Var, int, str], ...]
    state: int
    other_memories: Mapping[MemoryKind, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def other_peaks(self) -> dict[MemoryKind, int]:
        """The most bytes that are live in each memory other than the device."""
        return {kind: max(live) for kind, live in self.other_memories.items()}

    @property
    def host_peak(self) -> int:
        return self.other_peaks.get("host", 0)

    def __str__(self) -> str:
        where = ""
        if self.peak_eqn is not None and self.peak_eqn.results:
            source = self.peak_eqn.source
            line = f"  # {source}" if source else ""
            where = f" at {self.peak_eqn.results[0].name}{line}"
        lines = [f"peak {format_bytes(self.peak)}{where}", f"state {format_bytes(self.state)}"]
        for kind, peak in self.other_peaks.items():
            lines.append(f"{kind} {format_bytes(peak)}")
        for value, size, line in self.holders[:_MOST_HOLDERS]:
            lines.append(f"  {format_bytes(size):>10}  {value!r:<56}{line}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        peak = format_bytes(self.peak)
        return f"Memory(peak {peak}, state {format_bytes(self.state)}, {counted(len(self.live), 'equation')})"


def _si(n: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if n < 1000:
            return f"{n:.2f} {prefix}{unit}"
        n /= 1000
    return f"{n:.2f} T{unit}"


def cost(graph: Graph) -> Cost:
    """Count what one step of a program costs on one rank."""
    operations = 0
    bytes_moved = 0
    calls = 0
    kernels = 0
    for part, times in micro_batch_programs(graph).runs:
        for e, launched in launches(part).items():
            calls += times * launched.calls
            kernels += times * launched.kernels
            if not isinstance(e.op, Primitive) and not is_view(e):
                bytes_moved += times * memory_traffic(e, part)
                operations += times * flops(e, part)
    wire = tuple(
        (axis_and_role, total.bytes) for axis_and_role, total in wire_traffic(graph).items()
    )
    return Cost(operations, bytes_moved, wire, calls, kernels)


class Launches(NamedTuple):
    """The host's calls for an equation, and the kernels that they launch.

    A small step is as fast as its host. The calls are those of the eager backend: one for each operation, and one for
    equal updates next to each other (see `update_groups`). A collective launches its message; if members are packed,
    a kernel before it; and if they are unpacked, a kernel at the first wait.
    """

    calls: int
    kernels: int


@cached_on_graph
def launches(graph: Graph) -> Mapping[Eqn, Launches]:
    """The calls and launches of every equation, on the first rank."""
    as_run = with_number_operands(graph, settings(graph))
    # The first equation of a group makes the call for all of them.
    computed_by_first: set[Var] = set()
    for group in group_updates(as_run)[1]:
        for e in group[1:]:
            computed_by_first.update(e.results)
    # Some equations do not run: they became arithmetic on numbers, or operands of other calls.
    results_as_run = {v for e in as_run.eqns for v in e.results}
    pairs = pair(graph)

    def launches_of(e: Eqn) -> Launches:
        if any(v in computed_by_first for v in e.results) or is_constant(e):
            return Launches(0, 0)
        if as_run is not graph and e.results and results_as_run.isdisjoint(e.results):
            return Launches(0, 0)
        if any(isinstance(v, Number) for v in e.results):
            return Launches(0, 0)
        if rules(e).copies:
            return Launches(1, int(is_copy(e)))
        if e in pairs.starts:
            return Launches(1, 1 + bool(rules(e).sent_bytes(e, graph.axes)))
        if e in pairs.waits:
            if pairs.waits[e].member:
                return Launches(0, 0)  # the wait for the first member unpacks the whole bucket
            start = pairs.waits[e].start
            return Launches(1, bool(rules(start).unpacked_bytes(start, graph.axes)))
        if isinstance(e.op, Primitive):
            return Launches(int(rules(e).shares_storage(e)), 0)
        calls = inner_work(e, lambda g: sum(not op_facts(inner.op).view for inner in g.eqns))
        if calls is not None:
            return Launches(calls, calls)
        return Launches(1, 2 if e.op is ARRIVED else int(not rules(e).shares_storage(e)))

    return {e: launches_of(e) for e in graph.eqns}


# Operations that read some rows or elements of their first argument, such as the embeddings of a batch.
_READ_BY_INDEX = ("embedding", "gather", "index", "index_select")
# The index of the log-probabilities among the arguments of a loss. Forward reads one of them for each target, backward
# reads none.
_LOSSES = {
    "nll_loss_forward": 0,
    "nll_loss_backward": 1,
    "nll_loss2d_forward": 0,
    "nll_loss2d_backward": 1,
}


def memory_traffic(e: Eqn, graph: Graph) -> int:
    """Count the bytes that an equation and the functions that it calls read and write on the first rank."""
    inner = inner_work(
        e, lambda g: sum(memory_traffic(each, g) for each in g.eqns if not is_view(each))
    )
    if inner is not None:
        return inner
    size = local_bytes(graph)
    written = sum(map(size, e.results))
    if e.op is ARRIVED:
        value, _, _, *form = e.args
        codes = Coded(*form).bytes_per_element * size(value) / value.dtype.itemsize
        return size(value) + written + 2 * int(codes)  # codes are written and read
    bytes_moved = written + sum(map(size, e.ins))
    name = op_facts(e.op).name
    if name in _READ_BY_INDEX:
        bytes_moved -= max(size(e.ins[0]) - written, 0)  # it reads as many elements as it returns
    elif name in _LOSSES:
        # Forward reads less than a thousandth of them, so they count as not read.
        bytes_moved -= size(e.args[_LOSSES[name]])
    return bytes_moved


@cached_on_graph
def memory(graph: Graph) -> Memory:
    """Count the live bytes at every equation of a program (see `buffers.storages`).

    In a program of micro-batches, the micro-batch with the highest peak counts.
    """
    if graph.micro > 1:
        return _highest_micro_batch(graph)
    state = sum(map(device_bytes(graph), graph.state))
    if not graph.eqns:
        return Memory((), state, None, (), state)
    memories = by_memory(storages(graph, donation(graph)))
    on_device = memories.pop("device")
    live = live_bytes(graph, on_device)
    peak = max(live)
    index = live.index(peak)
    holders = []
    for storage in on_device:
        if storage.first <= index <= storage.last and storage.bytes:
            holders.append((storage.value, storage.bytes, storage.line))
    holders.sort(key=lambda holder: -holder[1])
    return Memory(
        live=tuple(live),
        peak=peak,
        peak_eqn=graph.eqns[index],
        holders=tuple(holders),
        state=state,
        other_memories={kind: tuple(live_bytes(graph, found)) for kind, found in memories.items()},
    )


def _highest_micro_batch(graph: Graph) -> Memory:
    """The memory of the micro-batch with the highest peak, including the bytes of the others."""
    memories = []
    for part, other_bytes in bytes_of_others(graph, micro_batch_programs(graph)).items():
        part_memory = memory(part)
        live = tuple(n + other_bytes for n in part_memory.live)
        peak = part_memory.peak + other_bytes
        memories.append(dataclasses.replace(part_memory, live=live, peak=peak))
    return max(memories, key=lambda m: m.peak)


def bytes_of_others(graph: Graph, programs: MicroBatchPrograms) -> dict[Graph, int]:
    """For the program of each micro-batch, the bytes that the other micro-batches have live while it runs.

    Their batches are live throughout. While a middle one runs, the joined outputs of earlier ones are live too.
    """
    size = local_bytes(graph)
    batch = (graph.micro - 1) * sum(size(v) for v in graph.inputs if is_cut(graph, v))
    joined = (graph.micro - 2) * sum(map(size, programs.joined_parts))
    other_bytes = dict.fromkeys(programs.different, batch)
    if programs.middle in other_bytes:
        other_bytes[programs.middle] += joined
    return other_bytes
