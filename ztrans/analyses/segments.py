"""Segments: equations of forward and backward that run in parts along a dim, one part after the other.

    y = mm(x, w)                     x.0 = slice(x, 0, 0, 8);  y.0 = mm(x.0, w); l.0 = sum(y.0)
    l = sum(y)             -->       x.1 = slice(x, 0, 8, 16); y.1 = mm(x.1, w); l.1 = sum(y.1)
                                     y = cat([y.0, y.1]); l = add(l.0, l.1)

A part is a rank of a mesh axis in time: the sharding rules say how each equation runs on parts (`Split`), and what the
results are if it sums over them (`Partial`). A segment reads whole values, which it may cut in any way. Its results are
whole again: parts are joined, and terms are added up as soon as they are computed, half precision in fp32. An equation
that reads such a sum belongs to what follows the segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from ..ir.collectives import rules
from ..ir.dependencies import needed, reachable
from ..ir.graph import (
    Eqn,
    Graph,
    Names,
    Partial,
    Placement,
    Split,
    Var,
    producers,
    users,
    variables,
)
from ..ir.layout import chunk, localize, part
from ..ir.op_facts import CAST, is_random, is_view, op_facts, rearranges
from ..ir.patterns import WHOLE, letters_of
from ..ir.registered_rules import NoRule
from ..ir.rewriter import Rewriter
from ..ir.sharding_rules import MEAN, SUM, pattern_of, rule

aten = torch.ops.aten
TILE = "tile"  # the axis in time
# They make values without reading any element, so a part makes its part.
CONSTRUCTORS = {"empty", "full", "new_empty", "new_full", "new_zeros", "new_ones", "ones", "zeros"}

_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_LOSS_GRADIENTS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)

_Dim = tuple[Var, int]


class CannotCut(Exception):
    """An equation cannot run in parts.

    Attributes:
        eqn: the equation.
        why: the reason, as the rest of a sentence about it.
    """

    def __init__(self, eqn: Eqn, why: str) -> None:
        super().__init__(why)
        self.eqn = eqn
        self.why = why


class _ReadsTotal(CannotCut):
    """An equation reads parts and, beside them, a value that is complete only after all parts."""

    def __init__(self, eqn: Eqn, total: Var) -> None:
        super().__init__(eqn, f"reads {total.name}, a sum over all rows")
        self.total = total


@dataclass(frozen=True, eq=False)
class Segment:
    """Equations that can run in parts.

    Attributes:
        eqns: the equations that run once for each part, in order.
        parts: the number of parts.
        dims: the dim along which each value that is cut is cut. All other values that the equations read are whole.
        terms: the results that are terms, each with the operation that combines them: "sum" or "mean".
    """

    eqns: tuple[Eqn, ...]
    parts: int
    dims: Mapping[Var, int]
    terms: Mapping[Var, str]


def with_sums_of_losses(graph: Graph) -> Graph:
    """The program with sums of losses in place of means, so that backward does not wait for a sum over all rows.

    A mean is the sum divided by the number of labels, or by the sum of their weights. Both depend on the labels alone,
    so they are computed first. The gradient keeps its bits. Backward begins with a constant.

        l, n = nll_loss_forward(x, labels, mean)               n = cast(sum(ne(labels, -100)), f32)
        g = ones_like(l)                               -->     s = nll_loss_forward(x, labels, sum); l = div(s, n)
        dx = nll_loss_backward(g, x, labels, mean, n)          g = new_ones(labels, []); g.n = div(g, n)
                                                               dx = nll_loss_backward(g.n, x, labels, sum, n)
    """
    new = Rewriter(graph)
    source = next((v for v in graph.arguments if v in graph.batch), None)
    for e in graph.eqns:
        if e.op is aten.ones_like.default and not e.out.shape and source is not None:
            kwargs = {"dtype": e.out.dtype}
            new.replace(e, e.replace(op=aten.new_ones.default, args=(source, []), kwargs=kwargs))
        elif e.op in _LOSSES:
            logits, target, weight, reduction, ignored = e.args
            if reduction not in (MEAN, SUM):
                continue
            loss, total_weight = e.outs
            labels = (target, ignored, e.out.dtype)
            count = (
                new.emit(_count, *labels) if weight is None else new.emit(_weight, weight, *labels)
            )
            if total_weight is not None:
                new.alias(total_weight, count)
            total = loss if reduction == SUM or loss is None else new.fresh(loss, ".sum")
            args = (logits, target, weight, SUM, ignored)
            eqns = [e.replace(args=args, outs=(total, None))]
            if total is not loss:
                eqns.append(Eqn(aten.div.Tensor, (total, count), (loss,)).like(e))
            new.replace(e, *eqns)
        elif e.op in _LOSS_GRADIENTS and e.args[4] == MEAN:
            gradient, *operands, total_weight = e.args
            share = new.fresh(gradient, ".share")
            divide = Eqn(aten.div.Tensor, (gradient, total_weight), (share,)).like(e)
            operands[3] = SUM
            new.replace(e, divide, e.replace(args=(share, *operands, total_weight)))
    return new.applied()


def _count(target: torch.Tensor, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    return (target != ignored).sum().to(dtype)


def _weight(
    weight: torch.Tensor, target: torch.Tensor, ignored: int, dtype: torch.dtype
) -> torch.Tensor:
    counts = target != ignored
    labels = torch.where(counts, target, torch.zeros_like(target))
    weights = torch.nn.functional.embedding(labels, weight.unsqueeze(-1))
    return (weights.squeeze(-1) * counts).sum().to(dtype)


def segment(graph: Graph, eqns: Sequence[Eqn], cuts: Mapping[Var, int], parts: int) -> Segment:
    """The segment of equations that run in parts if these values are cut.

    Equations that read no cut value run once, before the parts. So do the equations of a sum over all rows that parts
    read, such as the number of labels, if their results are no larger than what they read. Equations that read a sum
    over all parts and no cut value run once, after the parts.

    Args:
        graph: the program.
        eqns: some of its equations, in order.
        cuts: the dim along which each of some values is cut. What else must be cut follows from the equations.
        parts: the most parts; there are fewer if some would be empty.

    Raises: CannotCut for an equation that has no sharding rule for such parts, draws random numbers, or reads beside
        parts a value that is complete only after all of them.
    """
    rows = min(v.shape[dim] for v, dim in cuts.items())
    parts = -(-rows // chunk(rows, parts))
    run_once: set[Eqn] = set()
    while True:
        try:
            s = _segment([e for e in eqns if e not in run_once], cuts, parts)
        except _ReadsTotal as error:
            # The number of labels, or the statistics of an input, may be computed before the parts.
            makers = producers(eqns)
            before = needed([makers[error.total]], makers)
            if before <= run_once or not all(map(_has_small_results, before)):
                raise CannotCut(error.eqn, error.why) from None
            run_once |= before
        else:
            _before_and_after(graph, s.eqns)
            return s


def _segment(eqns: Sequence[Eqn], cuts: Mapping[Var, int], parts: int) -> Segment:
    """The segment of these equations, as far as they depend on what is cut (see `segment`)."""
    dims = cut_dims(eqns, cuts, parts)
    eqns_of_parts: list[Eqn] = []
    terms: dict[Var, str] = {}
    of_one_part: set[Var] = set()  # each part has its own, such as the seed of a kernel
    complete: set[Var] = set()  # known only after all parts
    for e in eqns:
        if op_facts(e.op).name in CONSTRUCTORS:
            if e.out in dims:
                eqns_of_parts.append(e)
            continue
        reads_parts = any((v in dims or v in of_one_part) and v not in complete for v in e.ins)
        total = next((v for v in e.ins if v in complete), None)
        if total is not None:
            if reads_parts:
                raise _ReadsTotal(e, total)
            complete.update(e.results)
            continue
        if not reads_parts:
            continue
        eqns_of_parts.append(e)
        for out, placement in zip(e.outs, _results(e, dims, parts)):
            if out is None:
                continue
            if isinstance(placement, Split):
                dims.setdefault(out, placement.dim)
            elif isinstance(placement, Partial):
                terms[out] = placement.op
                complete.add(out)
            else:
                of_one_part.add(out)
    return Segment(tuple(eqns_of_parts), parts, dims, terms)


def _results(e: Eqn, dims: Mapping[Var, int], parts: int) -> Sequence[Placement]:
    """The placements of the results of an equation that runs in parts.

    Raises: CannotCut if it cannot.
    """
    if is_random(e):
        raise CannotCut(e, "draws random numbers, in an order that parts would change")
    placements = [Split(TILE, dims[v]) if v in dims else None for v in e.ins]
    try:
        found = rule(e, placements, TILE, parts, contracts=True)
    except NoRule:
        raise CannotCut(e, "has no sharding rule") from None
    is_combined = any(isinstance(p, Partial) and p.op not in ("sum", "mean") for p in found.outs)
    if list(found.ins) != placements or is_combined:
        raise CannotCut(e, "needs all rows at once, or has no sharding rule")
    return found.outs


def _has_small_results(e: Eqn) -> bool:
    """Whether the results of an equation are views, or have no more elements than its largest argument."""
    return is_view(e) or sum(v.numel for v in e.results) <= max((v.numel for v in e.ins), default=1)


def cut_dims(eqns: Iterable[Eqn], cuts: Mapping[Var, int], parts: int) -> dict[Var, int]:
    """The dim along which each value is cut. A cut spreads to all dims with its letter in an equation's pattern.

    Raises: CannotCut if a value would be cut along two dims.
    """
    groups: dict[_Dim, list[list[_Dim]]] = {}
    named_in_error: dict[Var, Eqn] = {}
    for e in eqns:
        pattern = pattern_of(e, parts) if isinstance(e.op, torch._ops.OpOverload) else None
        if pattern is None or is_random(e):
            continue
        values = (*e.ins, *e.outs)
        ins, outs = letters_of(pattern, tuple(v.shape for v in e.ins), len(e.outs))
        of_letter: dict[str, list[_Dim]] = {}
        for v, letters in zip(values, (*ins, *outs)):
            if v is None:
                continue
            named_in_error.setdefault(v, e)
            for dim, letter in enumerate(letters):
                if letter != WHOLE:
                    of_letter.setdefault(letter, []).append((v, dim))
        for group in of_letter.values():
            for place in group:
                groups.setdefault(place, []).append(group)
    dims = dict(cuts)
    following = lambda place: [other for group in groups.get(place, ()) for other in group]
    for v, dim in reachable(cuts.items(), following):
        if dims.setdefault(v, dim) != dim:
            raise CannotCut(named_in_error[v], f"would cut {v.name} along two dims")
    return dims


def part_of(v: Var, dims: Mapping[Var, int], parts: int, number: int) -> Var:
    """One part of a value, with its shape, if the value is cut along a dim."""
    dim = dims.get(v)
    if dim is None:
        return v
    rows = part(v.shape[dim], parts, number)[1]
    return dataclasses.replace(v, shape=(*v.shape[:dim], rows, *v.shape[dim + 1 :]))


def on_part(e: Eqn, dims: Mapping[Var, int], parts: int, number: int) -> Eqn:
    """The equation with the sizes of one part among its arguments, where its results are cut."""
    outs = []
    for out in e.outs:
        if out is not None and out in dims:
            out = dataclasses.replace(out, layout=(Split(TILE, dims[out]),))
        outs.append(out)
    return localize(e.replace(outs=tuple(outs)), {TILE: parts}, {TILE: number})


def _before_and_after(graph: Graph, eqns: Iterable[Eqn]) -> tuple[list[Eqn], list[Eqn]]:
    """The other equations between the first and the last of a segment: those to run before its parts, and after them.

    Random draws and collectives keep their order.

    Raises: CannotCut if an equation of the segment needs one that can only follow it.
    """
    inside = set(eqns)
    before: list[Eqn] = []
    after: list[Eqn] = []
    results: set[Var] = set()
    complete: set[Var] = set()  # what depends on results, outside of the segment
    has_effect_after = False
    for e in graph.eqns[slice(*_span(graph, inside))]:
        reads_complete = any(v in complete for v in e.ins)
        if e in inside:
            if reads_complete:
                raise CannotCut(e, "reads what depends on all rows of the segment")
            results.update(e.results)
            continue
        has_effect = is_random(e) or rules(e).remote
        depends = reads_complete or any(v in results for v in e.ins)
        if depends or (has_effect and has_effect_after):
            after.append(e)
            complete.update(e.results)
            has_effect_after |= has_effect
        else:
            before.append(e)
    return before, after


def _span(graph: Graph, eqns: Set[Eqn]) -> tuple[int, int]:
    """The indices at which these equations begin and end in the program."""
    indices = [i for i, e in enumerate(graph.eqns) if e in eqns]
    return (indices[0], indices[-1] + 1) if indices else (0, 0)


# ---- the program


def in_parts(graph: Graph, segment: Segment) -> Graph:
    """The program in which a segment runs in parts."""
    if segment.parts == 1:
        return graph
    graph = _Parts(graph, segment).program()
    # An equation of backward that repeats one of these now computes a value of its own.
    replaced = set(segment.eqns)
    eqns = tuple(e.replace(repeats=None) if e.repeats in replaced else e for e in graph.eqns)
    return graph.replace(eqns=eqns)


class _Parts:
    """The equations of one segment, part after part.

    Attributes:
        graph: the program.
        segment: the segment.
        names: the names of the program.
        outputs: the results that equations outside of the parts read, or that the program returns.
        eqns: the equations so far.
        parts_of: the parts of each value that is cut.
        sums: the sum of the parts so far of each term that is read outside.
        widened: for each term in half precision that its readers only view and cast to fp32, these equations.
    """

    def __init__(self, graph: Graph, segment: Segment) -> None:
        self.graph = graph
        self.segment = segment
        self.names = Names.of(graph)
        self.inside = set(segment.eqns)
        self.outputs = set(variables(graph.outputs))
        for e in graph.eqns:
            if e not in self.inside:
                self.outputs.update(e.ins)
        self.eqns: list[Eqn] = []
        self.parts_of: dict[Var, list[Var]] = {}
        self.sums: dict[Var, Var] = {}
        self.widened = {v: _widening(graph, v) for v in segment.terms if v in self.outputs}

    def program(self) -> Graph:
        for number in range(self.segment.parts):
            self.add_part(number)
        replacements: dict[Eqn, tuple[Eqn, ...]] = {}
        for e in self.segment.eqns:
            for out in e.results:
                if out in self.sums:
                    self.complete_sum(out, e, replacements)
                elif out in self.parts_of and out in self.outputs:
                    args = (self.parts_of[out], self.segment.dims[out])
                    self.eqns.append(Eqn(aten.cat.default, args, (out,)).like(e))

        before, after = _before_and_after(self.graph, self.segment.eqns)
        start, end = _span(self.graph, self.inside)
        old = self.graph.eqns
        eqns: list[Eqn] = []
        for e in (*old[:start], *before, *self.eqns, *after, *old[end:]):
            eqns += replacements.get(e, (e,))
        return self.graph.replace(eqns=tuple(eqns))

    def add_part(self, number: int) -> None:
        """Add the equations of one part, and add its terms to the sums."""
        values: dict[Var, Var] = {}  # those of this part
        for e in self.segment.eqns:
            for v in dict.fromkeys(e.ins):
                if v in self.segment.dims and v not in values:
                    values[v] = self.slice(v, number, e)
            outs = tuple(out and self.local(out, number) for out in e.outs)
            local = on_part(e, self.segment.dims, self.segment.parts, number)
            self.eqns.append(local.with_inputs(lambda v: values.get(v, v), outs=outs, repeats=None))
            for out, result in zip(e.outs, outs):
                if out is None or result is None:
                    continue
                values[out] = result
                if out in self.segment.terms:
                    if out in self.outputs:
                        self.add_term(out, result, number)
                elif out in self.segment.dims:
                    self.parts_of.setdefault(out, []).append(result)

    def local(self, v: Var, number: int) -> Var:
        """A new value for the part of a value."""
        local = part_of(v, self.segment.dims, self.segment.parts, number)
        return dataclasses.replace(local, name=self.names.fresh(f"{v.name}.part{number}"))

    def slice(self, v: Var, number: int, reader: Eqn) -> Var:
        """The part of a whole value, as a view."""
        dim = self.segment.dims[v]
        start, rows = part(v.shape[dim], self.segment.parts, number)
        out = self.local(v, number)
        args = (v, dim, start, start + rows)
        self.eqns.append(Eqn(aten.slice.Tensor, args, (out,)).like(reader))
        return out

    def add_term(self, out: Var, term: Var, number: int) -> None:
        """Add the term of a part, which the last equation computes, to the sum of those before it."""
        e = self.eqns[-1]
        before = self.sums.get(out)
        is_half = term.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if is_half else term.dtype
        if before is None and not is_half:
            self.sums[out] = term
            return
        total = Var(self.names.fresh(f"{out.name}.sum"), dtype, out.shape)
        if number == self.segment.parts - 1 and self.segment.terms[out] == "sum":
            # The last sum takes the place of the term, or of its cast.
            views, cast = self.widened[out]
            if not is_half:
                total = out
            elif cast is not None and not views:
                total = cast.out
        self.sums[out] = total
        if before is None:
            self.eqns.append(Eqn(CAST, (term,), (total,), {"dtype": dtype}).like(e))
        elif e.op is aten.mm.default and not is_half:
            # It may write over the sum before (see `donation`).
            self.eqns[-1] = e.replace(op=aten.addmm.default, args=(before, *e.args), outs=(total,))
        else:
            self.eqns.append(Eqn(aten.add.Tensor, (before, term), (total,)).like(e))

    def complete_sum(self, out: Var, e: Eqn, replacements: dict[Eqn, tuple[Eqn, ...]]) -> None:
        """Let the readers of a term read the sum of all parts.

        If they only view and widen it, the sum keeps its dtype: the views have it too, and the cast goes.
        """
        total = self.sums[out]
        if self.segment.terms[out] == "mean":
            mean = dataclasses.replace(total, name=self.names.fresh(f"{out.name}.mean"))
            if mean.dtype == out.dtype:
                mean = out
            args = (total, self.segment.parts)
            self.eqns.append(Eqn(aten.div.Tensor, args, (mean,)).like(e))
            total = mean
        views, cast = self.widened[out]
        if total is out:
            return
        if cast is None or self.segment.terms[out] == "mean":
            self.eqns.append(Eqn(CAST, (total,), (out,), {"dtype": out.dtype}).like(e))
            return
        replacements[cast] = ()
        for view in views:
            wide = (
                cast.out if view is views[-1] else dataclasses.replace(view.out, dtype=total.dtype)
            )
            reads = {view.ins[0]: total}
            replacements[view] = (view.with_inputs(reads.__getitem__, outs=(wide,)),)
            total = wide


def _widening(graph: Graph, v: Var) -> tuple[list[Eqn], Eqn | None]:
    """The views of a value up to its cast to fp32, and the cast, if nothing else reads the value."""
    returned = set(variables(graph.outputs))
    readers = users(graph)
    views: list[Eqn] = []
    while v not in returned and len(readers.get(v, ())) == 1:
        (e,) = readers[v]
        if e.op is CAST and e.out.dtype == torch.float32:
            return views, e
        if not rearranges(e) or len(e.results) != 1:
            break
        views.append(e)
        v = e.out
    return [], None
