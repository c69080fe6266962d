"""Keep values of forward in the memory of the host until backward reads them.

    a = attention(q, k, v); y = mm(a, w)        a = attention(q, k, v); h = wait(to_host(a)); y = mm(a, w)
    ...                                   -->   ...
    dw = mm(dy, a)                              a' = wait(to_device(h)); dw = mm(dy, a')

The user chooses the values by a selective checkpoint, or a plan does.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial

from ..ir.collectives import rules
from ..ir.copies import to_device, to_host, wait_for_copy
from ..ir.graph import Eqn, Graph, Var
from ..ir.liveness import liveness
from ..ir.rewriter import Rewriter
from .recompute import needed_after_backward


def demanded_on_host(graph: Graph) -> set[Var]:
    """The values that selective checkpoints of the step move to the host."""
    demanded: set[Var] = set()
    for e in graph.eqns:
        if e.demand == "host":
            demanded.update(e.results)
    if not demanded:
        return demanded
    return demanded & values_for_backward(graph)


def values_for_backward(graph: Graph) -> set[Var]:
    """The values of forward that only forward and backward read, each the owner of its storage."""
    root = liveness(graph).root
    # Values that are needed after backward stay in memory: to move them would only add copies.
    needed_later = needed_after_backward(graph)
    read_in_backward: set[Var] = set()
    for e in graph.eqns:
        if e.region == "backward":
            read_in_backward.update(root[v] for v in e.ins)

    values = set()
    for e in graph.eqns:
        if not _may_be_moved(e):
            continue
        for v in e.results:
            # A view moves with the owner of its storage. A scalar is not worth a copy.
            owns_storage = root[v] is v
            if owns_storage and v.shape and v in read_in_backward and v not in needed_later:
                values.add(v)
    return values


def _may_be_moved(e: Eqn) -> bool:
    """Whether the results of an equation may be moved: it belongs to forward, and is not a collective or a copy."""
    return e.region == "forward" and e.provenance is None and not rules(e).starts


def keep_on_host(graph: Graph, chosen: Set[Var]) -> Graph:
    """Copy the values in `chosen` to the host when they are computed, and back before backward first reads them.

    Args:
        graph: the program.
        chosen: some of its `values_for_backward`.
    """
    new = Rewriter(graph)
    root = liveness(graph).root
    on_host: dict[Var, Var] = {}  # the copies of the chosen values
    # The values that backward reads instead of chosen values and their views.
    on_device: dict[Var, Var] = {}

    def value_on_device(reader: Eqn, v: Var) -> Var:
        """The value that backward reads for a value of forward. A copy back, or a view of it, precedes `reader`."""
        maker = new.makers.get(v)
        if v in on_device or maker is None or maker.region != "forward" or root[v] not in chosen:
            return on_device.get(v, v)
        if v in chosen:
            name = new.fresh_name(f"{v.name}.device")
            start = to_device(on_host[v], name).like(maker, "backward")
            wait = wait_for_copy(start.out).like(start)
            new.insert_before(reader, start, wait)
            on_device[v] = wait.out
        else:
            # Repeat a view on the copy, which takes no memory. The old view would keep the old storage.
            view = maker.with_inputs(partial(value_on_device, reader), region="backward")
            for x in maker.results:
                on_device[x] = new.fresh(x, ".device")
            outs = tuple(None if x is None else on_device[x] for x in maker.outs)
            new.insert_before(reader, view.replace(outs=outs))
        return on_device[v]

    for e in graph.eqns:
        if e.region == "backward":
            new.replace(e, e.with_inputs(partial(value_on_device, e)))
        for v in e.results:
            if v in chosen:
                name = new.fresh_name(f"{v.name}.host")
                start = to_host(v, name).like(e)
                wait = wait_for_copy(start.out).like(start)
                new.insert_after(e, start, wait)
                on_host[v] = wait.out
    return new.applied()
