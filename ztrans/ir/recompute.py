"""recompute: values of forward that backward computes for itself, instead of reading those that were kept.

    a = gelu(h); y = mm(a, w)               a = gelu(h); y = mm(a, w)
    ...                              -->    ...
    dw = mm(dy, a)                          a' = gelu(h); dw = mm(dy, a')

Which values these are is the choice of a transform (see `transforms.remat`), or of the user, by a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from .graph import Eqn, Graph, Names, Var, is_random, producers, substitute, variables
from .liveness import liveness


def recompute(graph: Graph, again: Set[Var]) -> Graph:
    """Let backward compute the values of `again`, each the first in its storage, where it first reads them.

    What computes them computes the views of them as well, and in its turn reads what backward has computed.
    """
    makers, root = producers(graph.eqns), liveness(graph).root
    place = {e: i for i, e in enumerate(graph.eqns)}
    names = Names(v.name for v in (*graph.inputs, *makers))
    eqns: list[Eqn] = []
    copies: dict[Var, Var] = {}

    def needed(v: Var) -> list[Eqn]:
        """The equations that compute `v` anew, in their order."""
        equations, reads = set[Eqn](), [v]
        while reads:
            v = reads.pop()
            if root[v] in again and v not in copies and makers[v].region == "forward" and makers[v] not in equations:
                equations.add(makers[v])
                reads += makers[v].ins
        return sorted(equations, key=place.__getitem__)

    def read(v: Var) -> Var:
        for e in needed(v):
            copies.update(
                (out, dataclasses.replace(out, name=names.fresh(f"{out.name}.again")))
                for out in e.results
                if root[out] in again
            )
            args, kwargs = (substitute(x, lambda v: copies.get(v, v)) for x in (e.args, e.kwargs))
            outs = tuple(out and copies.get(out) for out in e.outs)
            eqns.append(e.replace(args=args, kwargs=kwargs, outs=outs, region="backward"))
        return copies.get(v, v)

    for e in graph.eqns:
        if e.region == "backward":
            e = e.replace(args=substitute(e.args, read), kwargs=substitute(e.kwargs, read))
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))


def checkpointed(graph: Graph, checkpoint: Mapping[Var, int | None], drops: Set[Var]) -> Graph:
    """Recompute the values that selective checkpoints drop, matrix products included.

    `checkpoint` has the number of the checkpoint that computes a value, `drops` the values that are not to be stored.

    Kept are random draws, what the update or an output of the step reads anyway, and what leaves its checkpoint:
    that is what the next one begins with.
    """
    makers, root = producers(graph.eqns), liveness(graph).root
    dropped = {v for v in makers if root[v] is v and v in drops and not is_random(makers[v].op)}
    if not dropped:
        return graph
    kept = {root[v] for v in variables(graph.outputs)}
    for e in graph.eqns:
        here = next((checkpoint.get(v) for v in e.outs if v is not None), None)
        if e.region != "backward":
            kept.update(root[v] for v in e.ins if e.region == "update" or checkpoint.get(root[v]) != here)
    return recompute(graph, dropped - kept)
