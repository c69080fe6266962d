"""Cut the batch of a traced step: the program of one micro-batch, without another trace.

    y: [8,4] = mm(x: [8,16], w); z: [32] = view(y, [32])    -->    y: [4,4] = mm(x: [4,16], w); z: [16] = view(y, [16])

Sharding rules say along which dim a value has the rows of the batch, as for tiles (see `analyses.segments`). Each
equation on such values is run on meta tensors, to check that its results have the shapes that follow from the rules.
"""

from __future__ import annotations

import torch

from ..analyses.segments import CannotCut, cut_dims, on_part, part_of
from ..ir.graph import Eqn, Graph, Var, substitute
from ..ir.result_types import result_types, type_problem


def with_fewer_rows(graph: Graph, parts: int) -> Graph | None:
    """The traced program for the first of several equal parts of the batch; None if only a trace can tell it."""
    dims = _dims_of_rows(graph, parts)
    if dims is None:
        return None
    of_value = {v: part_of(v, dims, parts, 0) for v in dims}
    of_part = lambda v: of_value.get(v, v)
    eqns: list[Eqn] = []
    for e in graph.eqns:
        if any(v in dims for v in (*e.ins, *e.results)):
            outs = tuple(out and of_part(out) for out in e.outs)
            e = on_part(e, dims, parts, 0).with_inputs(of_part, outs=outs)
            if not _has_known_results(e):
                return None
        if e.repeats is not None:
            outs = tuple(out and of_part(out) for out in e.repeats.outs)
            e = e.replace(repeats=e.repeats.replace(outs=outs))
        eqns.append(e)
    return graph.replace(
        inputs=tuple(map(of_part, graph.inputs)),
        batch=frozenset(map(of_part, graph.batch)),
        eqns=tuple(eqns),
        outputs=substitute(graph.outputs, of_part),
    )


def _dims_of_rows(graph: Graph, parts: int) -> dict[Var, int] | None:
    """The dim along which each value has the rows of the batch; None if these have no such parts."""
    batch = {v: 0 for v in graph.batch if v.shape}
    if len({v.shape[0] for v in batch}) != 1:
        return None
    try:
        dims = cut_dims(graph.eqns, batch, parts)
    except CannotCut:
        return None
    is_state_cut = any(v in dims and v not in batch for v in graph.inputs)
    is_uneven = any(v.shape[dim] % parts for v, dim in dims.items())
    return None if is_state_cut or is_uneven else dims


def _has_known_results(e: Eqn) -> bool:
    """Whether the results of an equation have the types that its arguments give."""
    runs = isinstance(e.op, torch._ops.OpOverload) and result_types(e) is not None
    return runs and type_problem(e) is None
