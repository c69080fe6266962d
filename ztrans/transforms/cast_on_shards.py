"""Scale and cast parameters on their shards, and gather the results instead of the parameters.

    a = wait(all_gather(w))                        m = wait(all_reduce(max(abs(w)), max))
    s = div(448, max(abs(a)))                -->   s = div(448, m); c = cast(mul(w, s), f8)
    b = cast(mul(a, s), f8)                        b = wait(all_gather(c))

Everything but the gather depends only on the state, so it moves to the start of the step. Some operations commute with
a gather bit for bit: views that show each element once, and elementwise operations that IEEE 754 rounds correctly. The
maximum of the whole value is the maximum over the maxima of all shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..ir.collectives import bucket_key, coalesce, reduce, role, rules, wait
from ..ir.dependencies import grouped, needed
from ..ir.graph import (
    Eqn,
    Graph,
    Names,
    Partial,
    Provenance,
    Var,
    dce,
    producers,
    rename,
    users,
    variables,
)
from ..ir.layout import part, split_over
from ..ir.op_facts import CAST, is_random, op_facts, rearranges
from ..ir.pairing import pair
from ..ir.structure import structure
from ..ir.user_collectives import is_user_collective
from ..rewrites.rewriter import Rewriter

aten = torch.ops.aten
_NORM = aten.linalg_vector_norm.default
_EXTREMES: Mapping[object, str] = {
    aten.max.default: "max",
    aten.amax.default: "max",
    (_NORM, math.inf): "max",
    aten.min.default: "min",
    aten.amin.default: "min",
    (_NORM, -math.inf): "min",
}


def cast_on_shards(graph: Graph) -> Graph:
    """Scale and cast parameters on their shards where all of their readers allow it."""
    starts = _gathers_of_leaves(graph)
    while starts:
        on_shards = OnShards(graph, starts)
        unchanged = [start for start in starts if not on_shards.can_change(start)]
        if not unchanged:
            return _Rewriting(on_shards).run()
        # A gather that does not change may prevent changes of others, so the analysis runs again without it.
        for start in unchanged:
            del starts[start]
    return graph


def _gathers_of_leaves(graph: Graph) -> dict[Eqn, Var]:
    """The starts of gathers of single state leaves that are cut along one dim, each with the gathered value."""
    state = set(graph.state)
    gathers: dict[Eqn, Var] = {}
    for start, started in pair(graph).starts.items():
        if not rules(start).moves or start.kwargs["dtype"] is not None or len(start.outs) != 1:
            continue
        leaf = start.ins[0]
        if leaf in state and len(leaf.layout) == 1 and leaf.split is not None:
            gathers[start] = graph.eqns[started.first_wait].out
    return gathers


# ---- operations that commute with a gather


def _is_bijection(eqn: Eqn) -> bool:
    """Whether an equation is a view that shows every element of its argument once, in the same dtype."""
    return op_facts(eqn.op).permutes and rearranges(eqn)


def _is_exact(eqn: Eqn) -> bool:
    """Whether each element of the result is a correctly rounded function of one element of each argument.

    Not so for complex numbers and additions with an `alpha`, which may round once or twice, nor for a cast that changes
    the device or the order of the elements in memory.
    """
    if len(eqn.outs) != 1 or any(v.dtype.is_complex for v in (*eqn.ins, eqn.out)):
        return False
    if eqn.op is CAST:
        keeps_order = eqn.kwargs.get("memory_format") in (None, torch.preserve_format)
        return eqn.kwargs.get("dtype") is not None and keeps_order and not eqn.kwargs.get("device")
    facts = op_facts(eqn.op)
    # Overloads for numbers take an `alpha` by position.
    has_alpha = "alpha" in eqn.kwargs
    has_alpha |= facts.name in ("add", "sub", "rsub") and len(eqn.args) > 2
    return facts.exact and not has_alpha


def _may_move(eqn: Eqn) -> bool:
    """Whether an equation of forward or backward may run at the start of the step, once its arguments are there."""
    is_torch = isinstance(eqn.op, torch._ops.OpOverload)
    return eqn.region != "update" and is_torch and not is_random(eqn)


def _extreme(eqn: Eqn) -> str:
    """`max` or `min` if an equation computes it over all elements of a value or their magnitudes, else ""."""
    if eqn.out.numel != 1 or eqn.kwargs.get("dtype"):
        return ""
    operation = (_NORM, *eqn.args[1:2]) if eqn.op is _NORM else eqn.op
    return _EXTREMES.get(operation, "")


# ---- the equations at the start of the step


class Prologue:
    """Equations that depend on the state only, and run at the start of a step.

    Equal equations are computed once. Reductions of one kind share a message, so the scales of all parameters take one.

    Attributes:
        eqns: the equations, with a start and a wait for each reduction.
        values: for each value of the program that the prologue computes, the equal value of the prologue.
    """

    def __init__(self, graph: Graph) -> None:
        self.names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
        self.eqns: list[Eqn] = []
        inputs = [v for v in graph.inputs if v not in graph.batch and not v.layout]
        self.values: dict[Var, Var] = dict(zip(inputs, inputs))
        self._by_structure: dict[Hashable, Eqn] = {}
        # The length of the longest chain of reductions that a value depends on.
        self._round: dict[Var, int] = {}

    def add(self, eqn: Eqn) -> Eqn:
        """Add an equation, unless the prologue has an equal one. Returns the equation of the prologue."""
        eqn = eqn.with_inputs(lambda v: self.values.get(v, v), region="forward", hint=None)
        key = structure(eqn, lambda v: v)
        if key in self._by_structure:
            return self._by_structure[key]
        self._by_structure[key] = eqn
        self.eqns.append(eqn)
        number = max((self._round.get(v, 0) for v in eqn.ins), default=0)
        if rules(eqn).waits:
            number += 1
        self._round.update(dict.fromkeys(eqn.results, number))
        return eqn

    def repeat(self, eqn: Eqn) -> None:
        """Add an equation of the program, and map its results."""
        self.values.update(zip(eqn.results, self.add(eqn).results))

    def reduce(self, eqn: Eqn, term: Var, op: str, path: str) -> None:
        """Reduce a value with one term on each rank to the result of an equation of the program."""
        out = eqn.out
        axis = term.layout[0].axis
        name = self.names.fresh(f"{out.name}.all") if out.shape else out.name
        provenance = Provenance("param", (path,), axis)
        start = reduce([term], [name], axis, op, None, provenance=provenance, source=eqn.source)
        end = wait(self.add(start).out, source=eqn.source)
        if not out.shape:
            self.values[out] = self.add(end.replace(outs=(out,))).out
            return
        # The result may have dims of one element, as with `keepdim`, but the message carries a scalar.
        end = self.add(end)
        self.values[out] = end.out
        shape = list(out.shape)
        self.repeat(eqn.replace(op=aten.view.default, args=(end.out, shape), kwargs={}))

    def is_reduced(self, v: Var) -> bool:
        """Whether a value that the prologue computes depends on a reduction."""
        return self._round.get(self.values[v], 0) > 0

    def eqns_for(self, results: Iterable[Var]) -> list[Eqn]:
        """The equations that `results` need, in order, with the reductions of a round in buckets."""
        makers = producers(self.eqns)
        needed_eqns = needed([makers[v] for v in results], makers)
        by_round = grouped((self._round[e.out], e) for e in self.eqns if e in needed_eqns)
        ordered: list[Eqn] = []
        for number in sorted(by_round):
            # The starts of a round need its other equations. Waits are in the next round.
            starts = [e for e in by_round[number] if role(e) == "param"]
            ordered += (e for e in by_round[number] if role(e) != "param")
            buckets = grouped((bucket_key(e), e) for e in starts)
            ordered += map(coalesce, buckets.values())
        return ordered


# ---- values that each rank can compute on its shards


class Gathered(NamedTuple):
    """A whole value of the program as a gather of shards, followed by `views`.

    Attributes:
        shards: the value to gather; each rank computes its part.
        start: the gather of the parameter that the whole value is computed from.
        views: the views, in order.
        is_plain: whether only views and casts lead from the parameter to the value.
    """

    shards: Var
    start: Eqn
    views: tuple[Eqn, ...] = ()
    is_plain: bool = True


class OnShards:
    """The values of forward and backward that each rank can compute on its shards of parameters.

    Attributes:
        gathered: whole values that ranks can compute on their shards; first the gathered parameters themselves.
        prologue: the equations that compute their shards, and scalars.
        replaced: the equations of the program that the prologue replaces.
        needed: for each gather, its whole values that remaining equations read or the step returns.
    """

    def __init__(self, graph: Graph, parameters: Mapping[Eqn, Var]) -> None:
        self.graph = graph
        self.prologue = Prologue(graph)
        self.readers_of = users(graph)
        self.outputs = set(variables(graph.outputs))
        self.gathered = {v: Gathered(start.ins[0], start) for start, v in parameters.items()}
        self.replaced: set[Eqn] = set()
        for e in graph.eqns:
            if _may_move(e) and self._is_readable(e):
                is_computed = self._compute(e)
                if is_computed:
                    self.replaced.add(e)
        self.needed: dict[Eqn, list[Var]] = {start: [] for start in parameters}
        for v, gathered in self.gathered.items():
            if self.is_needed(v):
                self.needed[gathered.start].append(v)

    def is_needed(self, v: Var) -> bool:
        """Whether the step returns a value, or a remaining equation reads it."""
        return v in self.outputs or bool(self.readers(v))

    def readers(self, v: Var) -> list[Eqn]:
        """The equations that read a value and remain, because the prologue does not replace them."""
        return [e for e in self.readers_of.get(v, ()) if e not in self.replaced]

    # ---- the prologue

    def _is_readable(self, e: Eqn) -> bool:
        """Whether the prologue has the arguments of an equation: values of one gather with the same views, and scalars.

        The step's own collectives move if they reduce scalars, such as maxima over the ranks of tensor parallelism.
        """
        arguments = [self.gathered[v] for v in e.ins if v in self.gathered]
        if rules(e).remote and (arguments or not is_user_collective(e)):
            return False
        have_same_views = len({(gathered.start, gathered.views) for gathered in arguments}) <= 1
        return have_same_views and all(
            v in self.gathered or v in self.prologue.values for v in e.ins
        )

    def _compute(self, e: Eqn) -> bool:
        """Compute an equation in the prologue, on shards or on scalars. Returns: Whether that is possible."""
        gathered = next((self.gathered[v] for v in e.ins if v in self.gathered), None)
        if gathered is None:
            self.prologue.repeat(e)
        elif _is_bijection(e):
            self.gathered[e.out] = gathered._replace(views=(*gathered.views, e))
        elif _is_exact(e) and self._has_one_shape(e):
            self.gathered[e.out] = self._elementwise(e, gathered)
        elif _extreme(e) and not self._has_empty_part(gathered.shards):
            self._reduce_extreme(e, gathered)
        else:
            return False
        return True

    def _has_one_shape(self, e: Eqn) -> bool:
        """Whether the arguments of an elementwise equation have the shape of its result, or are scalars.

        An equation that reads an eight-bit value does not move: the eight-bit value itself should be gathered.
        """
        for v in e.ins:
            if v not in self.gathered:
                if v.numel != 1:
                    return False
            elif v.shape != e.out.shape or (v.dtype.itemsize == 1 and v.dtype != torch.bool):
                return False
        return True

    def _elementwise(self, e: Eqn, gathered: Gathered) -> Gathered:
        name = self.prologue.names.fresh(f"{e.out.name}.shard")
        out = dataclasses.replace(gathered.shards, name=name, dtype=e.out.dtype)
        local = e.with_inputs(
            lambda v: self.gathered[v].shards if v in self.gathered else v, outs=(out,)
        )
        shards = self.prologue.add(local).out
        return gathered._replace(shards=shards, is_plain=gathered.is_plain and e.op is CAST)

    def _reduce_extreme(self, e: Eqn, gathered: Gathered) -> None:
        """Compute the maximum or minimum of a whole value: first of the shards, then over the ranks."""
        op = _extreme(e)
        order = e.args[1:2] if e.op is _NORM else ()
        name = self.prologue.names.fresh(f"{e.out.name}.shard")
        term = Var(name, e.out.dtype, (), (Partial(gathered.shards.layout[0].axis, op),))
        local = e.replace(args=(gathered.shards, *order), kwargs={}, outs=(term,))
        self.prologue.reduce(e, self.prologue.add(local).out, op, gathered.start.ins[0].name)

    def _has_empty_part(self, shards: Var) -> bool:
        """Whether some rank has no elements of a value. An empty part has no maximum."""
        axis = shards.layout[0].axis
        ranks = self.graph.axes[axis]
        rows = shards.shape[split_over(shards, axis).dim]
        return part(rows, ranks, ranks - 1)[1] == 0

    # ---- gathers that change

    def can_change(self, start: Eqn) -> bool:
        """Whether a gather can bring one narrow value from which every needed value of its parameter follows.

        If the parameter is only cast, its gather casts it (`fuse_cast_gather`), so it does not change here.
        """
        values = self.needed[start]
        if values and all(self.gathered[v].is_plain for v in values):
            return False
        itemsize = start.ins[0].dtype.itemsize
        are_narrow = all(v.dtype.itemsize < itemsize for v in values)
        return are_narrow and len({self.gathered[v].shards for v in values}) <= 1


# ---- the new program


class _Rewriting:
    """Writes the program whose gathers bring the values that ranks compute on their shards."""

    def __init__(self, on_shards: OnShards) -> None:
        self.on_shards = on_shards
        self.graph = on_shards.graph
        self.names = on_shards.prologue.names
        self.makers = producers(self.graph.eqns)
        self.position = {e: i for i, e in enumerate(self.graph.eqns)}
        self.waits = {paired.start: e for e, paired in pair(self.graph).waits.items()}
        self.needed = {start: values for start, values in on_shards.needed.items() if values}
        self.replacements: dict[Eqn, list[Eqn]] = {}
        self.alias: dict[Var, Var] = {}

    def run(self) -> Graph:
        for start, values in self.needed.items():
            self.gather_narrow(start, values)

        # The prologue replaces equal equations of the program.
        eqns = self.prologue_eqns()
        in_prologue = set(producers(eqns))
        for v, value in self.on_shards.prologue.values.items():
            if v is not value and value in in_prologue:
                self.alias[v] = value
        for e in self.graph.eqns:
            if in_prologue.isdisjoint(e.results):
                eqns += self.replacements.get(e, [e])

        edits = Rewriter(self.graph.replace(eqns=tuple(eqns)))
        if self.graph.zero_stage == 3:
            for start, values in self.needed.items():
                self.regather(start, values, edits)
        return dce(rename(edits.applied(), self.alias))

    def prologue_eqns(self) -> list[Eqn]:
        """The equations at the start of the step: for the shards to gather, and the scalars that the program reads."""
        prologue = self.on_shards.prologue
        # All values of one gather have the same shards.
        results = [self.on_shards.gathered[values[0]].shards for values in self.needed.values()]
        for v, value in prologue.values.items():
            if prologue.is_reduced(v) and self.on_shards.is_needed(v):
                results.append(value)
        return prologue.eqns_for(results)

    def gather_narrow(self, start: Eqn, values: Sequence[Var]) -> None:
        """Gather the shards of `values`, and compute the values from the gathered one."""
        end = self.waits[start]
        narrow_start, narrow_end = self.gather(start, values[0], end.out.name)
        self.replacements[start] = [narrow_start]
        self.replacements[end] = [narrow_end]
        for v in values:
            maker = self.makers[v]
            views, self.alias[v] = self.viewed(v, narrow_end.out, v.name, maker)
            self.replacements[maker] = views

    def gather(self, start: Eqn, v: Var, name: str) -> tuple[Eqn, Eqn]:
        """The start and the wait that gather the shards of `v`, to replace the gather `start`."""
        end = self.waits[start]
        shards = self.on_shards.gathered[v].shards
        value = dataclasses.replace(end.out, name=name, dtype=shards.dtype)
        future = dataclasses.replace(value, name=f"{name}'", future=True)
        narrow_start = start.replace(args=([shards],), outs=(future,))
        narrow_end = end.replace(args=(future,), outs=(value,))
        return narrow_start, narrow_end

    def viewed(self, v: Var, value: Var, name: str, reader: Eqn) -> tuple[list[Eqn], Var]:
        """The views that turn a gathered value into `v`, in the region of `reader`, and the result, named `name`."""
        eqns = []
        views = self.on_shards.gathered[v].views
        for view in views:
            out_name = name if view is views[-1] else self.names.fresh(view.out.name)
            out = dataclasses.replace(view.out, name=out_name, dtype=v.dtype)
            args = (value, *view.args[1:])
            eqns.append(view.replace(args=args, outs=(out,), region=reader.region))
            value = out
        return eqns, value

    def regather(self, start: Eqn, values: Sequence[Var], edits: Rewriter) -> None:
        """Gather `values` again for backward if it reads them, as stage 3 gathers a parameter."""
        readers: dict[Var, list[Eqn]] = {}
        all_readers: set[Eqn] = set()
        for v in values:
            readers[v] = [e for e in self.on_shards.readers(v) if e.region == "backward"]
            all_readers.update(readers[v])
        if not all_readers or start.region == "backward":
            return

        first = min(all_readers, key=self.position.__getitem__)
        provenance = start.provenance
        if provenance is not None:
            provenance = dataclasses.replace(provenance, regather=self.graph.hints.regather)
        name = self.names.fresh(self.waits[start].out.name)
        narrow_start, narrow_end = self.gather(start, values[0], name)
        edits.insert_before(
            first,
            narrow_start.replace(provenance=provenance, region=first.region, source=first.source),
            narrow_end.replace(region=first.region, source=first.source),
        )
        for v, eqns in readers.items():
            views, copy = self.viewed(v, narrow_end.out, self.names.fresh(v.name), first)
            edits.insert_before(first, *views)
            edits.replace_reads(eqns, v, copy)
