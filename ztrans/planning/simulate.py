"""simulate: how long the program of one rank takes on a cluster, and which communication compute waits for.

Every equation is an operation of the compute queue. Its duration is measured, or that of the roofline. Every started
collective is a message of its lane. An axis has one lane for gathers and one for reductions, and the step's own
collectives have another. `event_simulator` plays them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.collectives import ALL_GATHER, REDUCE_SCATTER, SHARD, WAIT, is_alone, is_start, sends_as_it_lies, wire_bytes
from ..ir.graph import DTYPES, Eqn, Graph, Var, variables
from ..ir.layout import local_shape
from ..ir.operations import is_matmul, is_view
from ..ir.printer import op_name
from ..ir.user_collectives import is_users
from .cluster import Cluster
from .cost import flops, local_bytes, memory
from .event_simulator import Message, play
from .timeline import COMPUTE, Event, Timeline

_WAIT_TENSOR = "wait_tensor"


def lane(eqn: Eqn) -> str:
    """The name of a started collective's lane: gathers and reductions of an axis never queue behind each other."""
    if is_users(eqn):
        return f"{eqn.args[-1]} (step)"
    return f"{eqn.kwargs['axis']} {'gather' if eqn.op is ALL_GATHER else 'reduce'}"


def seconds(graph: Graph, cluster: Cluster) -> list[float]:
    """The seconds that each equation takes of compute; a collective takes those of packing and unpacking."""
    size, measured = local_bytes(graph), dict(cluster.measured)
    starts = {out: e for e in graph.eqns for out in e.outs if is_start(e)}
    durations = []

    def known(e: Eqn, part: str = "") -> float | None:
        return measured.get(signature(e, graph) + part) if measured else None

    for e in graph.eqns:
        if is_start(e):
            took = known(e)
            durations.append(_packing(e, graph, cluster) if took is None else took)
        elif e.op is WAIT:
            start = starts[e.args[0]]
            first = start.outs[0] is e.args[0]  # the first member's wait unpacks the bucket
            took = known(start, " wait")
            durations.append((_unpacking(start, graph, cluster) if took is None else took) if first else 0.0)
        elif e.op is SHARD or is_view(e):
            durations.append(0.0)
        else:
            took = known(e)
            durations.append(_roofline(e, graph, cluster, size) if took is None else took)
    return durations


def signature(eqn: Eqn, graph: Graph) -> str:
    """A text of everything that the duration of an operation depends on: its name, local types and literals."""
    at = dict.fromkeys(graph.axes, 0)

    def show(x: Any) -> str:
        if isinstance(x, Var):
            return f"{DTYPES.get(x.dtype, x.dtype)}{list(local_shape(x, graph.axes, at))}"
        if isinstance(x, torch.Tensor):
            return f"constant{list(x.shape)}"
        if isinstance(x, (list, tuple)):
            return f"[{' '.join(map(show, x))}]"
        return str(x)

    parts = [show(a) for a in eqn.args] + [f"{k}={show(v)}" for k, v in eqn.kwargs.items() if v is not None]
    return f"{op_name(eqn.op)}({', '.join(parts)})"


def _roofline(e: Eqn, graph: Graph, cluster: Cluster, size: Any) -> float:
    device = cluster.device
    moved = sum(size(v) for v in e.ins) + sum(size(o) for o in e.outs if o is not None)
    return device.launch + max(flops(e, graph) / device.rate(_rated(e)), moved / device.bandwidth)


def _rated(e: Eqn) -> str:
    """The name of an operation's rate: the dtype of its result, or "tf32" where PyTorch runs fp32 products in TF32."""
    dtype = next((DTYPES.get(o.dtype, "f32") for o in e.outs if o is not None), "f32")
    if dtype != "f32" or not is_matmul(e):
        return dtype
    convolves = "convolution" in op_name(e.op)
    allowed = torch.backends.cudnn.conv if convolves else torch.backends.cuda.matmul
    return "tf32" if allowed.fp32_precision == "tf32" else "f32"


