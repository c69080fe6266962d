"""OnShards: what forward and backward compute of gathered parameters that each rank can compute on its shards.

To scale, clamp and cast is elementwise. The scale of fp8 training follows from the largest magnitude of the whole
tensor, which is the largest of those of all shards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...ir.collectives import rules
from ...ir.graph import DTYPES, Eqn, Graph, Partial, Var, users, variables
from ...ir.layout import cut_over, part
from ...ir.op_facts import CAST, is_random, op_facts
from ...ir.printer import op_name
from ...ir.relations import grouped
from ...ir.source import where
from ...ir.user_collectives import is_users
from .commuting import extreme, is_bijection, is_elementwise
from .head import Head


class Whole(NamedTuple):
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


class OnShards:
    """One walk over a program.

    Attributes:
        whole: whole values that ranks can compute on shards; first `gathered`, parameters by the start of their gather.
        head: the equations that compute their shards, and scalars.
        moved: the equations of the program that are then superfluous.
        needed: for each gather, the whole values that other equations read, or that the step returns.
    """

    def __init__(self, graph: Graph, gathered: Mapping[Var, Eqn]) -> None:
        self.graph, self.head, self.used = graph, Head(graph), users(graph)
        self.whole = {v: Whole(start.ins[0], start) for v, start in gathered.items()}
        self.moved: set[Eqn] = set()
        for e in graph.eqns:
            if (
                e.region != "update"
                and isinstance(e.op, torch._ops.OpOverload)
                and not is_random(e.op)
            ):
                self._visit(e)
        self.outputs = set(variables(graph.outputs))
        by_start = grouped((x.start, v) for v, x in self.whole.items())
        self.needed = {
            start: [v for v in values if self.is_needed(v)] for start, values in by_start.items()
        }

    def is_needed(self, v: Var) -> bool:
        """Whether the step returns a value, or an equation reads it that no rank computes on shards."""
        return v in self.outputs or bool(self.readers(v))

    def readers(self, v: Var) -> list[Eqn]:
        """The equations that read a value as it is."""
        return [e for e in self.used.get(v, ()) if e not in self.moved]

    # ---- equations

    def _visit(self, e: Eqn) -> None:
        inside = [self.whole[v] for v in e.ins if v in self.whole]
        if not self._is_known(e, inside):
            return
        if not inside:
            self.head.repeat(e)
        elif is_bijection(e):
            self.whole[e.out] = inside[0]._replace(views=(*inside[0].views, e))
        elif is_elementwise(e) and self._fits(e):
            self.whole[e.out] = self._elementwise(e, inside[0])
        elif extreme(e)[0] and not self._has_empty_part(inside[0].shards):
            self._extreme(e, inside[0])
        else:
            return
        self.moved.add(e)

    def _is_known(self, e: Eqn, inside: list[Whole]) -> bool:
        """Whether ranks have what an equation reads: whole values of one gather, seen in the same way, and scalars.

        The step's own collectives move if they are of scalars, such as maxima over the ranks of tensor parallelism.
        """
        stays = rules(e).remote and (inside or not is_users(e))
        alike = len({(x.start, x.views) for x in inside}) <= 1
        return alike and not stays and all(v in self.whole or v in self.head.values for v in e.ins)

    def _fits(self, e: Eqn) -> bool:
        """Whether an elementwise equation reads whole values of the shape of its result, and scalars.

        It does not move if such a value has been cast to eight bits: that is what should be gathered.
        """
        narrow = any(
            v in self.whole and v.dtype.itemsize == 1 and v.dtype != torch.bool for v in e.ins
        )
        return not narrow and all(
            v.shape == e.out.shape if v in self.whole else v.numel == 1 for v in e.ins
        )

    def _elementwise(self, e: Eqn, like: Whole) -> Whole:
        out = dataclasses.replace(
            like.shards, name=self.head.names.fresh(f"{e.out.name}.shard"), dtype=e.out.dtype
        )
        read = lambda v: self.whole[v].shards if v in self.whole else v
        shards = self.head.add(e.reading(read, outs=(out,))).out
        return like._replace(shards=shards, plain=like.plain and e.op is CAST)

    def _extreme(self, e: Eqn, x: Whole) -> None:
        """Compute the maximum or minimum of a whole value: of the shards, and then over the ranks."""
        op, more = extreme(e)
        layout = (Partial(x.shards.layout[0].axis, op),)
        term = Var(self.head.names.fresh(f"{e.out.name}.shard"), e.out.dtype, (), layout)
        term = self.head.add(e.replace(args=(x.shards, *more), kwargs={}, outs=(term,))).out
        self.head.reduce(e, term, op, x.start.ins[0].name)

    def _has_empty_part(self, shards: Var) -> bool:
        """Whether a rank has no elements of a value: nothing has no maximum."""
        axis = shards.layout[0].axis
        split, ranks = cut_over(shards, axis), self.graph.axes[axis]
        return part(shards.shape[split.dim], ranks, ranks - 1)[1] == 0

    # ---- decisions

    def stays(self, start: Eqn) -> str | None:
        """Why a gather stays as it is: a note if the parameter is cast to eight bits behind it, else an empty text.

        None if the gather can change.
        """
        needed, dtype = self.needed[start], self._narrow_casts.get(start)
        wide = [v for v in needed if v.dtype.itemsize >= start.ins[0].dtype.itemsize]
        casts = dict.fromkeys(self.whole[v].shards for v in needed)
        if not wide and len(casts) <= 1:
            return "" if needed and all(self.whole[v].plain for v in needed) else None
        if dtype is None:
            return ""
        problem = (
            self._reads(wide)
            if wide
            else f"it is used in {len(casts)} ways, {' and '.join(map(str, casts))}"
        )
        return (
            f"{start.ins[0].name} is cast to {DTYPES.get(dtype, dtype)} behind its gather, because {problem}: "
            f"fuse_cast_gather needs a scale that is one number, from a maximum of the whole tensor, of which every "
            f"rank has a part"
        )

    def _reads(self, wide: list[Var]) -> str:
        """What reads a wide value first, as text."""
        readers = {e: v for v in wide for e in self.readers(v)}
        reader = next((e for e in self.graph.eqns if e in readers), None)
        what = (
            f"{op_name(reader.op)} ({where(reader.source)}) reads" if reader else "the step returns"
        )
        dtype = (readers[reader] if reader else wide[0]).dtype
        return f"{what} it in {DTYPES.get(dtype, dtype)}"

    @functools.cached_property
    def _narrow_casts(self) -> dict[Eqn, torch.dtype]:
        """For each gather whose value is cast to a float of eight bits, scaled in any way, that dtype."""
        starts = {v: x.start for v, x in self.whole.items()}
        casts: dict[Eqn, torch.dtype] = {}
        for e in self.graph.eqns:
            pointwise = e.op is CAST or op_facts(e.op).pointwise
            alike = [starts[v] for v in e.ins if v in starts and v.numel == e.out.numel]
            if alike and (is_bijection(e) or pointwise):
                starts[e.out] = alike[0]
                if e.op is CAST and e.out.dtype.is_floating_point and e.out.dtype.itemsize == 1:
                    casts.setdefault(alike[0], e.out.dtype)
        return casts
