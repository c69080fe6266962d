"""Which bytes are live, and when.

The memory analysis, the scheduling problem and the solver count the same buffers, each live from one event to another.
In a program, an event is the index of an equation. In a scheduling problem, it is a slot: slot 2k is place k, before
operation k, where messages start and are waited for; slot 2k + 1 is operation k. The buffer of a message may also begin
at its start or end at its wait, whose slots the schedule decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..ir.collectives import rules
from ..ir.dependencies import grouped
from ..ir.donation import Donation, donation
from ..ir.graph import Eqn, Graph, MemoryKind, Var, variables
from ..ir.higher_order import functions
from ..ir.layout import bytes_on_first_rank, local_shape
from ..ir.pairing import pair
from ..rewrites.flex_attention import is_attention, score_bytes

# The events whose slots a schedule decides. All other events of a scheduling problem are slots.
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
    """The changes of live bytes: a row of slots, and a row with the rise at each of them, negative for a fall.

    All events of the buffers must be slots, which may come in any order and repeat. So results can be concatenated;
    `sum_rises` adds them up.
    """
    changes = [(0, 0)]  # at least one, so that the transposed array has two rows
    for size, first, last in buffers:
        changes += ((first, size), (last + 1, -size))
    return np.array(changes, dtype=np.int64).T


_NO_RISES = rises(())


def sum_rises(all_rises: Sequence[np.ndarray], count: int) -> np.ndarray:
    """The live bytes at each of `count` slots, by several results of `rises` together."""
    slots, sizes = np.concatenate([*all_rises, _NO_RISES], axis=1)
    rise_at = np.bincount(np.minimum(slots, count), sizes, count + 1)
    return rise_at.cumsum()[:count].astype(np.int64)  # sums of bytes are exact as floats


def live_by_slot(buffers: Iterable[Buffer], count: int) -> np.ndarray:
    """The bytes of the buffers that are live at each of `count` slots."""
    return sum_rises([rises(buffers)], count)


def by_operation(slots: np.ndarray) -> np.ndarray:
    """For each operation, the most bytes live while it runs or at the place before it.

    The place at the end counts with the last operation.
    """
    most = np.maximum(slots[1::2], slots[:-1:2])
    if len(most):
        most[-1] = max(most[-1], slots[-1])
    return most


class Storage(NamedTuple):
    """A storage or a temporary buffer of a program, live from equation `first` to equation `last`."""

    value: Var
    bytes: int
    line: str  # the user's line, or the purpose of the buffer
    first: int
    last: int

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.bytes, self.first, self.last)


def local_bytes(graph: Graph) -> Callable[[Var], int]:
    """A function that returns the bytes of a value on rank 0."""
    return lambda v: bytes_on_first_rank(v, graph.axes)


def storages(graph: Graph, donated: Donation) -> list[Storage]:
    """Every storage and buffer of a program, from the equation that allocates it to the last one that needs it.

    Inputs belong to the caller, so they are live throughout. The new state is in the storage of the old state. Gathers
    carried from the step before are live until their last use, the sources of carried copies until their wait. Codes
    become the values of a whole bucket at its first wait. Storages in all memories are in the list.
    """
    size = local_bytes(graph)
    end = len(graph.eqns) - 1
    first_rank = dict.fromkeys(graph.axes, 0)
    starts, waits = pair(graph).starts, pair(graph).waits
    found_storages = _carried_storages(graph, donated)
    found_storages += (Storage(v, size(v), "state", 0, end) for v in graph.state)
    found_storages += (Storage(v, size(v), "batch", 0, end) for v in graph.arguments)
    for i, e in enumerate(graph.eqns):
        for k, out in enumerate(e.outs):
            if out is not None and donated.owner[out] is out:
                allocated = rules(e).received_bytes(e, k, graph.axes) if out.future else size(out)
                first = i
                last = min(donated.last[out], end)
                if e in starts and rules(e).decoding(e, graph.axes):
                    last = min(last, starts[e].first_wait)
                elif e in waits and rules(waits[e].start).decoding(waits[e].start, graph.axes):
                    first = waits[e].started.first_wait
                found_storages.append(Storage(out, allocated, str(e.source or ""), first, last))

        # Temporaries, which are live only while the equation runs.
        scores = score_bytes(e, lambda v: local_shape(v, graph.axes, first_rank))
        if scores:
            found_storages.append(Storage(e.results[0], scores, "scores of attention", i, i))
        temporaries = _function_bytes(e)
        if temporaries:
            line = "temporaries of its functions"
            found_storages.append(Storage(e.results[0], temporaries, line, i, i))
        if e in starts:
            found_storages += _message_buffers(graph, e, i, starts[e].first_wait)
    return found_storages


def _carried_storages(graph: Graph, donated: Donation) -> list[Storage]:
    """The results and buffers of carried gathers, and the sources of carried copies, from the start of the step on."""
    if not graph.carried_futures:
        return []
    found_storages: list[Storage] = []
    for e, wait in pair(graph, include_copies=True).waits.items():
        v = e.ins[0]
        start = wait.start
        line = str(start.source or "")
        if wait.started.index >= 0:
            continue
        if rules(start).copies:
            source = donated.owner[start.ins[0]]
            size = local_bytes(graph)(source)
            found_storages.append(Storage(source, size, line, 0, wait.started.first_wait))
            continue
        size = rules(start).received_bytes(start, wait.member, graph.axes)
        is_decoded = rules(start).decoding(start, graph.axes)
        last = wait.started.first_wait if is_decoded else donated.last[v]
        found_storages.append(Storage(v, size, line, 0, last))
        if not wait.member:
            found_storages += _message_buffers(graph, start, 0, wait.started.first_wait)
    return found_storages


def by_memory(all_storages: Iterable[Storage]) -> dict[MemoryKind, list[Storage]]:
    """The storages in each memory: the device, and every other one that has any."""
    memories: dict[MemoryKind, list[Storage]] = {"device": []}
    return memories | grouped((storage.value.memory, storage) for storage in all_storages)


def device_bytes(graph: Graph) -> Callable[[Var], int]:
    """A function that returns the bytes of a value on the device of rank 0, none for a value in another memory."""
    size = local_bytes(graph)
    return lambda v: size(v) if v.memory == "device" else 0


def live_bytes(graph: Graph, live_storages: Iterable[Storage]) -> list[int]:
    """The bytes of storages that are live at each equation of a program."""
    buffers = (storage.buffer for storage in live_storages)
    return live_by_slot(buffers, len(graph.eqns)).tolist()


def _message_buffers(graph: Graph, start: Eqn, index: int, wait: int) -> list[Storage]:
    """The buffers of a collective that equation `index` starts and equation `wait` is the first to wait for.

    Members are packed, cast, padded or encoded into the send buffer, which lives until the wait. The receive buffer of
    a gather that unpacks its members counts at the start and at the wait. The futures of codes count themselves.
    """
    sent_bytes = rules(start).sent_bytes(start, graph.axes)
    if not sent_bytes:
        return []
    is_decoded = rules(start).decoding(start, graph.axes)
    unpacked = 0 if is_decoded else rules(start).unpacked_bytes(start, graph.axes)
    return [
        Storage(start.out, sent_bytes, "send buffer", index, wait),
        Storage(start.out, unpacked, "receive buffer", index, index),
        Storage(start.out, unpacked, "receive buffer", wait, wait),
    ]


def _function_bytes(e: Eqn) -> int:
    """The peak bytes of the functions that an equation calls, without their arguments.

    The results of a branch are the results of its equation. A turn of a loop has results of its own, next to the
    results of the turn before. The functions of attention count as 0: the scores that they compute are a storage of
    their own.
    """
    if is_attention(e):
        return 0
    is_branch = e.op is torch.ops.higher_order.cond
    return max((_temporary_bytes(f.graph, not is_branch) for f in functions(e)), default=0)


def _temporary_bytes(graph: Graph, with_results: bool) -> int:
    """The bytes of a function at its peak, without its arguments, and with its results or without them."""
    size = local_bytes(graph)
    nothing_in_place = donation(graph, frozenset(graph.eqns))
    peak = max(live_bytes(graph, storages(graph, nothing_in_place)), default=0)
    counted_outside = set(graph.inputs)
    if not with_results:
        counted_outside.update(variables(graph.outputs))
    return max(peak - sum(map(size, counted_outside)), 0)
