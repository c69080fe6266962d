"""launches: how many calls the host makes for each equation of a program, and how many kernels it launches.

A small step is as fast as its host. These are the calls of the eager backend: each operation is one, and equal updates
that stand together need one (see `ir.update_groups`). A collective launches its message, what packs it
where something is packed, and what unpacks it at the first wait where something is unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..ir.collectives import rules
from ..ir.donation import is_constant
from ..ir.graph import Eqn, Graph, Primitive
from ..ir.higher_order import inner_work
from ..ir.op_facts import op_facts
from ..ir.pairing import pair
from ..ir.relations import cached_on_graph
from ..ir.update_groups import group_updates


class Launches(NamedTuple):
    """The calls that the host makes for an equation, and the kernels that these launch."""

    calls: int
    kernels: int


@cached_on_graph
def launches(graph: Graph) -> Mapping[Eqn, Launches]:
    """The calls and launches of every equation, on the first rank."""
    with_others = {e for group in group_updates(graph)[1] for e in group[1:]}
    pairs = pair(graph)

    def counted(e: Eqn) -> Launches:
        if e in with_others or is_constant(e):
            return Launches(0, 0)
        if e in pairs.starts:
            return Launches(1, 1 + bool(rules(e).sent_bytes(e, graph.axes)))
        if e in pairs.waits:
            started, member = pairs.waits[e].start, pairs.waits[e].member
            unpacks = bool(rules(started).unpacked_bytes(started, graph.axes))
            return Launches(1, unpacks) if not member else Launches(0, 0)
        if isinstance(e.op, Primitive):
            return Launches(int(rules(e).shares(e)), 0)
        inner = inner_work(e, lambda g: sum(not op_facts(each.op).view for each in g.eqns))
        if inner is not None:
            return Launches(inner, inner)
        return Launches(1, int(not op_facts(e.op).view))

    return {e: counted(e) for e in graph.eqns}
