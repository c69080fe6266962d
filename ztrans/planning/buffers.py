"""Which bytes are live, and when.

A buffer is live from one event to another. Memory analysis, formulation and solver count with the same buffers. The
events of a program are its equations, by number. Those of a scheduling problem are numbered slots: slot 2k is place k,
before operation k, where messages start and are waited for, and slot 2k + 1 is operation k. A buffer of a message may
also begin or end where that message starts or is waited for, which a schedule decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..ir.collectives import rules
from ..ir.donation import Donation, donation
from ..ir.flex_attention import is_attention, score_bytes
from ..ir.graph import Eqn, Graph, Var, variables
from ..ir.higher_order import functions
from ..ir.layout import local_shape
from ..ir.pairing import pair

# Events of a message, whose slots a schedule decides. All other events are slots.
AT_START = -1
AT_WAIT = -2


class Buffer(NamedTuple):
    """Bytes that are live from the event `first` to the event `last`, both included.

    At a wait, buffers that end there are freed before buffers that begin there are allocated.
    """

    bytes: int
    first: int
    last: int


def rises(buffers: Iterable[Buffer]) -> np.ndarray:
    """The curve of live bytes by its steps: a row of slots, and a row of the bytes by which it rises at each of them.

    A fall is a negative rise. All events of the buffers are slots. Rises in any order can be joined, and `sum_rises`
    makes the curve of them.
    """
    steps = [(0, 0)]  # one at least, so that there are columns
    for size, first, last in buffers:
        steps += ((first, size), (last + 1, -size))
    return np.array(steps, dtype=np.int64).T


_NO_RISES = rises(())


def sum_rises(several: Sequence[np.ndarray], count: int) -> np.ndarray:
    """By slot, of `count` slots, the live bytes of several `rises` together."""
    slots, sizes = np.concatenate([*several, _NO_RISES], axis=1)
    rise = np.bincount(np.minimum(slots, count), sizes, count + 1)
    return rise.cumsum()[:count].astype(np.int64)  # sums of bytes are exact as floats


def live_by_slot(buffers: Iterable[Buffer], count: int) -> np.ndarray:
    """By slot, of `count` slots, the bytes of all buffers that are live there."""
    return sum_rises([rises(buffers)], count)


def by_operation(slots: np.ndarray) -> np.ndarray:
    """By operation: the most bytes live while it runs or at the place before it. The end counts with the last one."""
    most = np.maximum(slots[1::2], slots[:-1:2])
    if len(most):
        most[-1] = max(most[-1], slots[-1])
    return most


class Storage(NamedTuple):
    """A storage or a buffer of a program, and the equations during which it is live, by number."""

    value: Var
    bytes: int
    line: str  # the user's line, or what the buffer is for
    first: int
    last: int

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.bytes, self.first, self.last)

    @property
    def on_host(self) -> bool:
        """Whether it is in the memory of the host. Only the others count as memory of the device."""
        return self.value.memory == "host"


def local_bytes(graph: Graph) -> Callable[[Var], int]:
    """A function from a value to its bytes on rank 0."""
    first_rank = dict.fromkeys(graph.axes, 0)
    return lambda v: math.prod(local_shape(v, graph.axes, first_rank)) * v.dtype.itemsize


def storages(graph: Graph, donated: Donation) -> list[Storage]:
    """Every storage and buffer of a program, from the equation that allocates it to the last one that needs it.

    Inputs belong to the caller, so they are live throughout. Gathers that the step before has started are live until
    their last use, and what its copies to the host read, until their wait. The new state is in the storage of the old
    one. Storages of the host are in the list too.
    """
    size = local_bytes(graph)
    end = len(graph.eqns) - 1
    first_rank = dict.fromkeys(graph.axes, 0)
    starts = pair(graph).starts
    every = _carried(graph, donated)
    for i, v in enumerate(graph.tensor_inputs):
        kind = "state" if i < graph.num_state else "batch"
        every.append(Storage(v, size(v), kind, 0, end))
    for i, e in enumerate(graph.eqns):
        for k, out in enumerate(e.outs):
            if out is not None and donated.owner[out] is out:
                allocated = rules(e).received_bytes(e, k, graph.axes) if out.future else size(out)
                last = min(donated.last[out], end)
                every.append(Storage(out, allocated, str(e.source or ""), i, last))

        # What an equation needs for itself while it runs.
        scores = score_bytes(e, lambda v: local_shape(v, graph.axes, first_rank))
        if scores:
            every.append(Storage(e.results[0], scores, "scores of attention", i, i))
        inside = _inside(e)
        if inside:
            every.append(Storage(e.results[0], inside, "temporaries of its functions", i, i))
        if e in starts:
            every += _packing(graph, e, i, starts[e].first_wait)
    return every


def _carried(graph: Graph, donated: Donation) -> list[Storage]:
    """The storages and buffers of gathers that the step before has started, and what its copies to the host read."""
    if not graph.carried_futures:
        return []
    every: list[Storage] = []
    for e, wait in pair(graph, include_copies=True).waits.items():
        v = e.ins[0]
        start = wait.start
        line = str(start.source or "")
        if wait.started.index >= 0:
            continue
        if rules(start).copies:
            source = donated.owner[start.ins[0]]
            size = local_bytes(graph)(source)
            every.append(Storage(source, size, line, 0, wait.started.first_wait))
            continue
        size = rules(start).received_bytes(start, wait.member, graph.axes)
        every.append(Storage(v, size, line, 0, donated.last[v]))
        if not wait.member:
            every += _packing(graph, start, 0, wait.started.first_wait)
    return every


def by_memory(every: Iterable[Storage]) -> tuple[list[Storage], list[Storage]]:
    """The storages in the memory of the device, and those in the memory of the host."""
    on_device: list[Storage] = []
    on_host: list[Storage] = []
    for storage in every:
        of_memory = on_host if storage.on_host else on_device
        of_memory.append(storage)
    return on_device, on_host


def device_bytes(graph: Graph) -> Callable[[Var], int]:
    """A function from a value to its bytes on the device of rank 0: a value on the host has none there."""
    size = local_bytes(graph)
    return lambda v: 0 if v.memory == "host" else size(v)


def live_bytes(graph: Graph, every: Iterable[Storage]) -> list[int]:
    """The bytes of storages that are live at each equation of a program."""
    return live_by_slot((storage.buffer for storage in every), len(graph.eqns)).tolist()


def _packing(graph: Graph, start: Eqn, index: int, wait: int) -> list[Storage]:
    """The buffers of a collective that starts at equation `index` and is first waited for at equation `wait`.

    The send buffer, into which members are packed, cast or padded, lives until the wait. The receive buffer of a
    gather that must unpack its members is counted at the start and at the wait.
    """
    sent_bytes = rules(start).sent_bytes(start, graph.axes)
    if not sent_bytes:
        return []
    unpacked = rules(start).unpacked_bytes(start, graph.axes)
    return [
        Storage(start.out, sent_bytes, "send buffer", index, wait),
        Storage(start.out, unpacked, "receive buffer", index, index),
        Storage(start.out, unpacked, "receive buffer", wait, wait),
    ]


def _inside(e: Eqn) -> int:
    """The most bytes that a function of an equation has live at once, besides its arguments.

    The results of a branch are those of its equation. A turn of a loop has results besides those of the turn before.
    The functions of attention count as 0: they compute scores, which are counted by themselves.
    """
    if is_attention(e):
        return 0
    is_branch = e.op is torch.ops.higher_order.cond
    return max((_temporaries(f.graph, is_branch) for f in functions(e)), default=0)


def _temporaries(graph: Graph, returned: bool) -> int:
    """The bytes of a program at its peak, without its arguments, and without its results if it just returns them."""
    size = local_bytes(graph)
    nothing_in_place = donation(graph, frozenset(graph.eqns))
    peak = max(live_bytes(graph, storages(graph, nothing_in_place)), default=0)
    counted_outside = set(graph.inputs)
    if returned:
        counted_outside.update(variables(graph.outputs))
    return max(peak - sum(map(size, counted_outside)), 0)