def _packing(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute to start a collective: to copy into its send buffer, and to send."""
    link = cluster.link(e.kwargs["axis"])
    host = link.call + link.host * wire_bytes(e, graph.axes)
    size = local_bytes(graph)
    in_place = [sends_as_it_lies(e, k, graph.axes) for k in range(len(e.outs))]
    copied = 2 * sum(size(v) for v, k in zip(e.ins, in_place) if not k)
    return cluster.device.launch + copied / cluster.device.bandwidth + host


def _unpacking(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute to make values of received bytes, as measured for their kind, else those of copies.

    The members of a packed gather are copied out of its buffer; the terms of a reduce_scatter are added up.
    """
    known = dict(cluster.link(e.kwargs["axis"]).unpack).get(e.op.name)
    if known is not None:
        return cluster.device.launch + known * wire_bytes(e, graph.axes)
    size = local_bytes(graph)
    packed = [o for k, o in enumerate(e.outs) if not is_alone(e, k, graph.axes)]
    copied = 2 * sum(map(size, packed)) if e.op is ALL_GATHER else 0
    if e.op is REDUCE_SCATTER:
        copied = sum(size(v) for v in e.ins) + sum(size(o) for o in e.outs)
    return cluster.device.launch + copied / cluster.device.bandwidth


def messages(graph: Graph, cluster: Cluster) -> list[tuple[Eqn, Message, int]]:
    """Every started collective as a message, with the bytes that it moves. Equation i is operation i."""
    waits = {e.args[0]: i for i, e in reversed(list(enumerate(graph.eqns))) if e.op is WAIT or _waits(e)}
    sent = []
    for i, e in enumerate(graph.eqns):
        if is_start(e):
            axis, kind, moved = e.kwargs["axis"], e.op.name, wire_bytes(e, graph.axes)
            need = min(waits[f] for f in e.outs)
        elif is_users(e) and not _waits(e):
            axis = e.args[-1]
            if axis not in graph.axes:
                continue  # the group is not an axis of the mesh, so its cost is not known
            kind, moved = _users_bytes(e, graph.axes[axis], local_bytes(graph))
            need = min((waits[o] for o in variables(e.outs) if o in waits), default=len(graph.eqns))
        else:
            continue
        link = cluster.link(axis)
        latency, moving = link.seconds(kind, moved, graph.axes[axis])
        sent.append((e, Message(i + 1, need, lane(e), link.name, latency, moving), moved))
    return sent


def _waits(e: Eqn) -> bool:
    return is_users(e) and op_name(e.op) == _WAIT_TENSOR


def _users_bytes(e: Eqn, ranks: int, size: Any) -> tuple[str, int]:
    """The kind of a collective of the user's step, and the bytes that a rank receives."""
    name, whole = op_name(e.op), max(sum(map(size, e.ins)), sum(size(o) for o in variables(e.outs)))
    kind = next((k for k in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") if name.startswith(k)), name)
    return kind, whole * (ranks - 1) * (2 if kind == "all_reduce" else 1) // ranks


def simulate(graph: Graph, cluster: Cluster) -> Timeline:
    """Simulate a program on a cluster.

    Raises:
        ValueError: the cluster has no link for an axis that the program communicates over.
    """
    cost, sent, live = seconds(graph, cluster), messages(graph, cluster), memory(graph)
    played = play(cost, [m for _, m, _ in sent])
    events = [
        Event(COMPUTE, played.start[i], s, e) for i, (e, s) in enumerate(zip(graph.eqns, cost)) if s > 0
    ]  # fmt: skip
    for k, (e, m, moved) in enumerate(sent):
        begin, end = played.begin[k], played.end[k]
        events.append(Event(m.lane, begin, end - begin, e, played.stall[k], moved))
    curve = tuple(zip(played.start, live.live))
    return Timeline(f"{graph.name}, simulated", played.seconds, tuple(events), curve)
