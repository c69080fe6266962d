"""Keep gathered parameters from the first micro-batch for all others."""

from __future__ import annotations

from ..ir.collectives import role, rules
from ..ir.graph import Graph, users
from ..ir.marks import KEEP
from ..ir.micro_batches import changing
from ..ir.pairing import pair
from ..ir.rewriter import Rewriter


def keep_gathers(graph: Graph) -> Graph:
    """Mark the values that the first micro-batch keeps for all others: parameters and their extremes.

    At stages 1 and 2 a parameter is gathered once. Stage 3 drops it after each forward, so each micro-batch gathers it.
    """
    if graph.micro == 1:
        return graph
    changing_values = changing(graph)
    readers = users(graph)
    new = Rewriter(graph)
    for wait, awaited in pair(graph).waits.items():
        if role(awaited.start) != "param" or wait.out in changing_values:
            continue
        # A parameter is reduced only to its maximum or minimum, for the scale of a cast (`fuse_cast_gather`).
        is_extreme = not rules(awaited.start).moves
        if is_extreme or graph.zero_stage in (1, 2):
            value = new.fresh(wait.out, ".kept")
            new.insert_after(wait, wait.replace(op=KEEP, args=(wait.out,), outs=(value,)))
            new.replace_reads(readers.get(wait.out, ()), wait.out, value)
    return new.applied()
