"""write_order: move the writes of the state to the end of a program, so that a failed step leaves the old state whole.

Updates run in place. If a rank fails between two of them, its state is half updated. With `writes_last`, the equations
that write the state run after everything that can fail because of another rank: every collective, forward and
backward. A step that fails before the first write leaves the old state unchanged.

    m1 = mul(m, 0.9)                 n = norm(g)
    n = norm(g)               -->    s = wait(all_reduce(n))
    s = wait(all_reduce(n))          m1 = mul(m, 0.9)
"""

from __future__ import annotations

from .collectives import rules
from .graph import Eqn, Graph, producers
from .op_facts import is_random
from .relations import needed


def writes_last(graph: Graph) -> Graph:
    """Move the equations of the update on which no collective depends to the end of the program.

    Random draws must keep their order, so they, and what they depend on, stay.
    """
    early = (e for e in graph.eqns if _can_fail(e) or is_random(e.op))
    first = needed(early, producers(graph.eqns))
    eqns = (*(e for e in graph.eqns if e in first), *(e for e in graph.eqns if e not in first))
    return graph.replace(eqns=eqns, writes_last=True)


def first_write(graph: Graph) -> int:
    """The index of the first equation that may write over the state; 0 unless the program writes its state last."""
    if not graph.writes_last:
        return 0
    return 1 + max((i for i, e in enumerate(graph.eqns) if _can_fail(e)), default=-1)


def _can_fail(e: Eqn) -> bool:
    """Whether an equation is a collective, which may fail because of another rank, or is forward or backward."""
    return e.region != "update" or rules(e).remote
