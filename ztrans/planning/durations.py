"""The seconds of a program's equations on a cluster, and the messages that it sends.

Every equation is an operation of the compute queue; its duration was measured, or follows from the roofline. Every
started collective is a message. Each axis has a lane for gathers, one for reductions, and one for the step's own
collectives; on GPUs of several hosts, also one for the first level of reductions. Simulations and plans use the same
seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..ir.cached_analysis import cached_on_graph
from ..ir.collectives import lane, rules
from ..ir.copies import other_memory
from ..ir.graph import DTYPES, Eqn, Graph, Primitive, Var
from ..ir.layout import local_shape
from ..ir.nested import instances
from ..ir.op_facts import is_matmul, op_facts
from ..ir.pairing import pair
from ..ir.printer import op_name
from ..ir.routes import Hosts, exchanges_inside
from ..ir.structure import structure
from ..ir.triton_launch import Launch
from .buffers import local_bytes
from .cluster import Cluster
from .cost import cost, launches, memory_traffic
from .devices import Device
from .flops import has_known_cost
from .network import Level, Message
from .roofline import queue_seconds, roofline_seconds

# A plan has a note on each operation of unknown cost that moves more than this share of the program's bytes.
_NOTED_SHARE = 0.01


class Sent(NamedTuple):
    """A message of a program."""

    eqn: Eqn  # the start
    message: Message
    bytes: int  # received by a rank


# The seconds of equations.


@cached_on_graph
def equation_seconds(graph: Graph, cluster: Cluster) -> Sequence[float]:
    """The time that each equation takes of the compute queue.

    A collective takes the overhead of sending, and between CPUs also the time of packing and unpacking.
    """
    measured_seconds = dict(cluster.measured)
    waits = pair(graph).waits
    eqn_launches = launches(graph)
    device = cluster.device
    work_seconds = kernel_seconds(graph, device)

    def seconds_of(e: Eqn) -> float:
        wait = waits.get(e)
        eqn_rules = rules(e)
        if eqn_rules.copies:
            return device.kernel_gap * eqn_launches[e].kernels
        if wait and wait.member:
            return 0.0  # the wait for the first member unpacks the whole bucket
        if measured_seconds:
            name = signature(wait.start, graph) + " wait" if wait else signature(e, graph)
            if name in measured_seconds:
                return measured_seconds[name]
        if wait:
            return _wait_seconds(wait.start, graph, cluster)
        if eqn_rules.packs:
            return _send_seconds(e, graph, cluster)
        if eqn_rules.shares_storage(e):
            return device.call_overhead * eqn_launches[e].calls
        return queue_seconds(device, eqn_launches[e].kernels, work_seconds(e))

    return tuple(map(seconds_of, graph.eqns))


def product_share(graph: Graph, seconds: Sequence[float]) -> float:
    """The share of matrix products in the seconds of forward and backward, when most messages are under way."""
    durations_of_products = []
    other_durations = []
    for e, duration in zip(graph.eqns, seconds):
        if is_matmul(e):
            durations_of_products.append(duration)
        elif e.region != "update" and not isinstance(e.op, Primitive):
            other_durations.append(duration)
    # Exact sums, so that the order of the equations, which a plan changes, does not matter.
    product_seconds = math.fsum(durations_of_products)
    return product_seconds / (product_seconds + math.fsum(other_durations) or 1.0)


def kernel_seconds(graph: Graph, device: Device) -> Callable[[Eqn], float]:
    """A function that returns the seconds of an equation's kernels.

    The layers of a model repeat a few hundred structures. Each structure is computed once: 8 us an equation, in place
    of 45.
    """
    first_rank = dict.fromkeys(graph.axes, 0)
    seconds_by_structure: dict[Hashable, float] = {}

    def local_type(v: Var) -> Hashable:
        return v.dtype, local_shape(v, graph.axes, first_rank)

    def seconds_of(e: Eqn) -> float:
        # The structure of a constant would have all of its elements.
        if instances((e.args, e.kwargs), torch.Tensor):
            return roofline_seconds(e, graph, device)
        key = structure(e, local_type), tuple(map(local_type, e.results))
        if key not in seconds_by_structure:
            seconds_by_structure[key] = roofline_seconds(e, graph, device)
        return seconds_by_structure[key]

    return seconds_of


def shared_launch_seconds(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds that a launch adds to an update. Equal updates next to each other share the launch."""
    if op_facts(e.op).view:
        return 0.0
    work = roofline_seconds(e, graph, cluster.device)
    return queue_seconds(cluster.device, 1, work) - work


