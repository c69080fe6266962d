"""Micro-batches: a program for one micro-batch, and the programs that run all micro-batches of a step.

    g.sum: f32[4] = accumulate(g)        first, middle...                  last
    g.mean = div(g.sum, 3)          -->  g.sum = g;  g.sum += g;  ...      g.sum += g; g.mean = div(g.sum, 3)
    w1 = sub(w, g.mean)                                                    w1 = sub(w, g.mean)

A value that depends on the batch reaches the update only through a mark (`accumulate`, `join`; see `marks`). So the
equations before the marks run for each micro-batch, and the update after them runs once, with the last micro-batch. A
leaf of the state that depends on the batch without a mark, such as a statistic of batch norm, changes with every
micro-batch, as in a loop.

`micro_batch_programs` writes the three programs that run: for the first micro-batch, for each one in the middle, and
for the last. None of them has a mark, and their lengths do not depend on the number of micro-batches. `Carry` passes
values from one micro-batch to the next.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Literal, NamedTuple

import torch

from .collectives import rules
from .dependencies import depending
from .donation import is_constant
from .graph import Eqn, Graph, Var, dce, producers, rename, variables
from .liveness import liveness
from .marks import ACCUMULATE, GRADIENT, JOIN, KEEP, PVARY
from .op_facts import is_random
from .printer import counted

aten = torch.ops.aten


def changing(graph: Graph) -> set[Var]:
    """The values that each micro-batch computes for itself.

    They depend on the batch without a mark in between, or on leaves of the state that change with every micro-batch.
    """
    changing_values = set(graph.batch)
    while True:
        for e in graph.eqns:
            is_mark = rules(e).over_all_micro_batches
            # Their second argument says only what the first one belongs to.
            read = variables(e.args[:1]) if e.op in (GRADIENT, PVARY) else e.ins
            reads_changing = not is_mark and any(v in changing_values for v in read)
            if reads_changing or _draws_before_the_update(e):
                changing_values.update(e.results)
        # The next micro-batch reads the changed leaves, so what depends on them changes too: search again.
        changed_leaves = {old for old, new in graph.leaves if new in changing_values}
        if changed_leaves <= changing_values:
            return changing_values
        changing_values |= changed_leaves


def micro_batches_of_values(graph: Graph) -> dict[Var, Literal["each", "all"]]:
    """Whether each value belongs to "each" micro-batch, or to "all", as a sum does.

    A value without an entry depends on neither, such as a parameter. No collective may have values of both kinds: all
    its results would change with every micro-batch, and the update that reads the sums would run in each of them.
    """
    if graph.micro == 1:
        return {}
    marks = (e for e in graph.eqns if rules(e).over_all_micro_batches)
    combined = chain.from_iterable(e.results for e in marks)
    of_all = depending(graph.eqns, combined)
    return {**dict.fromkeys(of_all, "all"), **dict.fromkeys(changing(graph), "each")}


@dataclass(frozen=True)
class MicroBatchPrograms:
    """The programs of one step, each of which runs for one micro-batch or for several in a row.

    Attributes:
        first: returns the new state, the terms of sums, the parts of joined values, and the kept values.
        middle: takes sums and kept values after the inputs of `first`, and returns the new state, sums and parts.
        last: takes sums, the joined parts of all earlier micro-batches, and kept values, and returns the outputs of the
            whole program. A step of one micro-batch has the whole program in all three places.
        micro: the number of micro-batches.
        sums: the number of summed values.
        joined_parts: for each joined value, the part of one micro-batch.
    """

    first: Graph
    middle: Graph
    last: Graph
    micro: int
    sums: int
    joined_parts: tuple[Var, ...]

    @property
    def runs(self) -> tuple[tuple[Graph, int], ...]:
        """The programs in order, each with the number of micro-batches that it runs for."""
        last = (self.last, 1)
        if self.micro == 1:
            return (last,)
        if self.micro == 2:
            return ((self.first, 1), last)
        return ((self.first, 1), (self.middle, self.micro - 2), last)

    @property
    def in_order(self) -> Iterator[Graph]:
        """The programs of all micro-batches, in order."""
        for program, times in self.runs:
            yield from repeat(program, times)

    @property
    def before_last(self) -> Iterator[Graph]:
        """The programs of all micro-batches but the last, in order."""
        return islice(self.in_order, self.micro - 1)

    @property
    def different(self) -> tuple[Graph, ...]:
        """Each program that runs, once."""
        return tuple(program for program, _ in self.runs)


class _Marks(NamedTuple):
    """The marks of a program. Each sum and each join has the input for its value from earlier micro-batches."""

    sums: dict[Eqn, Var]
    joins: dict[Eqn, Var]
    kept_values: list[Var]

    @property
    def joined_parts(self) -> tuple[Var, ...]:
        """The values of this micro-batch that are to be joined with the others."""
        return tuple(e.args[0] for e in self.joins)


def micro_batch_programs(graph: Graph) -> MicroBatchPrograms:
    """The programs that run one after the other for the micro-batches of a step. Of one, it is the program itself."""
    if graph.micro == 1:
        return MicroBatchPrograms(graph, graph, graph, micro=1, sums=0, joined_parts=())
    graph = _without_kept_inputs(graph)
    marks = _Marks({}, {}, [])
    for e in graph.eqns:
        if e.op is ACCUMULATE:
            marks.sums[e] = _earlier_input(e, e.out.shape)
        elif e.op is JOIN:
            rows = e.out.shape[0] - e.args[0].shape[0]
            marks.joins[e] = _earlier_input(e, (rows, *e.out.shape[1:]))
        elif e.op is KEEP:
            marks.kept_values.append(e.out)
    return MicroBatchPrograms(
        _first(graph, marks),
        _middle(graph, marks),
        _last(graph, marks),
        graph.micro,
        len(marks.sums),
        marks.joined_parts,
    )


def _first(graph: Graph, marks: _Marks) -> Graph:
    """The program of the first micro-batch. It returns its terms of the sums, and later programs add theirs there."""
    sums_to_clone = _sums_to_clone(graph, marks.sums)
    contiguous = {"memory_format": torch.contiguous_format}
    clones = {}
    terms = []
    for e in marks.sums:
        if e in sums_to_clone:
            clones[e] = e.replace(op=aten.clone.default, kwargs=contiguous)
            terms.append(e.out)
        else:
            terms.append(e.args[0])
    outputs = (*_state(graph), *terms, *marks.joined_parts, *marks.kept_values)
    first = _with_marks_replaced(graph, clones, (), outputs)
    kept_values = {e.out: e.args[0] for e in graph.eqns if e.op is KEEP}
    return _without_update(rename(first, kept_values))


def _middle(graph: Graph, marks: _Marks) -> Graph:
    """The program of each micro-batch between the first and the last."""
    inputs = (*marks.sums.values(), *marks.kept_values)
    sums = [e.out for e in marks.sums]
    outputs = (*_state(graph), *sums, *marks.joined_parts)
    return _without_update(_with_marks_replaced(graph, _adds(marks), inputs, outputs))


def _last(graph: Graph, marks: _Marks) -> Graph:
    """The program of the last micro-batch, with the update. It concatenates joined values."""
    joins = {}
    for e, earlier in marks.joins.items():
        joins[e] = e.replace(op=aten.cat.default, args=([earlier, *e.args],))
    inputs = (*marks.sums.values(), *marks.joins.values(), *marks.kept_values)
    return dce(_with_marks_replaced(graph, {**_adds(marks), **joins}, inputs, graph.outputs))


def _adds(marks: _Marks) -> dict[Eqn, Eqn]:
    """For each sum, the equation that adds the term of this micro-batch to the earlier ones."""
    add = aten.add.Tensor
    return {e: e.replace(op=add, args=(earlier, *e.args)) for e, earlier in marks.sums.items()}


def _state(graph: Graph) -> list[Var]:
    """The leaves of the state after a micro-batch before the last: the new ones where it changes them."""
    changing_values = changing(graph)
    return [new if new in changing_values else old for old, new in graph.leaves]


def _without_update(graph: Graph) -> Graph:
    """The program without the update and its random draws."""
    return dce(graph, _draws_before_the_update)


def _without_kept_inputs(graph: Graph) -> Graph:
    """The program that does not keep inputs or views of inputs, because every micro-batch has the inputs anyway."""
    root = liveness(graph).root
    inputs = set(graph.inputs)
    kept_inputs = {}
    for e in graph.eqns:
        if e.op is KEEP and root[e.out] in inputs:
            kept_inputs[e.out] = e.args[0]
    eqns = tuple(e for e in graph.eqns if kept_inputs.keys().isdisjoint(e.results))
    return rename(graph.replace(eqns=eqns), kept_inputs)


def _earlier_input(mark: Eqn, shape: tuple[int, ...]) -> Var:
    """The input for the value of a mark from all earlier micro-batches."""
    return dataclasses.replace(mark.out, name=f"{mark.out.name}.before", shape=shape)


def _sums_to_clone(graph: Graph, sums: Collection[Eqn]) -> set[Eqn]:
    """The sums whose first term shares its storage or is a constant. Later terms are added in place, to a clone."""
    root = liveness(graph).root
    makers = producers(graph.eqns)
    terms_of_storage = Counter(root[e.args[0]] for e in sums)
    sums_to_clone = set()
    for e in sums:
        term = e.args[0]
        owns_storage = term in makers and root[term] is term and terms_of_storage[term] == 1
        # A constant is made once for all steps, so nothing may be added to it.
        if not owns_storage or is_constant(makers[term]):
            sums_to_clone.add(e)
    return sums_to_clone


def _with_marks_replaced(
    graph: Graph, replacements: Mapping[Eqn, Eqn], inputs: Collection[Var], outputs: tuple
) -> Graph:
    """The program with replacements of marks, with more inputs, and with other outputs."""
    new_inputs = set(inputs)
    eqns = []
    for e in graph.eqns:
        # The mark of a kept value goes: the value is an input now.
        if new_inputs.isdisjoint(e.results):
            eqns.append(replacements.get(e, e))

    # A sum is added up in the storage of its input.
    returned = set(variables(outputs))
    donated = [(old, new) for old, new in graph.donated if new in returned]
    for e in replacements.values():
        first = e.args[0]  # a list, if the equation joins values
        if isinstance(first, Var) and first in new_inputs:
            donated.append((first, e.out))
    return graph.replace(
        inputs=(*graph.inputs, *inputs),
        eqns=tuple(eqns),
        outputs=outputs,
        micro=1,
        donated=tuple(donated),
        hidden=(),
    )


def is_cut(graph: Graph, v: Var) -> bool:
    """Whether an input is split along dim 0 into micro-batches. Numbers and scalars are passed to each of them."""
    return graph.micro > 1 and v in graph.batch and bool(v.shape)


class Carry:
    """The values that one rank passes from micro-batch to micro-batch: for each, get its `inputs`, `take` its outputs.

    Raises: ValueError if an argument does not have the rows of all micro-batches.
    """

    def __init__(
        self, graph: Graph, programs: MicroBatchPrograms, inputs: Sequence[torch.Tensor]
    ) -> None:
        n = graph.num_state
        self.programs = programs
        self.state = list(inputs[:n])
        self.done = 0  # micro-batches
        self.batches = [
            _rows(graph, v, x) for v, x in zip(graph.arguments, inputs[n:], strict=True)
        ]
        self.sums: list[torch.Tensor] = []
        self.joins: list[list[torch.Tensor]] = [[] for _ in programs.joined_parts]
        self.kept_values: list[torch.Tensor] = []

    def inputs(self) -> list[torch.Tensor]:
        """The inputs of the next micro-batch."""
        rows = [parts[self.done] for parts in self.batches]
        joins: list[torch.Tensor] = []
        if self.done == self.programs.micro - 1:
            joins = [torch.cat(earlier) for earlier in self.joins]
            self.joins = []
        return [*self.state, *rows, *self.sums, *joins, *self.kept_values]

    def take(self, outputs: Sequence[Any]) -> None:
        """Take the outputs of a micro-batch before the last."""
        unread = iter(outputs)
        self.state = list(islice(unread, len(self.state)))
        self.sums = list(islice(unread, self.programs.sums))
        for earlier in self.joins:
            earlier.append(next(unread))
        if not self.done:
            self.kept_values = list(unread)
        self.done += 1


def _rows(graph: Graph, v: Var, x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The part of an argument for each micro-batch."""
    if not is_cut(graph, v):
        return [x] * graph.micro
    if x.shape[0] != v.shape[0] * graph.micro:
        rows = f"{graph.micro} micro-batches of {counted(v.shape[0], 'row')}"
        raise ValueError(
            f"{graph.name}: {v.name} has {counted(x.shape[0], 'row')}, and the program is for {rows}."
        )
    return x.chunk(graph.micro)


def _draws_before_the_update(e: Eqn) -> bool:
    return is_random(e) and e.region != "update"
