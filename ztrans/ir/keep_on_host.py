"""Let values of forward wait for backward in the memory of the host.

    a = attention(q, k, v); y = mm(a, w)        a = attention(q, k, v); h = wait(to_host(a)); y = mm(a, w)
    ...                                   -->   ...
    dw = mm(dy, a)                              a' = wait(to_device(h)); dw = mm(dy, a')

The user chooses the values, by a selective checkpoint, or a plan does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from .collectives import rules
from .copies import to_device, to_host, wait_for_copy
from .graph import Eqn, Graph, Names, Var, producers
from .liveness import liveness
from .recompute import needed_after_backward


def demanded_on_host(graph: Graph) -> set[Var]:
    """The values that selective checkpoints of the step move to the host."""
    demanded: set[Var] = set()
    for e in graph.eqns:
        if e.demand == "host":
            demanded.update(e.results)
    return demanded & values_for_backward(graph) if demanded else demanded


def values_for_backward(graph: Graph) -> set[Var]:
    """The values of forward that only forward and backward read, each the owner of its storage."""
    root = liveness(graph).root
    # To move what is needed after backward too would only add copies.
    stay = needed_after_backward(graph)
    read_in_backward: set[Var] = set()
    for e in graph.eqns:
        if e.region == "backward":
            read_in_backward.update(root[v] for v in e.ins)

    values = set()
    for e in graph.eqns:
        if not _may_be_moved(e):
            continue
        for v in e.results:
            # A view moves with the value whose storage it has. A scalar is not worth a copy.
            owns_storage = root[v] is v
            if owns_storage and v.shape and v in read_in_backward and v not in stay:
                values.add(v)
    return values


def _may_be_moved(e: Eqn) -> bool:
    """Whether the results of an equation may be moved: it is forward's, and no collective or copy."""
    return e.region == "forward" and e.provenance is None and not rules(e).starts


def keep_on_host(graph: Graph, chosen: Set[Var]) -> Graph:
    """Copy the values in `chosen` to the host when they are computed, and back before backward first reads them.

    They are among the `values_for_backward` of the program.
    """
    moving = _MovingValues(graph, chosen)
    for e in graph.eqns:
        if e.region == "backward":
            e = e.with_inputs(moving.on_device)
        moving.eqns.append(e)
        for v in e.results:
            if v in chosen:
                moving.copy(v, e)
    return graph.replace(eqns=tuple(moving.eqns))


class _MovingValues:
    """The equations of a program so far, with the copies of the chosen values.

    Attributes:
        on_host: for each chosen value, its copy on the host.
        returned: for each chosen value, and each view of one, the value that backward reads in its place.
    """

    def __init__(self, graph: Graph, chosen: Set[Var]) -> None:
        self.chosen = chosen
        self.root = liveness(graph).root
        self.makers = producers(graph.eqns)
        self.names = Names(v.name for v in (*graph.inputs, *self.makers))
        self.eqns: list[Eqn] = []
        self.on_host: dict[Var, Var] = {}
        self.returned: dict[Var, Var] = {}

    def copy(self, v: Var, e: Eqn) -> None:
        """Copy a value to the host that an equation has computed."""
        start = to_host(v, self.names.fresh(f"{v.name}.host"), region=e.region, source=e.source)
        wait = wait_for_copy(start.out, region=e.region, source=e.source)
        self.eqns += (start, wait)
        self.on_host[v] = wait.out

    def on_device(self, v: Var) -> Var:
        """What backward reads for a value. The views that forward has made of a value are made again."""
        if v in self.returned:
            return self.returned[v]
        maker = self.makers.get(v)
        if maker is None or maker.region != "forward" or self.root[v] not in self.chosen:
            return v
        if v in self.chosen:
            self._copy_back(v, maker)
        else:
            self._repeat_view(maker)
        return self.returned[v]

    def _copy_back(self, v: Var, maker: Eqn) -> None:
        name = self.names.fresh(f"{v.name}.device")
        start = to_device(self.on_host[v], name, region="backward", source=maker.source)
        wait = wait_for_copy(start.out, region="backward", source=maker.source)
        self.eqns += (start, wait)
        self.returned[v] = wait.out

    def _repeat_view(self, view: Eqn) -> None:
        # A view of the copy that came back takes no memory; the old one would keep the storage that was given up.
        again = view.with_inputs(self.on_device, region="backward")
        for x in view.results:
            name = self.names.fresh(f"{x.name}.device")
            self.returned[x] = dataclasses.replace(x, name=name)
        outs = tuple(x and self.returned[x] for x in view.outs)
        self.eqns.append(again.replace(outs=outs))
