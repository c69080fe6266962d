"""Micro-batches: a program that is written for one micro-batch and runs once for each.

    g.sum: f32[4] = accumulate(g)        first, middle...                  last
    g.mean = div(g.sum, 3)          -->  g.sum = g;  g.sum += g;  ...      g.sum += g; g.mean = div(g.sum, 3)
    w1 = sub(w, g.mean)                                                    w1 = sub(w, g.mean)

A value that depends on the batch reaches the update only through a mark (`accumulate`, `join`; see `micro_marks`). So
the equations before the marks are repeated, and the update, behind them, runs once, with the last micro-batch. A leaf
of the state that depends on the batch without a mark, such as a statistic of batch norm, changes with every
micro-batch, as in a loop.

`parts` writes the program as the three programs that run: that of the first micro-batch, that of each one in the
middle, and that of the last. None of them has a mark, and their lengths do not depend on the number of micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .collectives import ACCUMULATE, JOIN, KEEP, MICRO_MARKS
from .donation import is_constant
from .graph import Eqn, Graph, Var, dce, is_random, producers, rename
from .liveness import liveness

aten = torch.ops.aten


@dataclass(frozen=True)
class Parts:
    """The programs of the micro-batches of one step.

    Attributes:
        first: returns the new state, the terms of sums, the parts of joined values, and the values that are kept.
        middle: takes sums and kept values behind the inputs of `first`, and returns the new state, sums and parts.
        last: takes sums, the joined parts of all others, and kept values, and returns what the whole program does.
        micro: the number of micro-batches.
        sums, joins: how many values are summed, and how many joined.
    """

    first: Graph
    middle: Graph
    last: Graph
    micro: int
    sums: int
    joins: int

    @property
    def before_last(self) -> Iterator[Graph]:
        """The programs of all micro-batches but the last, in order."""
        yield self.first
        for _ in range(self.micro - 2):
            yield self.middle

    @property
    def in_order(self) -> Iterator[Graph]:
        """The programs of all micro-batches, in order."""
        yield from self.before_last
        yield self.last

    @property
    def different(self) -> tuple[Graph, ...]:
        """Each program that runs, once."""
        return tuple(dict.fromkeys(self.in_order))


def is_cut(graph: Graph, v: Var) -> bool:
    """Whether an input is cut along dim 0 into micro-batches. A number, and a scalar, are passed to each of them."""
    return graph.micro > 1 and v in graph.batch and bool(v.shape)


def full_shape(graph: Graph, v: Var) -> tuple[int, ...]:
    """The shape of an argument of the whole step that has the shape of input `v` in each micro-batch."""
    return (v.shape[0] * graph.micro, *v.shape[1:]) if is_cut(graph, v) else v.shape


class Carry:
    """The inputs of the micro-batches of one rank, in order: `inputs` of each, then `take` its outputs.

    Raises: ValueError if an argument does not have the rows of all micro-batches.
    """

    def __init__(self, graph: Graph, parts: Parts, inputs: Sequence[torch.Tensor]) -> None:
        self.parts, n = parts, graph.num_state
        self.state, self.taken = list(inputs[:n]), 0
        self.batches = [self._cut(graph, v, x) for v, x in zip(graph.inputs[n:], inputs[n:], strict=True)]
        self.sums: list[torch.Tensor] = []
        self.joins: list[list[torch.Tensor]] = []
        self.kept: list[torch.Tensor] = []

    def _cut(self, graph: Graph, v: Var, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if not is_cut(graph, v):
            return [x] * graph.micro
        if x.shape[0] != v.shape[0] * graph.micro:
            rows = f"{graph.micro} micro-batches of {v.shape[0]} rows"
            raise ValueError(f"{graph.name}: {v.name} has {x.shape[0]} rows, and the program is for {rows}.")
        return [x.narrow(0, k * v.shape[0], v.shape[0]) for k in range(graph.micro)]

    def inputs(self) -> list[torch.Tensor]:
        """The inputs of the next micro-batch."""
        joined: list[torch.Tensor] = []
        if self.taken == self.parts.micro - 1:
            joined, self.joins = [torch.cat(before) for before in self.joins], []
        return [*self.state, *(cut[self.taken] for cut in self.batches), *self.sums, *joined, *self.kept]

    def take(self, outputs: Sequence[Any]) -> None:
        """Note the outputs of a micro-batch that is not the last."""
        n, sums, joins = len(self.state), self.parts.sums, self.parts.joins
        self.state, self.sums = list(outputs[:n]), list(outputs[n : n + sums])
        parts, kept = outputs[n + sums : n + sums + joins], outputs[n + sums + joins :]
        if not self.taken:
            self.joins, self.kept = [[] for _ in parts], list(kept)
        for before, part in zip(self.joins, parts):
            before.append(part)
        self.taken += 1


def changing(graph: Graph) -> set[Var]:
    """The values that each micro-batch computes anew: those that depend on the batch without a mark in between, and on
    leaves of the state that change with every micro-batch."""
    changes, leaves = set(graph.batch), list(zip(graph.inputs, graph.outputs[: graph.num_state]))
    while True:
        for e in graph.eqns:
            drawn = is_random(e.op) and e.region != "update"
            if drawn or (e.op not in (ACCUMULATE, JOIN) and any(v in changes for v in e.ins)):
                changes.update(e.results)
        carried = {old for old, new in leaves if new in changes} - changes
        if not carried:
            return changes
        changes |= carried


class _Marks(NamedTuple):
    """The marks of a program by kind."""

    sums: list[Eqn]
    joins: list[Eqn]
    kept: list[Eqn]


def parts(graph: Graph) -> Parts:
    """Write a program of several micro-batches as the programs that run one after the other."""
    root = liveness(graph).root
    shown = {e.out: e.args[0] for e in graph.eqns if e.op is KEEP and root[e.out] in graph.inputs}
    plain = rename(graph, shown)  # an input need not be kept
    marks = _Marks(*([e for e in plain.eqns if e.op is op and e.out not in shown] for op in MICRO_MARKS))
    sums = {e: dataclasses.replace(e.out, name=f"{e.out.name}.before") for e in marks.sums}
    first, middle, last = _first(plain, marks), _middle(plain, marks, sums), _last(plain, marks, sums)
    return Parts(first, middle, last, graph.micro, len(marks.sums), len(marks.joins))


def _first(graph: Graph, marks: _Marks) -> Graph:
    returned = [e.args[0] for e in (*marks.sums, *marks.joins, *marks.kept)]
    graph = rename(graph, {e.out: e.args[0] for e in marks.kept})
    state, copied = _state(graph), _copied(graph, marks.sums)
    own = [e.out if e in copied else e.args[0] for e in marks.sums]
    clones = {e: e.replace(op=aten.clone.default, kwargs={"memory_format": torch.contiguous_format}) for e in copied}
    graph = graph.replace(eqns=tuple(clones.get(e, e) for e in graph.eqns))
    return _micro_batch(graph, {}, graph.inputs, (*state, *own, *returned[len(marks.sums) :]))


def _copied(graph: Graph, sums: Sequence[Eqn]) -> set[Eqn]:
    """The sums whose first term must be copied, because its storage is not its own, and later terms are added there."""
    root, makers = liveness(graph).root, producers(graph.eqns)
    count = Counter(root[e.args[0]] for e in sums)

    def has_own(v: Var) -> bool:
        return v in makers and root[v] is v and count[v] == 1 and not is_constant(makers[v])

    return {e for e in sums if not has_own(e.args[0])}


def _middle(graph: Graph, marks: _Marks, sums: dict[Eqn, Var]) -> Graph:
    inputs = (*graph.inputs, *sums.values(), *(e.out for e in marks.kept))
    outputs = (*_state(graph), *(e.out for e in sums), *(e.args[0] for e in marks.joins))
    return _micro_batch(graph, sums, inputs, outputs)


def _last(graph: Graph, marks: _Marks, sums: dict[Eqn, Var]) -> Graph:
    rows = lambda e: (e.out.shape[0] - e.args[0].shape[0], *e.out.shape[1:])
    joins = {e: dataclasses.replace(e.out, name=f"{e.out.name}.before", shape=rows(e)) for e in marks.joins}
    inputs = (*graph.inputs, *sums.values(), *joins.values(), *(e.out for e in marks.kept))
    return dce(_with_inputs(graph, {**sums, **joins}, inputs, graph.outputs))


def _state(graph: Graph) -> list[Var]:
    """The leaves of the state after a micro-batch that is not the last: new where it changes them."""
    changes, n = changing(graph), graph.num_state
    return [new if new in changes else old for old, new in zip(graph.inputs[:n], graph.outputs)]


def _micro_batch(graph: Graph, before: dict[Eqn, Var], inputs: Sequence[Var], outputs: Sequence[Any]) -> Graph:
    """The program of a micro-batch that is not the last: without the update, and without the draws of the update."""
    drawn = lambda e: is_random(e.op) and e.region != "update"
    return dce(_with_inputs(graph, before, inputs, outputs), drawn)


def _with_inputs(graph: Graph, before: dict[Eqn, Var], inputs: Sequence[Var], outputs: Sequence[Any]) -> Graph:
    """The program with inputs for the values of earlier micro-batches (`before`), which its marks continue."""
    given, eqns = set(inputs), list[Eqn]()
    for e in graph.eqns:
        if e in before and e.op is ACCUMULATE:
            eqns.append(e.replace(op=aten.add.Tensor, args=(before[e], *e.args)))
        elif e in before:
            eqns.append(e.replace(op=aten.cat.default, args=([before[e], *e.args],)))
        elif not any(v in given for v in e.results):  # a kept value is an input
            eqns.append(e)
    donated = tuple((v, e.out) for e, v in before.items() if e.op is ACCUMULATE)
    batch = graph.batch | set(before.values()) - {v for v, _ in donated}
    return graph.replace(
        inputs=tuple(inputs), eqns=tuple(eqns), outputs=tuple(outputs), batch=batch, micro=1, donated=donated
    )
