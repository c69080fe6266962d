"""Keep a gathered value in parts on neighbours, which are consecutive ranks of an axis, such as the ranks of a host.

    w.full = wait(all_gather(w, axis=dp))            w.full = wait(all_gather(w, axis=dp))
    y = f(w.full)                                    w.full_1.cut = shard(w.full, 0, axis=dp/8)
                                                     w.full_1.part = clone(w.full_1.cut)
                                              -->    y = f(w.full)
    w.full_1 = wait(all_gather(w, axis=dp))          w.full_1 = wait(all_gather(w.full_1.part, axis=dp/8))
    z = g(w.full_1)                                  z = g(w.full_1)

Each 8 neighbours of dp hold the whole value together, so the second gather sends nothing to other hosts. Both programs
have the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch

from ..ir.axes import neighbour_count, neighbours
from ..ir.collectives import bucket_key, role, rules, shard
from ..ir.graph import Eqn, Graph, Split, Var
from ..ir.layout import split_over
from ..ir.pairing import pair
from ..ir.rewriter import Rewriter

aten = torch.ops.aten


def gathered_value(start: Eqn) -> Hashable:
    """A key of the value that a gather of one member brings: gathers with equal keys bring the same value."""
    return start.ins[0], start.out.dtype, bucket_key(start)


def kept_part(first_wait: Eqn, second_gather: Eqn, count: int) -> tuple[Eqn, Eqn]:
    """The equations that keep a part of a gathered value on each of `count` neighbours.

    Args:
        first_wait: the wait for the value.
        second_gather: the gather that brings the value again. The part is named after it.
        count: the number of neighbours.
    """
    value = first_wait.out
    axis = second_gather.kwargs["axis"]
    split = Split(neighbours(axis, count), split_over(second_gather.ins[0], axis).dim)
    cut, clone = own_part(value, split, second_gather.out.base_name)
    return cut.like(first_wait), clone.like(first_wait)


def own_part(value: Var, split: Split, name: str) -> tuple[Eqn, Eqn]:
    """The equations that keep this rank's part of a whole value: a view, and its copy, named after `name`."""
    cut = shard(value, f"{name}.cut", split.axis, split.dim)
    part = dataclasses.replace(cut.out, name=f"{name}.part")
    # The view alone would keep the whole value alive.
    clone = Eqn(aten.clone.default, (cut.out,), (part,), {"memory_format": torch.contiguous_format})
    return cut, clone


def gather_of_parts(part: Var, second_gather: Eqn) -> Eqn:
    """The gather among neighbours that brings the value of `second_gather` from their parts."""
    (split,) = set(part.layout) - set(second_gather.out.layout)
    provenance = second_gather.provenance
    if provenance is not None:
        provenance = dataclasses.replace(provenance, axis=split.axis, regather="always")
    kwargs = {"dtype": None, "axis": split.axis}
    return second_gather.replace(args=([part],), kwargs=kwargs, provenance=provenance)


def among_neighbours(graph: Graph) -> Graph:
    """Let neighbours keep parts of the values whose second gather asks for it (see `Provenance`), and gather the parts.

    A second gather still gathers from all ranks if its neighbours would be all ranks of the axis, or if no earlier
    gather brought the value.
    """
    first_waits: dict[Hashable, Eqn] = {}  # for each value
    parts: dict[Hashable, Var] = {}
    new = Rewriter(graph)
    for start, paired in pair(graph).starts.items():
        is_gather = role(start) == "param" and rules(start).moves
        if not is_gather or len(start.outs) != 1:
            continue
        value = gathered_value(start)
        provenance = start.provenance
        if provenance is None or not isinstance(provenance.regather, int):
            first_waits.setdefault(value, graph.eqns[paired.first_wait])
            continue
        if value not in first_waits or provenance.regather >= graph.axes[provenance.axis]:
            over_all_ranks = dataclasses.replace(provenance, regather="always")
            new.replace(start, start.replace(provenance=over_all_ranks))
            continue
        if value not in parts:
            first_wait = first_waits[value]
            cut, clone = kept_part(first_wait, start, provenance.regather)
            new.insert_after(first_wait, cut, clone)
            parts[value] = clone.out
        new.replace(start, gather_of_parts(parts[value], start))
    return with_neighbours_as_axes(new.applied())


def with_neighbours_as_axes(graph: Graph) -> Graph:
    """The program with the neighbours of its gathers among its axes."""
    new_axes: dict[str, None] = {}
    for e in graph.eqns:
        if not rules(e).moves:
            continue
        axis = e.kwargs["axis"]
        if neighbour_count(axis) is not None and axis not in graph.axes:
            new_axes[axis] = None
    return graph.replace(joint=(*graph.joint, *new_axes)) if new_axes else graph
