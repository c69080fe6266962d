"""cost: count the operations, bytes of memory traffic, bytes on the wire and live bytes of a program.

The figures are for rank 0, whose shards are the largest. They follow from the program; nothing runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from ..ir.collectives import rules
from ..ir.differences import traffic as sent_by
from ..ir.donation import Donation, donation
from ..ir.graph import Eqn, Graph, Primitive, Var, variables
from ..ir.higher_order import functions, inner_work, is_attention, score_bytes
from ..ir.layout import local_shape
from ..ir.micro_batches import in_order, is_cut, parts
from ..ir.op_facts import is_view
from ..ir.pairing import pair
from ..ir.printer import format_bytes
from ..ir.relations import cached_on_graph
from .launches import launches
from .solver.slots import summed

hops = torch.ops.higher_order


@dataclass(frozen=True, repr=False)
class Cost:
    """Floating-point operations, bytes read and written, and bytes received, on one rank in one step.

    `calls` are those that the host makes, and `launches` the kernels that these launch (see `planning.launches`).
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
        """The wire bytes of one axis, of one role, or of both together."""
        return sum(n for (a, r), n in self.wire if axis in (None, a) and role in (None, r))

    def __str__(self) -> str:
        lines = [
            f"{'compute':<24}{_si(self.flops, 'FLOP')}",
            f"{'memory traffic':<24}{format_bytes(self.bytes)}",
        ]
        lines += [f"{'host':<24}{self.calls:,} calls, {self.launches:,} kernel launches"]
        lines += [f"{f'wire {axis} {role}':<24}{format_bytes(n)}" for (axis, role), n in self.wire]
        return "\n".join(lines)

    def __repr__(self) -> str:
        moved = f"{format_bytes(self.bytes)} of memory traffic, {format_bytes(self.wire_bytes)} received"
        return f"Cost({_si(self.flops, 'FLOP')}, {moved}, {self.launches:,} launches)"


@dataclass(frozen=True, repr=False)
class Memory:
    """The bytes that are live while each equation runs, and the values that are live at the peak."""

    live: tuple[int, ...]  # the bytes that are live while each equation runs
    peak: int  # the greatest of these
    at: Eqn | None  # the equation at the peak
    holders: tuple[
        tuple[Var, int, str], ...
    ]  # (value, bytes, user's line) at the peak, largest first
    state: int  # the bytes of the state

    def __str__(self) -> str:
        name = next((out.name for out in self.at.results), "") if self.at else ""
        line = f"  # {self.at.source}" if self.at and self.at.source else ""
        where = f" at {name}{line}" if name else ""
        lines = [f"peak {format_bytes(self.peak)}{where}", f"state {format_bytes(self.state)}"]
        lines += [f"  {format_bytes(n):>10}  {v!r:<56}{line}" for v, n, line in self.holders[:12]]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Memory(peak {format_bytes(self.peak)}, state {format_bytes(self.state)}, {len(self.live)} equations)"


