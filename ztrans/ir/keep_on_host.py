"""keep_on_host: let values of forward wait for backward in the memory of the host.

    a = attention(q, k, v); y = mm(a, w)        a = attention(q, k, v); h = wait(to_host(a)); y = mm(a, w)
    ...                                   -->   ...
    dw = mm(dy, a)                              a' = wait(to_device(h)); dw = mm(dy, a')

The user chooses the values, by a selective checkpoint, or a plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from .collectives import rules
from .copies import to_device, to_host, wait_for_copy
from .graph import Eqn, Graph, Names, Var, rename, variables
from .liveness import liveness
from .recompute import recompute


def demanded_on_host(graph: Graph) -> set[Var]:
    """The values that selective checkpoints of the step move to the host."""
    movable = values_for_backward(graph)
    demanded = (e for e in graph.eqns if e.demand == "host")
    return {v for e in demanded for v in e.results if v in movable}


def values_for_backward(graph: Graph) -> set[Var]:
    """The values of forward that only forward and backward read, each the owner of its storage."""
    root = liveness(graph).root
    read_by: dict[str, set[Var]] = {"forward": set(), "backward": set(), "update": set()}
    for e in graph.eqns:
        read_by[e.region].update(root[v] for v in e.ins)
    returned = {root[v] for v in variables(graph.outputs)}
    owners = {v for e in graph.eqns if _may_be_moved(e) for v in e.results if root[v] is v}
    with_dims = {v for v in owners & read_by["backward"] if v.shape}
    return with_dims - read_by["update"] - returned


def _may_be_moved(e: Eqn) -> bool:
    """Whether the results of an equation may be moved: it is forward's, and no collective or copy."""
    return e.region == "forward" and e.provenance is None and not rules(e).starts


def keep_on_host(graph: Graph, chosen: Set[Var]) -> Graph:
    """Copy the values in `chosen` to the host when they are computed, and back before backward first reads them.

    They are among the `values_for_backward` of the program.
    """
    # As if backward computed them again; but what would compute them is the copy from the host.
    again = recompute(graph, chosen)
    originals = dict(again.copies[len(graph.copies) :])
    names = Names(v.name for e in again.eqns for v in e.results)
    on_host: dict[Var, Var] = {}
    on_device: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    read_again = set(originals.values())
    for e in again.eqns:
        returning = [v for v in e.results if originals.get(v) in chosen]
        for copy in returning:
            original = originals[copy]
            eqns += _copied(e, to_device, on_host[original], names.fresh(f"{original.name}.device"))
            on_device[copy] = eqns[-1].out
        if returning:
            continue
        eqns.append(e)
        for v in e.results:
            if v in chosen and v in read_again:
                eqns += _copied(e, to_host, v, names.fresh(f"{v.name}.host"))
                on_host[v] = eqns[-1].out
    return rename(again.replace(eqns=tuple(eqns), copies=graph.copies), on_device)


def _copied(e: Eqn, copy: Callable[..., Eqn], v: Var, name: str) -> list[Eqn]:
    """A copy of `v` and the wait for it, in the region and with the line of an equation."""
    start = copy(v, name, region=e.region, source=e.source)
    return [start, wait_for_copy(start.out, region=e.region, source=e.source)]
