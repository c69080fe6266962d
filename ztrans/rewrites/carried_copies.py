"""Let copies of new leaves to the host continue during forward of the next step.

    def step(w, m: f32<host>[4]):                      def step(w, m: f32<host>[4]!):
      ...forward, backward...                            ...; m.host = wait(m); ...forward, backward...
      m.device = wait(to_device(m))                      m.device = wait(to_device(m.host))
      m1 = update(m.device)                        -->   m1 = update(m.device)
      m1.host = wait(to_host(m1, over=m))                m1.host' = to_host(m1, over=m.host)
      return w1, m1.host                                 return w1, m1.host'

The leaf is a future from step to step, so the program stays a function. The source of the copy on the device lives
until the wait: it takes memory at the end of the step and at the beginning of the next one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from ..ir.graph import Eqn, Graph, Var, producers, users, variables
from ..ir.liveness import liveness
from ..ir.rewriter import Rewriter


def carriable_copies(graph: Graph) -> dict[Eqn, Var]:
    """The copies to the host that may continue after the step, each with the leaf of the state that it overwrites.

    Each overwrites the old leaf in the same place of the state. It reads memory of the device that neither the caller
    nor the next step can overwrite, and nothing else reads its result.
    """
    makers = producers(graph.eqns)
    readers = users(graph)
    times_returned = Counter(variables(graph.outputs))
    root = liveness(graph).root
    callers_storages = {root[v] for v in (*graph.inputs, *times_returned)}
    copies = {}
    for leaf, new in graph.leaves:
        wait = makers.get(new)
        start = makers.get(wait.ins[0]) if wait is not None and wait.ins else None
        if start is None or start.kwargs.get("over") is not leaf:
            continue
        is_private = root[start.ins[0]] not in callers_storages
        is_read = new in readers or leaf in times_returned or times_returned[new] > 1
        if is_private and not is_read:
            copies[start] = leaf
    return copies


def carry_copies(graph: Graph, copies: Mapping[Eqn, Var]) -> Graph:
    """Let copies to the host continue after the step.

    Args:
        graph: the program. The wait for each of the copies already stands where the next step is to wait for it.
        copies: the copies, each with the leaf that it overwrites.
    """
    new = Rewriter(graph)
    readers = users(graph)
    futures: dict[Var, Var] = {}
    for start, leaf in copies.items():
        (wait,) = readers[start.out]
        futures[leaf] = dataclasses.replace(leaf, future=True)
        arrived = new.fresh(leaf, f".{leaf.memory}")
        new.replace(wait, wait.replace(args=(futures[leaf],), outs=(arrived,), region="forward"))
        new.alias(leaf, arrived)
        new.alias(wait.out, start.out)
    inputs = tuple(futures.get(v, v) for v in graph.inputs)
    return new.applied().replace(inputs=inputs)
