"""Erase marks that no transform has replaced, and collectives over axes of one rank."""

from __future__ import annotations

import dataclasses

import torch

from ..ir.collectives import rules
from ..ir.graph import Eqn, Graph, Primitive, Var, dce, producers, rename, substitute
from ..ir.marks import MARKS
from ..ir.op_facts import CAST
from ..ir.rewriter import Rewriter


def erase_marks(graph: Graph) -> Graph:
    """Drop the marks that no transform has replaced; they are the identity."""
    new = Rewriter(graph)
    for e in graph.eqns:
        if e.op in MARKS.values():
            new.drop(e)
            new.alias(e.out, e.args[0])
    return new.applied()


def erase_trivial(graph: Graph) -> Graph:
    """Replace each collective over an axis of one rank, which moves nothing, by its members.

    They are cast as if they were sent, but not encoded.
    """
    trivial = {axis for axis, size in graph.axes.items() if size == 1}
    if not trivial:
        return graph

    new = Rewriter(graph)
    erased: set[Var] = set()
    for e in graph.eqns:
        if isinstance(e.op, Primitive) and rules(e).axis(e) in trivial:
            new.drop(e)
            for member, out in zip(e.ins, e.results):
                casts = _casts(member, out, e)
                new.insert_before(e, *casts)
                new.alias(out, casts[-1].out if casts else member)
            erased.update(e.results)
        elif rules(e).waits and e.ins[0] in erased:
            new.drop(e)
            new.alias(e.out, e.ins[0])
    return _without_axes(new.applied(), trivial)


def _casts(member: Var, out: Var, start: Eqn) -> list[Eqn]:
    """The casts of a member to the dtype of the wire, and then to the dtype of its result."""
    casts: list[Eqn] = []
    for dtype in (start.kwargs.get("dtype"), out.dtype):
        if not isinstance(dtype, torch.dtype) or dtype == member.dtype:
            continue
        name = f"{out.base_name}.{str(dtype).removeprefix('torch.')}"
        value = Var(name, dtype, member.shape, member.layout)
        casts.append(Eqn(CAST, (member,), (value,), {"dtype": dtype}).like(start))
        member = value
    return casts


def _without_axes(graph: Graph, axes: set[str]) -> Graph:
    """The program without `axes`, which have one rank each, in the layouts of its values."""
    new_values: dict[Var, Var] = {}
    for v in (*graph.inputs, *producers(graph.eqns)):
        layout = tuple(p for p in v.layout if p.axis not in axes)
        if layout != v.layout:
            new_values[v] = dataclasses.replace(v, layout=layout)
    if not new_values:
        return dce(graph)

    def new_value(v: Var) -> Var:
        return new_values.get(v, v)

    graph = graph.replace(
        inputs=tuple(map(new_value, graph.inputs)),
        batch=frozenset(map(new_value, graph.batch)),
        eqns=tuple(e.replace(outs=substitute(e.outs, new_value)) for e in graph.eqns),
    )
    return dce(rename(graph, new_values))
