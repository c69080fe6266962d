"""The values of forward that backward needs, and the costs to recompute them or to keep them on the host.

A computation is an equation of forward that depends on the batch. If it is repeated, it runs again right before
backward first needs one of its results, and the results are not live in between. Or its results wait on the host, and
return before backward first needs them:

    kept         live from its birth to the last use in forward or backward
    recomputed   live from its birth to the last use in forward, and from the first use in backward to the last one
    on the host  live from its birth until it has left, and from the start of its return to the last use in backward

The inputs of a repeated computation are needed where it runs again. So a kept input lives longer, and any other input
is recomputed or returns earlier. Values that depend on the state alone do not count here: parameters and their casts
are available in backward anyway, or are gathered for it. Views are repeated with the storages that they show.

Live bytes are counted in the program without recomputation and moves, as planning counts them (see `buffers`). A place
is the number of one of its operations. `residency` has the changes that a choice makes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...ir.graph import Eqn, Graph, Var, producers
from ...ir.liveness import liveness
from ...ir.varying import varying
from ...rewrites.recompute import repeatable
from ..buffers import local_bytes
from .absences import HostLink

# A place after the end of every program.
NOWHERE = sys.maxsize


@dataclass
class Use:
    """The places where the program of one rank needs a storage. A storage that the program lacks has the defaults.

    Attributes:
        bytes: its size on one rank.
        born: the place of its computation.
        forward: the last place before backward that needs it.
        first, last: the first and the last place in backward that needs it; `NOWHERE` and -1 without any.
    """

    bytes: int = 0
    born: int = 0
    forward: int = 0
    first: int = NOWHERE
    last: int = -1


class Value(NamedTuple):
    """A storage that forward allocates: its uses, and what may become of it.

    Attributes:
        var: the first value that has the storage.
        maker: the computation that allocates it, by index.
        use: the places where the program of one rank needs it.
        droppable: whether backward may recompute it instead of keeping it.
        movable: whether it may wait for backward on the host.
    """

    var: Var
    maker: int
    use: Use
    droppable: bool
    movable: bool


class Computation(NamedTuple):
    """An equation of forward. Its values are indices.

    Attributes:
        eqn: the equation.
        seconds: its duration, including the views that run again with it.
        args, results: the values that it reads and allocates.
        droppable: the results that backward may recompute.
        movable: the results that may wait for backward on the host.
    """

    eqn: Eqn
    seconds: float
    args: tuple[int, ...]
    results: tuple[int, ...]
    droppable: tuple[int, ...]
    movable: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Model:
    """The computations and values of a program, and its live bytes.

    Attributes:
        values, computations: in the order of the program.
        readers: for each value, the computations that read it.
        live: by operation, the live bytes if nothing is recomputed or moved.
        link: the link to the host, if values may wait there.
    """

    values: tuple[Value, ...]
    computations: tuple[Computation, ...]
    readers: tuple[tuple[int, ...], ...]
    live: np.ndarray
    link: HostLink | None

    @functools.cached_property
    def forced(self) -> tuple[int, ...]:
        """The computations that a checkpoint of the step, or the user, demands to repeat."""
        forced: list[int] = []
        for i, computation in enumerate(self.computations):
            if computation.eqn.demand == "recompute" and computation.droppable:
                forced.append(i)
        return tuple(forced)


def uses_of(graph: Graph, operations: Sequence[Eqn]) -> dict[str, Use]:
    """The uses of a program's storages, by the names of their first values. Places are the numbers of `operations`."""
    root = liveness(graph).root
    size = local_bytes(graph)
    uses: dict[str, Use] = {}
    for place, e in enumerate(operations):
        for v in (*e.ins, *e.results):
            use = uses.setdefault(root[v].name, Use(born=place))
            if e.region == "backward":
                use.first = min(use.first, place)
                use.last = place
            else:
                use.forward = place
        for v in e.results:
            uses.setdefault(v.name, Use()).bytes = size(v)
    return uses


def model_of(
    graph: Graph,
    seconds: Mapping[Eqn, float],
    uses: Mapping[str, Use],
    live: np.ndarray,
    at_least: int | None,
    link: HostLink | None,
    movable: Collection[str],
) -> Model:
    """The model of a program.

    Args:
        graph: the program before it is sharded, without recomputation in backward.
        seconds: the duration of each equation of `graph`.
        uses: the uses of the storages of `graph` in the program of one rank, by name.
        live: by operation, the live bytes of the program of one rank.
        at_least: the least size of a value that is recomputed, unless the user demands it. With None, no value is.
        link: the link to the host, if values may wait there.
        movable: the names of the values that may wait there.
    """
    root = liveness(graph).root
    over_batch = varying(graph, ("batch",))
    views = _views_for_backward(graph)
    droppable = set() if at_least is None else _droppable(graph, uses, at_least)
    index_of: dict[Var, int] = {}
    values: list[Value] = []
    computations: list[Computation] = []
    for e in graph.eqns:
        allocated = [v for v in e.results if root[v] is v and v in over_batch]
        if e.region != "forward" or not allocated:
            continue

        args = tuple(dict.fromkeys(index_of[root[v]] for v in e.ins if root[v] in index_of))
        results = range(len(values), len(values) + len(allocated))
        index_of.update(zip(allocated, results))
        for v in allocated:
            use = uses.get(v.name, Use())
            values.append(Value(v, len(computations), use, v in droppable, v.name in movable))

        seconds_with_views = seconds[e] + sum(seconds[view] for view in views.get(e, ()))
        computations.append(_computation(e, seconds_with_views, args, results, values))
    return Model(tuple(values), tuple(computations), _readers(values, computations), live, link)


def _droppable(graph: Graph, uses: Mapping[str, Use], at_least: int) -> set[Var]:
    """The values that backward may recompute: large ones, and ones that the user demands to recompute."""
    droppable = set()
    for v, e in repeatable(graph).items():
        use = uses.get(v.name)
        if use is None or not use.bytes:
            continue  # the program of one rank does not have it
        is_large = e.demand is None and use.bytes >= at_least
        if is_large or e.demand == "recompute":
            droppable.add(v)
    return droppable


def _readers(
    values: Sequence[Value], computations: Sequence[Computation]
) -> tuple[tuple[int, ...], ...]:
    """For each value, the computations that read it."""
    readers: list[list[int]] = [[] for _ in values]
    for i, computation in enumerate(computations):
        for v in computation.args:
            readers[v].append(i)
    return tuple(map(tuple, readers))


def _views_for_backward(graph: Graph) -> dict[Eqn, list[Eqn]]:
    """For each equation of forward, the views of its results that backward reads. They run again with it."""
    root = liveness(graph).root
    makers = producers(graph.eqns)
    backward_inputs: set[Var] = set()
    for e in graph.eqns:
        if e.region == "backward":
            backward_inputs.update(e.ins)

    views: dict[Eqn, list[Eqn]] = {}
    for e in graph.eqns:
        is_read_view = any(v in backward_inputs and root[v] is not v for v in e.results)
        if e.region != "forward" or not is_read_view:
            continue
        maker = makers.get(root[e.results[0]])
        if maker is not None and maker is not e:
            views.setdefault(maker, []).append(e)
    return views


def _computation(
    e: Eqn, seconds: float, args: tuple[int, ...], results: range, values: Sequence[Value]
) -> Computation:
    return Computation(
        eqn=e,
        seconds=seconds,
        args=args,
        results=tuple(results),
        droppable=tuple(v for v in results if values[v].droppable),
        movable=tuple(v for v in results if values[v].movable),
    )