def signature(eqn: Eqn, graph: Graph) -> str:
    """Everything that the duration of an operation depends on, as text: its name, local types and literals."""
    first_rank = dict.fromkeys(graph.axes, 0)

    def show(x: Any) -> str:
        if isinstance(x, Var):
            return f"{DTYPES.get(x.dtype, x.dtype)}{list(local_shape(x, graph.axes, first_rank))}"
        if isinstance(x, torch.Tensor):
            return f"constant{list(x.shape)}"
        if isinstance(x, (list, tuple)):
            return f"[{' '.join(map(show, x))}]"
        return str(x)

    texts = list(map(show, eqn.args))
    texts += (f"{name}={show(x)}" for name, x in eqn.kwargs.items() if x is not None)
    return f"{op_name(eqn.op)}({', '.join(texts)})"


def notes_on_unknown_costs(graph: Graph, cluster: Cluster) -> list[str]:
    """A note on each operation of unknown cost that moves more than 1% of the bytes.

    Such an operation may compute for longer than its bytes move. An operation with a measured duration has a known
    cost.
    """
    measured_seconds = dict(cluster.measured)
    by_name: Counter[str] = Counter()
    for e in graph.eqns:
        if not has_known_cost(e) and signature(e, graph) not in measured_seconds:
            by_name[_full_name(e)] += memory_traffic(e, graph)
    if not by_name:
        return []
    all_bytes = cost(graph).bytes
    notes = []
    for name, size in by_name.items():
        if size > _NOTED_SHARE * all_bytes:
            notes.append(
                f"{name} moves {size / all_bytes:.0%} of the bytes, and no formula counts what it computes: it counts "
                f"as fast as its bytes. Measure it (`Compiled.profile`), or register its FLOPs "
                f"(torch.utils.flop_counter.register_flop_formula)"
            )
    return notes


def _full_name(e: Eqn) -> str:
    """The name of an operation with its namespace, or the name of a Triton kernel."""
    return e.args[0].name if isinstance(e.args[0], Launch) else op_facts(e.op).name


