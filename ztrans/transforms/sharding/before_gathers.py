"""Scale and cast parameters on their shards, and gather the results instead of the parameters.

    a = wait(all_gather(w))                        m = wait(all_reduce(max(abs(w)), max))
    s = div(448, max(abs(a)))                -->   s = div(448, m); c = cast(mul(w, s), f8)
    b = cast(mul(a, s), f8)                        b = wait(all_gather(c))

Equations of forward and backward that depend on the state alone run on shards by the rules of the update, if that
gives the same bits. So the operation must be one that IEEE 754 rounds correctly, or a maximum or minimum of the whole
value. The first equation that reads a whole value gathers it. Everything but the gather moves to the start of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

import torch

from ...ir.collectives import bucket_key, coalesce, role, rules
from ...ir.dependencies import depending, grouped, needed
from ...ir.graph import Eqn, Graph, Partial, Provenance, Var, dce, producers, substitute
from ...ir.layout import on_axis
from ...ir.op_facts import CAST, is_random, op_facts, rearranges
from ...ir.pairing import pair
from ...ir.sharding_rules import rule
from ...ir.structure import structure
from ...rewrites.redistribute import redistribute
from .rank_values import EndOfStep, RankValues, Reader

aten = torch.ops.aten


def cast_before_gathers(graph: Graph) -> Graph:
    """Scale and cast parameters on their shards where a single gather of the results then sends fewer bytes."""
    gathers = _gathers_of_leaves(graph)
    while gathers:
        walk = _Walk(graph, gathers)
        program = walk.run()
        wide = [start for start in gathers if not walk.sends_less(start)]
        if not wide:
            return state_first(program)
        # A gather that does not change may prevent changes of others, so the walk is repeated without it.
        for start in wide:
            del gathers[start]
    return graph


def _gathers_of_leaves(graph: Graph) -> dict[Eqn, Eqn]:
    """The starts of gathers of single state leaves that are cut along one dim, each with its wait."""
    state = set(graph.state)
    gathers: dict[Eqn, Eqn] = {}
    for start, started in pair(graph).starts.items():
        if not rules(start).moves or start.kwargs["dtype"] is not None or len(start.outs) != 1:
            continue
        leaf = start.ins[0]
        is_whole_after = not start.out.layout  # an all_to_all cuts it along another dim
        if leaf in state and len(leaf.layout) == 1 and leaf.split is not None and is_whole_after:
            gathers[start] = graph.eqns[started.first_wait]
    return gathers


class Gathered(NamedTuple):
    """A whole value of the program as a gather of shards, followed by views.

    Views that show each element once commute with elementwise operations. So these run on the shards of the parameter,
    and w and its transpose share a gather.

    Attributes:
        start: the gather of the parameter that the value is computed from.
        shards: the value to gather; each rank computes its part.
        views: the views, in order.
        is_plain: whether only views and casts lead from the parameter to the value.
    """

    start: Eqn
    shards: Var
    views: tuple[Eqn, ...] = ()
    is_plain: bool = True


class _Walk:
    """One walk over the program of a rank, which gathers parameters where equations read them whole.

    Attributes:
        gathers: the gathers that the walk places again, each with its wait.
        values: the new program so far.
        gathered: the values of the program that are computed from the parameters of these gathers on shards.
        of_state: the other values that depend on the state alone, whole on every rank.
        of_extremes: the equations that depend on a maximum or minimum of a parameter.
        sent: the shards that each gather sends.
    """

    def __init__(self, graph: Graph, gathers: dict[Eqn, Eqn]) -> None:
        self.graph = graph
        self.gathers = gathers
        self.starts = {end: start for start, end in gathers.items()}
        # New gathers take the names of the gathers that they replace.
        remaining = [e for e in graph.eqns if e not in gathers and e not in self.starts]
        self.values = RankValues(graph.replace(eqns=tuple(remaining)))
        self.gathered: dict[Var, Gathered] = {}
        self.of_state = {v for v in graph.inputs if v not in graph.batch and not v.layout}
        self.of_extremes: set[Var] = set()
        self.sent: dict[Eqn, set[Gathered]] = {start: set() for start in gathers}
        self._by_structure: dict[Hashable, Eqn] = {}

    def run(self) -> Graph:
        """The program that gathers the values that its equations read."""
        hint = next(iter(self.gathers)).hint
        for e in self.graph.eqns:
            self.values.enter_phase(e)
            if e in self.starts:
                start = self.starts[e]
                self.bind(e.out, Gathered(start, start.ins[0]))
            elif e not in self.gathers and not self.add_before_gather(e):
                self.add_whole(e)
        outputs = substitute(self.graph.outputs, lambda v: self.whole_value(v, EndOfStep(None)))
        eqns = []
        for e in self.values.eqns:
            is_gather = role(e) == "param" and rules(e).moves
            eqns.append(e.replace(hint=hint) if is_gather else e)
        return dce(self.graph.replace(eqns=tuple(eqns), outputs=outputs))

    def whole_value(self, v: Var, reader: Reader) -> Var:
        """A whole value, or the shards that the update reads."""
        if v not in self.gathered:
            return self.values.without_layout.get(v, v)
        gathered = self.gathered[v]
        self.sent[gathered.start].add(gathered._replace(views=()))
        return self.values.whole_value(v, reader)

    def sends_less(self, start: Eqn) -> bool:
        """Whether one gather of narrower values replaces a gather.

        If the parameter is only cast, its gather casts it (`fuse_cast_gather`), so it does not change here.
        """
        itemsize = start.ins[0].dtype.itemsize
        sent = self.sent[start]
        is_narrower = all(g.shards.dtype.itemsize < itemsize and not g.is_plain for g in sent)
        return is_narrower and len(sent) <= 1

    # ---- equations

    def add_before_gather(self, e: Eqn) -> bool:
        """Add an equation of forward or backward that depends on the state alone, and say whether that is possible.

        Without shards it is added if its results are small: numbers, and values such as the vector of all scales.
        """
        is_torch = isinstance(e.op, torch._ops.OpOverload)
        if e.region == "update" or not is_torch or is_random(e):
            return False
        if any(v not in self.gathered and v not in self.of_state for v in e.ins):
            return False
        arguments = [self.gathered[v] for v in e.ins if v in self.gathered]
        if arguments:
            same_views = {(x.start, x.views) for x in arguments}
            return len(same_views) == 1 and self.add_on_shards(e, arguments[0])
        self.of_state.update(e.results)
        if any(v in self.of_extremes for v in e.ins):
            self.of_extremes.update(e.results)
        elif any(out.numel > 1 for out in e.results):
            return False
        self.add(e)
        return True

    def add_whole(self, e: Eqn) -> None:
        """Add an equation that runs unchanged, on whole values and on the shards of the update."""
        self.values.eqns.append(e.with_inputs(lambda v: self.whole_value(v, e)))

    def add_on_shards(self, e: Eqn, argument: Gathered) -> bool:
        """Add an equation that reads shards with the views of `argument`, and numbers, if its rule gives equal bits."""
        shards = argument.shards
        if op_facts(e.op).permutes and rearranges(e):
            self.values.defer(e)
            self.gathered[e.out] = argument._replace(views=(*argument.views, e))
            return True
        # The views follow the gather, so the equation reads shards of the shape of the parameter.
        if _is_exact(e) and self.reads_one_shape(e, shards):
            local = e.with_inputs(lambda v: self.gathered[v].shards if v in self.gathered else v)
            shape = shards.shape
        elif _reduces_all(e):
            order = e.args[1:2] if e.op is aten.linalg_vector_norm.default else ()
            local = e.replace(args=(shards, *order), kwargs={})
            shape = ()
        else:
            return False
        (split,) = shards.layout
        out = Var(self.values.names.fresh(f"{e.out.name}.shard"), e.out.dtype, shape)
        placements = [on_axis(v.layout, split.axis) for v in local.ins]
        size = self.graph.axes[split.axis]
        sharding_rule = rule(local.replace(outs=(out,)), placements, split.axis, size)
        (placement,) = sharding_rule.outs
        reduction = placement.op if isinstance(placement, Partial) else ""
        if placement is None or list(sharding_rule.ins) != placements:
            return False
        if reduction not in ("", "max", "min"):  # sums and norms of parts have other bits
            return False
        out = dataclasses.replace(out, layout=(placement,))
        out = self.add(local.replace(outs=(out,)))
        if reduction:
            self.add_reduction(e, out, argument)
        else:
            is_plain = argument.is_plain and e.op is CAST
            self.bind(e.out, argument._replace(shards=out, is_plain=is_plain))
        return True

    def reads_one_shape(self, e: Eqn, shards: Var) -> bool:
        """Whether the arguments of an elementwise equation have the shape of its result, or are numbers.

        An equation that reads an eight-bit value does not move: the eight-bit value itself should be gathered.
        """
        for v in e.ins:
            if v not in self.gathered:
                if v.numel != 1 or len(v.shape) > len(shards.shape):
                    return False
            elif v.shape != e.out.shape or (v.dtype.itemsize == 1 and v.dtype != torch.bool):
                return False
        return True

    def bind(self, v: Var, gathered: Gathered) -> None:
        """Let the gather of shards, followed by its views, stand for a value of the program."""
        self.gathered[v] = gathered
        value = v
        if gathered.views:
            value = dataclasses.replace(v, shape=gathered.shards.shape)
        self.values.bind(value, gathered.shards)
        self.values.paths[value] = gathered.start.ins[0].name
        for view in gathered.views:
            viewed = v
            if view is not gathered.views[-1]:
                viewed = self.values.renamed(dataclasses.replace(view.out, dtype=v.dtype))
            self.values.defer(view.replace(args=(value, *view.args[1:]), outs=(viewed,)))
            value = viewed

    def add_reduction(self, e: Eqn, term: Var, argument: Gathered) -> None:
        """Add the maximum or minimum over the ranks, whose term comes from the shards of one rank."""
        # The result may have dims of one element, as with `keepdim`, but the message carries a scalar.
        name = self.values.names.fresh(f"{e.out.name}.all") if e.out.shape else e.out.name
        path = argument.start.ins[0].name
        provenance = Provenance("param", (path,), term.layout[0].axis)
        site = self.values.site(e, provenance, fixed_name=name)
        eqns, extreme = redistribute(term, None, site, name)
        for eqn in eqns:
            extreme = self.add(eqn)
        if e.out.shape:
            args = (extreme, list(e.out.shape))
            extreme = self.add(e.replace(op=aten.view.default, args=args, kwargs={}))
        self.values.without_layout[e.out] = extreme
        self.of_state.add(e.out)
        self.of_extremes.add(e.out)

    def add(self, eqn: Eqn) -> Var:
        """Add an equation, unless the program has an equal one. Returns: Its result."""
        eqn = eqn.with_inputs(lambda v: self.values.without_layout.get(v, v))
        equal = self._by_structure.setdefault(structure(eqn, lambda v: v), eqn)
        if equal is eqn:
            self.values.eqns.append(eqn)
        self.values.without_layout.update(zip(eqn.results, equal.results))
        return equal.out


def _reduces_all(eqn: Eqn) -> bool:
    """Whether an equation reduces all elements of a value, perhaps to a maximum or minimum: its rule says to what."""
    return (
        op_facts(eqn.op).reduction
        and eqn.out.numel == 1
        and str(eqn.op).endswith(".default")
        and not eqn.kwargs.get("dtype")
    )


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


def state_first(graph: Graph) -> Graph:
    """Move what the gathers of parameters send, as far as it depends on the state alone, to the start of the step.

    Reductions that can start at the same time share a message, so the extremes of all parameters take one.
    """
    late = list(graph.batch)
    for e in graph.eqns:
        if e.region == "update" or rules(e).copies:
            late += e.results
    dependent = depending(graph.eqns, late)
    makers = producers(graph.eqns)
    needed_early: list[Eqn] = []
    for e in graph.eqns:
        if role(e) == "param" and e.out not in dependent:
            needed_early += [makers[v] for v in e.ins if v in makers] if rules(e).moves else [e]
    early = needed(needed_early, makers)

    # The length of the longest chain of reductions that a value depends on.
    rounds: dict[Var, int] = {}
    groups: dict[tuple[int, bool], list[Eqn]] = {}
    for e in graph.eqns:
        if e in early:
            number = max((rounds.get(v, 0) for v in e.ins), default=0) + rules(e).waits
            rounds.update(dict.fromkeys(e.results, number))
            # The starts of a round need its other equations. Their waits are in the next round.
            group = groups.setdefault((number, role(e) == "param"), [])
            group.append(e.replace(region="forward", hint=None))

    eqns: list[Eqn] = []
    for (_, are_starts), group in sorted(groups.items()):
        if are_starts:
            group = list(map(coalesce, grouped((bucket_key(e), e) for e in group).values()))
        eqns += group
    eqns += (e for e in graph.eqns if e not in early)
    return graph.replace(eqns=tuple(eqns))
