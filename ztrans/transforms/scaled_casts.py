"""Scaled casts: gather what each rank computes on its shards of a parameter, instead of the parameter.

    a = wait(all_gather(w))                        m = wait(all_reduce(max(abs(w)), max))
    s = div(448, max(abs(a)))                -->   s = div(448, m); c = cast(mul(w, s), f8)
    b = cast(mul(a, s), f8)                        b = wait(all_gather(c))

All but the gather depends on the state only, so it moves to the start of the step. Some operations commute with a
gather bit for bit: views that show each element once, and elementwise operations that IEEE 754 rounds correctly. A
maximum of the whole value is the maximum of those of all shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Set
from typing import NamedTuple

import torch

from ..ir.collectives import bucket_key, coalesce, reduce, role, rules, wait
from ..ir.graph import (
    DTYPES,
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
from ..ir.layout import cut_over, part
from ..ir.op_facts import CAST, is_random, op_facts, rearranges
from ..ir.pairing import pair
from ..ir.printer import op_name
from ..ir.relations import grouped, needed
from ..ir.source import where
from ..ir.structure import structure
from ..ir.user_collectives import is_users
from .edits import Edits

aten = torch.ops.aten
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
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
    """The program in which parameters are scaled and cast on shards, as far as all that reads them allows it."""
    notes: dict[Var, str] = {}  # by the leaf
    starts: dict[Eqn, Var] = {}
    state = set(graph.inputs[: graph.num_state])
    for start, started in pair(graph).starts.items():
        if _is_of_leaf(start, state):
            starts[start] = graph.eqns[started.first_wait].out
    while starts:
        shards = OnShards(graph, {value: start for start, value in starts.items()})
        unchanged = {start: why for start in starts if (why := shards.obstacle(start)) is not None}
        if not unchanged:
            graph = _Rewriting(shards).run()
            break
        # A gather that stays may be an obstacle for others, so they are looked at again without it.
        for start, why in unchanged.items():
            del starts[start]
            if why:
                notes.setdefault(start.ins[0], why)
    return graph.replace(notes=(*graph.notes, *notes.values()))


def _is_of_leaf(start: Eqn, state: Set[Var]) -> bool:
    """Whether an equation starts the gather of one leaf of the `state`, which is cut along one dim."""
    if not rules(start).moves or start.kwargs["dtype"] is not None or len(start.outs) != 1:
        return False
    leaf = start.ins[0]
    is_cut = len(leaf.layout) == 1 and leaf.split is not None
    return is_cut and leaf in state


# ---- which operations commute with a gather


def _is_bijection(eqn: Eqn) -> bool:
    """Whether an equation is a view that shows every element of its argument once, in the same dtype."""
    return op_facts(eqn.op).permutes and rearranges(eqn)


def _is_elementwise(eqn: Eqn) -> bool:
    """Whether each element of the result is a correctly rounded function of one element of each argument.

    Left out are complex numbers and an addition with an `alpha`, which may round once or twice, and a cast that changes
    the device or the order of the elements in memory.
    """
    if len(eqn.outs) != 1 or any(v.dtype.is_complex for v in (*eqn.ins, eqn.out)):
        return False
    if eqn.op is CAST:
        keeps_order = eqn.kwargs.get("memory_format") in (None, torch.preserve_format)
        return eqn.kwargs.get("dtype") is not None and keeps_order and not eqn.kwargs.get("device")
    facts = op_facts(eqn.op)
    has_alpha = "alpha" in eqn.kwargs
    has_alpha |= facts.name in ("add", "sub", "rsub") and len(eqn.args) > 2
    return facts.exact and not has_alpha


def _extreme(eqn: Eqn) -> str:
    """`max` or `min`, if an equation computes that of all elements of a value, or of all magnitudes."""
    operation = (_NORM, *eqn.args[1:2]) if eqn.op is _NORM else eqn.op
    if eqn.out.numel != 1 or eqn.kwargs.get("dtype"):
        return ""
    return _EXTREMES.get(operation, "")


# ---- the equations at the start of the step


class Head:
    """Equations that depend on the state only, and run at the start of a step.

    Equal equations are computed once. Reductions of one kind share a message, so the scales of all parameters take one.

    Attributes:
        eqns: the equations, a start and a wait for each reduction.
        values: for each value of the program that the head computes, the value of the head that equals it.
    """

    def __init__(self, graph: Graph) -> None:
        self.names = Names(v.name for v in (*graph.inputs, *producers(graph.eqns)))
        self.eqns: list[Eqn] = []
        inputs = [v for v in graph.inputs if v not in graph.batch and not v.layout]
        self.values: dict[Var, Var] = dict(zip(inputs, inputs))
        self._by_structure: dict[Hashable, Eqn] = {}
        # How many reductions a value depends on that follow each other.
        self._round: dict[Var, int] = {}

    def add(self, eqn: Eqn) -> Eqn:
        """Add an equation, unless the head has an equal one. Returns the equation that the head has."""
        eqn = eqn.with_inputs(lambda v: self.values.get(v, v), region="forward", order=None)
        equal = self._by_structure.setdefault(structure(eqn, lambda v: v), eqn)
        if equal is eqn:
            self.eqns.append(eqn)
            latest = max((self._round.get(v, 0) for v in eqn.ins), default=0)
            self._round.update(dict.fromkeys(eqn.results, latest + rules(eqn).waits))
        return equal

    def repeat(self, eqn: Eqn) -> None:
        """Add an equation of the program, with its results."""
        self.values.update(zip(eqn.results, self.add(eqn).results))

    def reduce(self, eqn: Eqn, term: Var, op: str, path: str) -> None:
        """Reduce a term, of which each rank has one, to the result of an equation of the program."""
        out = eqn.out
        axis = term.layout[0].axis
        name = self.names.fresh(f"{out.name}.all") if out.shape else out.name
        provenance = Provenance("param", (path,), axis)
        start = reduce([term], [name], axis, op, None, provenance=provenance, source=eqn.source)
        end = wait(self.add(start).out, source=eqn.source)
        if not out.shape:
            self.values[out] = self.add(end.replace(outs=(out,))).out
            return
        end = self.add(end)
        self.values[out] = end.out
        shape = list(out.shape)
        self.repeat(eqn.replace(op=aten.view.default, args=(end.out, shape), kwargs={}))

    def is_reduced(self, v: Var) -> bool:
        """Whether a value of the program, which the head computes, depends on a reduction."""
        return self._round.get(self.values[v], 0) > 0

    def computing(self, results: Iterable[Var]) -> list[Eqn]:
        """The equations that `results` need, in order."""
        makers = producers(self.eqns)
        eqns = needed((makers[v] for v in results), makers)
        by_round = grouped((self._round[e.out], e) for e in self.eqns if e in eqns)
        ordered: list[Eqn] = []
        for number in sorted(by_round):
            buckets = grouped((bucket_key(e), e) for e in by_round[number] if role(e) == "param")
            ordered += (e for e in by_round[number] if role(e) != "param")
            ordered += map(coalesce, buckets.values())
        return ordered


# ---- what each rank can compute on its shards


class Gathered(NamedTuple):
    """A whole value of the program: views of a value whose shards each rank computes.

    Attributes:
        shards: that value, on shards.
        start: the gather of the parameter that the whole value is computed from.
        views: the views, in order.
        is_plain: whether only views and casts lead to it from the parameter.
    """

    shards: Var
    start: Eqn
    views: tuple[Eqn, ...] = ()
    is_plain: bool = True


class OnShards:
    """What forward and backward compute of gathered parameters that each rank can compute on its shards.

    Attributes:
        gathered: whole values that ranks can compute on shards; first the parameters, by the start of their gather.
        head: the equations that compute their shards, and scalars.
        replaced: the equations of the program that are then superfluous.
        needed: for each gather, the whole values that other equations read, or that the step returns.
        position: for each equation of the program, its index.
    """

    def __init__(self, graph: Graph, parameters: Mapping[Var, Eqn]) -> None:
        self.graph = graph
        self.head = Head(graph)
        self.readers_of = users(graph)
        self.position = {e: i for i, e in enumerate(graph.eqns)}
        self.gathered = {v: Gathered(start.ins[0], start) for v, start in parameters.items()}
        self.replaced: set[Eqn] = set()
        for e in graph.eqns:
            is_torch = isinstance(e.op, torch._ops.OpOverload) and not is_random(e)
            if e.region != "update" and is_torch and self._is_readable(e) and self._compute(e):
                self.replaced.add(e)
        self.outputs = set(variables(graph.outputs))
        self.needed: dict[Eqn, list[Var]] = {start: [] for start in parameters.values()}
        for v, value in self.gathered.items():
            if self.is_needed(v):
                self.needed[value.start].append(v)

    def is_needed(self, v: Var) -> bool:
        """Whether the step returns a value, or an equation reads it that no rank computes on shards."""
        return v in self.outputs or bool(self.readers(v))

    def readers(self, v: Var) -> list[Eqn]:
        """The equations that read a value as it is."""
        return [e for e in self.readers_of.get(v, ()) if e not in self.replaced]

    def _is_readable(self, e: Eqn) -> bool:
        """Whether ranks have what an equation reads: whole values of one gather, seen in the same way, and scalars.

        The step's own collectives move if they are of scalars, such as maxima over the ranks of tensor parallelism.
        """
        values = [self.gathered[v] for v in e.ins if v in self.gathered]
        if rules(e).remote and (values or not is_users(e)):
            return False
        are_alike = len({(value.start, value.views) for value in values}) <= 1
        return are_alike and all(v in self.gathered or v in self.head.values for v in e.ins)

    def _compute(self, e: Eqn) -> bool:
        """Compute an equation in the head, on shards or on scalars. Returns: Whether that is possible."""
        value = next((self.gathered[v] for v in e.ins if v in self.gathered), None)
        if value is None:
            self.head.repeat(e)
        elif _is_bijection(e):
            self.gathered[e.out] = value._replace(views=(*value.views, e))
        elif _is_elementwise(e) and self._has_one_shape(e):
            self.gathered[e.out] = self._elementwise(e, value)
        elif _extreme(e) and not self._has_empty_part(value.shards):
            self._reduce_extreme(e, value)
        else:
            return False
        return True

    def _has_one_shape(self, e: Eqn) -> bool:
        """Whether an elementwise equation reads whole values of the shape of its result, and scalars.

        It stays if such a value has been cast to eight bits: that is what should be gathered.
        """
        for v in e.ins:
            if v not in self.gathered:
                if v.numel != 1:
                    return False
            elif v.shape != e.out.shape or (v.dtype.itemsize == 1 and v.dtype != torch.bool):
                return False
        return True

    def _elementwise(self, e: Eqn, value: Gathered) -> Gathered:
        name = self.head.names.fresh(f"{e.out.name}.shard")
        out = dataclasses.replace(value.shards, name=name, dtype=e.out.dtype)
        on_shards = lambda v: self.gathered[v].shards if v in self.gathered else v
        shards = self.head.add(e.with_inputs(on_shards, outs=(out,))).out
        return value._replace(shards=shards, is_plain=value.is_plain and e.op is CAST)

    def _reduce_extreme(self, e: Eqn, value: Gathered) -> None:
        """Compute the maximum or minimum of a whole value: of the shards, and then over the ranks."""
        op = _extreme(e)
        order = e.args[1:2] if e.op is _NORM else ()
        name = self.head.names.fresh(f"{e.out.name}.shard")
        term = Var(name, e.out.dtype, (), (Partial(value.shards.layout[0].axis, op),))
        of_shards = self.head.add(e.replace(args=(value.shards, *order), kwargs={}, outs=(term,)))
        self.head.reduce(e, of_shards.out, op, value.start.ins[0].name)

    def _has_empty_part(self, shards: Var) -> bool:
        """Whether a rank has no elements of a value: nothing has no maximum."""
        axis = shards.layout[0].axis
        ranks = self.graph.axes[axis]
        rows = shards.shape[cut_over(shards, axis).dim]
        return part(rows, ranks, ranks - 1)[1] == 0

    def obstacle(self, start: Eqn) -> str | None:
        """Why a gather stays as it is: a note if the parameter is cast to eight bits after it, else an empty text.

        None if the gather can change.
        """
        values = self.needed[start]
        leaf = start.ins[0]
        wide = [v for v in values if v.dtype.itemsize >= leaf.dtype.itemsize]
        casts = dict.fromkeys(self.gathered[v].shards for v in values)
        if not wide and len(casts) <= 1:
            is_plain = bool(values) and all(self.gathered[v].is_plain for v in values)
            return "" if is_plain else None
        dtype = self._narrow_dtypes.get(start)
        if dtype is None:
            return ""
        uses = f"it is used in {len(casts)} ways, {' and '.join(map(str, casts))}"
        problem = self._reads(wide) if wide else uses
        return (
            f"{leaf.name} is cast to {DTYPES.get(dtype, dtype)} after its gather, because {problem}: "
            f"fuse_cast_gather needs a scale that is one number, from a maximum of the whole tensor, of which every "
            f"rank has a part"
        )

    def _reads(self, wide: list[Var]) -> str:
        """What reads a wide value first, as text."""
        readers = {e: v for v in wide for e in self.readers(v)}
        reader = min(readers, key=self.position.__getitem__, default=None)
        if reader is None:
            return f"the step returns it in {DTYPES.get(wide[0].dtype, wide[0].dtype)}"
        dtype = readers[reader].dtype
        return (
            f"{op_name(reader.op)} ({where(reader.source)}) reads it in {DTYPES.get(dtype, dtype)}"
        )

    @functools.cached_property
    def _narrow_dtypes(self) -> dict[Eqn, torch.dtype]:
        """For each gather whose value is cast to a float of eight bits, scaled in any way, that dtype."""
        dtypes: dict[Eqn, torch.dtype] = {}
        starts_of: dict[Var, set[Eqn]] = {}  # the gathers whose scaled values these are
        for v, value in self.gathered.items():
            starts_of.setdefault(v, set()).add(value.start)
        for e in self.graph.eqns:
            starts = _same_size(e, starts_of)
            if not starts:
                continue
            if e.op is CAST and e.out.dtype in _EIGHT_BITS:
                dtypes = dict.fromkeys(starts, e.out.dtype) | dtypes  # the first cast counts
            if e.op is CAST or op_facts(e.op).pointwise or _is_bijection(e):
                starts_of.setdefault(e.out, set()).update(starts)
        return dtypes


def _same_size(e: Eqn, starts_of: Mapping[Var, set[Eqn]]) -> set[Eqn]:
    """The gathers whose scaled values an equation reads, if its result has as many elements."""
    starts: set[Eqn] = set()
    for v in e.ins:
        if v in starts_of and v.numel == e.out.numel:
            starts |= starts_of[v]
    return starts


# ---- the new program


class _Rewriting:
    """The program whose gathers bring what `shards` says that ranks compute on their shards."""

    def __init__(self, shards: OnShards) -> None:
        self.shards = shards
        self.graph = shards.graph
        self.names = shards.head.names
        self.makers = producers(self.graph.eqns)
        self.waits = {of_wait.start: e for e, of_wait in pair(self.graph).waits.items()}
        self.needed = {start: values for start, values in shards.needed.items() if values}
        self.replacements: dict[Eqn, list[Eqn]] = {}
        self.alias: dict[Var, Var] = {}

    def run(self) -> Graph:
        for start, values in self.needed.items():
            self.gather_narrow(start, values)
        head = self.head()
        in_head = {out for e in head for out in e.results}
        for v, value in self.shards.head.values.items():
            if v is not value and value in in_head:
                self.alias[v] = value
        eqns = list(head)
        for e in self.graph.eqns:
            if in_head.isdisjoint(e.results):
                eqns += self.replacements.get(e, [e])
        edits = Edits(self.graph.replace(eqns=tuple(eqns)))
        if self.graph.stage == 3:
            for start, values in self.needed.items():
                self.regather(start, values, edits)
        return dce(rename(edits.applied(), self.alias))

    def head(self) -> list[Eqn]:
        """The equations at the start: all that the gathers send, and the scalars that the program reads."""
        head = self.shards.head
        # All values that follow from one gather have the same shards.
        results = [self.shards.gathered[values[0]].shards for values in self.needed.values()]
        for v, value in head.values.items():
            if head.is_reduced(v) and self.shards.is_needed(v):
                results.append(value)
        return head.computing(results)

    def gather_narrow(self, start: Eqn, values: list[Var]) -> None:
        """Gather the shards from which `values` follow, and compute these from the gathered value."""
        end = self.waits[start]
        begin, narrow_end = self.gather(start, values[0], end.out.name)
        self.replacements[start] = [begin]
        self.replacements[end] = [narrow_end]
        for v in values:
            maker = self.makers[v]
            views, self.alias[v] = self.viewed(v, narrow_end.out, v.name, maker)
            self.replacements[maker] = views

    def gather(self, start: Eqn, v: Var, name: str) -> tuple[Eqn, Eqn]:
        """The gather of the shards of a whole value, for another gather."""
        shards = self.shards.gathered[v].shards
        value = dataclasses.replace(self.waits[start].out, name=name, dtype=shards.dtype)
        future = dataclasses.replace(value, name=f"{name}'", future=True)
        begin = start.replace(args=([shards],), outs=(future,))
        return begin, self.waits[start].replace(args=(future,), outs=(value,))

    def viewed(self, v: Var, value: Var, name: str, reader: Eqn) -> tuple[list[Eqn], Var]:
        """The views by which a gathered value becomes `v`, in the region of `reader`, and the result, called `name`."""
        eqns = []
        views = self.shards.gathered[v].views
        for view in views:
            out_name = name if view is views[-1] else self.names.fresh(view.out.name)
            out = dataclasses.replace(view.out, name=out_name, dtype=v.dtype)
            args = (value, *view.args[1:])
            eqns.append(view.replace(args=args, outs=(out,), region=reader.region))
            value = out
        return eqns, value

    def regather(self, start: Eqn, values: list[Var], edits: Edits) -> None:
        """Gather a value of forward for backward too, if that reads it, as stage 3 gathers a parameter."""
        readers: dict[Var, list[Eqn]] = {}
        all_readers: set[Eqn] = set()
        for v in values:
            readers[v] = [e for e in self.shards.readers(v) if e.region == "backward"]
            all_readers.update(readers[v])
        if not all_readers or start.region == "backward":
            return
        first = min(all_readers, key=self.shards.position.__getitem__)
        name = self.names.fresh(self.waits[start].out.name)
        begin, end = self.gather(start, values[0], name)
        provenance = start.provenance and dataclasses.replace(
            start.provenance, regather=self.graph.hints.regather
        )
        site = {"region": first.region, "source": first.source}
        edits.insert_before(
            first, begin.replace(provenance=provenance, **site), end.replace(**site)
        )
        for v, eqns in readers.items():
            views, copy = self.viewed(v, end.out, self.names.fresh(v.name), first)
            edits.insert_before(first, *views)
            edits.replace_reads(eqns, v, copy)
