"""Write the equations around wide values for rows: [batch, sequence, ...] becomes [1, batch * sequence, ...].

    h: [2,8,64] = view(mm: [16,64])            h: [1,16,64] = view(mm)
    a: [2,8,64] = gelu(h)               -->    a: [1,16,64] = gelu(h)
    v: [16,64] = view(a)                       v: [16,64] = view(a)

Then four parts of the 16 rows are parts of every value, though 2 sequences have no four parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import torch

from ..ir.graph import Eqn, Graph, Names, Var, variables
from ..ir.layout import with_size
from ..ir.op_facts import op_facts
from ..ir.patterns import WHOLE, letters_of
from ..ir.sharding_rules import pattern_of
from ..ir.varying import varying
from .segments import CONSTRUCTORS, CannotCut

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class MergedRows(NamedTuple):
    """A program in which equations compute rows, these equations, and the rows of each value that had two dims."""

    graph: Graph
    eqns: tuple[Eqn, ...]
    rows_of: Mapping[Var, Var]


def merged_rows(graph: Graph, eqns: Sequence[Eqn]) -> MergedRows | None:
    """The program in which these equations compute rows; None if no view shows rows as two dims.

    Raises: CannotCut if one of them distinguishes the two dims.
    """
    dims = _two_dims_of_rows(eqns)
    if dims is None:
        return None
    from_batch = varying(graph, ("batch",))
    merged: dict[Var, Var] = {}
    names = Names.of(graph)
    for e in eqns:
        for v in (*e.ins, *e.results):
            if v.shape[:2] == dims and v in from_batch and v not in merged:
                name = names.fresh(f"{v.name}.rows")
                shape = (1, dims[0] * dims[1], *v.shape[2:])
                merged[v] = dataclasses.replace(v, name=name, shape=shape)

    inside = set(eqns)
    read_outside = {v for e in graph.eqns if e not in inside for v in e.ins}
    read_outside.update(variables(graph.outputs))
    replacements: dict[Eqn, list[Eqn]] = {}
    new_eqns = []
    bound: set[Var] = set()
    for e in eqns:
        _check_rows(e, dims, merged.keys())
        replacement = []
        for v in dict.fromkeys(e.ins):
            if v in merged and v not in bound:
                replacement.append(_view(v, merged[v]).like(e))
                bound.add(v)
        new = _with_rows(e, merged)
        new_eqns.append(new)
        replacement.append(new)
        bound.update(e.results)
        for v in e.results:
            if v in merged and v in read_outside:
                replacement.append(_view(merged[v], v).like(e))
        replacements[e] = replacement
    program = [new for e in graph.eqns for new in replacements.get(e, (e,))]
    return MergedRows(graph.replace(eqns=tuple(program)), tuple(new_eqns), merged)


def _two_dims_of_rows(eqns: Sequence[Eqn]) -> tuple[int, int] | None:
    """The first two dims of a value that a view makes of rows, or turns into rows."""
    for e in eqns:
        if e.op in _RESHAPES:
            for long, short in ((e.out, e.ins[0]), (e.ins[0], e.out)):
                if len(long.shape) > 2 and short.shape[:1] == (long.shape[0] * long.shape[1],):
                    return long.shape[0], long.shape[1]
    return None


def _view(v: Var, out: Var) -> Eqn:
    return Eqn(aten.view.default, (v, list(out.shape)), (out,))


def _with_rows(e: Eqn, merged: Mapping[Var, Var]) -> Eqn:
    """The equation on rows, with the new shape of its result among its arguments."""
    if e.results and e.out in merged and isinstance(e.op, torch._ops.OpOverload):
        e = with_size(e, merged[e.out].shape)
    outs = tuple(None if out is None else merged.get(out, out) for out in e.outs)
    return e.with_inputs(lambda v: merged.get(v, v), outs=outs)


def _check_rows(e: Eqn, dims: tuple[int, int], merged: Set[Var]) -> None:
    """Raises: CannotCut unless the equation treats both dims as rows of all values that have them."""
    values = [v for v in (*e.ins, *e.outs) if v is not None]
    if e.op in _RESHAPES or not any(v in merged for v in values):
        return
    if op_facts(e.op).name in CONSTRUCTORS:
        return
    is_expand = op_facts(e.op).name == "expand" and e.ins[0] not in merged
    if is_expand and len(e.ins[0].shape) <= len(e.out.shape) - 2:  # it has neither dim
        return
    pattern = pattern_of(e, 1) if isinstance(e.op, torch._ops.OpOverload) else None
    if pattern is None:
        raise CannotCut(e, "has no sharding rule")
    ins, outs = letters_of(pattern, tuple(v.shape for v in e.ins), len(e.outs))
    rows: set[tuple[str, ...]] = set()
    others: set[str] = set()
    for v, letters in zip((*e.ins, *e.outs), (*ins, *outs)):
        if v is not None and v in merged:
            rows.add(tuple(letters[:2]))
            others.update(letters[2:])
        elif v is not None:
            others.update(letters)
    letters_of_rows = rows.pop()
    if rows or WHOLE in letters_of_rows or others.intersection(letters_of_rows):
        raise CannotCut(e, f"tells the dims of {dims[0]} and {dims[1]} rows apart")
