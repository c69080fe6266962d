"""Find the values that share storage, and the last equation that needs each storage.

A view shares the storage of its argument. The value of a future may share its receive buffer. If a collective sends a
member from the member's own storage, that storage is needed until the wait. The storage of outputs, and so of the new
state, is needed to the end. So is the source of a copy that continues after the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .cached_analysis import cached_on_graph
from .collectives import rules
from .graph import Graph, Var, variables
from .pairing import pair


@dataclass(frozen=True)
class Liveness:
    """The owners and lifetimes of storages.

    Attributes:
        root: for each value, the value that owns its storage.
        last: for each owner, the index of the last equation that needs the storage.
    """

    root: dict[Var, Var]
    last: dict[Var, int]


@cached_on_graph
def liveness(graph: Graph) -> Liveness:
    """The storage and the lifetime of every value of a program."""
    waits = pair(graph, include_copies=True).waits
    root: dict[Var, Var] = {v: v for v in graph.inputs}
    last: dict[Var, int] = {}
    for index, e in enumerate(graph.eqns):
        needed = [*e.ins, *e.results]
        shares = rules(e).shares_storage(e)
        if e in waits:
            # The start decides where a member is received, and from where it is sent.
            start = waits[e].start
            member = waits[e].member
            shares = rules(start).stays_in_buffer(start, member)
            is_of_this_step = waits[e].started.index >= 0
            if is_of_this_step and rules(start).sends_without_copy(start, member, graph.axes):
                needed.append(start.ins[member])

        for out in e.results:
            root[out] = root[e.ins[0]] if shares and e.ins else out
        last.update((root[v], index) for v in needed)
    for v in (*variables(graph.outputs), *read_after_step(graph)):
        last[root[v]] = len(graph.eqns)
    return Liveness(root, last)


def read_after_step(graph: Graph) -> Iterator[Var]:
    """The sources of the copies that continue after the step."""
    if not graph.carried_futures:
        return
    for e in graph.eqns:
        if rules(e).copies and e.out in graph.carried_futures:
            yield e.args[0]
