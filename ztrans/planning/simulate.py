"""simulate: predict how long the program of one rank takes on a cluster, and which communication compute waits for.

Every equation is an operation of the compute queue. Its duration was measured, or follows from the roofline. Every
started collective is a message of a lane. Each axis has a lane for gathers, one for reductions, and one for the step's
own collectives. `event_simulator` then computes when everything happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, lane, rules
from ..ir.graph import DTYPES, Eqn, Graph, Primitive, Var
from ..ir.layout import local_shape
from ..ir.micro_batches import parts
from ..ir.op_facts import is_matmul
from ..ir.pairing import pair
from ..ir.printer import op_name
from .cluster import Cluster, Device
from .cost import flops, local_bytes, memory, traffic
from .event_simulator import Message, play
from .launches import launches
from .timeline import COMPUTE, Event, Timeline, one_by_one


def seconds(graph: Graph, cluster: Cluster) -> list[float]:
    """The time that each equation takes of the compute queue: collectives only what packing and unpacking need."""
    measured, waits, launched = dict(cluster.measured), pair(graph).waits, launches(graph)

    def duration(e: Eqn) -> float:
        waited = waits.get(e)
        if waited and waited.member:
            return 0.0  # the wait for the first member unpacks the whole bucket
        timed, part = (waited.start, " wait") if waited else (e, "")
        known = measured.get(signature(timed, graph) + part) if measured else None
        if known is not None:
            return known
        if waited:
            return _unpacking(timed, graph, cluster)
        if rules(e).packs:
            return _packing(e, graph, cluster)
        if rules(e).shares(e):
            return cluster.device.call * launched[e].calls
        return cluster.device.launch * launched[e].kernels + _roofline(e, graph, cluster.device)

    return list(map(duration, graph.eqns))


def signature(eqn: Eqn, graph: Graph) -> str:
    """Everything that the duration of an operation depends on, as text: its name, local types and literals."""
    at = dict.fromkeys(graph.axes, 0)

    def show(x: Any) -> str:
        if isinstance(x, Var):
            return f"{DTYPES.get(x.dtype, x.dtype)}{list(local_shape(x, graph.axes, at))}"
        if isinstance(x, torch.Tensor):
            return f"constant{list(x.shape)}"
        if isinstance(x, (list, tuple)):
            return f"[{' '.join(map(show, x))}]"
        return str(x)

    parts = [show(a) for a in eqn.args] + [
        f"{k}={show(v)}" for k, v in eqn.kwargs.items() if v is not None
    ]
    return f"{op_name(eqn.op)}({', '.join(parts)})"


def _roofline(e: Eqn, graph: Graph, device: Device) -> float:
    """The seconds that a kernel runs: as long as its operations take, or its bytes."""
    return max(flops(e, graph) / device.rate(_rated(e)), traffic(e, graph) / device.bandwidth)


def _rated(e: Eqn) -> str:
    """The name of an operation's rate: the dtype of its result, or "tf32" if PyTorch runs this product in TF32."""
    dtype = next((DTYPES.get(o.dtype, "f32") for o in e.results), "f32")
    if dtype != "f32" or not is_matmul(e):
        return dtype
    if "convolution" in op_name(e.op):
        # The class that replaces this module at import has the attribute, and mypy reads the module.
        precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    else:
        precision = torch.backends.cuda.matmul.fp32_precision
    return "tf32" if precision == "tf32" else "f32"


