"""Erase the collectives over mesh axes of one rank, which move nothing."""

from __future__ import annotations

import dataclasses

from ..graph import Eqn, Graph, Primitive, Var, dce, producers, rename, substitute
from ..op_facts import CAST
from .table import rules


def erase_trivial(graph: Graph) -> Graph:
    """Replace each collective over an axis of size 1 by its members, cast as if they had been sent."""
    trivial = {axis for axis, size in graph.axes.items() if size == 1}
    if not trivial:
        return graph
    alias: dict[Var, Var] = {}
    eqns: list[Eqn] = []
    for e in graph.eqns:
        if isinstance(e.op, Primitive) and rules(e).axis(e) in trivial:
            for member, out in zip(e.ins, e.results):
                casts, alias[out] = _rounded(member, out, e)
                eqns += casts
        elif rules(e).waits and e.ins[0] in alias:
            alias[e.results[0]] = e.ins[0]
        else:
            eqns.append(e)
    return _without_axes(rename(graph.replace(eqns=tuple(eqns)), alias), trivial)


def _rounded(member: Var, out: Var, start: Eqn) -> tuple[list[Eqn], Var]:
    """The casts of a member to the dtype in which it would be sent and to that of its result, and the result."""
    casts: list[Eqn] = []
    for dtype in (start.kwargs.get("dtype"), out.dtype):
        if dtype is not None and dtype != member.dtype:
            name = f"{out.name.removesuffix(chr(39))}.{dtype}".replace("torch.", "")
            value = Var(name, dtype, member.shape, member.layout)
            casts.append(
                Eqn(CAST, (member,), (value,), {"dtype": dtype}, start.region, start.source)
            )
            member = value
    return casts, member


def _without_axes(graph: Graph, axes: set[str]) -> Graph:
    """The program without `axes`, of one rank each, in the layouts of its values."""
    whole = {
        v: dataclasses.replace(v, layout=tuple(part for part in v.layout if part.axis not in axes))
        for v in (*graph.inputs, *producers(graph.eqns))
        if v.layout
    }
    eqns = tuple(e.replace(outs=substitute(e.outs, lambda v: whole.get(v, v))) for e in graph.eqns)
    inputs, batch = (
        map(lambda v: whole.get(v, v), values) for values in (graph.inputs, graph.batch)
    )
    return dce(
        rename(graph.replace(inputs=tuple(inputs), eqns=eqns, batch=frozenset(batch)), whole)
    )