def _send_seconds(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute to send a collective."""
    device = cluster.device
    link = cluster.link(e.kwargs["axis"])
    sending = link.overhead + link.byte_overhead * rules(e).wire_bytes(e, graph.axes)
    # A GPU packs beside compute: then these seconds are in the message (see `messages`).
    packing = _packing_seconds(e, graph, cluster) if device.gloo else 0.0
    launch = 0.0 if link.includes_packing else device.kernel_gap
    return launch + sending + packing


def _packing_seconds(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds to copy values into the send buffer of a collective, or to encode them."""
    device = cluster.device
    encoding = rules(e).encoding(e, graph.axes)
    if encoding:
        return device.coding * encoding / device.bandwidth
    if cluster.link(e.kwargs["axis"]).includes_packing:
        return 0.0
    size = local_bytes(graph)
    copied = 0
    for k, v in enumerate(e.ins):
        if not rules(e).sends_without_copy(e, k, graph.axes):
            copied += size(v)
    return 2 * copied / device.bandwidth  # each byte is read and written


def _wait_seconds(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds of compute to turn the received bytes of a collective into values."""
    device = cluster.device
    measured_unpack = dict(cluster.link(e.kwargs["axis"]).unpack).get(rules(e).kind.name)
    if measured_unpack is not None and not rules(e).decoding(e, graph.axes):
        return device.kernel_gap + measured_unpack * rules(e).wire_bytes(e, graph.axes)
    is_in_compute = device.gloo or _is_decoded_at_wait(e, graph)
    return device.kernel_gap + (_unpacking_seconds(e, graph, cluster) if is_in_compute else 0.0)


def _is_decoded_at_wait(e: Eqn, graph: Graph) -> bool:
    """Whether compute decodes the values of a collective: a gather of codes, whose values exist only from then on."""
    return rules(e).moves and rules(e).decoding(e, graph.axes) > 0


def _unpacking_seconds(e: Eqn, graph: Graph, cluster: Cluster) -> float:
    """The seconds to unpack or decode a collective, estimated from the bytes that this moves."""
    device = cluster.device
    decoding = rules(e).decoding(e, graph.axes)
    if decoding:
        return device.coding * decoding / device.bandwidth
    return rules(e).unpacking_traffic(e, graph.axes) / device.bandwidth


# The messages of a program.


def messages(graph: Graph, cluster: Cluster, seconds: Sequence[float] | None = None) -> list[Sent]:
    """The message of every started collective, and of every copy between two memories. Place k is before equation k.

    Args:
        graph, cluster: the program, and the speeds of its messages.
        seconds: the seconds of the equations, by default `equation_seconds`.
    """
    sent_messages = []
    share_of_products = product_share(graph, seconds or equation_seconds(graph, cluster))
    for e, started in pair(graph, include_user=True, include_copies=True).starts.items():
        axis = rules(e).axis(e)
        if axis is not None and axis not in graph.axes:
            continue  # a group of processes that is not an axis of the mesh: its link is unknown
        *inside, last = transfers(e, graph, cluster)
        lost = cluster.lost_beside(axis, rules(e).kind.name) if axis is not None else 0.0
        message = Message(
            issue=started.index + 1,  # after its equation, which takes the seconds of sending
            need=started.first_wait,
            lane=last.lane,
            link=last.link,
            latency=last.latency,
            seconds=last.seconds,
            inside=inside[0] if inside else None,
            taken=share_of_products * lost,
        )
        if rules(e).packs and not cluster.device.gloo:
            message = _packed_beside(message, e, graph, cluster)
        sent_messages.append(Sent(e, message, rules(e).wire_bytes(e, graph.axes)))
    return sent_messages


def _packed_beside(message: Message, e: Eqn, graph: Graph, cluster: Cluster) -> Message:
    """The message with the seconds in which a GPU packs and unpacks it beside compute."""
    message = message._replace(pack_beside=_packing_seconds(e, graph, cluster))
    is_measured = cluster.link(e.kwargs["axis"]).includes_packing
    if _is_decoded_at_wait(e, graph) or (is_measured and not rules(e).decoding(e, graph.axes)):
        return message
    unpack = _unpacking_seconds(e, graph, cluster)
    if message.inside is None:
        return message._replace(unpack_beside=unpack)
    # The terms are added up inside each host; the sums of hosts are few.
    return message._replace(inside=message.inside._replace(unpack_beside=unpack))


def transfers(e: Eqn, graph: Graph, cluster: Cluster) -> list[Level]:
    """The levels of a collective or a copy: one, or two if each has a lane of its own."""
    axis = rules(e).axis(e)
    size = rules(e).wire_bytes(e, graph.axes)
    if axis is None:  # a copy: each direction has a link of its own
        return [Level(lane(e), lane(e), *cluster.tiers[other_memory(e)].copy_seconds(size))]
    link = cluster.link(axis)
    ranks = graph.axes[axis]
    kind = rules(e).kind.name
    if not isinstance(e.op, Primitive):
        return [Level(lane(e), link.name, *link.seconds(kind, size, ranks))]

    levels = []
    if link.inside is not None and cluster.has_two_lanes(e, graph.axes):
        received = size * cluster.charge_factor_inside(e, graph.axes)
        latency, seconds = link.inside.seconds(kind, received, link.local)
        calls = exchanges_inside(e, Hosts(ranks, ranks // link.local))
        ranks //= link.local
        levels.append(Level(_inside_lane(e), link.inside.name, latency * calls, seconds))
        link = dataclasses.replace(link, inside=None, local=1)  # the second level, between hosts
    received = size * cluster.charge_factor(e, graph.axes)
    return [*levels, Level(lane(e), link.name, *link.seconds(kind, received, ranks))]


def _inside_lane(eqn: Eqn) -> str:
    """The name of the queue of the first level of a collective."""
    return f"{lane(eqn)} inside hosts"
