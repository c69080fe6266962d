"""Scaled casts: a parameter is scaled and cast on shards, before it is gathered.

The scale of fp8 training follows from the largest magnitude of the whole tensor, which is the largest of those of all
shards. To scale, clamp and cast is elementwise. All of it depends on the state only, so it moves to the start of the
step, with one small all_reduce for the scales of all parameters:

    a = wait(all_gather(w))                        m = wait(all_reduce(max(abs(w)), max))
    s = div(448, max(abs(a)))                -->   s = div(448, m); c = cast(mul(w, s), f8)
    b = cast(mul(a, s), f8)                        b = wait(all_gather(c))
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from ..ir.collectives import rules
from ..ir.graph import DTYPES, Eqn, Graph, Partial, Provenance, Var, is_random, substitute, users, variables
from ..ir.layout import cut_over, part
from ..ir.printer import op_name
from ..ir.relations import grouped
from ..ir.source import where
from .commuting import CAST, extreme, is_bijection, is_elementwise, of_all
from .state_head import Head


class OnShards(NamedTuple):
    """A whole value of the program: views of a value whose shards each rank computes.

    Attributes:
        shards: that value, on shards.
        start: the gather of the parameter that the whole value is computed from.
        views: the views, in order.
        plain: whether only views and casts lead to it from the parameter.
    """

    shards: Var
    start: Eqn
    views: tuple[Eqn, ...] = ()
    plain: bool = True


class ScaledCasts:
    """What of forward and backward each rank can compute on shards of the gathered leaves `whole`."""

    def __init__(self, graph: Graph, whole: dict[Var, Eqn]) -> None:
        self.graph, self.head, self.used = graph, Head(graph), users(graph)
        self.whole = {v: OnShards(start.ins[0], start) for v, start in whole.items()}
        self.moved: set[Eqn] = set()
        self.measured: set[Eqn] = set()  # the gathers of whose value a maximum or minimum is computed
        for e in graph.eqns:
            if e.region != "update" and isinstance(e.op, torch._ops.OpOverload) and not is_random(e.op):
                self.visit(e)
        self.outputs, self.order = set(variables(graph.outputs)), {e: k for k, e in enumerate(graph.eqns)}
        by_start = grouped((x.start, v) for v, x in self.whole.items())
        # For each gather, the whole values that other equations read, or that the step returns.
        self.needed = {start: [v for v in values if self.is_needed(v)] for start, values in by_start.items()}
        self.only_cast = {start for start, values in by_start.items() if all(self.whole[v].plain for v in values)}
        self.only_cast -= self.measured

    def is_needed(self, v: Var) -> bool:
        """Whether the step returns a value, or an equation reads it that no rank computes on shards."""
        return v in self.outputs or bool(self.readers(v))

    def readers(self, v: Var) -> list[Eqn]:
        """The equations that read a value on every rank as it is."""
        return [e for e in self.used.get(v, ()) if e not in self.moved]

    def visit(self, e: Eqn) -> None:
        """Add an equation to what the ranks compute on shards, if they can."""
        inside = [self.whole[v] for v in e.ins if v in self.whole]
        known = all(v in self.whole or v in self.head.values for v in e.ins)
        if not known or rules(e).remote:
            return
        if not inside:
            self.head.repeat(e)
        elif len({(x.start, x.views) for x in inside}) > 1:
            return
        elif is_bijection(e):
            self.whole[e.out] = inside[0]._replace(views=(*inside[0].views, e))
        elif is_elementwise(e) and self.alike(e):
            self.whole[e.out] = self.on_shards(e, inside[0])
        elif (op := extreme(e)) is not None and not self.has_empty_part(inside[0].shards):
            self.extreme_of(e, op, inside[0])
        else:
            return
        self.moved.add(e)

    def alike(self, e: Eqn) -> bool:
        """Whether an elementwise equation reads whole values of the shape of its result, and scalars.

        It does not move if such a value has been cast to eight bits: that is what should be gathered.
        """
        whole = [v for v in e.ins if v in self.whole]
        narrow = any(v.dtype.itemsize == 1 and v.dtype != torch.bool for v in whole)
        return not narrow and all(v.shape == e.out.shape if v in self.whole else v.numel == 1 for v in e.ins)

    def on_shards(self, e: Eqn, like: OnShards) -> OnShards:
        """The result of an elementwise equation, computed on shards."""
        name = self.head.names.fresh(f"{e.out.name}.shard")
        out = dataclasses.replace(like.shards, name=name, dtype=e.out.dtype)
        args, kwargs = (substitute(x, self.shards_of) for x in (e.args, e.kwargs))
        shards = self.head.add(e.replace(args=args, kwargs=kwargs, outs=(out,))).out
        return like._replace(shards=shards, plain=like.plain and e.op is CAST)

    def shards_of(self, v: Var) -> Var:
        return self.whole[v].shards if v in self.whole else v

    def extreme_of(self, e: Eqn, op: str, x: OnShards) -> None:
        """Compute the maximum or minimum of a whole value: of the shards, and then over the ranks."""
        self.measured.add(x.start)
        axis = x.shards.layout[0].axis
        term = dataclasses.replace(
            e.out, name=self.head.names.fresh(f"{e.out.name}.shard"), shape=(), layout=(Partial(axis, op),)
        )
        provenance = Provenance("param", (x.start.ins[0].name,), axis)
        self.head.reduce(self.head.add(of_all(e, x.shards, term)).out, op, provenance, e)

    def has_empty_part(self, shards: Var) -> bool:
        """Whether a rank has no elements of a value: nothing has no maximum."""
        axis = shards.layout[0].axis
        split, ranks = cut_over(shards, axis), self.graph.axes[axis]
        return part(shards.shape[split.dim], ranks, ranks - 1)[1] == 0

    # ---- decisions

    def problem(self, start: Eqn) -> str | None:
        """Why a gather stays as it is: text for the note, empty if only casts follow it. None if it can change."""
        if start in self.only_cast:
            return ""
        needed = self.needed[start]
        wide = [v for v in needed if v.dtype.itemsize >= start.ins[0].dtype.itemsize]
        if wide:
            reading = [(e, v) for v in wide for e in self.readers(v)]
            reader, v = min(reading, key=lambda read: self.order[read[0]], default=(None, wide[0]))
            what = f"{op_name(reader.op)} ({where(reader.source)}) reads" if reader else "the step returns"
            return f"{what} it in {DTYPES.get(v.dtype, v.dtype)}"
        casts = dict.fromkeys(self.whole[v].shards for v in needed)
        return f"it is used in {len(casts)} ways, {' and '.join(map(str, casts))}" if len(casts) > 1 else None

    def note(self, start: Eqn) -> str | None:
        """The note about a parameter that is cast to eight bits only behind its gather, or None."""
        problem = self.problem(start)
        cast = self.narrow_cast(start) if problem else None
        if cast is None:
            return None
        leaf, dtype = start.ins[0], DTYPES.get(cast.out.dtype, cast.out.dtype)
        return (
            f"{leaf.name} is cast to {dtype} behind its gather, because {problem}: fuse_cast_gather needs a scale that "
            f"is one number, from a maximum of the whole tensor, of which every rank has a part"
        )

    def narrow_cast(self, start: Eqn) -> Eqn | None:
        """The first cast to a float of eight bits of the gathered value, scaled in any way."""
        values = {v for v, x in self.whole.items() if x.start is start}
        for e in self.graph.eqns:
            if any(v in values for v in e.ins) and (is_bijection(e) or is_elementwise(e)):
                values.add(e.out)
                if e.op is CAST and e.out.dtype.is_floating_point and e.out.dtype.itemsize == 1:
                    return e
        return None

