"""Programs: a program that is written for one micro-batch, as the three programs that run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..collectives import ACCUMULATE, JOIN, KEEP
from ..donation import is_constant
from ..graph import Eqn, Graph, Var, dce, producers, rename
from ..liveness import liveness
from ..op_facts import is_random
from ..relations import grouped
from .changes import changing

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


class _Marks(NamedTuple):
    """The marks of a program by kind."""

    sums: list[Eqn]
    joins: list[Eqn]
    kept: list[Eqn]


def parts(graph: Graph) -> Parts:
    """Write a program of several micro-batches as the programs that run one after the other."""
    root = liveness(graph).root
    by_op = grouped((e.op, e) for e in graph.eqns)
    shown = {e.out: e.args[0] for e in by_op.get(KEEP, ()) if root[e.out] in graph.inputs}
    plain = rename(graph, shown)  # an input need not be kept
    by_op = grouped((e.op, e) for e in plain.eqns if e.out not in shown)
    marks = _Marks(*(by_op.get(op, []) for op in (ACCUMULATE, JOIN, KEEP)))
    sums = {e: _before(e, e.out.shape) for e in marks.sums}
    first, middle, last = (
        _first(plain, marks),
        _middle(plain, marks, sums),
        _last(plain, marks, sums),
    )
    return Parts(first, middle, last, graph.micro, len(marks.sums), len(marks.joins))


def in_order(graph: Graph) -> list[Graph]:
    """The programs of one step in the order in which they run: that of each micro-batch, or else the program itself."""
    return list(parts(graph).in_order) if graph.micro > 1 else [graph]


def _before(mark: Eqn, shape: tuple[int, ...]) -> Var:
    """The input for what the earlier micro-batches contribute to the value of a mark."""
    return dataclasses.replace(mark.out, name=f"{mark.out.name}.before", shape=shape)


def _first(graph: Graph, marks: _Marks) -> Graph:
    state, copied = _state(graph), _copied(graph, marks.sums)
    own = [e.out if e in copied else e.args[0] for e in marks.sums]
    clones = {
        e: e.replace(op=aten.clone.default, kwargs={"memory_format": torch.contiguous_format})
        for e in copied
    }
    outputs = (*state, *own, *(e.args[0] for e in marks.joins), *(e.out for e in marks.kept))
    new = _with(graph, clones, ()).replace(outputs=outputs)
    return _without_update(rename(new, {e.out: e.args[0] for e in marks.kept}))


def _copied(graph: Graph, sums: Sequence[Eqn]) -> set[Eqn]:
    """The sums whose first term must be copied, because its storage is not its own, and later terms are added there."""
    root, makers = liveness(graph).root, producers(graph.eqns)
    count = Counter(root[e.args[0]] for e in sums)

    def has_own(v: Var) -> bool:
        return v in makers and root[v] is v and count[v] == 1 and not is_constant(makers[v])

    return {e for e in sums if not has_own(e.args[0])}


def _middle(graph: Graph, marks: _Marks, sums: Mapping[Eqn, Var]) -> Graph:
    inputs = (*sums.values(), *(e.out for e in marks.kept))
    outputs = (*_state(graph), *(e.out for e in sums), *(e.args[0] for e in marks.joins))
    return _without_update(_with(graph, _added(sums), inputs).replace(outputs=outputs))


def _last(graph: Graph, marks: _Marks, sums: Mapping[Eqn, Var]) -> Graph:
    joins = {
        e: _before(e, (e.out.shape[0] - e.args[0].shape[0], *e.out.shape[1:])) for e in marks.joins
    }
    joined = {
        e: e.replace(op=aten.cat.default, args=([before, *e.args],)) for e, before in joins.items()
    }
    inputs = (*sums.values(), *joins.values(), *(e.out for e in marks.kept))
    return dce(_with(graph, {**_added(sums), **joined}, inputs))


def _added(sums: Mapping[Eqn, Var]) -> dict[Eqn, Eqn]:
    """For each sum, the equation that adds this micro-batch to the ones before it."""
    return {e: e.replace(op=aten.add.Tensor, args=(before, *e.args)) for e, before in sums.items()}


def _state(graph: Graph) -> list[Var]:
    """The leaves of the state after a micro-batch that is not the last: new where it changes them."""
    changes, n = changing(graph), graph.num_state
    return [new if new in changes else old for old, new in zip(graph.inputs[:n], graph.outputs)]


def _with(graph: Graph, instead: Mapping[Eqn, Eqn], inputs: Collection[Var]) -> Graph:
    """The program with other equations in place of marks, and with more inputs: earlier sums, and kept values."""
    eqns = tuple(instead.get(e, e) for e in graph.eqns if not any(v in inputs for v in e.results))
    donated = tuple((v, e.out) for e in instead.values() for v in e.args[:1] if v in inputs)
    return graph.replace(inputs=(*graph.inputs, *inputs), eqns=eqns, micro=1, donated=donated)


def _without_update(graph: Graph) -> Graph:
    """The program without the update, and without the random draws of the update."""
    return dce(graph, lambda e: is_random(e.op) and e.region != "update")
