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
from .regions import Fact


def recompute(graph: Graph, again: Set[Var]) -> Graph:
    """Let backward compute the values of `again`, each the first in its storage, where it first reads them.

    What computes them computes the views of them as well, and in its turn reads what backward has computed.
    """
    made, root = producers(graph.eqns), liveness(graph).root
    names = Names(v.name for v in (*graph.inputs, *made))
    eqns: list[Eqn] = []
    done: dict[Var, Var] = {}

    def read(v: Var) -> Var:
        if root[v] in again and v not in done and made[v].region == "forward":
            e = made[v]
            args, kwargs = substitute(e.args, read), substitute(e.kwargs, read)
            for out in e.outs:
                if out is not None and root[out] in again:
                    done[out] = dataclasses.replace(out, name=names.fresh(f"{out.name}.again"))
            outs = tuple(map(done.get, e.outs))
            eqns.append(e.replace(args=args, kwargs=kwargs, outs=outs, region="backward"))
        return done.get(v, v)

    for e in graph.eqns:
        if e.region == "backward":
            e = e.replace(args=substitute(e.args, read), kwargs=substitute(e.kwargs, read))
        eqns.append(e)
    return graph.replace(eqns=tuple(eqns))


def checkpointed(graph: Graph, facts: Mapping[Var | None, Fact]) -> Graph:
    """Recompute what selective checkpoints drop, matrix products included; `facts` are those of what made each value.

    Kept are random draws, what the update or an output of the step reads anyway, and what leaves its checkpoint:
    that is what the next one begins with.
    """
    made, root = producers(graph.eqns), liveness(graph).root
    at = lambda v: facts[v].checkpoint if v in facts else None
    dropped = {v for v in made if root[v] is v and facts[v].dropped and not is_random(made[v].op)}
    if not dropped:
        return graph
    kept = {root[v] for v in variables(graph.outputs)}
    for e in graph.eqns:
        here = next((at(v) for v in e.outs if v is not None), None)
        if e.region != "backward":
            kept.update(root[v] for v in e.ins if e.region == "update" or at(root[v]) != here)
    return recompute(graph, dropped - kept)
