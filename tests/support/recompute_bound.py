"""Seconds of recomputation that no choice can avoid, by minimum cuts. The choices of ztrans are compared with them.

At one place in backward, each value that backward still needs is either live, or is computed again later, from values
that are live there or are computed again themselves. With a price for every live byte, the cheapest such choice is a
minimum cut:

    source --seconds--> equation --infinite--> each value that it computes
    value  --price x bytes--> value, live          value --infinite--> each equation that reads it
    value, live --infinite--> sink, if backward needs it

The seconds of a choice that fits are at least those of the cut, less the price of the bytes that may be live. This
holds for every place and every price, so the greatest of them is the bound. It leaves out what recomputation itself has
live, and all other places.
"""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from ztrans.planning.recompute.model import Model

_SCALE = 1e15  # capacities are whole numbers: flows of floats may not end
_EXACT = 1e-6  # the share by which a bound may be too small


def least_seconds(model: Model, target: float, places: Iterable[int]) -> float:
    """Seconds of recomputation that every choice within a target needs.

    Args:
        model: the values and computations of a program.
        target: the bytes that may be live.
        places: the operations at which bytes are counted.
    """
    return max((_at_place(model, target, place) for place in places), default=0.0)


def _at_place(model: Model, target: float, place: int) -> float:
    """The bound by the bytes that are live at one place, with the best price for them."""
    room = target - (float(model.live[place]) - _bytes_across(model, place))
    # The cut as a function of the price is a broken line. Its pieces near the best price are found by crossing two.
    few_seconds, many_bytes = 0.0, _bytes_across(model, place)
    # At this price no byte is kept if it can be computed again.
    dearest = 2 * sum(computation.seconds for computation in model.computations)
    many_seconds, few_bytes = _cut(model, place, dearest)
    if many_bytes <= room:
        return 0.0
    if few_bytes > room:
        return float("inf")
    best = 0.0
    while True:
        price = (many_seconds - few_seconds) / (many_bytes - few_bytes)
        at_crossing = many_seconds + price * (few_bytes - room)
        seconds, size = _cut(model, place, price)
        value = seconds + price * (size - room)
        best = max(best, value)
        # Values and prices are rounded, so a piece that was crossed before may seem to be below the crossing.
        if value >= at_crossing * (1 - _EXACT) or not few_bytes < size < many_bytes:
            return best
        if size > room:
            few_seconds, many_bytes = seconds, size
        else:
            many_seconds, few_bytes = seconds, size


def _bytes_across(model: Model, place: int) -> float:
    """The bytes of values of forward that are live at a place, because backward reads them there or later."""
    return float(sum(v.use.bytes for v in model.values if v.use.forward < place <= v.use.last))


def _cut(model: Model, place: int, price: float) -> tuple[float, float]:
    """The cheapest choice at a place: its seconds of recomputation, and its live bytes."""
    graph = _network(model, place, price)
    if not graph:
        return 0.0, 0.0
    _, (reached, _) = nx.minimum_cut(graph, "source", "sink")
    seconds = 0.0
    for _, node in graph.out_edges("source"):
        if node not in reached:
            seconds += model.computations[node[1]].seconds
    size = 0.0
    for node in reached:
        if node[0] == "value" and ("live", node[1]) not in reached:
            size += model.values[node[1]].use.bytes
    return seconds, size


def _network(model: Model, place: int, price: float) -> nx.DiGraph:
    """The network of a place, with the values that backward needs there or later, and what they are computed from."""
    graph = nx.DiGraph()
    unread = [i for i, v in enumerate(model.values) if v.use.forward < place <= v.use.last]
    graph.add_edges_from((("live", i), "sink") for i in unread)
    seen = set(unread)
    while unread:
        i = unread.pop()
        value = model.values[i]
        graph.add_edge(("value", i), ("live", i), capacity=round(_SCALE * price * value.use.bytes))
        if not value.droppable:  # it is live, or nobody needs it
            graph.add_edge("source", ("value", i))
            continue
        computation = model.computations[value.maker]
        equation = ("equation", value.maker)
        graph.add_edge("source", equation, capacity=round(_SCALE * computation.seconds))
        graph.add_edge(equation, ("value", i))
        graph.add_edges_from((("live", arg), equation) for arg in computation.args)
        unread += set(computation.args) - seen
        seen.update(computation.args)
    return graph
