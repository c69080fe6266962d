"""Run the micro-batches of a step layer by layer, in one program for all of them.

    layer 1 of micro-batch 1, layer 1 of micro-batch 2, ...; layer 2 of micro-batch 1, ...

Each equation whose results differ from micro-batch to micro-batch is written once for each, and the copies are sorted
by the stretches between narrow points (see `analyses.narrow_points`). The last stretch of forward and the first one of
backward, which have the loss, count as one of backward: the logits of a micro-batch are dropped before the next one has
any, and the head is gathered once. A sum over micro-batches adds its terms in their order, so it has the bits of
`accumulate` in the order of micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from ..analyses.narrow_points import Stretch, stretches
from ..ir.collectives import rules
from ..ir.graph import Eqn, Graph, Names, Region, Var, producers, substitute
from ..ir.marks import ACCUMULATE, JOIN
from ..ir.micro_batches import changing, is_cut
from ..ir.op_facts import is_matmul, is_random
from ..ir.printer import counted
from ..ir.rewriter import reordered
from ..ir.source import where

aten = torch.ops.aten

_Place = tuple[int, int]  # a stretch, and a position in it
_REGIONS: tuple[Region, ...] = ("forward", "backward")
# With fewer layers of forward, beside those that belong to the loss, nearly nothing is in the order of layers.
_FEWEST_LAYERS = 2
_ONCE = -1  # the micro-batch of an equation that runs once: before all copies of its stretch


def in_layer_order(written: Graph, marked: Graph) -> Graph:
    """The program of all micro-batches, in the order of layers.

    Args:
        written: the program of one micro-batch as it was traced.
        marked: that program with the marks of micro-batches.

    Raises: ValueError with the user's line if forward or backward draws random numbers.
    """
    for e in marked.eqns:
        if e.region != "update" and is_random(e):
            raise _draws(marked, e)
    groups = _stretches_with_losses(written)
    in_stretches, losses = _places_in_stretches(groups)
    places = _places(marked, in_stretches)
    copies = _Copies(marked)
    keys: dict[Eqn, tuple[int, int, int, int]] = {e: (0, _ONCE, 0, 0) for e in copies.cuts()}
    for position, e in enumerate(marked.eqns):
        stretch, place = places[e]
        for micro, copy in copies.of(e):
            if stretch in losses and copy.region == "forward":
                copy = copy.replace(region="backward")
            keys[copy] = (stretch, micro, place, position)
    program = reordered(copies.program(tuple(keys)), keys.__getitem__)
    layers = sum(len(parts) == 1 and parts[0].region == "forward" for parts in groups)
    if layers >= _FEWEST_LAYERS:
        return program
    note = (
        f"accumulate: order='layers' finds {counted(layers, 'layer')} in {written.name} beside the loss, and runs all "
        f"else one micro-batch after the other. A layer ends where only one large value passes on.\n"
        f"  Use order='batches', whose program does not grow with the number of micro-batches."
    )
    return program.with_hints(notes=(*program.hints.notes, note))


def _draws(graph: Graph, e: Eqn) -> ValueError:
    return ValueError(
        f"accumulate: order='layers' runs each layer for all micro-batches, and {graph.name} draws random numbers in "
        f"forward, which would then come in another order.\n  at {where(e.source)}\n"
        f"Use order='batches'; or turn dropout off; or draw the numbers before the step, and pass them with the batch."
    )


# ---- where equations stand in the order of layers


def _places_in_stretches(
    groups: Sequence[Sequence[Stretch]],
) -> tuple[dict[Var, _Place], set[int]]:
    """The place of each value that is computed in a stretch, and the stretches that have a loss."""
    places: dict[Var, _Place] = {}
    losses: set[int] = set()
    for number, parts in enumerate(groups):
        if len(parts) > 1:
            losses.add(number)
        for e in itertools.chain.from_iterable(part.eqns for part in parts):
            places.update(dict.fromkeys(e.results, (number, len(places))))
    return places, losses


def _stretches_with_losses(graph: Graph) -> list[list[Stretch]]:
    """The stretches of a program in order, with all those around a loss as one.

    They are the last one of forward, the first one of backward, and their neighbours that read no other leaves, such as
    the parts of a loss in parts, or that multiply no matrices, such as the last norm. What they keep for backward is
    then kept for one micro-batch only.
    """
    position = {e: i for i, e in enumerate(graph.eqns)}
    parts = [part for region in _REGIONS for part in stretches(graph, region) if part.eqns]
    parts.sort(key=lambda part: position[part.eqns[0]])

    groups: list[list[Stretch]] = []
    end = 0
    for k, (before, after) in enumerate(itertools.pairwise(parts), 1):
        if (before.region, after.region) != ("forward", "backward") or k < end:
            continue
        leaves = before.leaves | after.leaves
        first = k - 1
        while first > end and _belongs_to_loss(parts[first - 1], leaves):
            first -= 1
        groups += ([part] for part in parts[end:first])
        end = k + 1
        while end < len(parts) and _belongs_to_loss(parts[end], leaves):
            end += 1
        groups.append(parts[first:end])
    return [*groups, *([part] for part in parts[end:])]


def _belongs_to_loss(part: Stretch, leaves: Set[Var]) -> bool:
    return part.leaves <= leaves or not any(map(is_matmul, part.eqns))


def _places(marked: Graph, in_stretches: Mapping[Var, _Place]) -> dict[Eqn, _Place]:
    """The place of each equation of a program with marks.

    Sums and joins stand where their terms are computed. An equation in no stretch, such as a cast of a weight, stands
    before its first reader in a stretch. If no stretch reads it, it stands after what it reads if it runs in each
    micro-batch, as an accuracy does, and otherwise at the end.
    """
    places: dict[Eqn, _Place] = {}
    first_read: dict[Var, _Place] = {}
    for e in reversed(marked.eqns):
        values = e.ins if rules(e).over_all_micro_batches else e.results
        known = [in_stretches[v] for v in values if v in in_stretches]
        known = known or [first_read[v] for v in e.results if v in first_read]
        if known:
            places[e] = min(known)
            for v in e.ins:
                first_read[v] = min(places[e], first_read.get(v, places[e]))

    makers = producers(marked.eqns)
    changing_values = changing(marked)
    end = max(in_stretches.values(), default=(0, 0))
    for e in marked.eqns:
        if e not in places:
            is_repeated = any(v in changing_values for v in e.results)
            read = [places[makers[v]] for v in e.ins if v in makers]
            places[e] = max(read, default=(0, 0)) if is_repeated else end
    return places


# ---- the copies of equations


class _Copies:
    """The equations of a program with marks, once for each micro-batch where their results differ.

    Attributes:
        values: for each micro-batch, its own value in place of each one that differs.
        whole_inputs: for each input that is cut into micro-batches, the input with all rows.
    """

    def __init__(self, marked: Graph) -> None:
        self.marked = marked
        self.changing = changing(marked)
        self.whole_inputs: dict[Var, Var] = {}
        for v in marked.inputs:
            if is_cut(marked, v):
                rows = v.shape[0] * marked.micro
                self.whole_inputs[v] = dataclasses.replace(v, shape=(rows, *v.shape[1:]))

        computed = [v for e in marked.eqns for v in e.results]
        self.names = Names.of(marked)
        self.values: list[dict[Var, Var]] = []
        for micro in range(marked.micro):
            own = {v: self._copy(v, micro) for v in computed if v in self.changing}
            own.update((v, self._copy(v, micro)) for v in self.whole_inputs)
            # A leaf that every micro-batch changes is read as the one before has left it.
            for old, new in marked.leaves if micro else ():
                if new in self.changing:
                    own[old] = self.values[-1].get(new, new)
            self.values.append(own)
        self.copy_of: dict[tuple[Eqn, int], Eqn] = {}

    def _copy(self, v: Var, micro: int) -> Var:
        name = self.names.fresh(f"{v.base_name}.m{micro}")
        return dataclasses.replace(v, name=f"{name}'" if v.future else name)

    def cuts(self) -> Iterator[Eqn]:
        """The equations that cut the inputs."""
        for v, whole in self.whole_inputs.items():
            rows = v.shape[0]
            for micro, own in enumerate(self.values):
                args = (whole, 0, micro * rows, (micro + 1) * rows)
                yield Eqn(aten.slice.Tensor, args, (own[v],))

    def of(self, e: Eqn) -> Iterator[tuple[int, Eqn]]:
        """The equations that take the place of `e`, each with its micro-batch."""
        of_mark: dict[Any, Callable] = {ACCUMULATE: self._sums, JOIN: self._joined}
        if e.op in of_mark:
            yield from of_mark[e.op](e)
        elif not any(v in self.changing for v in e.results):
            yield _ONCE, e.with_inputs(self._own_value(-1))  # of a mark, what a gradient is for
        else:
            for micro in range(self.marked.micro):
                own_value = self._own_value(micro)
                copy = e.with_inputs(own_value, outs=substitute(e.outs, own_value))
                if e.repeats is not None:
                    copy = copy.replace(repeats=self.copy_of.get((e.repeats, micro)))
                self.copy_of[e, micro] = copy
                yield micro, copy

    def _own_value(self, micro: int) -> Callable[[Var], Var]:
        """What a micro-batch has in place of each value."""
        own = self.values[micro]
        return lambda v: own.get(v, v)

    def _all_values(self, v: Var) -> list[Var]:
        """What all micro-batches have in place of a value."""
        return [own.get(v, v) for own in self.values]

    def _sums(self, e: Eqn) -> Iterator[tuple[int, Eqn]]:
        terms = self._all_values(e.args[0])
        total = terms[0]
        for micro, term in enumerate(terms[1:], 1):
            out = e.out if micro == len(terms) - 1 else self._copy(e.out, micro)
            yield micro, e.replace(op=aten.add.Tensor, args=(total, term), outs=(out,))
            total = out

    def _joined(self, e: Eqn) -> Iterator[tuple[int, Eqn]]:
        yield _ONCE, e.replace(op=aten.cat.default, args=(self._all_values(e.args[0]),))

    def program(self, eqns: tuple[Eqn, ...]) -> Graph:
        """The program of all micro-batches, with these equations."""
        whole = lambda v: self.whole_inputs.get(v, v)
        return self.marked.replace(
            inputs=tuple(map(whole, self.marked.inputs)),
            batch=frozenset(map(whole, self.marked.batch)),
            eqns=eqns,
            outputs=substitute(self.marked.outputs, self._own_value(-1)),
            micro=1,
        )