def _packing(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute that it takes to copy into the send buffer of a collective, and to send."""
    link = cluster.link(e.kwargs["axis"])
    host = link.call + link.host * rules(e).wire_bytes(e, graph.axes)
    size = local_bytes(graph)
    in_place = [rules(e).sends_own(e, k, graph.axes) for k in range(len(e.outs))]
    copied = 2 * sum(size(v) for v, k in zip(e.ins, in_place) if not k)
    return cluster.device.launch + copied / cluster.device.bandwidth + host


def _unpacking(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute that it takes to turn received bytes into values.

    They were measured for this kind of collective, or follow from the bytes that are copied: the members of a packed
    gather are copied out of its buffer, and the terms of a reduce_scatter are added up.
    """
    known = dict(cluster.link(e.kwargs["axis"]).unpack).get(op_name(e.op))
    if known is not None:
        return cluster.device.launch + known * rules(e).wire_bytes(e, graph.axes)
    copied = COPIES.get(e.op, NO_COPIES).exact(e, graph)
    return cluster.device.launch + copied / cluster.device.bandwidth


def _terms_and_sums(e: Eqn, graph: Graph) -> int:
    """The bytes that a reduce_scatter reads, the terms of every rank, and writes, their sum."""
    size = local_bytes(graph)
    return sum(map(size, e.ins)) + sum(map(size, e.results))


class Copies(NamedTuple):
    """The bytes that are copied to turn the received bytes of a collective into values."""

    exact: Callable[[Eqn, Graph], int]  # counts them
    times: int  # the planner's estimate of how often a received byte is copied


NO_COPIES = Copies(lambda e, graph: 0, 0)
COPIES: Mapping[Any, Copies] = {
    ALL_GATHER: Copies(lambda e, graph: 2 * rules(e).unpacked_bytes(e, graph.axes), 2),
    REDUCE_SCATTER: Copies(_terms_and_sums, 1),
    ALL_REDUCE: NO_COPIES,
}


def messages(graph: Graph, cluster: Cluster) -> list[tuple[Eqn, Message, int]]:
    """Every started collective as a message, with the bytes that it moves. Its operations are all equations."""
    sent = []
    for e, started in pair(graph, include_user=True).starts.items():
        axis = rules(e).axis(e)
        if axis not in graph.axes:
            continue  # over a group that is no axis of the mesh, so its link is unknown
        link, ranks = cluster.link(axis), graph.axes[axis]
        kind, moved = _moved(e, graph, ranks)
        weight = cluster.weight(e, graph.axes) if isinstance(e.op, Primitive) else 1.0
        latency, moving = link.seconds(kind, moved * weight, ranks)
        message = Message(
            started.index + 1, started.first_wait, lane(e), link.name, latency, moving
        )
        sent.append((e, message, moved))
    return sent


def _moved(e: Eqn, graph: Graph, ranks: int) -> tuple[str, int]:
    """The kind of a collective, planned or the step's own, and the bytes that a rank receives."""
    if isinstance(e.op, Primitive):
        return e.op.name, rules(e).wire_bytes(e, graph.axes)
    size, name = local_bytes(graph), op_name(e.op)
    whole = max(sum(map(size, e.ins)), sum(map(size, e.results)))
    kind = next(
        (
            k
            for k in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
            if name.startswith(k)
        ),
        name,
    )
    return kind, whole * (ranks - 1) * (2 if kind == "all_reduce" else 1) // ranks


def simulate(graph: Graph, cluster: Cluster) -> Timeline:
    """Simulate a program on a cluster.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.
    """
    if graph.micro > 1:
        return _in_turn(graph, cluster)
    cost, sent, live = seconds(graph, cluster), messages(graph, cluster), memory(graph)
    played = play(cost, [m for _, m, _ in sent])
    events = [
        Event(COMPUTE, played.start[i], s, e)
        for i, (e, s) in enumerate(zip(graph.eqns, cost))
        if s > 0
    ]
    for k, (e, m, moved) in enumerate(sent):
        begin, end = played.begin[k], played.end[k]
        events.append(Event(m.lane, begin, end - begin, e, played.stall[k], moved))
    curve = tuple(zip(played.start, live.live))
    return Timeline(f"{graph.name}, simulated", played.seconds, tuple(events), curve)


def _in_turn(graph: Graph, cluster: Cluster) -> Timeline:
    """The timelines of all micro-batches, one behind the other."""
    programs = parts(graph)
    simulated = {part: simulate(part, cluster) for part in programs.different}
    return one_by_one(f"{graph.name}, simulated", [simulated[part] for part in programs.in_order])
