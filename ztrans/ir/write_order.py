"""write_order: the part of a program after which its state may be written, where writes come last.

Updates are done in place. If a rank fails between two of them, its state is half updated. With `writes_last`, the
equations that write the state run after everything that can fail on another rank: every collective, forward and
backward. A step that fails before that point leaves the old state whole.

    m1 = mul(m, 0.9)                 n = norm(g)
    n = norm(g)               -->    s = wait(all_reduce(n))
    s = wait(all_reduce(n))          m1 = mul(m, 0.9)
"""

from __future__ import annotations

from .collectives import rules
from .graph import Eqn, Graph, is_random, producers


def writes_last(graph: Graph) -> Graph:
    """The program with the equations of its update on which no collective depends at its end.

    Random draws keep their order, so they stay where they are.
    """
    maker, needed = producers(graph.eqns), set[Eqn]()
    for e in reversed(graph.eqns):
        if e in needed or _can_fail(e) or is_random(e.op):
            needed.add(e)
            needed.update(maker[v] for v in e.ins if v in maker)
    eqns = (*(e for e in graph.eqns if e in needed), *(e for e in graph.eqns if e not in needed))
    return graph.replace(eqns=eqns, writes_last=True)


def first_write(graph: Graph) -> int:
    """The index of the first equation that may write over the state: 0 where writes need not come last."""
    if not graph.writes_last:
        return 0
    return 1 + max((i for i, e in enumerate(graph.eqns) if _can_fail(e)), default=-1)


def _can_fail(e: Eqn) -> bool:
    """Whether the step may fail here because of another rank, or still computes what the update reads."""
    return e.region != "update" or rules(e).remote
