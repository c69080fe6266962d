"""A time that no order of a program's collectives beats, within the memory of the order that it has.

`solver/bound.py` bounds the schedules of one problem. A step of micro-batches has one problem for each of them, and the
gathers that the step before has started are in no problem.
"""

from __future__ import annotations

from ..ir.copies import is_copy
from ..ir.graph import Graph
from ..ir.micro_batches import micro_batch_programs
from ..rewrites.across_steps import carried_starts, without_gathers_of
from ..rewrites.half_copies import with_half_copies
from .buffers import local_bytes
from .cluster import Cluster
from .cost import bytes_of_others
from .formulate import formulate
from .simulate import simulate
from .skeleton import skeleton
from .solver.bound import bound


def lower_bound(
    graph: Graph, unordered: Graph, lever_options: tuple[str, ...], cluster: Cluster, peak: int
) -> tuple[float, str] | None:
    """A lower bound for the seconds of a program, and what binds it in the last micro-batch.

    None if no collective is planned.

    Args:
        graph: the program in the order of its plan.
        unordered: the program before it has an order.
        lever_options: the options of the plan's levers. The cluster may not have them.
        cluster: the speeds.
        peak: the bytes that may be live in every order.
    """
    # The plan has kept copies of leaves in half precision on the host, or not, whichever is faster.
    unordered_programs = dict.fromkeys((unordered, with_half_copies(unordered)))
    bounds = [_bound(graph, each, lever_options, cluster, peak) for each in unordered_programs]
    return min((each for each in bounds if each is not None), default=None)


def _bound(
    graph: Graph, unordered: Graph, lever_options: tuple[str, ...], cluster: Cluster, peak: int
) -> tuple[float, str] | None:
    """As `lower_bound`, for the copies that `unordered` has."""
    # Each micro-batch is bounded by itself, so the bytes of the others are taken from the peak.
    peak -= min(bytes_of_others(graph, micro_batch_programs(graph)).values())
    options = tuple(dict.fromkeys((*cluster.neighbours(unordered.axes), *lever_options)))
    if graph.carried:
        # These gathers may end during the step before. So the bound counts no time for them, and their leaves are
        # whole from the start.
        num_inputs = len(unordered.inputs)
        carried: set[int] = set()
        for start in carried_starts(graph):
            carried.update(start.leaves)
        unordered = without_gathers_of(unordered, carried)
        size = local_bytes(unordered)
        peak += sum(size(v) for v in unordered.inputs[num_inputs:])

    order = skeleton(unordered, options)
    if not order.gathers and not order.reductions:
        return None
    total = 0.0
    bottleneck = ""
    for part, times in micro_batch_programs(unordered).runs:
        order = skeleton(part, options)
        if order.gathers or order.reductions or any(map(is_copy, part.eqns)):
            result = bound(formulate(order, cluster, peak, least=True))
            seconds, bottleneck = result.seconds, result.binds
        else:
            # Without planned collectives and copies there is one order.
            seconds, bottleneck = simulate(part, cluster).seconds, "compute"
        total += times * seconds
    return total, bottleneck