def _si(n: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if n < 1000:
            return f"{n:.2f} {prefix}{unit}"
        n /= 1000
    return f"{n:.2f} T{unit}"


def local_bytes(graph: Graph) -> Callable[[Var], int]:
    """A function from a value to its bytes on rank 0."""
    at = dict.fromkeys(graph.axes, 0)
    return lambda v: math.prod(local_shape(v, graph.axes, at)) * v.dtype.itemsize


def cost(graph: Graph) -> Cost:
    """Count what one step of a program costs on one rank."""
    operations = moved = calls = kernels = 0
    for part, times in Counter(in_order(graph)).items():
        for e, launched in launches(part).items():
            calls += times * launched.calls
            kernels += times * launched.kernels
            if not isinstance(e.op, Primitive) and not is_view(e):
                moved += times * traffic(e, part)
                operations += times * flops(e, part)
    wire = tuple((axis_and_role, sent.bytes) for axis_and_role, sent in sent_by(graph).items())
    return Cost(operations, moved, wire, calls, kernels)


def traffic(e: Eqn, graph: Graph) -> int:
    """Count the bytes that an equation, or the functions that it calls, reads and writes on the first rank."""
    inner = inner_work(e, lambda g: sum(traffic(each, g) for each in g.eqns if not is_view(each)))
    return inner or sum(map(local_bytes(graph), (*e.ins, *e.results)))


def flops(e: Eqn, graph: Graph) -> int:
    """Count the floating-point operations of one equation on the first rank."""
    inner = inner_work(e, lambda g: sum(flops(each, g) for each in g.eqns if not is_view(each)))
    if inner is not None:
        return inner
    at = dict.fromkeys(graph.axes, 0)
    formula = flop_registry.get(getattr(e.op, "overloadpacket", e.op))
    if formula is None:
        return (
            0
            if isinstance(e.op, Primitive)
            else sum(math.prod(local_shape(o, graph.axes, at)) for o in e.results)
        )

    def meta(v: Var) -> torch.Tensor:
        return torch.empty(local_shape(v, graph.axes, at), dtype=v.dtype, device="meta")

    given = [meta(a) if isinstance(a, Var) else a for a in e.args]
    # A gradient that is not needed is None. It would have the shape of the argument that it is for.
    outs = [
        meta(o) if o is not None else next(iter(given[k + 1 :]), None) for k, o in enumerate(e.outs)
    ]
    return int(formula(*given, **e.kwargs, out_val=outs[0] if len(outs) == 1 else tuple(outs)))


class Held(NamedTuple):
    """A storage or a buffer, and the equations during which it is live."""

    first: int  # the index of the first of these equations
    last: int  # the index of the last, included
    value: Var
    bytes: int
    line: str  # the user's line, or what the buffer is for


def held(graph: Graph, given: Donation) -> list[Held]:
    """Every storage and buffer of a program, from the equation that allocates it to the last one that needs it.

    Inputs are live throughout, because they belong to the caller. The new state is in the storage of the old one.
    """
    size, n, at = local_bytes(graph), len(graph.eqns), dict.fromkeys(graph.axes, 0)
    shape = lambda v: local_shape(v, graph.axes, at)
    starts = pair(graph).starts
    lines = ["state" if i < graph.num_state else "batch" for i in range(len(graph.inputs))]
    every = [Held(0, n - 1, v, size(v), line) for v, line in zip(graph.inputs, lines)]
    for i, e in enumerate(graph.eqns):
        for k, out in enumerate(e.outs):
            if out is not None and given.owner[out] is out:
                allocated = rules(e).received_bytes(e, k, graph.axes) if out.future else size(out)
                every.append(
                    Held(i, min(given.last[out], n - 1), out, allocated, str(e.source or ""))
                )
        if computed := score_bytes(e, shape):
            every.append(Held(i, i, e.results[0], computed, "scores of attention"))
        if inside := _inside(e):
            every.append(Held(i, i, e.results[0], inside, "temporaries of its functions"))
        if e in starts:
            every += _packing(graph, e, i, starts[e].first_wait)
    return every


def _inside(e: Eqn) -> int:
    """The most bytes that a function of an equation has live at once, besides its arguments.

    The results of a branch are those of its equation. A turn of a loop has results besides those of the turn before.
    The functions of attention count as 0: they compute scores, which are counted by themselves.
    """
    return (
        0
        if is_attention(e)
        else max((_temporaries(f.graph, e.op is hops.cond) for f in functions(e)), default=0)
    )


def _temporaries(graph: Graph, returned: bool) -> int:
    """The bytes of a program at its peak, without its arguments, and without its results if it just returns them."""
    size, outputs = local_bytes(graph), variables(graph.outputs) if returned else ()
    nothing_in_place = donation(graph, frozenset(graph.eqns))
    live = _live(held(graph, nothing_in_place), len(graph.eqns))
    return max(max(live, default=0) - sum(map(size, {*graph.inputs, *outputs})), 0)


def _packing(graph: Graph, start: Eqn, at: int, wait: int) -> list[Held]:
    """The buffers of a collective that starts at equation `at` and is first waited for at equation `wait`.

    The send buffer, into which members are packed, cast or padded, lives until the wait. The receive buffer of a
    gather that must unpack its members is counted at the start and at the wait.
    """
    sent = rules(start).sent_bytes(start, graph.axes)
    if not sent:
        return []
    unpacked, first = rules(start).unpacked_bytes(start, graph.axes), start.out
    receive = [Held(i, i, first, unpacked, "receive buffer") for i in (at, wait)]
    return [Held(at, wait, first, sent, "send buffer"), *receive]


@cached_on_graph
def memory(graph: Graph) -> Memory:
    """Count the live bytes at every equation of a program (see `held`).

    Of a program of micro-batches, they are those of the micro-batch with the highest peak.
    """
    if graph.micro > 1:
        return _highest(graph)
    every, n = held(graph, donation(graph)), len(graph.eqns)
    state = sum(h.bytes for h in every[: graph.num_state])
    curve = _live(every, n)
    peak = max(curve, default=state)
    at = curve.index(peak) if curve else 0
    at_peak = [(h.value, h.bytes, h.line) for h in every if h.first <= at <= h.last and h.bytes]
    holders = tuple(sorted(at_peak, key=lambda holder: -holder[1]))
    return Memory(tuple(curve), peak, graph.eqns[at] if curve else None, holders, state)


def _live(every: Sequence[Held], n: int) -> list[int]:
    """The bytes that are live at each of the n equations of a program."""
    return summed(((h.first, h.last + 1, h.bytes) for h in every), n).tolist()


def _highest(graph: Graph) -> Memory:
    """The memory of the micro-batch with the highest peak, with what others hold: their batch, and what they return."""
    programs, size = parts(graph), local_bytes(graph)
    batch = (graph.micro - 1) * sum(size(v) for v in graph.inputs if is_cut(graph, v))
    returned = sum(
        size(v) for v in programs.first.outputs[graph.num_state + programs.sums :][: programs.joins]
    )
    held_by_others = {programs.middle: batch + (graph.micro - 2) * returned}

    def counted(part: Graph) -> Memory:
        own, more = memory(part), held_by_others.get(part, batch)
        return dataclasses.replace(
            own, live=tuple(n + more for n in own.live), peak=own.peak + more
        )

    return max(map(counted, programs.different), key=lambda each: each.peak)
